"""Contenders measured in turns, so that the machine's other work meets them all alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Take = Callable[[], float]  # does the work once and says what was measured
PAUSE = 0.3  # seconds: what the one before left behind is gone then
Name = TypeVar("Name")


def interleaved(takes: Mapping[Name, Take], rounds: int) -> dict[Name, list[float]]:
    """Each contender once in each round, in an order that rotates."""
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
    """The median of the ratios, each of two measurements of one round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
