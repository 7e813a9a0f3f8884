"""Ask silent ranks for their Python stacks, read what `faulthandler` wrote, and find the learner's line."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import private_names
from ..frames import Place, is_learners, is_ours, with_source
from ..run.trace import end_of
from ..run_folder import RankFiles
from ..stack_dumps import answer, request, size_of
from .facts import Beside, Position

if TYPE_CHECKING:
    from ..run.run import Run

STACK_SECONDS = 1.0  # how long the ranks get to write their stacks; it takes milliseconds
DUMP_BYTES = 1 << 18  # read at most: a dump has a hundred frames for each of a hundred threads
CRASH = "Fatal Python error: "
THREAD = re.compile(r"^(Current|Thread|Stack)\b.*\(most recent call first\):\n((?:  .*\n)*)", re.MULTILINE)
CURRENT = re.compile(r"^(Current|Stack)\b", re.MULTILINE)  # the heading of the thread that has crashed
STACK_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')
WRAPPERS = {"wrapper", "decorate_context", "_fn", "__call__", "_wrapped_call_impl", "_call_impl"}
DISTRIBUTED = os.path.join("torch", "distributed") + os.sep
MULTIPROCESSING = os.path.join("multiprocessing", "process.py")


def ask_stacks(run: Run, ranks: Iterable[int]) -> None:
    """Ask ranks on this machine for their stacks by a signal, and wait until they have written them."""
    if run.is_job:  # another machine's pid is somebody else's here
        return
    asked: dict[Path, int] = {}
    for rank in ranks:
        path, facts = RankFiles(run.folder, rank).stack, run.facts(rank)
        number, size = facts.get("stack_signal"), size_of(path)
        if number and request(facts["pid"], number):
            asked[path] = size
    until = time.monotonic() + STACK_SECONDS
    for path, size in asked.items():
        answer(path, size, until)


def dumped(text: str) -> list[list[Place]]:
    """Return the stacks in a dump of `faulthandler`, innermost frame first, the current thread's first."""
    stacks = []
    for _, lines in sorted(THREAD.findall(text), key=lambda thread: thread[0] == "Thread"):
        stack = [(file, int(line), function) for file, line, function in STACK_LINE.findall(lines)]
        by_multiprocessing = stack[-1:] == [("<string>", 1, "<module>")]  # its python -c
        stacks.append(stack[:-1] if by_multiprocessing else stack)
    return stacks


def asked_stack(run: Run, rank: int) -> list[Place]:
    """Return the stack of the thread that a signal met, if it is in the learner's code, or another; or none.

    The system lets the main thread handle a signal, unless another one is pending there.
    """
    stacks = dumped(end_of(RankFiles(run.folder, rank).stack, DUMP_BYTES)[1])
    return next(filter(position_of, stacks), stacks[0] if stacks else [])


def crash_position(run: Run, rank: int | str) -> tuple[Position | None, str]:
    """Return where the learner's code was when a rank crashed in C, if it was written down anywhere.

    If another thread has crashed, also say where that one was, or that it runs no Python code.
    """
    trace, named = run.trace(rank), run.facts(rank).get("crash_file")
    for path in [trace.files.crash, *([Path(named)] if named else []), *reversed(trace.log_files())]:
        _, crashed, text = end_of(path, DUMP_BYTES)[1].rpartition(CRASH)
        if crashed:
            stacks = dumped(text)
            position = next(filter(None, map(position_of, stacks)), None)
            if not CURRENT.search(text) or (
                stacks[0] and all(is_ours(file) for file, _, _ in stacks[0])
            ):  # std::terminate's
                return position, "in a thread that runs no Python code"
            if position is None or position_of(stacks[0]) or not stacks[0]:
                return position, ""
            file, line, function = next(place for place in stacks[0] if not is_ours(place[0]))
            return position, f"in another thread, in {function} ({os.path.basename(file)}, line {line})"
    return None, ""


def position_of(stack: Sequence[Place], pending: bool = False) -> Position | None:
    """Return where a stack, innermost frame first, is in the learner's code; None if it is not.

    ``pending``: the rank has called a collective that is not over, so it waits.
    """
    depth = next((i for i, (file, _, _) in enumerate(stack) if is_learners(file)), None)
    if depth is None:
        return None
    inner = stack[:depth]
    names = [name for file, _, name in reversed(inner) if file != private_names.__file__]  # around torch's
    function = next((name for name in names if name not in WRAPPERS), None)
    return Position(with_source(*stack[depth]), function, pending or in_distributed(inner))


def in_distributed(stack: Sequence[Place]) -> bool:
    return any(DISTRIBUTED in file for file, _, _ in stack)


def has_pending(record: Mapping[str, Any]) -> bool:
    """Return whether a rank's main thread, not another one, is in a collective that is not over."""
    elsewhere = any(in_distributed(thread["stack"]) for thread in record.get("threads", []))
    return bool(record.get("pending")) and not elsewhere


def beside(record: Mapping[str, Any]) -> list[Beside]:
    """Return the threads and the forked processes in a rank's record of where it is."""
    threads = [
        Beside(position_of(each["stack"]), each["name"], each["daemon"]) for each in record.get("threads", [])
    ]
    return threads + [each for text in record.get("forked", []) if (each := _forked(text))]


def _forked(text: str) -> Beside | None:
    for stack in dumped(text):
        # what lies below multiprocessing's first frame is where the parent forked it
        own = list(itertools.takewhile(lambda place: not place[0].endswith(MULTIPROCESSING), stack))
        if position := position_of(own):
            loads = any(name == "_worker_loop" for _, _, name in own)
            return Beside(position, loads=loads)
    return None
