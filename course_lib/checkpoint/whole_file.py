"""A file that is there whole or not at all, whenever its writer is killed (lesson 10)."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: what a killed writer left behind stays
    fcntl = None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, beside ``path``; when the block ends it takes the name ``path`` in one move.

    Until then, and for ever if the block raises or the process dies, ``path`` is as it was. Several writers
    do not meet: each has a file of its own, and the last to be done stays. The bytes are on the disk before
    the name is, so a power cut does not leave a name without bytes.

    Raises
    ------
    OSError
        No such folder, no right to write there, a full disk.
    """
    with _part_of(path) as (file, part):
        yield file
        file.flush()
        os.fsync(file.fileno())
        if not fcntl:
            file.close()  # Windows renames no open file
        os.replace(part, path)
    with contextlib.suppress(OSError):  # the name, too; Windows opens no folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _part_of(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A new file beside ``path``, of this writer alone; what dead writers left is removed first.

    A writer holds a lock on its part, which the system frees when it dies: so a part without one is left
    over. (Of a writer on another machine only where the file system has locks between machines.)
    """
    start, end = f".{path.name}.", ".part"
    for left in path.parent.iterdir() if fcntl else ():
        if left.name.startswith(start) and left.name.endswith(end):
            with contextlib.suppress(OSError), open(left, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
    while True:
        part = path.with_name(f"{start}{os.getpid()}-{secrets.token_hex(4)}{end}")
        with open(part, "xb") as file:  # with the rights of the user's other files; a tempfile is private
            if fcntl:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            if not part.exists():  # another writer took it for left over, before it had its lock
                continue
            try:
                yield file, part
            finally:
                part.unlink(missing_ok=True)  # renamed by now, or not wanted
        return
