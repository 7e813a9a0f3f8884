"""Record a process's own failure before it ends (`report` reads the record)."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..frames import is_learners, is_ours, with_source
from ..hardware import memory
from ..private_names import tell_of_ended_children
from ..run_folder import RankFiles, process_name

WORKER_SECONDS = 0.5  # that a worker may take to end after its connection
MOST_FRAMES = 12  # a deep recursion shows the outermost and the innermost ones
RECENT_SECONDS = 10.0  # an error may come of a worker that has ended since then, or that it names
LOST = (ConnectionError, EOFError)  # raised where the other end of a connection is gone
_ended: dict[int, tuple[int, float]] = {}  # exit code by pid, and when that was seen


def report_exception(folder: Path, rank: int | str, error: BaseException) -> None:
    """Record an exception, with its causes, as the failure of a rank."""
    causes: list[str] = []
    seen, cause, lost = {id(error)}, _cause(error), isinstance(error, LOST)
    while cause is not None and id(cause) not in seen and len(causes) < MOST_FRAMES:
        causes.append(": ".join(_name_and_message(cause)).removesuffix(": "))
        lost = lost or isinstance(cause, LOST)
        seen.add(id(cause))
        cause = _cause(cause)
    text = "".join(traceback.format_exception(error))
    workers = _killed_workers(text, expected=lost)
    write_failure(folder, rank, *_name_and_message(error), _frames(error), text, causes, workers=workers)


def watch_children() -> None:
    """Note how the processes end that this one starts by `multiprocessing`: a failure may come of it."""
    tell_of_ended_children(lambda pid, code: _ended.setdefault(pid, (code, time.time())))


def _killed_workers(text: str, expected: bool) -> list[tuple[int, int]]:
    """Return pid and exit code of each worker of `multiprocessing` whose end by a signal explains an error.

    ``text`` is the error's. A connection may be reset some moments before its process has ended: look again
    if one is ``expected``.
    """
    until = time.monotonic() + (WORKER_SECONDS if expected else 0)
    while True:
        multiprocessing.active_children()  # looks at each
        since = time.time() - RECENT_SECONDS
        killed = [
            (pid, code)
            for pid, (code, at) in _ended.items()
            if code < 0 and code != -signal.SIGTERM  # by which a DataLoader ends its workers
            if at >= since or re.search(rf"\b{pid}\b", text)
        ]
        if killed or time.monotonic() >= until:
            return killed
        time.sleep(0.02)


def described(error: BaseException) -> dict[str, Any]:
    """Return an exception's type, message and frames in the learner's code, as in a failure's record."""
    kind, message = _name_and_message(error)
    return {"type": kind, "message": message, "frames": _frames(error)}


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _name_and_message(error: BaseException) -> tuple[str, str]:
    kind = type(error)
    try:
        message = str(error)
    except Exception:  # an exception whose own __str__ fails
        message = "(its message cannot be shown)"
    inside = kind.__module__ in ("builtins", "__main__")
    return kind.__name__ if inside else f"{kind.__module__}.{kind.__name__}", message


def write_failure(
    folder: Path,
    rank: int | str,
    kind: str,
    message: str,
    frames: list[dict[str, Any]],
    text: str,
    causes: Sequence[str] = (),
    exit_code: int | None = None,
    workers: Sequence[tuple[int, int]] = (),
    pid: int | None = None,
) -> None:
    """Record a failure; without a ``kind``, the rank reported nothing, and only its exit code is known."""
    record = {"time": time.time(), "type": kind, "message": message, "frames": frames, "text": text}
    record |= {"causes": list(causes), "exit_code": exit_code, "process": process_name(pid or os.getpid())}
    if workers:
        record |= {"workers": list(workers), "memory": memory()}
    with contextlib.suppress(OSError):  # a full disk, a folder that was removed: `report` says that
        write_whole(RankFiles(folder, rank).failure, json.dumps(record))


def _frames(error: BaseException) -> list[dict[str, Any]]:
    """Return the learner's own frames, outermost first; without any, the innermost one unless it is ours."""
    trace = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno or 0, frame.name) for frame in trace]
    if isinstance(error, SyntaxError) and error.filename:  # a line that cannot be parsed has not run
        places.append((error.filename, error.lineno or 0, "<module>"))
    own = [place for place in places if is_learners(place[0])]
    last = [place for place in places[-1:] if not is_ours(place[0])]
    own = own or last
    left_out = max(0, len(own) - MOST_FRAMES)
    half = MOST_FRAMES // 2
    frames = [with_source(*place) for place in (own[:half] + own[-half:] if left_out else own)]
    if left_out:
        frames[half]["left_out"] = left_out
    return frames
