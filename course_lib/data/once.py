"""Make a data set once, in the course's own folder, however many processes ask for it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..files import locked
from ..host.home import home, refused

LOCK_SECONDS = 60.0  # then go on without the lock: a process that hangs must not block the others


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a data set's folder in ``home()/data``; the first call makes it, and others wait for that.

    ``make`` fills the folder that it gets. It may be killed, or run in another process at the same time, so
    it must write each file with `whole_file`, the same bytes each time. If the folder cannot be written to,
    or the disk is full, `CourseHomeError` is raised, and no half-made file is left.
    """
    folder = home() / "data" / name
    whole = folder / ".whole"  # the last file that is made
    try:
        if not whole.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock", LOCK_SECONDS):
                if not whole.exists():  # another process may have made it while this one waited
                    make(folder)
                    whole.touch()
    except OSError as error:
        raise refused(folder, error) from None
    return folder
