"""A connection to a sandboxed process: messages there and back, within limits on their time and length."""

from __future__ import annotations

import json
import math
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

MOST_REPLY_BYTES = 48 << 20  # of one line: five ranks' answers, encoded as JSON once more
MOST_STRINGS = 100  # in a line
MOST_REST = 1000  # bytes of a line outside its strings: a list takes twenty times the memory of its text
A_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?')  # in JSON
LOOK_SECONDS = 0.25  # between two looks at memory and processes
STRUCK = 0.9  # of a limit that the sandbox keeps: its clock may have started later than ours


class SessionEnded(Exception):
    """The session ended too early; the message tells the learner why."""


class CannotJudge(BaseException):
    """This machine cannot judge now; not an Exception, lest a judge take it for the answer's fault."""


class Session:
    """A connection to a sandboxed process.

    Parameters
    ----------
    connection
        The grader's end of a socket.
    check_limits
        Called every `LOOK_SECONDS`; raises SessionEnded if the sandbox exceeds a limit.
    """

    def __init__(self, connection: socket.socket, check_limits: Callable[[], None]) -> None:
        connection.settimeout(LOOK_SECONDS)
        self._connection, self._check_limits = connection, check_limits
        self._rest = bytearray()  # of a message that has come in part
        self._checked = 0.0
        self._since, self._until = 0.0, math.inf  # for the replies
        self.struck = False  # whether a limit was reached, of time or another

    def limit(self, seconds: float) -> None:
        """Set how long the replies from now on may take."""
        self._since = time.monotonic()
        self._until = self._since + seconds

    def note_limit(self, seconds: float) -> None:
        """Note whether a limit of these seconds, which the sandbox keeps, was reached since `limit`."""
        self.struck |= time.monotonic() - self._since >= STRUCK * seconds

    def ask(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the replies to it, and to no other; their contents are untrusted.

        `SessionEnded` is raised if the process does not read or reply any more, or not in time, if a reply is
        too long, or if the sandbox exceeds its limits.
        """
        mark = secrets.token_hex(8)
        unsent = memoryview(json.dumps(request | {"id": mark}).encode() + b"\n")
        while unsent:
            unsent = unsent[self._in_time(self._connection.send, unsent[: 1 << 16]) :]
        for reply in self._messages():
            if reply.get("id") == mark:
                yield reply

    def _messages(self) -> Iterator[dict[str, Any]]:
        while data := self._in_time(self._connection.recv, 1 << 20):
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = bytes(self._rest) + lines[0]
                self._rest.clear()
            self._rest += rest
            if len(self._rest) > MOST_REPLY_BYTES:
                raise SessionEnded(f"more than {MOST_REPLY_BYTES >> 20} MiB came back from your code")
            for line in lines:
                with suppress(ValueError, RecursionError):
                    is_flat = len(A_STRING.sub(b"", line, MOST_STRINGS)) <= MOST_REST
                    if is_flat and isinstance(message := json.loads(line), dict):
                        yield message
        raise SessionEnded("your code ended the process that runs it")

    def _in_time(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """Return what a method of the connection returns; check the deadline and the limits meanwhile."""
        try:
            while time.monotonic() < self._until:
                if time.monotonic() - self._checked > LOOK_SECONDS:
                    self._check_limits()
                    self._checked = time.monotonic()
                with suppress(TimeoutError):
                    return call(argument)
            raise SessionEnded("your code was not done in time")
        except SessionEnded:
            self.struck = True
            raise
        except OSError:
            raise SessionEnded("your code ended the process that runs it") from None
