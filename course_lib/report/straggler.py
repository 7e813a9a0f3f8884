"""Find the rank that is late again and again.

All ranks leave a collective such as `backward`'s all_reduce together, so a step takes equally long on all of
them. But they do not enter it together, as PyTorch's flight recorder notes, though not over NCCL; on one
machine all ranks share one clock. By chance each rank would be last equally often. A straggler makes the
others wait in most steps, for longer than they make it wait, by more than chance explains, and in nearly
every part of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..run.run import Run

FEWEST = 20  # collectives that all ranks were seen to call
SHORTEST = 1.0  # seconds from the first to the last of these
STEPS = 5  # in each part of the run that is assessed separately
MOST_PARTS = 20
MOSTLY = 0.8  # of these parts: in so many it must make the others wait for longer than they make it wait
BY_CHANCE = 3.0  # standard deviations: coin tosses exceed these in one of seven hundred runs
LATE_SHARE = 0.05  # of a step, at least
LATE_SECONDS = 1e-3  # at least: waking up may take as long


@dataclass(frozen=True)
class Straggler:
    """A rank that is late for the collectives again and again."""

    rank: int
    seconds: float  # that the others wait for it in a step (median)
    step_seconds: float  # what a step takes

    @property
    def share(self) -> float:
        """The share of the others' time that they spend waiting for it."""
        return self.seconds / self.step_seconds

    def __str__(self) -> str:
        late, step = 1e3 * self.seconds, 1e3 * self.step_seconds
        wait = f"the others wait {late:.3g} ms for it in a step of {step:.3g} ms"
        return f"rank {self.rank} is late again and again: {wait}"


def straggler(run: Run) -> Straggler | None:
    """Return the rank that the others wait for in nearly every step, if there is one (lesson 14).

    Return None also if too little is known: one rank, few collectives, a very short run.
    """
    run = run.snapshot()
    arrivals = collective_arrivals(run)
    if run.world_size < 2 or len(arrivals.numbers) < FEWEST or np.ptp(arrivals.begun) < SHORTEST:
        return None
    step = step_seconds(run) or float(np.ptp(arrivals.begun) / np.ptp(arrivals.numbers))
    rank, late = _latest(arrivals, step)
    if late:
        late = min(late, step * _others_wait(run, rank))
    return Straggler(rank, late, step) if late >= max(LATE_SECONDS, LATE_SHARE * step) else None


def _latest(arrivals: CollectiveArrivals, step: float) -> tuple[int, float]:
    """Return the rank that cost the others most, and how many seconds per step: 0 if not again and again."""
    collectives, ranks = arrivals.seconds.shape
    others = arrivals.waited.copy()
    others[np.arange(collectives), arrivals.last] = np.inf
    cost = others.min(axis=1)  # all others waited at least this long for the last one
    cost[0] = 0.0  # what came before it is not known
    rank = int(np.bincount(arrivals.last, weights=cost, minlength=ranks).argmax())
    net = np.where(arrivals.last == rank, cost, -cost)
    a_step = (collectives - 1) * step / float(np.ptp(arrivals.begun))  # collectives in a step
    by_step = _by_part(net, a_step)
    if net.sum() < BY_CHANCE * np.sqrt((by_step**2).sum()):
        return rank, 0.0
    by_part = _by_part(net, max(STEPS * a_step, collectives / MOST_PARTS))
    return rank, float(np.median(by_step)) if (by_part > 0).mean() >= MOSTLY else 0.0


def _by_part(values: np.ndarray, length: float) -> np.ndarray:
    """Sum the values, without the first one, in parts of ``length`` values or slightly more."""
    count = max(1, int((len(values) - 1) / max(1.0, length)))
    return np.diff(np.cumsum(values)[np.linspace(0, len(values) - 1, count + 1).astype(int)])


def _others_wait(run: Run, rank: int) -> float:
    """Return the least share of its time that another rank's main thread does not work; 1 if not known.

    It limits what a late rank can cost: if collectives run in parallel with the computation, perhaps nobody
    waits for it. It is not known for a rank with a GPU, which waits for the GPU in ways of its own.
    """
    shares = [1.0]
    for other in set(range(run.world_size)) - {rank}:
        ticks = run.ticks(other)
        ticks = {name: ticks[name][ticks["passes"] > 0] for name in ("seconds", "cpu_seconds")}
        on_gpu = str(run.facts(other).get("device", "")).startswith("cuda")
        if len(ticks["seconds"]) > 1 and not on_gpu and not np.isnan(ticks["cpu_seconds"]).any():
            shares.append(max(0.0, 1 - float(np.ptp(ticks["cpu_seconds"]) / np.ptp(ticks["seconds"]))))
    return min(shares)


def step_seconds(run: Run) -> float:
    """Return the seconds per step inside the `track` loops, averaged over the ranks; 0 if there is none."""
    ticks = [run.ticks(rank) for rank in range(run.world_size)]
    rates = [each["tracked_seconds"][-1] / each["steps"][-1] for each in ticks if each["steps"][-1:].any()]
    return float(np.mean(rates)) if rates else 0.0


# --- when the ranks called their collectives --------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveArrivals:
    """The collectives that all ranks were seen to call, and in which all wait for all."""

    numbers: np.ndarray  # of shape (collectives,), the same on every rank
    seconds: np.ndarray  # of shape (collectives, ranks): since the launch, when each rank called it

    @cached_property
    def begun(self) -> np.ndarray:
        """When each began, as the last rank called it, of shape (collectives,)."""
        return np.maximum.accumulate(self.seconds.max(axis=1, initial=0))

    @cached_property
    def last(self) -> np.ndarray:
        """Which rank called each last, of shape (collectives,)."""
        return self.seconds.argmax(axis=1)

    @cached_property
    def waited(self) -> np.ndarray:
        """Seconds that each rank can have waited for the last one, of shape (collectives, ranks).

        No longer than since its own latest call: before that it was at work.
        """
        waited = []
        for column in np.sort(self.seconds, axis=0).T:
            called = column[np.maximum(0, np.searchsorted(column, self.begun, side="right") - 1)]
            waited.append(self.begun - np.maximum(called, np.append(0.0, self.begun[:-1])))
        return np.maximum(0.0, np.stack(waited, axis=1))


def collective_arrivals(run: Run) -> CollectiveArrivals:
    """Collect the arrivals from what the ranks have written so far."""
    by_rank = [trace.arrivals for trace in run.traces()]
    common = by_rank[0]["number"] if by_rank else np.empty(0)
    for arrivals in by_rank[1:]:
        common = np.intersect1d(common, arrivals["number"], assume_unique=True)
    if not len(common):
        return CollectiveArrivals(common, np.empty((0, len(by_rank))))
    rows = [np.searchsorted(arrivals["number"], common) for arrivals in by_rank]
    meets = by_rank[0]["meets"][rows[0]] > 0
    columns = [arrivals["seconds"][row][meets] for arrivals, row in zip(by_rank, rows, strict=True)]
    return CollectiveArrivals(common[meets], np.stack(columns, axis=1))
