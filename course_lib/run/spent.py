"""Where the time of the ranks went inside their `track` loops, by what each has noted (`rank.pace`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .run import Run

SHORTEST = 1.0  # seconds inside loops: of less there is no verdict
LOOPBACK = 1e9  # bytes/s that gloo moves between two processes of one machine, in round numbers (lesson 09)


@dataclass(frozen=True)
class Parts:
    """Where a rank's time inside its `track` loops went: seconds, in all."""

    seconds: float
    steps: float
    loader: float  # the loop waited for its next batch, or made it
    loader_cpu: float  # of this the rank's own work
    computing: float  # the main thread at work on anything else
    no_core: float  # the main thread ready for work, and no core free
    waiting: float  # asleep: in a collective, for a device, in a sleep of its own
    cores: float  # that all threads of the rank kept busy, in the mean

    def share(self, part: str) -> float:
        """Of the time in the loops, 0 to 1."""
        return getattr(self, part) / self.seconds


def parts_of(run: Run, rank: int) -> Parts | None:
    """Where a rank's time in its loops went; None where that is less than a second.

    Where there is enough without, the first steps do not count: the start of the loader's workers is in them.
    """
    pace = run.trace(rank).pace()
    if len(pace["seconds"]) < 2 or pace["tracked_seconds"][-1] < SHORTEST:
        return None
    begun = int(np.argmax(pace["steps"] >= 2)) if pace["steps"].max() >= 2 else 0
    first = begun if pace["tracked_seconds"][-1] - pace["tracked_seconds"][begun] >= SHORTEST else 0
    whole = {name: float(column[-1] - column[first]) for name, column in pace.items()}
    seconds, loader = whole["tracked_seconds"], min(whole["loader_seconds"], whole["tracked_seconds"])
    computing = max(0.0, whole["cpu_seconds"] - whole["loader_cpu_seconds"])
    no_core = whole["delay_seconds"]
    return Parts(
        seconds,
        max(1.0, whole["steps"]),
        loader,
        whole["loader_cpu_seconds"],
        computing,
        no_core,
        max(0.0, seconds - loader - computing - no_core),
        whole["process_cpu_seconds"] / seconds,
    )


@dataclass(frozen=True)
class Step:
    """What a step is made of, in the mean."""

    seconds: float
    computing: float  # seconds of the main thread's own work
    calls: float  # collectives of the group of all ranks
    bytes: float  # of the tensors in these

    def traffic_seconds(self, world_size: int) -> float:
        """What the bytes alone take, 2 (n − 1) / n of them from each rank, as in a ring (lesson 05)."""
        return 2 * (world_size - 1) / world_size * self.bytes / LOOPBACK


def step_of(run: Run, parts: Mapping[int, Parts]) -> Step:
    """Rank 0's arrivals say how many collectives there are a second, and how large."""
    of_rank_0, arrivals = parts[0], run.trace(0).arrivals()
    seconds = of_rank_0.seconds / of_rank_0.steps
    computing = float(np.mean([each.computing / each.steps for each in parts.values()]))
    if len(arrivals["number"]) < 2:
        return Step(seconds, computing, 0.0, 0.0)
    calls = float(seconds * np.ptp(arrivals["number"]) / max(np.ptp(arrivals["seconds"]), 1e-9))
    return Step(seconds, computing, calls, calls * float(arrivals["bytes"][1:].mean()))
