"""The guard: a process that briefly outlives a kernel, to kill everything that its runs have started.

A rank that dies with its fork server has no time to end its DataLoader workers. A rank in C code that holds
the GIL has no thread to do so. Jupyter's restart kills the kernel and the fork server at once. So a kernel
starts `kill` as a program, in its own session, before the fork server, and tells it by a pipe what to kill.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from .. import kill

OOM_SCORE = 500  # the score of a process that uses half of the memory, or of a container's limit

_lock = threading.Lock()
_guard: subprocess.Popen[bytes] | None = None
_guarded: set[int] = set()
_kernel_pid = 0  # the process that _guard watches: a fork of the kernel needs its own guard


def protect(pids: Iterable[int]) -> None:
    """Have these processes, and all that they start, killed when this one ends, however it ends."""
    global _guard, _guarded, _kernel_pid
    with _lock:
        new = set(pids)
        _first_to_go(new)
        if _kernel_pid != os.getpid():
            _guard, _guarded, _kernel_pid = None, set(), os.getpid()
        _guarded |= new
        if _guard is None or _guard.poll() is not None:
            _guard = subprocess.Popen(
                [sys.executable, "-P", kill.__file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            new = _guarded
        _tell("+", new)


def release(pids: Iterable[int]) -> None:
    """Stop guarding these processes: they have ended, and their pids may be reused."""
    with _lock:
        gone = _guarded.intersection(pids)
        _guarded.difference_update(gone)
        _tell("-", gone)


def _first_to_go(pids: Iterable[int]) -> None:
    """Have Linux kill these rather than the notebook's kernel when memory runs out: their end is reported.

    By default Linux kills the largest process. Child processes inherit the setting.
    """
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # only Linux has it
            own = int(Path("/proc/self/oom_score_adj").read_text())
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(own + OOM_SCORE, 1000)))


def _tell(sign: str, pids: set[int]) -> None:
    if _guard is not None and _guard.stdin is not None and _kernel_pid == os.getpid():
        with contextlib.suppress(OSError):  # the guard was killed: the next run starts another
            _guard.stdin.write("".join(f"{sign}{pid}\n" for pid in pids).encode())
            _guard.stdin.flush()
