"""Find where the time of the ranks went inside their `track` loops, from what `rank.pace` has recorded.

The time is divided into short windows of whole steps. What happens in every step is in most windows; an
occasional pause (an evaluation, a checkpoint) is in a few, however long it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .meetings import Meetings
    from .run import Run

SHORTEST = 1.0  # seconds inside loops: for less there is no verdict
WINDOW = 0.5  # seconds, at least, and whole steps: a tick may see a step 0.1 s after its end
FEWEST_LOOKS = 6  # that found a rank asleep: fewer do not show where it sleeps
CALL_AT_MOST = 2e-3  # seconds that a small collective takes on free cores: here 1 ms, rarely more
LOOPBACK = 1e9  # bytes/s that gloo moves between two processes on one machine, in round numbers (lesson 09)


@dataclass(frozen=True)
class Parts:
    """Where a rank's time inside its `track` loops went: total seconds, and the usual share of a step."""

    seconds: float
    steps: float
    loader: float  # the loop waited for its next batch, or made it
    loader_cpu: float  # of this, CPU time of the main thread
    computing: float  # the main thread's CPU time for anything else
    no_core: float  # the main thread was ready to run, but no core was free
    waiting: float  # the main thread slept: in a collective, for a device, or of its own accord
    carriers_no_core: float  # gloo's threads, which run the collectives, were ready, but no core was free
    for_others: float | None  # of `waiting`, at most: until another rank called the collective; None: unknown
    in_collectives: float | None  # the share of looks at the sleeping rank that found one; None: too few
    cores: float  # that all threads of the rank together kept busy, on average
    most: Mapping[str, float]  # for each part, the median over the windows of its share of a window

    def share(self, part: str) -> float:
        """Return a part's share, 0 to 1, of the whole time in the loops."""
        return getattr(self, part) / self.seconds

    def usual(self, part: str) -> float:
        """Return the median of this share over short windows: what is true of most steps."""
        return self.most[part]


def parts_of(run: Run, rank: int, met: Meetings | None = None) -> Parts | None:
    """Return where a rank's time in its loops went; None if that is less than a second.

    The first steps, which include the start of the loader's workers, do not count if there is enough without
    them. ``met``, if given, says where the ranks waited for each other.
    """
    pace = run.trace(rank).pace()
    if not len(pace["seconds"]) or pace["tracked_seconds"][-1] < SHORTEST:
        return None
    pace = {name: np.concatenate([[0.0], column]) for name, column in pace.items()}
    pace["seconds"][0] = pace["seconds"][1] - pace["tracked_seconds"][1]
    edges = _windows(pace["tracked_seconds"], pace["steps"])
    gained = {name: np.diff(column[edges]) for name, column in pace.items()}
    seconds = gained["tracked_seconds"]
    loader = np.minimum(gained["loader_seconds"], seconds)
    loader_cpu = np.minimum(gained["loader_cpu_seconds"], loader)
    computing = np.maximum(0.0, gained["cpu_seconds"] - loader_cpu)
    no_core = gained["delay_seconds"]
    carriers = gained["carriers_delay_seconds"]
    waiting = np.maximum(0.0, seconds - loader - computing - no_core)
    unknown = np.full(len(seconds), np.nan)
    for_others = unknown if met is None else met.waited_between(pace["seconds"][edges], rank)
    for_others = np.minimum(for_others * seconds, waiting)
    asleep, inside = gained["asleep_samples"].sum(), gained["collective_samples"].sum()
    series = {
        "loader": loader,
        "loader_cpu": loader_cpu,
        "computing": computing,
        "no_core": no_core,
        "waiting": waiting,
        "carriers_no_core": carriers,
    }
    sums = {name: float(each.sum()) for name, each in series.items()}
    usual = {name: float(np.median(each / seconds)) for name, each in series.items()}
    known = ~np.isnan(for_others)
    if known.any():
        sums["for_others"] = float(for_others[known].sum() / seconds[known].sum() * seconds.sum())
        usual["for_others"] = float(np.median((for_others / seconds)[known]))
    return Parts(
        seconds=float(seconds.sum()),
        steps=max(1.0, float(gained["steps"].sum())),
        **({"for_others": None} | sums),
        in_collectives=float(inside / asleep) if asleep >= FEWEST_LOOKS else None,
        cores=float(gained["process_cpu_seconds"].sum() / seconds.sum()),
        most=usual,
    )


def _windows(tracked: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the rows that bound the windows: whole steps, at least WINDOW seconds of them.

    The rows outside of them do not count; if less than a second is left without these, one window takes all.
    """
    ended = 1 + np.flatnonzero(np.diff(steps) > 0)  # the first rows after the end of a step
    edges: list[int] = []
    for row in ended:
        if not edges or tracked[row] - tracked[edges[-1]] >= WINDOW:
            edges.append(int(row))
    if len(edges) < 2 or tracked[edges[-1]] - tracked[edges[0]] < SHORTEST:
        return np.array([0, len(tracked) - 1])
    return np.array(edges)


@dataclass(frozen=True)
class Step:
    """What an average step is made of."""

    seconds: float
    computing: float  # seconds of the main thread's CPU time outside the loader
    calls: float  # collectives of the group of all ranks
    bytes: float  # of the tensors in these

    def traffic_seconds(self, world_size: int) -> float:
        """Return the time for the bytes alone: 2 (n − 1) / n of them per rank, as in a ring (lesson 05)."""
        return 2 * (world_size - 1) / world_size * self.bytes / LOOPBACK

    def at_most(self, world_size: int) -> float:
        """Return the share of a step that its collectives take, at most, if their threads find free cores."""
        return (self.traffic_seconds(world_size) + CALL_AT_MOST * self.calls) / self.seconds


def step_of(run: Run, parts: Mapping[int, Parts]) -> Step:
    """Describe the average step; rank 0's arrivals give the number and size of its collectives."""
    of_rank_0, arrivals = parts[0], run.trace(0).arrivals()
    seconds = of_rank_0.seconds / of_rank_0.steps
    computing = float(np.mean([each.computing / each.steps for each in parts.values()]))
    if len(arrivals["number"]) < 2:
        return Step(seconds, computing, 0.0, 0.0)
    calls = float(seconds * np.ptp(arrivals["number"]) / max(np.ptp(arrivals["seconds"]), 1e-9))
    return Step(seconds, computing, calls, calls * float(arrivals["bytes"][1:].mean()))
