"""In the sandbox: run a submission's cells, or its answers on ranks, as the grader asks.

A submission can reach and change everything here, so the grader trusts none of it. Requests and replies are
JSON, one per line.

A request is one of these, with an ``"id"`` that its replies repeat:

- ``{"do": "run", "files": {path: base64}, "steps": […], "seconds": …}``: run a notebook. A step is
  ``{"cell": name, "source": …}``, with ``"definitions": true`` if only these are to run, or, where an answer
  should be, ``{"question": number, "name": …}``. Replies: ``{"at": place}`` before each step;
  ``{"answer": number, "pickled": base64}`` or ``{"answer": number, "refused": words}``; ``{"done": true}``.
- ``{"do": "keep", "files": {path: base64}, "pickled": base64, "cells": {name: source}}``: keep the answer for
  the next requests. Reply: ``{"done": true}``, once ranks can start at once.
- ``{"do": "folder"}``: make an empty folder. Reply: ``{"folder": path}``.
- ``{"do": "ask", "work": base64, "args": […], "nprocs": …, "seconds": …}``: run the grader's work on ranks.
  Reply: ``{"texts": […]}`` by rank, ``{"refused": words}`` or ``{"trouble": words}``.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib
import itertools
import json
import linecache
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ...launcher.forkserver import wait_until_loaded, warm_up

Message = dict[str, Any]
DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)
spawn = multiprocessing.util.spawnv_passfds  # starts multiprocessing's own programs


def serve(descriptor: int) -> None:
    """Answer the requests that come on a socket, by its file descriptor, until there are no more."""
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork_server_by_fork):
        warm_up()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            for reply in DO[request["do"]](request):
                connection.sendall(json.dumps(reply | {"id": request["id"]}).encode() + b"\n")


def _fork_server_by_fork(path: Any, command: list[str], passed: Any) -> int:
    """Start the fork server by forking this process, which has PyTorch, not as a new Python."""
    if "multiprocessing.forkserver" not in command[-1]:
        return spawn(path, command, passed)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            close_all_but(*passed)
            exec(command[-1], {"__name__": "__main__"})
        os._exit(0)
    return pid


def close_all_but(*kept: int) -> None:
    """Close all file descriptors but these and the standard ones, as for a new program."""
    most = max(os.sysconf("SC_OPEN_MAX"), 1 << 16)
    for last, following in itertools.pairwise([2, *sorted(kept), most]):
        os.closerange(last + 1, following)


def _put(files: dict[str, str]) -> None:
    """Write the files that lie beside the notebook to this folder."""
    for path, content in files.items():
        with contextlib.suppress(OSError):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(base64.b64decode(content))
    importlib.invalidate_caches()


# --- a notebook -------------------------------------------------------------------------------------------


def run(request: Message) -> Iterator[Message]:
    """Run all cells in order, even after one has failed, and pickle the answers."""
    _put(request["files"])
    shell, answered = _shell(), set()
    for place, step in enumerate(request["steps"]):
        yield {"at": place}
        if "cell" in step:
            shell.ast_transformers = [_Definitions()] * bool(step.get("definitions"))
            _run_cell(shell, step["cell"], step["source"], request["seconds"])
        elif step["question"] not in answered:
            answer = _pickled_answer(shell, step["name"], request["seconds"])
            answered |= {step["question"]} if "pickled" in answer else set()
            yield {"answer": step["question"], **answer}
    yield {"done": True}


class _Definitions(ast.NodeTransformer):
    """Keeps only a cell's imports, functions, classes, and assignments without a call.

    Decorators, default arguments and the bodies of classes still run.
    """

    def visit_Module(self, cell: ast.Module) -> ast.Module:
        cell.body = [part for part in cell.body if _defines(part)]
        return cell


def _defines(part: ast.stmt) -> bool:
    if isinstance(part, ast.Try):  # as around imports
        handled = [each for handler in part.handlers for each in handler.body]
        return all(map(_defines, [*part.body, *handled, *part.orelse, *part.finalbody]))
    if isinstance(part, DEFINES):
        return True
    calls = any(isinstance(each, ast.Call | ast.Await) for each in ast.walk(part))
    return isinstance(part, ast.Assign | ast.AnnAssign) and not calls


def _shell() -> Any:
    """Return an IPython shell as in a kernel, with its magics, but without a history."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    package: Any = sys.modules[__name__.partition(".")[0]]
    package.check = package.progress = lambda *_: None  # no judge is here; the grader asks by itself
    config = Config({"HistoryManager": {"enabled": False}})
    return InteractiveShell.instance(config=config, colors="NoColor")


def _run_cell(shell: Any, name: str, source: str, seconds: float) -> None:
    shell.compile.get_code_name = lambda *_: name
    with contextlib.suppress(BaseException), _interrupted_after(seconds):  # a cell may raise anything
        shell.run_cell(source, store_history=False)


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt like a kernel, then again every second; the grader's limit ends code that resists."""
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _pickled_answer(shell: Any, name: str, seconds: float) -> Message:
    """Pickle an answer as `check` does; this may run the answer's own code."""
    from ...pickling import dumps

    if name not in shell.user_ns:
        return {"refused": f"there is no {name} in the notebook: which cell should define it?"}
    try:
        with _interrupted_after(seconds):
            return {"pickled": base64.b64encode(dumps(shell.user_ns[name])).decode()}
    except BaseException as error:
        words = f"your answer cannot be sent to the ranks: {type(error).__name__}"
        with contextlib.suppress(BaseException):  # its own __str__ may fail
            words = f"{words}: {error}"
        return {"refused": words[:600]}


# --- an answer --------------------------------------------------------------------------------------------

_answer = b""  # pickled


def keep(request: Message) -> Iterator[Message]:
    """Keep an answer for the requests that follow, and get ready to start ranks."""
    global _answer
    _put(request["files"])
    _answer = base64.b64decode(request["pickled"])
    for name, source in request["cells"].items():
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    wait_until_loaded(threading.Event())
    yield {"done": True}


def ask(request: Message) -> Iterator[Message]:
    """Run a work on the answer, on fresh ranks."""
    from ...report.failed import RankError
    from ..check import in_words, told_by_ranks
    from ..question import Refused

    given = base64.b64decode(request["work"]), _answer, request["args"]
    try:
        yield {"texts": told_by_ranks(_in_a_rank, given, request["nprocs"], request["seconds"])}
    except Refused as why:
        yield {"refused": str(why)}
    except RankError as error:
        yield {"trouble": in_words(error)}
    except Exception as error:
        yield {"trouble": f"your code failed: {type(error).__name__}: {error}"}


def _in_a_rank(work: bytes, answer: bytes, args: Any) -> None:
    from ..in_rank.work import answer_in_a_rank

    asked, function = pickle.loads(work)
    answer_in_a_rank(asked, function, answer, args)


def folder(_: Message) -> Iterator[Message]:
    """Make an empty folder, which is gone when the session is."""
    from ..inputs import OTHER_DISK

    other = OTHER_DISK if os.environ["TMPDIR"] == "/tmp" else None  # without the walls it would stay
    yield {"folder": tempfile.mkdtemp(prefix="course-", dir=other)}


DO: dict[str, Callable[[Message], Iterator[Message]]] = {
    "run": run,
    "keep": keep,
    "folder": folder,
    "ask": ask,
}
