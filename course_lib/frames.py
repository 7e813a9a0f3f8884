"""Tell the learner's own lines of code from all others, and format them for reports."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

from .notebook import shell

CONTEXT_LINES = 2  # source lines shown above and below the failing one
LINE_LENGTH = 400
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


def label(filename: str) -> str:
    """Return a name to show: ``Cell In[7]`` for a cell of this kernel, a short path for a file."""
    with contextlib.suppress(AttributeError, TypeError):  # no cell, or no IPython
        return " ".join(shell().compile.format_code_name(filename))
    with contextlib.suppress(ValueError):
        return str(Path(filename).relative_to(Path.cwd()))
    return Path(filename).name


def line_of(frame: dict[str, Any]) -> str:
    """Format a frame's place and source line in one line."""
    source = dict(frame["source"]).get(frame["line"], "").strip()
    return f"{label(frame['file'])}, line {frame['line']}" + (f": {shortened(source)}" if source else "")


def show(frame: dict[str, Any]) -> str:
    """Format a frame as source lines, with the failing one marked."""
    lines = [f"[{frame['left_out']} more calls]\n"] if frame.get("left_out") else []
    lines.append(f"{label(frame['file'])}, line {frame['line']}, in {frame['function']}")
    for number, text in frame["source"]:
        mark = "---->" if number == frame["line"] else "     "
        lines.append(f"{mark} {number:4} {shortened(text)}".rstrip())
    return "\n".join(lines) + "\n"


def shortened(line: str) -> str:
    """Cut a line that is longer than `LINE_LENGTH`."""
    return line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + " …"
