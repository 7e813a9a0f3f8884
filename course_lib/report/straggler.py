"""Find the rank that is late again and again.

All ranks leave a collective such as `backward`'s all_reduce together, so a step takes equally long on all of
them. But they do not enter it together. PyTorch's flight recorder notes when each does, except over NCCL; on
one machine all ranks share one clock. By chance each rank would be last equally often. A straggler makes the
others wait in most steps, for longer than they make it wait, by more than chance explains, and in nearly
every part of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..run.run import Run

FEWEST = 20  # collectives that all ranks were seen to call
SHORTEST = 1.0  # seconds from the first to the last of these
STEPS = 5  # in each part of the run that is assessed separately
MOST_PARTS = 20
MOSTLY = 0.8  # share of parts in which it must make the others wait for longer than they make it wait
BY_CHANCE = 3.0  # standard deviations: coin tosses exceed them in one of seven hundred runs
LATE_SHARE = 0.05  # of a step, at least
LATE_SECONDS = 1e-3  # at least: waking up may take as long


@dataclass(frozen=True)
class Straggler:
    """A rank that is late for the collectives again and again."""

    rank: int
    seconds: float  # that the others wait for it in a step (median)
    step_seconds: float  # what a step takes

    def __str__(self) -> str:
        late, step = 1e3 * self.seconds, 1e3 * self.step_seconds
        wait = f"the others wait {late:.3g} ms for it in a step of {step:.3g} ms"
        return f"rank {self.rank} is late again and again: {wait}"


def straggler(run: Run) -> Straggler | None:
    """Return the rank that the others wait for in nearly every step, if there is one (lesson 14).

    Return None also if too little is known: one rank, few collectives, a very short run.
    """
    run = run.snapshot()
    numbers, arrivals = collective_arrivals(run)
    if run.world_size < 2 or len(numbers) < FEWEST:
        return None
    begun = np.maximum.accumulate(arrivals.max(axis=1))  # each collective, as the last rank called it
    seconds = float(np.ptp(begun))
    if seconds < SHORTEST:
        return None
    step = _step_seconds(run) or seconds / float(np.ptp(numbers))
    rank, late = _latest(arrivals, begun, (len(numbers) - 1) * step / seconds)
    if late:
        late = min(late, step * _others_wait(run, rank))
    return Straggler(rank, late, step) if late >= max(LATE_SECONDS, LATE_SHARE * step) else None


def collective_arrivals(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the collectives in which all ranks wait for all, and when each rank called them.

    The times are in seconds since the launch, of shape (collectives, ranks).
    """
    by_rank = [trace.arrivals for trace in run.traces()]
    common = by_rank[0]["number"] if by_rank else np.empty(0)
    for arrivals in by_rank[1:]:
        common = np.intersect1d(common, arrivals["number"], assume_unique=True)
    if not len(common):
        return common, np.empty((0, len(by_rank)))
    rows = [np.searchsorted(arrivals["number"], common) for arrivals in by_rank]
    meets = by_rank[0]["meets"][rows[0]] > 0
    columns = [arrivals["seconds"][row][meets] for arrivals, row in zip(by_rank, rows, strict=True)]
    return common[meets], np.stack(columns, axis=1)


def _latest(arrivals: np.ndarray, begun: np.ndarray, collectives_per_step: float) -> tuple[int, float]:
    """Return the rank that cost the others most, and how many seconds per step: 0 if not again and again."""
    collectives, ranks = arrivals.shape
    last = arrivals.argmax(axis=1)
    waited = np.empty(arrivals.shape)
    for rank, called in enumerate(np.sort(arrivals, axis=0).T):
        # a rank waits at most since its own latest call: before that it was at work
        latest = called[np.maximum(0, np.searchsorted(called, begun, side="right") - 1)]
        waited[:, rank] = np.maximum(0.0, begun - np.maximum(latest, np.append(0.0, begun[:-1])))
    waited[np.arange(collectives), last] = np.inf
    cost = waited.min(axis=1)  # all others waited at least this long for the last one
    cost[0] = 0.0  # what came before it is not known
    rank = int(np.bincount(last, weights=cost, minlength=ranks).argmax())
    net = np.where(last == rank, cost, -cost)
    by_step = _by_part(net, collectives_per_step)
    if net.sum() < BY_CHANCE * np.sqrt((by_step**2).sum()):
        return rank, 0.0
    by_part = _by_part(net, max(STEPS * collectives_per_step, collectives / MOST_PARTS))
    return rank, float(np.median(by_step)) if (by_part > 0).mean() >= MOSTLY else 0.0


def _by_part(values: np.ndarray, length: float) -> np.ndarray:
    """Sum the values, without the first one, in parts of ``length`` values or slightly more."""
    count = max(1, int((len(values) - 1) / max(1.0, length)))
    return np.diff(np.cumsum(values)[np.linspace(0, len(values) - 1, count + 1).astype(int)])


def _others_wait(run: Run, rank: int) -> float:
    """Return the smallest share of time in which another rank's main thread is idle; 1 if unknown.

    It limits what a late rank can cost: if collectives run in parallel with the computation, perhaps nobody
    waits for it. It is unknown for a rank with a GPU, which waits for the GPU in its own ways.
    """
    shares = [1.0]
    for other in set(range(run.world_size)) - {rank}:
        ticks = run.trace(other).ticks
        seconds, worked = (ticks[name][ticks["passes"] > 0] for name in ("seconds", "cpu_seconds"))
        on_gpu = str(run.facts(other).get("device", "")).startswith("cuda")
        if len(seconds) > 1 and not on_gpu and not np.isnan(worked).any():
            shares.append(max(0.0, 1 - float(np.ptp(worked) / np.ptp(seconds))))
    return min(shares)


def _step_seconds(run: Run) -> float:
    """Return the seconds per step inside the `track` loops, averaged over the ranks; 0 if unknown."""
    ticks = [trace.ticks for trace in run.traces()]
    rates = [each["tracked_seconds"][-1] / each["steps"][-1] for each in ticks if each["steps"][-1:].any()]
    return float(np.mean(rates)) if rates else 0.0
