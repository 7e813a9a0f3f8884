"""What a rank that runs an answer may take, and what is left of it afterwards: nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil

MOST_BYTES = 1 << 30  # of memory, beyond what the rank begins with: an endless list ends before the machine
PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 5  # in which who is ended may have started another


@contextlib.contextmanager
def confined() -> Iterator[None]:
    """In a rank: what the answer starts stays in the rank's family and ends with it, and memory has a limit.

    A process in a session of its own is out of reach for a signal to the rank's group, and one whose parent
    has ended belongs to nobody; so, on Linux, those of this rank become its own children.
    """
    if sys.platform == "linux":
        import resource

        with contextlib.suppress(OSError, ValueError):
            most = psutil.Process().memory_info().data + MOST_BYTES
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _end_who_left()


def _end_who_left() -> None:
    """End children in other sessions; those of this one, such as a DataLoader's, end with its group."""
    for _ in range(ROUNDS):
        with contextlib.suppress(AttributeError):  # not everywhere
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # there are none, which is quickly said
                return
        away = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError):
                if os.getsid(child.pid) != os.getsid(0) and child.status() != psutil.STATUS_ZOMBIE:
                    away.append(child)
        if not away:
            return
        for child in away:
            with contextlib.suppress(OSError):  # it leads no group, or is gone
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.01)
