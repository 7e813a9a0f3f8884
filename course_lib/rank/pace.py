"""Where a rank's time goes, and when it comes to each collective: whence `why` knows why a run is not faster.

All of it is counted by others: the operating system (how long the main thread has worked, and how long it
waited for a core), PyTorch's flight recorder (when each collective was called), and `track` (the loader).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Any

from ..run_folder import EVERYONE
from .standstill import collectives, status

SCHEDSTAT = "/proc/self/task/{}/schedstat"  # of a thread: ns at work, ns ready for work without a core
BYTES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1}


class Pace:
    """Read in every tick by the recorder's thread; ``launched`` is when the run began, by time.time()."""

    def __init__(self, launched: float) -> None:
        self._launched = launched
        self._flights, self._last = b"", 0
        self._before: list[float] | None = None  # the tick before, where the loop ran already
        self._sums = [0.0] * 6

    def read(self, now: float, steps: int, in_a_loop: bool, loader: tuple[float, float]) -> list[float]:
        """A row of `run_folder.PACE`, or nothing outside of loops: it sums up the ticks that lay inside."""
        cpu, delay = _of_the_main_thread()
        here = [now, *loader, cpu, time.process_time(), delay]
        before, self._before = self._before, here if in_a_loop else None
        if before is None or not in_a_loop:
            return []
        self._sums = [total + new - old for total, new, old in zip(self._sums, here, before, strict=True)]
        return [now - self._launched, steps, *self._sums]

    def arrivals(self) -> list[float]:
        """Rows of `run_folder.ARRIVAL`, one after the other: of the collectives since the last look."""
        flights, rows = status(), []
        if flights != self._flights:
            self._flights = flights
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                called = sorted(_arrival(each) for each in collectives() if _of_all(each))
                if called and called[-1][0] < self._last:  # a new group, which counts from 1
                    self._last = 0
                rows = [(n, at - self._launched, size) for n, at, size in called if n > self._last]
                self._last = max([self._last, *(row[0] for row in rows)])
        return [value for row in rows for value in row]


def _of_the_main_thread() -> tuple[float, float]:
    """Seconds: at work, and ready for work without a core."""
    with contextlib.suppress(OSError, ValueError):  # no Linux, or a kernel that does not count
        with open(SCHEDSTAT.format(os.getpid()), "rb") as file:
            cpu, delay = file.read().split()[:2]
        return int(cpu) / 1e9, int(delay) / 1e9
    return math.nan, math.nan


def _of_all(entry: dict[str, Any]) -> bool:
    return entry["process_group"][0] == EVERYONE


def _arrival(entry: dict[str, Any]) -> tuple[int, float, int]:
    tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    size = sum(math.prod(shape) * BYTES.get(dtype, 4) for shape, dtype in tensors)
    return entry["collective_seq_id"], entry["time_created_ns"] / 1e9, size
