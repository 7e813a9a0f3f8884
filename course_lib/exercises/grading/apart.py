"""In the sandbox: copy this process, which has loaded PyTorch, into Linux namespaces of its own.

Loading PyTorch takes seconds, copying a process that has it some milliseconds. Each copy has processes, a
/tmp, a /dev/shm, System V memory and a loopback network that no other copy sees and that end with it.
bubblewrap has closed off the rest; it cannot make the copies, since it starts programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing.util
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

# From linux/sched.h, linux/mount.h, linux/prctl.h, linux/sockios.h, linux/if.h and linux/capability.h
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_DUMPABLE, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 4, 47, 4
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CAPABILITY_VERSION_3 = 0x20080522
READY = b"1"


class Copy:
    """A copy of this process in namespaces of its own, with a helper outside them that kills it when told.

    ``work`` runs in the copy, with the file descriptor ``way`` and no other of this process. No other process
    keeps it open, so that a reader at its other end sees when the copy has ended.
    """

    def __init__(self, work: Callable[[int], None], way: int, user: int, disk_bytes: int) -> None:
        ready, told = os.pipe()
        hold, self._let_go = os.pipe()

        def copy() -> None:
            os.close(hold)
            if _laid_out(disk_bytes) and _without_rights(user):
                os.write(told, READY)
                os.close(told)
                _work_and_reap(work, way)

        self._pid = os.fork()
        if self._pid == 0:
            _only([hold, told, way])
            _beside(copy, hold, told, way)
        for its in (told, hold, way):
            os.close(its)
        self.is_there = os.read(ready, 1) == READY
        os.close(ready)

    def end(self) -> None:
        """Kill the copy and all that it has started, and wait until it is gone."""
        os.close(self._let_go)
        os.waitpid(self._pid, 0)


def _beside(copy: Callable[[], None], hold: int, *its: int) -> None:
    """In the helper: make the copy, wait until it is no longer wanted, and kill it."""
    with contextlib.suppress(BaseException):
        if _libc("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET):
            first = os.fork()  # its process 1: when it ends, Linux kills all the others
            if first == 0:
                with contextlib.suppress(BaseException):
                    copy()
                os._exit(0)
            for each in its:
                os.close(each)
            os.read(hold, 1)
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
    os._exit(0)


def _laid_out(disk_bytes: int) -> bool:
    """Give the new namespaces their /proc, empty folders and loopback; return whether all mounts worked."""
    plain, size = MS_NOSUID | MS_NODEV, f"size={disk_bytes},mode=1777".encode()
    mounts = [(b"proc", b"/proc", plain | MS_NOEXEC, None)]
    mounts += [(b"tmpfs", place, plain, size) for place in (b"/tmp", b"/dev/shm")]
    done = all(_libc("mount", kind, place, kind, how, more) for kind, place, how, more in mounts)
    os.chdir("/tmp")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    return done


def _work_and_reap(work: Callable[[int], None], way: int) -> None:
    """As process 1 of the new namespace, let a child do the work, and reap orphans until it has ended."""
    works = os.fork()
    if works == 0:
        with contextlib.suppress(BaseException):
            work(way)
        os._exit(0)
    os.close(way)
    _libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody may inspect it
    while os.wait()[0] != works:
        pass


def _without_rights(user: int) -> bool:
    """Become ``user``, who owns nothing here, unless it is 0, and give up every capability."""
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    head, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    return _libc("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) and _libc("capset", head, none)


def _libc(name: str, *given: Any) -> bool:
    return getattr(ctypes.CDLL(None, use_errno=True), name)(*given) == 0


@contextlib.contextmanager
def fork_server_is_a_copy() -> Any:
    """Have multiprocessing start its fork server as a copy of this process, not as a new Python."""
    starts = multiprocessing.util.spawnv_passfds

    def copies(path: Any, words: list[str], passed: Any) -> int:
        if "multiprocessing.forkserver" not in words[-1]:
            return starts(path, words, passed)
        pid = os.fork()
        if pid == 0:
            _only(passed)
            with contextlib.suppress(BaseException):
                exec(words[-1], {"__name__": "__main__"})
            os._exit(0)
        return pid

    multiprocessing.util.spawnv_passfds = copies
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = starts


def _only(files: Any) -> None:
    """Close all file descriptors but these and the standard ones, as a new program would have them."""
    after = 3
    for file in sorted(files):
        os.closerange(after, file)
        after = file + 1
    os.closerange(after, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") > 0 else 1 << 16)
