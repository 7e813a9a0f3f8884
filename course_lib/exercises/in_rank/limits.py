"""Limit what an answer may use in a rank, and leave nothing running that it has started."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import psutil

from ...kill import PR_SET_CHILD_SUBREAPER, kill_families, prctl

MOST_BYTES = 1 << 30  # of memory, beyond what the rank starts with: an endless list fails before the machine
ROUNDS = 5  # kill repeatedly: a dying process may have forked


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """In a rank, limit an answer's memory, and at the end kill what it started in other sessions.

    A signal to the rank's process group does not reach a process in a session of its own, and an orphan is no
    longer a descendant. So, on Linux, the rank is made the subreaper of its orphans. On other systems memory
    has no limit, and an orphan that has cleared its environment may be left running.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):  # `data` is Linux's alone
        import resource

        most = psutil.Process().memory_info().data + MOST_BYTES
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _kill_those_outside()


def _kill_those_outside() -> None:
    """Kill descendants in other sessions; those in this one, as DataLoader workers, end with its group."""
    for _ in range(ROUNDS):
        with contextlib.suppress(AttributeError):  # not on every system
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # no children: skip the slow search
                return
        away = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(child.pid) != os.getsid(0) and child.status() != psutil.STATUS_ZOMBIE:
                    away.append(child)
        if not away:
            return
        kill_families(away)
        time.sleep(0.01)
