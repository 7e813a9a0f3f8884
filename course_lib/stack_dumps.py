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
import time
from pathlib import Path

REST_SECONDS = 0.05  # a dump takes milliseconds, but on a busy machine its process may be held up in it


def answer_requests(path: Path) -> int | None:
    """Have this process write its stacks to a file on a real-time signal, which is returned.

    The processes that it forks write theirs to the same file. Return None where the program uses such signals
    already, or the system does not tell: only Linux does.
    """
    if hasattr(signal, "SIGRTMAX") and _answers_to(os.getpid()) == set():
        faulthandler.register(signal.SIGRTMAX, open(path, "w"))
        return int(signal.SIGRTMAX)
    return None


def request(pid: int, number: int) -> bool:
    """Ask a process by this signal; return False, and send none, if its program is seen to use such signals.

    It is if it catches others, too, or resets, ignores or blocks this one. A handler of its own for this one
    alone is not seen from outside: a rank notes it (`Recorder.stack_signal`), but what it forks does not.
    """
    with contextlib.suppress(OSError):
        if _answers_to(pid) == {number}:
            os.kill(pid, number)
            return True
    return False


def answer(path: Path, start: int, until: float) -> str:
    """Wait until a file has grown beyond ``start`` bytes and grows no more, or ``until``.

    Return the new text; empty if there is none.
    """
    seen, grew = start, time.monotonic()
    while (now := time.monotonic()) < until:
        size = size_of(path)
        if size != seen:
            seen, grew = size, now
        elif size > start and now - grew >= REST_SECONDS:
            break
        time.sleep(0.005)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _answers_to(pid: int) -> set[int] | None:
    """Return the real-time signals that a process catches; None if it ignores or blocks one, or is gone."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        masks = dict(line.split(":") for line in lines if line.startswith("Sig"))
        ignored, blocked, caught = (
            {n for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if int(masks[kind], 16) >> (n - 1) & 1}
            for kind in ("SigIgn", "SigBlk", "SigCgt")
        )
        return None if ignored | blocked else caught
    return None
