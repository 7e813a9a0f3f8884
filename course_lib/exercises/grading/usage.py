"""Measure what a sandbox's processes use: memory, and the time for which others kept its cores from them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from ... import hardware

PROC = Path("/proc")
OWN = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+)", re.MULTILINE)  # in /proc/N/status, in KiB
IGNORED = re.compile(r"^SigIgn:\s+([0-9a-f]+)", re.MULTILINE)  # there, too: a bit for each signal


class Waiting:
    """How long processes have waited for cores that others used, as Linux measures it; elsewhere 0.

    Processes that only wait for each other do not count: what they lack of their cores is no more than what
    they could not use, nor than what others used, and a hang waits for no core at all. Nor do processes that
    ignore the end of their children, since nobody knows what these have used.

    Parameters
    ----------
    cores
        Those of the processes; by default all that this process may use.
    """

    def __init__(self, cores: Collection[int] = ()) -> None:
        self._count = len(cores) or hardware.cores()
        self._cores = {*cores} or ({*os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set())
        self._looked = time.monotonic()
        self._idle = self._idle_seconds()
        self._waits: dict[Path, int] = {}  # nanoseconds, by thread
        self._used = 0.0
        self.seconds = 0.0

    def look(self, family: Collection[psutil.Process]) -> None:
        """Add what has been lost since the last look."""
        waits: dict[Path, int] = {}
        used, idle, ignores = 0.0, self._idle_seconds(), False
        for process in family:
            with suppress(OSError):
                for thread in (PROC / str(process.pid) / "task").iterdir():
                    waits[thread] = int((thread / "schedstat").read_text().split()[1])
                ignored = IGNORED.findall((PROC / str(process.pid) / "status").read_text())
                ignores |= any(int(bits, 16) >> (signal.SIGCHLD - 1) & 1 for bits in ignored)
            with suppress(psutil.Error, AttributeError):
                used += sum(process.cpu_times()[:4])  # with those of children that have ended
        waited = sum(count - self._waits.get(thread, 0) for thread, count in waits.items()) / 1e9
        now = time.monotonic()
        took = now - self._looked
        unused = took - (used - self._used) / self._count
        others = took * len(self._cores) - (idle - self._idle) - (used - self._used)
        self.seconds += 0.0 if ignores else max(0.0, min(waited, unused, others, took))
        self._looked, self._waits, self._used, self._idle = now, waits, used, idle

    def _idle_seconds(self) -> float:
        """Return for how long the cores have had nothing to do, or only this process."""
        total = 0
        with suppress(OSError):
            found = re.findall(r"(?m)^cpu(\d+)(?: \d+){3} (\d+) (\d+)", (PROC / "stat").read_text())
            total = sum(int(idle) + int(waits) for core, idle, waits in found if int(core) in self._cores)
        return total / os.sysconf("SC_CLK_TCK") + time.process_time()


def own_bytes(process: psutil.Process) -> int:
    """Return a process's memory without files' pages: quick, but pages that forks share count in each."""
    with suppress(OSError):
        status = (PROC / str(process.pid) / "status").read_text()
        return 1024 * sum(map(int, OWN.findall(status)))
    with suppress(psutil.Error):  # not Linux
        return process.memory_info().rss
    return 0


def proportional_bytes(process: psutil.Process) -> int:
    """Return memory, with shared pages divided among their users (PSS) where that is known; slow."""
    try:
        return process.memory_full_info().pss
    except (psutil.AccessDenied, AttributeError):
        return own_bytes(process)
    except psutil.NoSuchProcess:
        return 0


def tasks_of_this_user() -> int:
    """Count this user's processes and threads, which the system counts together."""
    count, own = 0, os.geteuid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == own else 0
    return count
