"""Describe in words what an answer returned or raised, even if its own classes raise meanwhile."""

from __future__ import annotations

import contextlib
import reprlib
from typing import Any


def number(value: Any) -> float | str:
    """Convert a number of any type to a float; describe all else in words."""
    if not isinstance(value, bool | str | bytes):
        with contextlib.suppress(BaseException):  # also what an answer's own class raises
            return float(value)
    return told(value)


def told(value: Any) -> str:
    """Describe in words a returned value of another kind than asked for."""
    return "nothing (None)" if value is None else shown(value)


def reason(error: BaseException) -> str:
    """Describe in one line what an answer raised."""
    words = ""
    with contextlib.suppress(BaseException):  # its own __str__ may fail
        words = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {words:.120}"


class _Short(reprlib.Repr):
    """A repr that shows the beginning of long lists, in little time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxarray = 30
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_instance(self, value: Any, level: int) -> str:
        return repr(value)  # the caller handles what that raises


def shown(value: Any) -> str:
    try:
        return f"{_Short().repr(value):.60}, {_a_type(value)}"
    except BaseException:  # its own __repr__ may fail, or try to end the process
        return _a_type(value)


def _a_type(value: Any) -> str:
    name = type(value).__name__
    return f"a{'n' * (name[:1] in 'aeiouAEIO')} {name}"
