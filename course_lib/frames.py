"""Tell the learner's own lines of code from all others, and read their source."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

CONTEXT_LINES = 2  # source lines shown above and below the failing one
OURS = str(Path(__file__).parent) + os.sep
NOT_THE_LEARNERS = tuple(
    {
        OURS,
        "<frozen ",
        "<string>",  # python -c, which starts the fork server
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
Place = tuple[str, int, str]  # file, line, function


def is_learners(filename: str) -> bool:
    """Return whether a file is the learner's: not this package's, not Python's, not an installed one's."""
    return not filename.startswith(NOT_THE_LEARNERS)


def is_ours(filename: str) -> bool:
    """Return whether a file is this package's."""
    return filename.startswith(OURS)


def frame_of(thread: int | None) -> FrameType | None:
    """Return a thread's current frame, or None if there is no such thread. Hold it only for a moment.

    Before Python 3.12 the garbage collector must not run in this call: what it frees may let another thread
    run, and if that thread starts one, both deadlock (CPython issue 106883).
    """
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames().get(thread or 0)
    finally:
        if collects:
            gc.enable()


def with_source(filename: str, line: int, function: str) -> dict[str, Any]:
    """Describe a frame together with the source lines around it, for a reader without the source."""
    lines = linecache.getlines(filename)
    first = max(1, line - CONTEXT_LINES)
    shown = lines[first - 1 : line + CONTEXT_LINES]
    return {
        "file": filename,
        "line": line,
        "function": function,
        "source": [[first + i, text.rstrip("\n")] for i, text in enumerate(shown)],
    }
