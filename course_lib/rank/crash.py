"""Have a crash in C leave the Python stacks in a file, or know where the program wants them left."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def leave_stacks(path: Path, note: Callable[..., None]) -> None:
    """Have a crash write the stacks to a file, unless the program says where (`faulthandler.enable`).

    Then they are there alone: in the rank's output, or in the file that is noted.
    """
    if not faulthandler.is_enabled():  # PYTHONFAULTHANDLER enables it
        faulthandler.enable(open(path, "w"))
    enable = faulthandler.enable

    @functools.wraps(enable)
    def noted(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        with contextlib.suppress(Exception):
            file: Any = args[0] if args else kwargs.get("file")
            fd = file if isinstance(file, int) or file is None else file.fileno()
            note(crash_file=fd is not None and (_path(fd) or os.path.abspath(file.name)))

    faulthandler.enable = noted


def _path(fd: int) -> str:
    """Return the path of an open file by its descriptor; "" where the system does not tell (macOS)."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""
