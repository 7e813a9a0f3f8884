"""What an answer did to files, whichever way it did it: by Python's audit events, and in torch's own writer.

`torch.save` that was imported by name, `pickle.dump` and `Path.write_bytes` look alike there. Works run under
it in a rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SAVES = ("_save", "_legacy_save")  # where torch.save ends, by its two formats
CHANGES = ("os.remove", "os.rename", "os.link", "os.truncate")  # audit events, beside "open"


@dataclass
class Written:
    """By this process, in names as `os.path.realpath` gives them.

    Attributes
    ----------
    opened : list of str
        Files that were opened for writing.
    gone : list of str
        Names that were removed, or given to another file by a rename away from it.
    saves : int
        Calls of `torch.save`.
    """

    opened: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    saves: int = 0
    before: Callable[[str, str], None] = lambda what, name: None

    def inside(self, folder: str | Path) -> list[str]:
        """What was opened for writing in a folder."""
        begin = os.path.realpath(folder) + os.sep
        return [name for name in self.opened if name.startswith(begin)]


_watching: list[Written] = []
_hooked: list[bool] = []  # an audit hook stays until the process ends


@contextlib.contextmanager
def written(before: Callable[[str, str], None] = lambda what, name: None) -> Iterator[Written]:
    """Watch what is written inside; it is known at once.

    Parameters
    ----------
    before
        Called before each step, with what it is and a file's name: one of `CHANGES`; "open", of a file for
        writing; "save", in each `torch.save` after its file was opened. It may wait there as a slow disk
        does, or look at what a kill would leave. What it does itself is not watched.
    """
    if not _hooked:
        sys.addaudithook(_heard)
        _hooked.append(True)
    found = Written(before=before)

    def opens(real: Callable[[Any], Any], name: Any, *args: Any, **named: Any) -> Any:
        if isinstance(name, str | os.PathLike):  # written by C++, which tells no audit hook
            _noted(found, "open", os.path.realpath(name))
        return real(name, *args, **named)

    def saves(real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        found.saves += 1
        _noted(found, "save", "")
        return real(*args, **named)

    module = torch.serialization
    with contextlib.ExitStack() as stack:
        for name, call in [("_open_zipfile_writer", opens), *((name, saves) for name in SAVES)]:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, partial(call, getattr(module, name))))
        _watching.append(found)
        try:
            yield found
        finally:
            _watching.remove(found)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event not in ("open", *CHANGES):
        return
    name = args[0]
    if not isinstance(name, str | bytes | os.PathLike):  # the number of an open file
        return
    if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
        return
    for each in list(_watching):
        _noted(each, event, os.path.realpath(os.fsdecode(name)))


def _noted(found: Written, what: str, name: str) -> None:
    if what in ("open", "os.truncate"):
        found.opened.append(name)
    elif what in ("os.remove", "os.rename"):
        found.gone.append(name)
    watching, _watching[:] = _watching[:], []
    try:
        found.before(what, name)
    finally:
        _watching[:] = watching
