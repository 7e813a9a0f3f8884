"""Tell the learner's own lines of code from all others, and read their source."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import os
import re
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

CONTEXT_LINES = 2  # source lines shown above and below the failing one
OURS = str(Path(__file__).parent) + os.sep
STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# Where packages are installed (into an environment, for a user, by the system), and torch.compile's own code
PACKAGES = re.compile(r"[/\\](site-packages|dist-packages|torchinductor_[^/\\]+)[/\\]")
TYPED_IN = re.compile(r"<(stdin|console|\w+-input)\b")  # other names of this form: code that a library makes
Place = tuple[str, int, str]  # file, line, function


def is_learners(filename: str) -> bool:
    """Return whether a file is the learner's: not this package's, not Python's, not an installed one's."""
    if filename.startswith("<"):
        return bool(TYPED_IN.match(filename))
    elsewhere = _packages_elsewhere(tuple(map(str, sys.path)))  # an entry may be anything
    return not (filename.startswith((OURS, *STDLIB, *elsewhere)) or PACKAGES.search(filename))


@functools.lru_cache(maxsize=1)
def _packages_elsewhere(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return packages that lie in another folder on ``path``: torch, and those that pip has installed there.

    A folder may hold installed packages beside a project (``pip install --target``, PYTHONPATH): pip lists
    their files. Of a project that is installed to be edited, it lists none of the project's folder.
    """
    found = set[str]()
    with contextlib.suppress(Exception):  # there is no torch, or it is half imported
        torch = find_spec("torch")
        found |= {os.path.join(folder, "") for folder in torch.submodule_search_locations}  # type: ignore
    for entry in path:
        with contextlib.suppress(Exception):  # it is not there, cannot be read, or the working folder is gone
            folder = os.path.abspath(entry)
            for files in () if PACKAGES.search(folder + os.sep) else Path(folder).glob("*.dist-info/RECORD"):
                with contextlib.suppress(OSError):
                    names = set(re.findall(r"^[^/,]+/?", files.read_text(), re.MULTILINE)) - {"../"}
                    found |= {os.path.join(folder, name.replace("/", os.sep)) for name in names}
    return tuple(found)


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
