"""Record a process's own failure before it ends (`report` reads the record)."""

from __future__ import annotations

import errno
import itertools
import json
import linecache
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..compat import on_child_end
from ..files import write_whole
from ..host.hardware import memory
from ..record.layout import RankFiles, process_name
from ..tracebacks.learner_code import is_learners, is_ours, with_source

WORKER_SECONDS = 0.5  # how much longer than its connection a worker may last
MOST_FRAMES = 12  # of a longer stack, the outermost and the innermost ones
MOST_RELATED = 30  # exceptions that are recorded beside another one
RELATED_FRAMES = 4  # of each of these exceptions
ROOM_SECONDS = 0.5  # how long another rank may take to make room on a full disk
RECENT_SECONDS = 10.0  # a worker may explain an error if it ended this recently, or if the error names it
LOST = (ConnectionError, EOFError)  # raised when the other end of a connection is gone
_ended: dict[int, tuple[int, float]] = {}  # exit code by pid, and when that was seen


def report_exception(folder: Path, rank: int | str, error: BaseException) -> None:
    """Record an exception, and those that Python's traceback shows beside it, as the failure of a rank."""
    others = list(itertools.islice(_related(error, {id(error)}), MOST_RELATED))
    lost = any(isinstance(each, LOST) for each in (error, *(other for _, other in others)))
    text = "".join(traceback.format_exception(error))
    beside = [related(how, described(each, RELATED_FRAMES)) for how, each in others]
    facts = described(error) | {"related": beside}
    if workers := _killed_workers(text, expected=lost):
        facts |= {"workers": workers, "memory": memory()}
    write_failure(folder, rank, **facts, text=text)


def related(how: str, exception: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an exception that belongs to another one, in the way that `_related` yields."""
    text = f"{exception['type']}: {exception['message']}".removesuffix(": ")
    return {"how": how, "text": text, "frames": exception["frames"]}


def _related(error: BaseException, seen: set[int]) -> Iterator[tuple[str, BaseException]]:
    """Yield each exception that belongs to an error, and how: it is inside the group, or led to the error."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    context = None if error.__suppress_context__ else error.__context__
    for how, each in [*(("inside", part) for part in parts), ("from", error.__cause__), ("during", context)]:
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield how, each
            yield from _related(each, seen)


def watch_children() -> None:
    """Note how children that `multiprocessing` starts end: this may explain a later failure."""
    on_child_end(lambda pid, code: _ended.setdefault(pid, (code, time.time())))


def _killed_workers(text: str, expected: bool) -> list[tuple[int, int]]:
    """Return pid and exit code of each worker of `multiprocessing` whose end by a signal explains an error.

    ``text`` is the error's traceback. If a worker's end is ``expected``, look again: a connection may be lost
    some moments before the worker has ended.
    """
    until = time.monotonic() + (WORKER_SECONDS if expected else 0)
    while True:
        multiprocessing.active_children()  # polls each
        since = time.time() - RECENT_SECONDS
        killed = [
            (pid, code)
            for pid, (code, at) in _ended.items()
            if code < 0 and code != -signal.SIGTERM  # the signal by which a DataLoader ends its workers
            if at >= since or re.search(rf"\b{pid}\b", text)
        ]
        if killed or time.monotonic() >= until:
            return killed
        time.sleep(0.02)


def described(error: BaseException, most_frames: int = MOST_FRAMES) -> dict[str, Any]:
    """Return an exception's type, message and frames in the learner's code, as in a failure's record.

    The message includes notes and, for a line that cannot be parsed, its place.
    """
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    printed = "".join(traceback.TracebackException.from_exception(error).format_exception_only())
    line, _, message = f"\n{printed}".removesuffix("\n").partition(f"\n{module}{kind.__qualname__}")
    if isinstance(error, SyntaxError) and linecache.getline(error.filename or "", error.lineno or 0):
        line = f" ({os.path.basename(error.filename or '')}, line {error.lineno})"  # its frame shows the line
    message = message.removeprefix(": ") + line
    return {"type": f"{module}{kind.__name__}", "message": message, "frames": _frames(error, most_frames)}


def write_failure(folder: Path, rank: int | str, pid: int | None = None, **facts: Any) -> None:
    """Record a failure: an exception, as `described`, or only an exit code or a message about the rank."""
    record = {"time": time.time(), "process": process_name(pid or os.getpid())} | facts
    until = time.monotonic() + ROOM_SECONDS
    while True:
        try:
            return write_whole(RankFiles(folder, rank).failure, json.dumps(record))
        except OSError as error:  # a full disk, a folder that was removed: `report` says so
            if error.errno != errno.ENOSPC or time.monotonic() > until:
                return
            time.sleep(0.02)  # another rank may be about to make room


def _frames(error: BaseException, most: int = MOST_FRAMES) -> list[dict[str, Any]]:
    """Return the learner's own frames, outermost first; without any, the innermost one unless it is ours.

    Frames that a recursion repeats are left out, except the last.
    """
    trace = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno or 0, frame.name) for frame in trace]
    if isinstance(error, SyntaxError) and error.filename:  # a line that cannot be parsed has not run
        places.append((error.filename, error.lineno or 0, "<module>"))
    own = [place for place in places if is_learners(place[0])]
    own = own or [place for place in places[-1:] if not is_ours(place[0])]
    first = sorted({place: i for i, place in reversed(list(enumerate(own)))}.values())
    if own and own[first[-1]] != own[-1]:
        first.append(len(own) - 1)
    shown = first if len(first) <= most else first[: most // 2] + first[-(most // 2) :]
    ends = [*shown[1:], len(own)]
    return [with_source(*own[i]) | {"left_out": end - i - 1} for i, end in zip(shown, ends, strict=False)]
