"""Record what an answer does to files, by Python's audit events and in torch's own writer.

These see any way to write: a `torch.save` that was imported by name, `pickle.dump`, `Path.write_bytes`. Works
run under them in a rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SAVES = ("_save", "_legacy_save")  # what torch.save calls, one for each of its formats
NAMES = ("os.rename", "os.link")  # audit events that give a file a new name, their second argument
CHANGES = ("os.remove", "os.truncate", *NAMES)  # besides "open"


@dataclass
class FileAudit:
    """What this process wrote in one folder; names are as `os.path.realpath` gives them.

    Attributes
    ----------
    opened : list of str
        Files that were opened for writing.
    gone : list of str
        Names that no longer exist, since their file was removed or renamed.
    saves : int
        Calls of `torch.save`, to whatever place.
    """

    folder: str
    before: Callable[[str, str], None]
    opened: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    saves: int = 0


_audits: list[FileAudit] = []
_hooked: list[bool] = []  # an audit hook stays until the process ends
_thread = threading.local()  # its `in_before`: whether it is inside `before`


@contextlib.contextmanager
def audit_files(
    folder: str | Path, before: Callable[[str, str], None] = lambda what, name: None
) -> Iterator[FileAudit]:
    """Record what is written inside the block, as it happens.

    Parameters
    ----------
    folder
        The folder to watch, with those below it: a rank writes notes of its own elsewhere.
    before
        Called before each step, with its kind and a file's name. The kind is one of `CHANGES`; or "open", for
        writing; or "save", with the folder's name, in each `torch.save` after its file was opened. This call
        may wait, like a slow disk, or look at what a kill would leave. Of its own steps, only saves count.
    """
    if not _hooked:
        sys.addaudithook(_on_event)
        _hooked.append(True)
    audit = FileAudit(os.path.realpath(folder) + os.sep, before)

    def opens(real: Callable[[Any], Any], name: Any, *args: Any, **named: Any) -> Any:
        if isinstance(name, str | os.PathLike):  # written by C++, which raises no audit event
            _record(audit, "open", name)
        return real(name, *args, **named)

    def saves(real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        audit.saves += 1
        _record(audit, "save", audit.folder)
        return real(*args, **named)

    module = torch.serialization
    with contextlib.ExitStack() as stack:
        for name, call in [("_open_zipfile_writer", opens), *((name, saves) for name in SAVES)]:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, partial(call, getattr(module, name))))
        _audits.append(audit)
        try:
            yield audit
        finally:
            _audits.remove(audit)


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if not _audits or event not in ("open", *CHANGES):
        return
    if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
        return
    names = [arg for arg in args[:2] if isinstance(arg, str | bytes | os.PathLike)]  # no open files
    if names:
        for audit in list(_audits):
            _record(audit, event, *(names if event in NAMES else names[:1]))


def _record(audit: FileAudit, what: str, *names: Any) -> None:
    """Record a step if one of its names is in the folder, unless the step is one of `before`'s own."""
    places = [os.path.realpath(os.fsdecode(name)) + os.sep * (what == "save") for name in names]
    if getattr(_thread, "in_before", False) or not any(place.startswith(audit.folder) for place in places):
        return
    if what in ("open", "os.truncate"):
        audit.opened.append(places[0])
    elif what in ("os.remove", "os.rename"):
        audit.gone.append(places[0])
    _thread.in_before = True
    try:
        audit.before(what, places[0])
    finally:
        _thread.in_before = False
