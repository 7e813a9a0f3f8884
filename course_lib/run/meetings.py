"""When the ranks came to the collectives in which each waits for each, and how long they waited there.

PyTorch's flight recorder knows when each rank called which collective; on one machine all ranks have one
clock. A collective begins when the last rank has come. Until then the others can have waited: at most since
the last collective that they called themselves, for before it they were at work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .run import Run

KNOWN = 0.5  # of the collectives: where all ranks were seen at fewer, those few say nothing of the others


@dataclass(frozen=True)
class Meetings:
    """The collectives that all ranks were seen to call, where each waits for each.

    Attributes
    ----------
    numbers : np.ndarray
        Of shape (collectives,): every rank counts them alike.
    seconds : np.ndarray
        Of shape (collectives, ranks): when each rank came, since the launch.
    known : float
        Of all collectives, those that every rank was seen at, 0 to 1.
    """

    numbers: np.ndarray
    seconds: np.ndarray
    known: float

    @cached_property
    def begun(self) -> np.ndarray:
        """When the last rank had come to each: of shape (collectives,)."""
        return np.maximum.accumulate(self.seconds.max(axis=1, initial=0))

    @cached_property
    def last(self) -> np.ndarray:
        """Which rank that was."""
        return self.seconds.argmax(axis=1)

    @cached_property
    def waited(self) -> np.ndarray:
        """Seconds that each rank can have waited for the last one: of shape (collectives, ranks)."""
        before = np.concatenate([self.begun[:1] * 0, self.begun[:-1]])
        called = [
            np.sort(column)[np.maximum(0, np.searchsorted(np.sort(column), self.begun, side="right") - 1)]
            for column in self.seconds.T
        ]
        since = np.maximum(np.stack(called, axis=1), before[:, None])
        return np.maximum(0.0, self.begun[:, None] - since)

    def waited_between(self, edges: np.ndarray, rank: int) -> np.ndarray:
        """The same of one rank, in all, from each edge (a second since the launch) to the next.

        NaN before the first collective that is known, and everywhere where too few are.
        """
        if self.known < KNOWN or not len(self.numbers):
            return np.full(len(edges) - 1, np.nan)
        sums = np.concatenate([[0.0], np.cumsum(self.waited[:, rank])])
        between = np.diff(sums[np.searchsorted(self.begun, edges, side="right")])
        return np.where(edges[1:] > self.begun[0], between, np.nan)


def meetings(run: Run) -> Meetings:
    """From what the ranks wrote so far."""
    arrivals = [run.trace(rank).arrivals() for rank in range(run.world_size)]
    common = arrivals[0]["number"] if arrivals else np.empty(0)
    for each in arrivals[1:]:
        common = np.intersect1d(common, each["number"], assume_unique=True)
    if not len(common):
        return Meetings(common, np.empty((0, len(arrivals))), 0.0)
    rows = [np.searchsorted(each["number"], common) for each in arrivals]
    meets = arrivals[0]["meets"][rows[0]] > 0
    columns = [each["seconds"][row][meets] for each, row in zip(arrivals, rows, strict=True)]
    return Meetings(
        common[meets],
        np.stack(columns, axis=1),
        len(common) / float(np.ptp(common) + 1),
    )
