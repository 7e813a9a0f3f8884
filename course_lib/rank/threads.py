"""What the threads of a rank do, and which exceptions ended them."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

from ..tracebacks.learner_code import Place, frame_of, is_learners
from .failure import described

MOST_ERRORS = 8


def stack_of(thread: int | None) -> list[Place]:
    """Return a thread's stack, innermost first.

    It holds no frames: a frame keeps alive everything that it refers to.
    """
    frame = frame_of(thread)
    stack = [] if frame is None else walk_stack(frame)
    return [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in stack]


def cpu_seconds(thread: int | None) -> float:
    """Return the CPU time of a living thread; NaN on a system that does not count it for each thread."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread or 0))
    except (AttributeError, OSError):  # macOS
        return math.nan


def other_threads() -> list[dict[str, Any]]:
    """Describe threads beside the main one that run the learner's code or keep the process from ending."""
    found = []
    for thread in threading.enumerate():
        stack = stack_of(thread.ident)
        matters = not thread.daemon or any(is_learners(file) for file, _, _ in stack)
        if matters and thread is not threading.main_thread():
            found.append({"name": thread.name, "daemon": thread.daemon, "stack": stack})
    return found


def note_exceptions(note: Callable[..., None]) -> None:
    """Note as a fact each exception that ends a thread; then call the hook that was installed before."""
    pid, noted, before = os.getpid(), list[dict[str, Any]](), threading.excepthook

    def hook(args: Any) -> None:
        with contextlib.suppress(Exception):  # the earlier hook still reports it
            name = args.thread.name if args.thread else "?"
            failed = args.exc_type is not SystemExit and not name.startswith("course-")  # those are ours
            if os.getpid() == pid and failed and len(noted) < MOST_ERRORS:
                noted.append({"thread": name} | described(args.exc_value))
                note(thread_errors=[*noted])
        before(args)

    threading.excepthook = hook
