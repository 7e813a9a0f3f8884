"""Count the bytes that this process has really sent, by the system's own count for each connection."""

from __future__ import annotations

import os
import socket
import stat
import struct

# Offsets in Linux's struct tcp_info (linux/tcp.h): bytes sent, and how many of these were retransmitted
SENT, AGAIN = 200, 208
ROOM = 256
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def bytes_sent() -> int | None:
    """Return the bytes that this process has sent over the TCP connections that it has open now (lesson 05).

    Call it before and after a collective: gloo's ranks talk over TCP, and the difference is what this rank
    sent, including a few hundred bytes of bookkeeping. Between the GPUs of one machine, NCCL uses other ways
    (NVLink, PCIe, shared memory), which this does not see. A connection that is closed takes its count with
    it: let no rank leave before all have made their second call (a barrier).

    None without an open TCP connection, or if the system does not report it: Linux does, since 4.19.
    """
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:  # another system
        return None
    sent = [count for fd in descriptors if (count := _sent_over(int(fd))) is not None]
    return sum(dict(sent).values()) if sent else None  # one connection may have several descriptors


def _sent_over(fd: int) -> tuple[int, int] | None:
    """Return a TCP connection's inode number and the bytes sent over it; None for any other descriptor."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in FAMILIES:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ROOM)
            inode = os.fstat(connection.fileno()).st_ino
    except OSError:  # closed since it was listed; or a stream, but not TCP
        return None
    if len(info) < AGAIN + 8:
        return None
    sent, again = (struct.unpack_from("=Q", info, at)[0] for at in (SENT, AGAIN))
    return inode, sent - again
