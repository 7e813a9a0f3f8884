"""Note when this rank called which collective, except over NCCL, from PyTorch's flight recorder."""

from __future__ import annotations

import contextlib

from ..record.layout import EVERYONE
from .standstill import ONE_WAY, collectives, status


class CollectiveLog:
    """Reads the flight recorder; ``launched`` is when the run began, by time.time()."""

    def __init__(self, launched: float) -> None:
        self._launched = launched
        self._flights, self._last = b"", 0

    def read(self) -> list[float]:
        """Return rows of `layout.ARRIVAL`, one after the other: the collectives since the last call."""
        flights, calls, rows = status(), [], list[float]()
        if flights == self._flights:
            return rows
        self._flights = flights
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # a changed form
            for group, number, entry in collectives():
                if group == EVERYONE:
                    meets = entry["profiling_name"].rpartition(":")[2] not in ONE_WAY
                    calls.append((number, entry["time_created_ns"] / 1e9 - self._launched, meets))
        calls.sort()
        if calls and calls[-1][0] < self._last:  # a new group, which counts from 1
            self._last = 0
        for call in calls:
            if call[0] > self._last:
                rows.extend(call)
                self._last = call[0]
        return rows
