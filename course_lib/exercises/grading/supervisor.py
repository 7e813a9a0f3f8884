"""In the sandbox: load PyTorch once, and start a process for each session.

Loading PyTorch takes seconds, but forking a process that has it takes milliseconds. Each session has Linux
namespaces of its own: processes, a /tmp, a /dev/shm, System V memory and a loopback network that no other
session sees. When their process 1 is killed, the kernel kills their other processes and frees the rest.
bubblewrap makes such namespaces only for a new program, not for a fork. This process runs no submitted code.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
from typing import Any

from ...launcher.forkserver import load_here
from .answer_server import close_all_but, serve

# From linux/sched.h, linux/mount.h, linux/prctl.h, linux/sockios.h, linux/if.h and linux/capability.h
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
NICE = 10  # the judge comes first
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CAPABILITY_VERSION_3 = 0x20080522


def main(user: int, processes: int, file_bytes: int, data_bytes: int, disk_bytes: int) -> None:
    """Set limits that nothing can raise afterwards, load what sessions need, then start and end sessions.

    A byte on standard input ends the session, if there is one; with a socket, it also starts another session,
    which serves that socket. The same byte goes back.

    A session runs as ``user``, who owns nothing here, unless this is 0. Its /tmp and its /dev/shm have
    ``disk_bytes`` each. If this is 0, no namespaces can be made: this process serves the only session itself,
    and the grader ends it.
    """
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    limits = {resource.RLIMIT_NPROC: processes, resource.RLIMIT_FSIZE: file_bytes}
    for what, most in (limits | {resource.RLIMIT_DATA: data_bytes, resource.RLIMIT_CORE: 0}).items():
        hard = resource.getrlimit(what)[1]
        most = most if hard < 0 else min(most, hard)
        resource.setrlimit(what, (most, most))
    os.nice(NICE)
    if not disk_bytes:
        _become(user)
    import torch._dynamo  # noqa: F401 – the first optimizer would load it, which takes seconds
    from IPython.core.interactiveshell import InteractiveShell  # noqa: F401

    from .. import check  # noqa: F401

    load_here()
    process_1 = 0
    while True:
        command, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if process_1:
            os.kill(process_1, signal.SIGKILL)
            os.waitpid(process_1, 0)  # returns when the kernel has ended the namespaces' last process
        if sockets and not disk_bytes:
            control.send(command)
            control.close()
            return serve(*sockets)
        process_1 = _start(sockets[0], user, disk_bytes) if sockets else 0
        if not command or (sockets and not process_1):
            return
        control.send(command)


def _start(connection: int, user: int, disk_bytes: int) -> int:
    """Start a session in new namespaces; return the pid of their process 1, or 0 if they cannot be made."""
    _libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to adopt process 1 when its parent has ended
    reader, writer = os.pipe()
    parent = os.fork()  # a process can make a namespace for the pids of its children only once
    if parent == 0:
        with contextlib.suppress(BaseException):
            close_all_but(writer, connection)
            _libc("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
            if os.fork() == 0:
                _process_1(writer, connection, user, disk_bytes)
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(writer)
    os.close(connection)
    pid = os.read(reader, 20)
    os.close(reader)
    return int(pid or 0)


def _process_1(writer: int, connection: int, user: int, disk_bytes: int) -> None:
    """Set up the namespaces, have a child serve the session, and reap orphans until the child has ended."""
    pid = os.readlink("/proc/self").encode()  # as the supervisor's /proc has it, who can kill this by it
    _libc("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    for place in (b"/tmp", b"/dev/shm"):
        size = f"size={disk_bytes},mode=1777".encode()
        _libc("mount", b"tmpfs", place, b"tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir("/tmp")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    _become(user)
    _give_up_capabilities()
    server = os.fork()
    if server == 0:
        os.close(writer)
        serve(connection)
        os._exit(0)
    _libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody may inspect it
    os.write(writer, pid)
    os.close(connection)  # so that the grader sees when the session has ended
    while os.wait()[0] != server:
        pass


def _become(user: int) -> None:
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        _give_up_capabilities()  # those from bwrap stay inheritable otherwise


def _give_up_capabilities() -> None:
    _libc("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def _libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
