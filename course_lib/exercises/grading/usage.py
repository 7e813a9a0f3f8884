"""Count what a sandbox's processes use: memory, processes and threads."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

OWN = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+)", re.MULTILINE)  # in /proc/N/status, in KiB


def own_bytes(process: psutil.Process) -> int:
    """Return a process's memory without pages of files; quick, but counts shared pages in each fork."""
    with suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        return 1024 * sum(map(int, OWN.findall(status)))
    with suppress(psutil.Error):  # not Linux
        return process.memory_info().rss
    return 0


def proportional_bytes(process: psutil.Process) -> int:
    """Return a process's memory, with shared pages divided among processes (PSS) where possible; slow."""
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
