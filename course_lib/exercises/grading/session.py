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
MOST_REST = 1000  # bytes of a line outside of them: a list takes twenty times the memory of its text
A_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?')  # in JSON
LOOK_SECONDS = 0.25  # between two looks at memory and processes
MOST_WAITING = 5.0  # times a limit, by the clock, for processes that do not get their cores
A_SHARE = 0.8  # of a limit that its processes had cores for; who had less was not too slow
NOISE = 0.05  # of the time that others have the cores, on a machine with nothing else to do


class SessionEnded(Exception):
    """The session is over before its time; the message tells the learner why."""


class CannotJudge(BaseException):
    """This machine cannot judge now; not an Exception, so that no judge takes it for an answer's fault."""


class Session:
    """A connection to a sandboxed process.

    Parameters
    ----------
    connection
        The grader's end of a socket.
    check_limits
        Called every `LOOK_SECONDS`; raises SessionEnded if the sandbox exceeds a limit.
    waited
        Returns for how many seconds others have kept the sandbox's cores from it: these count in no limit.
    """

    def __init__(
        self,
        connection: socket.socket,
        check_limits: Callable[[], None],
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        connection.settimeout(LOOK_SECONDS)
        self._connection, self._check_limits, self._waited = connection, check_limits, waited
        self._rest = bytearray()  # of a message that has come in part
        self._checked = 0.0
        self._until = self._last = math.inf
        self._since = 0.0, 0.0  # when the limit was set: by `now`, and by the clock
        self._began = time.monotonic()
        self._struck = False  # a limit that might not have, without others

    @property
    def is_crowded(self) -> bool:
        """Whether others had its cores for a good part of the time, or for some of it and a limit struck."""
        return self._struck or self._waited() > (1 - A_SHARE) * (time.monotonic() - self._began)

    def now(self) -> float:
        """Return the time in seconds by a clock that stands still while others have the sandbox's cores."""
        return time.monotonic() - self._waited()

    def limit(self, seconds: float) -> None:
        """Set how long the replies from now on may take, by `now`."""
        self._since = self.now(), time.monotonic()
        self._until, self._last = self._since[0] + seconds, self._since[1] + MOST_WAITING * seconds

    def check_share(self, seconds: float, patience: float) -> None:
        """Raise CannotJudge if a limit has struck in the sandbox whose processes hardly had cores.

        The limit was ``patience * seconds`` by the clock, from the call of `limit` on; most of ``seconds`` is
        what they should have had.
        """
        used, took = max(0.0, self.now() - self._since[0]), time.monotonic() - self._since[1]
        if took < patience * seconds:
            return
        if used < A_SHARE * seconds:
            raise CannotJudge(f"in {took:.0f} s, other programs left it the cores for only {used:.0f} s")
        self._struck |= used < (1 - NOISE) * took

    def ask(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the replies to it, and to no other; what they contain is untrusted.

        `SessionEnded` is raised if the process does not read or reply any more, or not in time, if a reply is
        too long, or if the sandbox exceeds its limits; `CannotJudge` if it hardly got a core.
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
        while self.now() < self._until:
            if time.monotonic() > self._last:
                took = time.monotonic() - self._since[1]
                raise CannotJudge(f"other programs had the cores of this machine for most of {took:.0f} s")
            if time.monotonic() - self._checked > LOOK_SECONDS:
                self._check_limits()
                self._checked = time.monotonic()
            try:
                return call(argument)
            except TimeoutError:
                continue
            except OSError:
                raise SessionEnded("your code ended the process that runs it") from None
        raise SessionEnded("your code was not done in time")
