"""Write a file atomically (lesson 10), read it, and lock it. This module needs nothing else of the course."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[IO[bytes]]:
    """Open a file to write, beside ``path``; when the block ends, it is renamed to ``path`` atomically.

    Until then, and for good if the block raises or the process dies, ``path`` is unchanged. Writers do not
    interfere: each has a file of its own, and the last to finish wins. With ``durable``, the bytes are on the
    disk before the name is, so a power cut leaves no name without bytes; and what killed writers have left
    beside ``path`` is deleted first.
    """
    with _part_of(path, durable) as (file, part):
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())
        os.replace(part, path)
    if durable:
        with contextlib.suppress(OSError):  # a file system that syncs no folders
            folder = os.open(path.parent, os.O_RDONLY)  # sync the name, too
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextlib.contextmanager
def _part_of(path: Path, durable: bool) -> Iterator[tuple[IO[bytes], Path]]:
    """Create a file beside ``path`` for this writer alone, and delete it if the block raises.

    A durable writer holds a lock on its part, which the system frees when it dies: a part without a lock
    is a leftover. This protects a writer on another machine only if the file system shares locks.
    """
    start, end = f".{path.name}.", ".part"
    for left in path.parent.iterdir() if durable else ():
        if left.name.startswith(start) and left.name.endswith(end):
            # refused where its writer still holds the lock
            with contextlib.suppress(OSError), open(left, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
    while True:
        part = path.with_name(f"{start}{os.getpid()}-{os.urandom(4).hex()}{end}")
        with open(part, "xb") as file:  # with the mode of the user's other files; a tempfile is private
            if durable:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not part.exists():  # another writer took it for a leftover before it had its lock
                    continue
            try:
                yield file, part
            except BaseException:
                discard(part)
                raise
        return


def write_whole(path: Path, text: str) -> None:
    """Replace a text file atomically, in UTF-8, so that a reader never finds half of it; see `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the facts in a file; none if it is missing or damaged."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file, without a truncated last one; none if it is missing."""
    try:
        return path.read_text("utf-8", errors="replace").split("\n")[:-1]
    except OSError:
        return []


def discard(path: Path) -> None:
    """Delete a file if it is there, and if that is possible."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, seconds: float = math.inf) -> Iterator[bool]:
    """Hold a lock on a file, made if it is missing; the system frees the lock if its holder dies.

    Yield whether the lock was acquired: not while another process holds it for ``seconds``, and never on a
    file system without locks.
    """
    deadline, acquired = time.monotonic() + seconds, False
    with open(path, "ab") as file:
        while not acquired and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                acquired = True
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield acquired
