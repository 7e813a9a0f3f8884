"""Wait for other processes, find those that a test has started, and find a free port for them."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import psutil

Answer = TypeVar("Answer")


def wait_for(condition: Callable[[], object], seconds: float = 240, what: str = "the condition") -> object:
    """Wait until a condition is true and return its value: a generous limit, never a fixed time.

    An expensive condition, such as a look at all processes, is checked less often.
    """
    until, worked = time.monotonic() + seconds, time.thread_time()
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {seconds} s in vain for {what}")
        time.sleep(min(0.2, max(0.02, 10 * (time.thread_time() - worked))))
        worked = time.thread_time()
    return value


def alive(process: psutil.Process | int) -> bool:
    """Return whether a process still runs: one that has ended, a zombie, does not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def unless_gone(ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Ask a process something (``process.name``); it may have ended since it was found."""
    try:
        return ask()
    except psutil.NoSuchProcess:  # a zombie, too
        return otherwise


def processes_marked(variable: str, value: str) -> list[psutil.Process]:
    """Return the living processes that were started with a variable set to a value."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(variable) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Socket(NamedTuple):
    pid: int
    host: str
    port: int


def connections(process: psutil.Process) -> list[Any]:
    """Return a process's sockets of the internet, by the name that psutil before or since 6 has for it."""
    return (getattr(process, "net_connections", None) or process.connections)("inet")


def listening(parent: psutil.Process) -> set[Socket]:
    """Return the listening sockets of a process and its descendants; some of these may end meanwhile."""
    found = set()
    for process in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = [each for each in connections(process) if each.status == psutil.CONN_LISTEN]
            found |= {Socket(process.pid, *each.laddr[:2]) for each in sockets}
    return found


def free_port() -> int:
    """Return a free port of 127.0.0.1, outside the range that systems assign: those would soon be taken."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
