"""Note when this rank called which collective, but not over NCCL, from PyTorch's flight recorder."""

from __future__ import annotations

import contextlib
from typing import Any

from ..run_folder import EVERYONE
from .standstill import ONE_WAY, collectives, status


class ArrivalReader:
    """Reads the flight recorder; ``launched`` is when the run began, by time.time()."""

    def __init__(self, launched: float) -> None:
        self._launched = launched
        self._flights, self._last = b"", 0

    def read(self) -> list[float]:
        """Return rows of `run_folder.ARRIVAL`, one after the other: the collectives since the last call."""
        flights, rows = status(), []
        if flights != self._flights:
            self._flights = flights
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                called = sorted(_arrival(entry) for entry in collectives() if _of_all(entry))
                if called and called[-1][0] < self._last:  # a new group, which counts from 1
                    self._last = 0
                rows = [(n, at - self._launched, meets) for n, at, meets in called if n > self._last]
                self._last = max([self._last, *(number for number, _, _ in rows)])
        return [value for row in rows for value in row]


def _of_all(entry: dict[str, Any]) -> bool:
    return entry["process_group"][0] == EVERYONE


def _arrival(entry: dict[str, Any]) -> tuple[int, float, bool]:
    meets = entry["profiling_name"].rpartition(":")[2] not in ONE_WAY
    return entry["collective_seq_id"], entry["time_created_ns"] / 1e9, meets
