"""Find when the ranks called the collectives in which all wait for all, and how long they waited there.

PyTorch's flight recorder knows when each rank called which collective; on one machine all ranks share one
clock. A collective begins when the last rank has called it. Until then the others can have waited, at most
since the last collective that they called themselves: before that they were at work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .run import Run

KNOWN = 0.5  # of the time, at least, must lie between known collectives, or the result is NaN


@dataclass(frozen=True)
class Meetings:
    """The collectives that all ranks were seen to call, and in which all wait for all.

    Attributes
    ----------
    numbers : np.ndarray
        Of shape (collectives,): their numbers, the same on every rank.
    seconds : np.ndarray
        Of shape (collectives, ranks): when each rank called it, since the launch.
    known : np.ndarray
        Of shape (collectives,): whether all ranks were seen to call the one before, too.
    """

    numbers: np.ndarray
    seconds: np.ndarray
    known: np.ndarray

    @cached_property
    def begun(self) -> np.ndarray:
        """When the last rank had called each, of shape (collectives,)."""
        return np.maximum.accumulate(self.seconds.max(axis=1, initial=0))

    @cached_property
    def last(self) -> np.ndarray:
        """Which rank called each last, of shape (collectives,)."""
        return self.seconds.argmax(axis=1)

    @cached_property
    def waited(self) -> np.ndarray:
        """Seconds that each rank can have waited for the last one, of shape (collectives, ranks)."""
        before = np.concatenate([self.begun[:1] * 0, self.begun[:-1]])
        called = [
            np.sort(column)[np.maximum(0, np.searchsorted(np.sort(column), self.begun, side="right") - 1)]
            for column in self.seconds.T
        ]
        since = np.maximum(np.stack(called, axis=1), before[:, None])
        return np.maximum(0.0, self.begun[:, None] - since)

    def waited_between(self, edges: np.ndarray, rank: int) -> np.ndarray:
        """Return a rank's waiting as a share of the time between each two edges (seconds since the launch).

        NaN where too little is known: a rank is seen only at the last few collectives before each tick.
        """
        if not len(self.numbers):
            return np.full(len(edges) - 1, np.nan)
        passed = np.diff(self.begun, prepend=self.begun[0]) * self.known
        at = np.searchsorted(self.begun, edges, side="right")

        def between(values: np.ndarray) -> np.ndarray:
            return np.diff(np.concatenate([[0.0], np.cumsum(values)])[at])

        seen = between(passed)
        enough = seen >= KNOWN * np.diff(edges)
        return np.where(
            enough, between(self.waited[:, rank] * self.known) / np.where(enough, seen, 1.0), np.nan
        )


def meetings(run: Run) -> Meetings:
    """Collect the meetings from what the ranks have written so far."""
    arrivals = [run.trace(rank).arrivals() for rank in range(run.world_size)]
    common = arrivals[0]["number"] if arrivals else np.empty(0)
    for each in arrivals[1:]:
        common = np.intersect1d(common, each["number"], assume_unique=True)
    if not len(common):
        return Meetings(common, np.empty((0, len(arrivals))), common > 0)
    rows = [np.searchsorted(each["number"], common) for each in arrivals]
    meets = arrivals[0]["meets"][rows[0]] > 0
    columns = [each["seconds"][row][meets] for each, row in zip(arrivals, rows, strict=True)]
    return Meetings(
        common[meets],
        np.stack(columns, axis=1),
        np.diff(common[meets], prepend=-np.inf) == np.diff(np.flatnonzero(meets), prepend=-1),
    )
