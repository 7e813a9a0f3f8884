"""In the sandbox: run a submission's cells, or its answers on ranks, as the grader asks.

Everything here is in the submission's reach and may be changed by it, so the grader trusts none of it.
Requests and replies are JSON, one per line.

A request is one of these, with an ``"id"`` that its replies repeat:

- ``{"do": "run", "cells": [[name, source, number or None, skip]], "names": {number: name}, "seconds": …}``:
  run the cells of a notebook. Replies: ``{"at": place}`` before each; ``{"answer": number, "pickled": …}``
  (base64) at each cell with a check; at the end the same, or ``{"answer": number, "refused": words}``, for
  each question without one so far; ``{"done": true}``.
- ``{"do": "hold", "pickled": base64, "cells": {name: source}}``: keep the answer for the next requests.
  Reply: ``{"done": true}``, once ranks can start at once.
- ``{"do": "folder"}``: make an empty folder. Reply: ``{"folder": path}``.
- ``{"do": "ask", "work": base64, "args": […], "nprocs": …, "seconds": …}``: run the grader's work on ranks.
  Reply: ``{"texts": […]}`` by rank, ``{"refused": words}`` or ``{"trouble": words}``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import linecache
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...launcher.forkserver import load_here, wait_until_loaded, warm_up
from .apart import Copy, fork_server_is_a_copy

Request = dict[str, Any]
Reply = dict[str, Any]


def main(user: int = 0, disk_bytes: int = 0) -> None:
    """Load what all sessions need, then open sessions, one at a time.

    Commands are one byte each: ``o``, with a socket, opens a session, and ``c`` closes it; each is answered
    by the same byte once it is done. With ``disk_bytes`` each session is in namespaces of its own (`apart`),
    and is killed with them; without, there is only one session, which the grader ends.
    """
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    _load()
    session: Copy | None = None
    while True:
        word, passed, _, _ = socket.recv_fds(control, 1, 1)
        if word == b"o":
            (way,) = passed
            if not disk_bytes:
                control.send(word)
                control.close()
                return _serve(way)
            session = Copy(_serve, way, user, disk_bytes)
            if not session.is_there:
                return
        elif word == b"c" and session:
            session.end()
        else:
            return
        control.send(word)


def _load() -> None:
    """Load, once, what each session would have to load."""
    import torch._dynamo  # noqa: F401 – the first optimizer would, which takes seconds
    from IPython.core.interactiveshell import InteractiveShell  # noqa: F401

    from .. import check  # noqa: F401

    load_here()


def _serve(number: int) -> None:
    """Serve a session on an open file descriptor, until there are no more requests."""
    with fork_server_is_a_copy():
        warm_up()
    way = socket.socket(fileno=number)
    with way.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            for reply in DO[request["do"]](request):
                way.sendall(json.dumps(reply | {"id": request["id"]}).encode() + b"\n")


# --- a notebook -------------------------------------------------------------------------------------------


def run(request: Request) -> Iterator[Reply]:
    """Run cells as a notebook does, each whether or not those before it failed, except those to skip."""
    shell = _shell()
    names, found = request["names"], set()
    for place, (name, source, number, skip) in enumerate(request["cells"]):
        yield {"at": place}
        if number in names:
            answer = _answer(shell, number, names[number], request["seconds"])
            if "pickled" in answer:
                found.add(number)
                yield answer
        elif number is None and not skip:
            _run_cell(shell, name, source, request["seconds"])
    for place, number in enumerate(names, len(request["cells"])):
        yield {"at": place}
        if number not in found:
            yield _answer(shell, number, names[number], request["seconds"])
    yield {"done": True}


def _shell() -> Any:
    """Return an IPython shell as in a kernel, with its magics, but without a history."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    face = sys.modules[__name__.partition(".")[0]]
    face.check = face.progress = lambda *_: None  # the judges are not here; the grader asks on its own
    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell.instance(config=config, colors="NoColor")


def _run_cell(shell: Any, name: str, source: str, seconds: float) -> None:
    shell.compile.get_code_name = lambda *_: name
    with contextlib.suppress(BaseException), _interrupted_after(seconds):  # a cell may raise anything
        shell.run_cell(source, store_history=False)


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt as the kernel does, then again every second; code that resists meets the grader's limit."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(shell: Any, number: str, name: str, seconds: float) -> Reply:
    """Pickle an answer as `check` does; this may run the answer's own code."""
    from ...by_value import dumps

    if name not in shell.user_ns:
        words = f"there is no {name} in the notebook: which cell should define it?"
        return {"answer": number, "refused": words}
    try:
        with _interrupted_after(seconds):
            return {"answer": number, "pickled": base64.b64encode(dumps(shell.user_ns[name])).decode()}
    except BaseException as error:
        words = f"your answer cannot be sent to the ranks: {type(error).__name__}"
        with contextlib.suppress(BaseException):  # its own __str__ may fail
            words = f"{words}: {error}"
        return {"answer": number, "refused": words[:600]}


# --- an answer --------------------------------------------------------------------------------------------

_held = b""  # the answer, pickled


def hold(request: Request) -> Iterator[Reply]:
    """Keep an answer for the requests that follow, and get ready to start ranks."""
    global _held
    _held = base64.b64decode(request["pickled"])
    for name, source in request["cells"].items():
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    wait_until_loaded(threading.Event())
    yield {"done": True}


def ask(request: Request) -> Iterator[Reply]:
    """Run a work on the answer, on fresh ranks."""
    from ...report.failed import RankError
    from ..asking import Refused
    from ..check import in_words, told_by_ranks

    given = base64.b64decode(request["work"]), _held, request["args"]
    try:
        yield {"texts": told_by_ranks(_in_a_rank, given, request["nprocs"], request["seconds"])}
    except Refused as why:
        yield {"refused": str(why)}
    except RankError as error:
        yield {"trouble": in_words(error)}
    except Exception as error:
        yield {"trouble": f"your code failed: {type(error).__name__}: {error}"}


def folder(_: Request) -> Iterator[Reply]:
    """Make an empty folder, which is gone when the session is."""
    from ..drawn import OTHER_DISK

    other = OTHER_DISK if os.environ["TMPDIR"] == "/tmp" else None  # without the walls it would stay
    yield {"folder": tempfile.mkdtemp(prefix="course-", dir=other)}


def _in_a_rank(work: bytes, answer: bytes, args: Any) -> None:
    from ..asking import answer_in_a_rank

    asked, does = pickle.loads(work)
    answer_in_a_rank(asked, does, answer, args)


DO: dict[str, Callable[[Request], Iterator[Reply]]] = {"run": run, "hold": hold, "folder": folder, "ask": ask}
