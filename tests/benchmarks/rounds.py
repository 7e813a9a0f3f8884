"""Measure contenders in turns, so that other work on the machine affects them all alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Take = Callable[[], float]  # does the work once and returns what was measured
PAUSE = 0.3  # seconds for what the last contender left behind to end
Name = TypeVar("Name")


def interleaved(takes: Mapping[Name, Take], rounds: int) -> dict[Name, list[float]]:
    """Measure each contender once in each round, in an order that rotates."""
    names = list(takes)
    taken: dict[Name, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        first = i % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            taken[name].append(takes[name]())
    return taken


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios of two measurements in the same round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
