"""Find when the ranks called the collectives in which all wait for all, and how long they waited there.

PyTorch's flight recorder notes when each rank called which collective, but not over NCCL; on one machine all
ranks share one clock. A collective begins when the last rank has called it. Until then another rank can have
waited, but no longer than since its own latest call: before that it was at work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..run.run import Run


@dataclass(frozen=True)
class CollectiveArrivals:
    """The collectives that all ranks were seen to call, and in which all wait for all.

    Attributes
    ----------
    numbers : np.ndarray
        Of shape (collectives,): their numbers, the same on every rank.
    seconds : np.ndarray
        Of shape (collectives, ranks): when each rank called it, since the launch.
    """

    numbers: np.ndarray
    seconds: np.ndarray

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


def collective_arrivals(run: Run) -> CollectiveArrivals:
    """Collect the arrivals from what the ranks have written so far."""
    by_rank = [run.trace(rank).arrivals() for rank in range(run.world_size)]
    common = by_rank[0]["number"] if by_rank else np.empty(0)
    for arrivals in by_rank[1:]:
        common = np.intersect1d(common, arrivals["number"], assume_unique=True)
    if not len(common):
        return CollectiveArrivals(common, np.empty((0, len(by_rank))))
    rows = [np.searchsorted(arrivals["number"], common) for arrivals in by_rank]
    meets = by_rank[0]["meets"][rows[0]] > 0
    columns = [arrivals["seconds"][row][meets] for arrivals, row in zip(by_rank, rows, strict=True)]
    return CollectiveArrivals(common[meets], np.stack(columns, axis=1))
