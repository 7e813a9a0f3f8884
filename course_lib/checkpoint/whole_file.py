"""Write a file atomically: it is there whole or not at all, whenever its writer is killed (lesson 10)."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: the part that a killed writer leaves behind stays
    fcntl = None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, beside ``path``; when the block ends, it is renamed to ``path`` atomically.

    Until then, and for good if the block raises or the process dies, ``path`` is unchanged. Writers do not
    interfere: each has a file of its own, and the last to finish wins. The bytes are on the disk before the
    name is, so a power cut does not leave a name without bytes.

    Raises
    ------
    OSError
        There is no such folder, no permission to write there, or the disk is full.
    """
    with _part_of(path) as (file, part):
        yield file
        file.flush()
        os.fsync(file.fileno())
        if not fcntl:
            file.close()  # Windows cannot rename an open file
        os.replace(part, path)
    with contextlib.suppress(OSError):  # sync the name, too; Windows opens no folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _part_of(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Create a file beside ``path`` for this writer alone; first delete what dead writers have left.

    A writer holds a lock on its part, which the system frees when it dies: a part without one is a leftover.
    (For a writer on another machine, only if the file system has locks between machines.)
    """
    start, end = f".{path.name}.", ".part"
    for left in path.parent.iterdir() if fcntl else ():
        if left.name.startswith(start) and left.name.endswith(end):
            with contextlib.suppress(OSError), open(left, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
    while True:
        part = path.with_name(f"{start}{os.getpid()}-{secrets.token_hex(4)}{end}")
        with open(part, "xb") as file:  # with the mode of the user's other files; a tempfile is private
            if fcntl:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            if not part.exists():  # another writer took it for a leftover before it had its lock
                continue
            try:
                yield file, part
            finally:
                part.unlink(missing_ok=True)  # renamed by now, or abandoned
        return
