"""Make a data set once, in the course's own folder, whoever asks for it and however many ask at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..files import locked
from ..home import home, refused

LOCK_SECONDS = 60.0  # then make the files without the lock: a maker that hangs must not block everyone


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of a data set; the first call makes it, and all others wait until it is whole.

    Parameters
    ----------
    name
        The folder's name, in ``home()/data``.
    make
        A function that fills the folder it is given. It may be killed, and another process may run it at
        the same time: it must write each file with `whole_file`, the same bytes each time.

    Raises
    ------
    CourseHomeError
        The folder cannot be written to, or the disk is full. No half-made file is left.
    """
    folder = home() / "data" / name
    whole = folder / ".whole"  # the last file that is made
    try:
        if not whole.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock", LOCK_SECONDS):
                if not whole.exists():  # another process may have made them while this one waited
                    make(folder)
                    whole.touch()
    except OSError as error:
        raise refused(folder, error) from None
    return folder
