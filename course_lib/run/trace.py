"""How the files of a run's folder are read: numbers, ends of texts, each only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")


class ByRank(Sequence[Item]):
    """A list with an entry for each rank, each read when it is asked for."""

    def __init__(self, count: int, read: Callable[[int], Item]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self._read(each) for each in range(self._count)[rank]]
        if not -self._count <= rank < self._count:
            raise IndexError(f"rank {rank} of a run with {self._count} ranks")
        return self._read(rank % self._count)

    def __iter__(self) -> Iterator[Item]:
        return (self._read(rank) for rank in range(self._count))

    def __repr__(self) -> str:
        return repr(list(self))


def rows_of(path: Path, columns: list[str], skip: int = 0) -> dict[str, np.ndarray]:
    """The columns of a file of float64 rows; a last row cut short is left out."""
    try:
        flat = np.fromfile(path, "<f8", offset=8 * len(columns) * skip)
    except OSError:
        flat = np.empty(0)
    whole = flat[: flat.size // len(columns) * len(columns)].reshape(-1, len(columns))
    return dict(zip(columns, whole.T, strict=True))


def end_of(path: Path, count: int) -> tuple[int, str]:
    """A text file's size in bytes, and its last ones."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - count))
            return size, file.read(count).decode(errors="replace")
    except OSError:
        return 0, ""
