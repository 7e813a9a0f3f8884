"""Which rank is late, again and again.

All ranks leave a collective such as `backward`'s all_reduce together, so a step takes equally long on all of
them, and its time tells nothing. But they do not come to it together. PyTorch's flight recorder knows when
each rank called which collective; on one machine all ranks have one clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .run import Run

FEWEST = 20  # collectives that all ranks were seen to come to
SHORTEST = 1.0  # seconds from the first to the last of these
MOSTLY = 0.6  # of them the straggler is the last to come
LATE_SHARE = 0.05  # of a step, at least
LATE_SECONDS = 1e-3  # at least: less is what waking up takes


@dataclass(frozen=True)
class Straggler:
    """A rank that comes late to the collectives, again and again."""

    rank: int
    seconds: float  # later than the last of the others, in the median
    step_seconds: float  # what a step takes

    @property
    def share(self) -> float:
        """Of the others' time that goes into waiting for it."""
        return self.seconds / self.step_seconds

    def __str__(self) -> str:
        late, step = 1e3 * self.seconds, 1e3 * self.step_seconds
        return (
            f"rank {self.rank} is late again and again: the others wait {late:.3g} ms for it in a step of"
            f" {step:.3g} ms"
        )


def straggler(run: Run) -> Straggler | None:
    """The rank that the others wait for in nearly every step, if there is one (lesson 14).

    Returns
    -------
    Straggler or None
        None also where too little is known: one rank, few collectives, a run of a moment.
    """
    numbers, seconds = meetings(run)
    if run.world_size < 2 or len(numbers) < FEWEST or np.ptp(seconds) < SHORTEST:
        return None
    last = seconds.argmax(axis=1)
    rank = int(np.bincount(last, minlength=run.world_size).argmax())
    late = float(np.median(seconds[:, rank] - np.delete(seconds, rank, axis=1).max(axis=1)))
    step = step_seconds(run) or float(np.ptp(seconds.max(axis=1)) / np.ptp(numbers))
    if (last == rank).mean() < MOSTLY or late < max(LATE_SECONDS, LATE_SHARE * step):
        return None
    return Straggler(rank, late, step)


def meetings(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The collectives that all ranks were seen to call.

    Returns
    -------
    (np.ndarray, np.ndarray)
        Their numbers, of shape (collectives,), and when each rank came there, in seconds since the launch, of
        shape (collectives, ranks).
    """
    arrivals = [run.trace(rank).arrivals() for rank in range(run.world_size)]
    common = arrivals[0]["number"] if arrivals else np.empty(0)
    for each in arrivals[1:]:
        common = np.intersect1d(common, each["number"], assume_unique=True)
    columns = [each["seconds"][np.searchsorted(each["number"], common)] for each in arrivals]
    return common, np.stack(columns, axis=1) if columns else np.empty((0, 0))


def step_seconds(run: Run) -> float:
    """What a step inside the `track` loops takes, in the mean over the ranks; 0 where there is none."""
    ticks = [run.ticks(rank) for rank in range(run.world_size)]
    rates = [each["tracked_seconds"][-1] / each["steps"][-1] for each in ticks if each["steps"][-1:].any()]
    return float(np.mean(rates)) if rates else 0.0
