"""The process that outlives a kernel by a moment, to end all that its runs have started.

A rank that dies with its fork server has no time to end its DataLoader workers, one that holds the
interpreter's lock has no thread to do it, and Jupyter's restart kills kernel and fork server at one blow. So
the first run of a kernel starts this file, in a session of its own, and tells it by a pipe which processes
belong to the runs at work.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

OOM_SCORE = 500  # a process that takes half of the memory, or of a container's limit, has as much

_lock = threading.Lock()
_guard: subprocess.Popen[bytes] | None = None
_guarded: set[int] = set()
_kernel_pid = 0  # the process that _guard guards: a fork of the kernel needs its own


def protect(pids: Iterable[int]) -> None:
    """From now on these processes, and all that they start, end with this one, however it ends."""
    global _guard, _guarded, _kernel_pid
    if not hasattr(os, "killpg"):  # on Windows the ranks' own threads watch the kernel
        return
    with _lock:
        new = set(pids)
        _first_to_go(new)
        if _kernel_pid != os.getpid():
            _guard, _guarded, _kernel_pid = None, set(), os.getpid()
        _guarded |= new
        if _guard is None or _guard.poll() is not None:
            _guard = subprocess.Popen(
                [sys.executable, "-P", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            new = _guarded
        _tell("+", new)


def release(pids: Iterable[int]) -> None:
    """These have ended; their numbers may soon be those of others."""
    with _lock:
        gone = _guarded.intersection(pids)
        _guarded.difference_update(gone)
        _tell("-", gone)


def _first_to_go(pids: Iterable[int]) -> None:
    """Where memory runs out Linux kills the largest: let it be a rank, whose end is told, never the kernel.

    What these start inherits it.
    """
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # Linux alone has it
            own = int(Path("/proc/self/oom_score_adj").read_text())
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(own + OOM_SCORE, 1000)))


def _tell(sign: str, pids: set[int]) -> None:
    if _guard is not None and _guard.stdin is not None and _kernel_pid == os.getpid():
        with contextlib.suppress(OSError):  # it was killed: the next run starts another
            _guard.stdin.write("".join(f"{sign}{pid}\n" for pid in pids).encode())
            _guard.stdin.flush()


def end_families(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to processes, to all that they have started, and to the process groups that these lead."""
    family: list[psutil.Process] = []
    for process in processes:
        family.append(process)
        with contextlib.suppress(psutil.Error):
            family += process.children(recursive=True)
    for process in family:
        if hasattr(os, "killpg") and (process.is_running() or not psutil.pid_exists(process.pid)):
            # the group may outlive its leader; another process that has the number now is not meant
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(psutil.Error):
            process.kill()


def main(kernel_pid: int) -> None:
    """Keep the list that comes by standard input; when the kernel has ended, end who is on it."""
    watched = [sys.stdin.fileno()]
    with contextlib.suppress(AttributeError, OSError):  # no Linux, or gone: the pipe ends with the kernel too
        watched.append(os.pidfd_open(kernel_pid))  # a fork of the kernel may hold the pipe open
    processes: dict[int, psutil.Process] = {}
    rest = b""
    while ready := select.select(watched, [], [])[0]:
        if watched[0] not in ready:
            break
        data = os.read(watched[0], 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            pid = int(line[1:])
            if line[:1] == b"+":
                with contextlib.suppress(psutil.NoSuchProcess):
                    processes[pid] = psutil.Process(pid)
            else:
                processes.pop(pid, None)
    end_families(processes.values())


if __name__ == "__main__":
    main(int(sys.argv[1]))
