"""How many bytes this process has really sent: the system's own count, of each of its connections."""

from __future__ import annotations

import os
import socket
import struct
import sys

# Where Linux keeps these in its struct tcp_info (linux/tcp.h): bytes sent, and of them sent once more
SENT, AGAIN = 200, 208
ROOM = 256
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def bytes_sent() -> int | None:
    """Bytes that this process has sent over the TCP connections that it has open now (lesson 05).

    Take it before and after a collective: gloo's ranks talk over TCP, and the difference is what this rank
    sent, a few hundred bytes of book-keeping included. NCCL goes other ways between the GPUs of one machine
    (NVLink, PCIe, shared memory), of which this sees nothing. A connection that is closed between the two
    takes its count with it: the difference is then too small, or negative. So let no rank leave before all
    have taken theirs (a barrier).

    Returns
    -------
    int or None
        None where the system does not tell: Linux does, since 4.19.
    """
    if not sys.platform.startswith("linux"):
        return None
    found = [each for fd in os.listdir("/proc/self/fd") if (each := _sent_over(int(fd))) is not None]
    return sum(dict(found).values()) if found else None  # one connection may have several descriptors


def _sent_over(fd: int) -> tuple[int, int] | None:
    """The connection's number, and the bytes sent over it."""
    try:
        copy = os.dup(fd)  # closed with the socket object that is made of it
    except OSError:  # closed since it was listed
        return None
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    with connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in FAMILIES:
            return None
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ROOM)
        except OSError:  # a stream, but not TCP
            return None
        if len(info) < AGAIN + 8:
            return None
        sent, again = (struct.unpack_from("=Q", info, at)[0] for at in (SENT, AGAIN))
        return os.fstat(copy).st_ino, sent - again
