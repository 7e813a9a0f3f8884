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
    (NVLink, PCIe, shared memory), of which this sees nothing.

    Returns
    -------
    int or None
        None where the system does not tell: Linux does, since 4.19.
    """
    if not sys.platform.startswith("linux"):
        return None
    counts = [count for fd in os.listdir("/proc/self/fd") if (count := _sent_over(int(fd))) is not None]
    return sum(counts) if counts else None


def _sent_over(fd: int) -> int | None:
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
        if connection.type != socket.SOCK_STREAM or connection.family not in (
            socket.AF_INET,
            socket.AF_INET6,
        ):
            return None
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ROOM)
        if len(info) < AGAIN + 8:
            return None
        return struct.unpack_from("=Q", info, SENT)[0] - struct.unpack_from("=Q", info, AGAIN)[0]
