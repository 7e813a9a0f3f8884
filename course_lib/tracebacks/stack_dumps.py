"""Have a process write its Python stacks when it crashes in C, or when another process asks by a signal.

`faulthandler` writes the stacks in C, even while C code holds the interpreter lock and no thread can run
Python. A rank that can run a thread needs no signal: see `rank.standstill`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REST_SECONDS = 0.05  # a dump takes milliseconds, but a busy machine may stop the process in the middle


def leave_at_a_crash(path: Path, note: Callable[..., None]) -> None:
    """Have a crash in C write the stacks to a file, unless the program says where (`faulthandler.enable`).

    The rank then notes the program's file as ``crash_file``, or False if it is the rank's output.
    """
    if not faulthandler.is_enabled():  # PYTHONFAULTHANDLER enables it
        faulthandler.enable(open(path, "w"))
    enable = faulthandler.enable

    @functools.wraps(enable)
    def enable_and_note(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        with contextlib.suppress(Exception):
            file: Any = args[0] if args else kwargs.get("file")
            fd = file if isinstance(file, int) or file is None else file.fileno()
            note(crash_file=fd is not None and (_path(fd) or os.path.abspath(file.name)))

    faulthandler.enable = enable_and_note


def _path(fd: int) -> str:
    """Return the path of an open file; "" on macOS, which has no /proc."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def answer_requests(path: Path) -> int | None:
    """Have this process and its forks write their stacks to a file on a real-time signal; return the signal.

    Return None if the program already uses such signals, or if the system is not Linux.
    """
    if hasattr(signal, "SIGRTMAX") and _answers_to(os.getpid()) == set():
        faulthandler.register(signal.SIGRTMAX, open(path, "w"))
        return int(signal.SIGRTMAX)
    return None


def request(pid: int, number: int) -> bool:
    """Ask a process for its stacks by this signal; if its program uses such signals, only return False.

    From outside we see whether the program catches another one, or resets, ignores or blocks this one.
    Only a rank can tell whether it handles this one itself (`Recorder.stack_signal`), and not for its forks.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if _answers_to(pid) == {number}:
            os.kill(pid, number)
            return True
    return False


def answer(path: Path, start: int, until: float) -> str:
    """Return the text that a file gains beyond ``start`` bytes, once it grows no more, or at ``until``."""
    seen, grew = start, time.monotonic()
    while (now := time.monotonic()) < until:
        size = size_of(path)
        if size != seen:
            seen, grew = size, now
        elif size > start and now - grew >= REST_SECONDS:
            break
        time.sleep(0.005)
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()[start:].decode(errors="replace")
    return ""


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _answers_to(pid: int) -> set[int] | None:
    """Return the real-time signals that a process catches; None if it ignores or blocks one, or is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    masks = dict(line.split(":") for line in lines if line.startswith("Sig"))
    ignored, blocked, caught = (
        {n for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if int(masks[kind], 16) >> (n - 1) & 1}
        for kind in ("SigIgn", "SigBlk", "SigCgt")
    )
    return None if ignored | blocked else caught
