"""Have a process write its Python stacks when another one asks, and ask it: by a signal that its program does
not use.

`faulthandler` writes them in C: also while the process holds the interpreter lock in C code, and none of its
threads can run. A process that can run a thread need not be asked in this way (`rank.standstill`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path


def answer_requests(path: Path) -> int | None:
    """Choose a real-time signal that nobody uses, and have this process write its stacks to a file on it.

    The processes that it forks write theirs to the same file. Return None where there is no such signal:
    only Linux tells which ones a process uses.
    """
    if sys.platform == "linux":
        for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
            if _is_in(os.getpid(), number, caught=False):
                faulthandler.register(number, open(path, "w"))
                return number
    return None


def request(pid: int, number: int) -> bool:
    """Ask a process by the signal that it has chosen; return False if it would not answer now.

    If its program has reset the signal, ignores it or blocks it, none is sent.
    """
    with contextlib.suppress(OSError):
        if _is_in(pid, number, caught=True):
            os.kill(pid, number)
            return True
    return False


def answer(path: Path, start: int, until: float) -> str:
    """Wait until a file has grown beyond ``start`` bytes, and return the new text; empty at ``until``."""
    seen = start
    while time.monotonic() < until:
        time.sleep(0.005)
        size = size_of(path)
        if size == seen > start:  # one dump takes milliseconds
            break
        seen = size
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _is_in(pid: int, number: int, caught: bool) -> bool:
    """Return whether a process catches a signal, or lets it have its default; False if it blocks it."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        masks = {line[:6]: int(line[8:], 16) for line in lines if line.startswith("Sig") and line[3] != "Q"}
        has = {name: bool(mask >> (number - 1) & 1) for name, mask in masks.items()}
        return not has["SigBlk"] and not has["SigIgn"] and has["SigCgt"] == caught
    return False
