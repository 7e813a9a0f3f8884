"""Kill processes with all that they have started: at once, or as soon as another process has ended.

As a program, ``python kill.py PID``, it is the guard of a kernel (`launcher.guard`). It briefly outlives the
kernel, so it must not need the rest of the package.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def families(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return processes with all that they have started."""
    family: list[psutil.Process] = []
    for process in processes:
        family.append(process)
        with contextlib.suppress(psutil.Error):  # it has ended
            if process.is_running():  # or psutil looks at all processes in vain
                family += process.children(recursive=True)
    return family


def kill_families(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, all that they have started, and the process groups that any of these lead."""
    for process in families(processes):
        if process.is_running() or not psutil.pid_exists(process.pid):
            # a group may outlive its leader; spare another process that has the leader's pid by now
            kill_group(process.pid)
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            process.kill()


def kill_group(pid: int) -> None:
    """Kill the process group that a process leads or has led, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_group_of(facts: Path) -> None:
    """Kill the process group of the rank that wrote a file of facts, unless a later process has its pid."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no facts, or damaged ones
        pid, seen = json.loads(facts.read_text())["pid"], facts.stat().st_mtime
        began = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):  # the rank; its group may live on
            began = psutil.Process(pid).create_time()
        if began <= seen:
            kill_group(pid)


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that has ended is listed until its parent collects its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_with(pid: int) -> None:
    """Kill this process and its process group as soon as another process has ended, however it ended."""

    def watch() -> None:
        try:
            with open(os.pidfd_open(pid), "rb") as end:
                select.select([end], [], [])
        except (AttributeError, OSError):  # not Linux, or already gone
            while is_alive(pid):
                time.sleep(0.2)
        if os.getpgrp() == os.getpid():
            kill_group(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, name="course-end-with", daemon=True).start()


def end_with_parent() -> bool:
    """Have Linux kill this process when its parent ends; return False on other systems.

    This takes less time than `end_with`, and works even if the process is busy in C code.
    """
    parent = os.getppid()
    done = prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if done and os.getppid() != parent:
        os._exit(1)
    return done


def prctl(option: int, value: int) -> bool:
    """Set an attribute of this process; return whether that was done, which only Linux does."""
    import ctypes  # the guard does not need it

    with contextlib.suppress(AttributeError, TypeError):  # macOS
        return ctypes.CDLL(None).prctl(option, value) == 0
    return False


def guard(kernel_pid: int) -> None:
    """Keep the list of processes that arrives on stdin; once the kernel has ended, kill them all."""
    watched = [sys.stdin.fileno()]
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or gone: the pipe closes with it, too
        watched.append(os.pidfd_open(kernel_pid))  # a fork of the kernel may hold the pipe open
    processes: dict[int, psutil.Process] = {}
    rest = b""
    while ready := select.select(watched, [], [])[0]:
        if watched[0] not in ready or not (data := os.read(watched[0], 1 << 16)):
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            pid = int(line[1:])
            if line[:1] == b"+":
                with contextlib.suppress(psutil.NoSuchProcess):
                    processes[pid] = psutil.Process(pid)
            else:
                processes.pop(pid, None)
    kill_families(processes.values())


if __name__ == "__main__":
    guard(int(sys.argv[1]))
