"""Read the Python stacks that `faulthandler` wrote, and find the learner's line in a stack."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import compat
from ..tracebacks.learner_code import Place, is_learners, is_ours, with_source
from .facts import OtherActivity, Position

if TYPE_CHECKING:
    from ..record.trace import Trace

CRASH = "Fatal Python error: "
THREAD = re.compile(r"^(Current|Thread|Stack)\b.*\(most recent call first\):\n((?:  .*\n)*)", re.MULTILINE)
CURRENT = re.compile(r"^(Current|Stack)\b", re.MULTILINE)  # the heading of the thread that has crashed
STACK_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')
WRAPPERS = {"wrapper", "decorate_context", "_fn", "__call__", "_wrapped_call_impl", "_call_impl"}
DISTRIBUTED = os.path.join("torch", "distributed") + os.sep
MULTIPROCESSING = os.path.join("multiprocessing", "process.py")


def dumped(text: str) -> list[list[Place]]:
    """Return the stacks in a dump of `faulthandler`, innermost frame first, the current thread's first."""
    stacks = []
    for _, lines in sorted(THREAD.findall(text), key=lambda thread: thread[0] == "Thread"):
        stack = [(file, int(line), function) for file, line, function in STACK_LINE.findall(lines)]
        by_multiprocessing = stack[-1:] == [("<string>", 1, "<module>")]  # its python -c
        stacks.append(stack[:-1] if by_multiprocessing else stack)
    return stacks


def asked_stack(trace: Trace) -> list[Place]:
    """Return the first stack in the learner's code or, without one, the current thread's, if there is any.

    The current thread is the one that handled the signal: the main thread, unless it had another one pending.
    """
    stacks = dumped(trace.stacks)
    return next(filter(position_of, stacks), stacks[0] if stacks else [])


def crash_position(trace: Trace) -> tuple[Position | None, str]:
    """Return where the learner's code was when a rank crashed in C, if any file says so.

    If another thread crashed, also say where that thread was, or that it runs no Python code.
    """
    for end in trace.crash_texts():
        _, crashed, text = end.rpartition(CRASH)
        if not crashed:
            continue
        stacks = dumped(text)
        position = next(filter(None, map(position_of, stacks)), None)
        first = next(iter(stacks), [])
        foreign = [place for place in first if not is_ours(place[0])]
        if not CURRENT.search(text) or (first and not foreign):  # by std::terminate
            return position, "in a thread that runs no Python code"
        if position is None or position_of(first) or not foreign:
            return position, ""
        file, line, function = foreign[0]
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
    names = [name for file, _, name in reversed(inner) if file != compat.__file__]  # our wrappers of torch's
    function = next((name for name in names if name not in WRAPPERS), None)
    return Position(with_source(*stack[depth]), function, pending or in_distributed(inner))


def in_distributed(stack: Sequence[Place]) -> bool:
    return any(DISTRIBUTED in file for file, _, _ in stack)


def position_in(record: Mapping[str, Any], stack: Sequence[Place]) -> Position | None:
    """Return where a rank's main thread is, by its stack and its record of pending collectives."""
    other_waits = any(in_distributed(thread["stack"]) for thread in record.get("threads", []))
    return position_of(stack, bool(record.get("pending")) and not other_waits)


def others_in(record: Mapping[str, Any]) -> list[OtherActivity]:
    """Return the threads and the forked processes in a rank's record of where it is."""
    threads = [
        OtherActivity(position_of(each["stack"]), each["name"], each["daemon"])
        for each in record.get("threads", [])
    ]
    return threads + [each for text in record.get("forked", []) if (each := _forked(text))]


def _forked(text: str) -> OtherActivity | None:
    for stack in dumped(text):
        # from multiprocessing's innermost frame outwards, the frames are the parent's at the fork
        own = list(itertools.takewhile(lambda place: not place[0].endswith(MULTIPROCESSING), stack))
        if position := position_of(own):
            loads = any(name == "_worker_loop" for _, _, name in own)
            return OtherActivity(position, loads=loads)
    return None
