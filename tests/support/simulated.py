"""Training runs in simulated time: what ranks would have written, however busy this machine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from course_lib import Run
from course_lib.run_folder import ARRIVAL, PACE, TICK, RankFiles

Doing = tuple[str, float]  # an activity and its seconds
BUFFER = 16  # collectives that the flight recorder keeps
INTERVAL = 0.1  # seconds between two ticks
LOOKS = 3  # samples between two ticks
TOGETHER = ("meet", "starved")


def simulated(
    ranks: int, steps: int, step: Callable[[int, int], Iterable[Doing]], seed: int = 0, size: float = 4.0
) -> Run:
    """Make a run in which rank r does ``step(r, i)`` in its step i: a sequence of activities with seconds.

    A rank can "work", "sleep", wait for a core ("no_core"), let its "loader" sleep, make a batch itself
    ("loader_work"), be "outside" its loop, and "meet" the others in a collective of ``size`` bytes, which
    takes so long once all have arrived. A "starved" one takes so long because its threads get no core.
    """
    times: list[list[float]] = [[0.0] for _ in range(ranks)]
    kinds: list[list[str]] = [[] for _ in range(ranks)]
    ends: list[list[float]] = [[] for _ in range(ranks)]
    came: list[list[float]] = [[] for _ in range(ranks)]

    def spend(rank: int, kind: str, until: float) -> None:
        kinds[rank].append(kind)
        times[rank].append(until)

    for i in range(steps):
        left = [list(step(rank, i)) for rank in range(ranks)]
        while any(left):
            took, how = 0.0, "meet"
            for rank, doings in enumerate(left):
                while doings and doings[0][0] not in TOGETHER:
                    kind, seconds = doings.pop(0)
                    spend(rank, kind, times[rank][-1] + seconds)
                if doings:
                    how, took = doings.pop(0)
                    came[rank].append(times[rank][-1])
            if any(len(each) > 0 and each[-1] == times[rank][-1] for rank, each in enumerate(came)):
                begun = max(each[-1] for each in came)
                for rank in range(ranks):
                    spend(rank, "meet", begun)
                    spend(rank, how, begun + took)
        for rank in range(ranks):
            ends[rank].append(times[rank][-1])

    run, dice = Run.create("train", ranks), np.random.default_rng(seed)
    for rank in range(ranks):
        lived = np.array(times[rank]), np.array(kinds[rank]), np.array(ends[rank])
        _write(run, rank, *lived, came[rank], size, dice)
    return run


def _write(
    run: Run,
    rank: int,
    times: np.ndarray,
    kinds: np.ndarray,
    ends: np.ndarray,
    came: list[float],
    size: float,
    dice: np.random.Generator,
) -> None:
    ticks = np.arange(0.03, times[-1] + INTERVAL, INTERVAL)

    def so_far(*wanted: str) -> np.ndarray:
        return np.interp(
            ticks, times, np.concatenate([[0], np.cumsum(np.diff(times) * np.isin(kinds, wanted))])
        )

    looks = np.sort(
        (ticks[:, None] + INTERVAL * (np.arange(LOOKS) + dice.random((len(ticks), LOOKS))) / LOOKS).ravel()
    )
    seen = kinds[np.minimum(np.searchsorted(times, looks, side="right") - 1, len(kinds) - 1)]
    looks = np.where(looks < times[-1], looks, np.inf)
    tracked = so_far("work", "sleep", "no_core", "loader", "loader_work", *TOGETHER)
    made = np.isin(kinds, ("loader", "loader_work"))
    loader = np.concatenate([[0], np.cumsum(np.diff(times)[made])])[
        np.searchsorted(times[1:][made], ticks, side="right")
    ]
    pace = {
        "seconds": ticks,
        "steps": np.searchsorted(ends, ticks, side="right"),
        "tracked_seconds": tracked,
        "loader_seconds": loader,  # counted once the batch is there
        "loader_cpu_seconds": so_far("loader_work"),
        "cpu_seconds": so_far("work", "loader_work"),
        "process_cpu_seconds": so_far("work", "loader_work"),
        "delay_seconds": so_far("no_core"),
        "carriers_delay_seconds": so_far("starved"),
        "asleep_samples": np.searchsorted(looks[np.isin(seen, ("sleep", *TOGETHER))], ticks),
        "collective_samples": np.searchsorted(looks[np.isin(seen, TOGETHER)], ticks),
    }
    inside = np.diff(tracked, prepend=0) > 0
    np.column_stack([pace[name] for name in PACE])[inside].astype("<f8").tofile(
        RankFiles(run.folder, rank).pace
    )
    tick = {"steps": pace["steps"], "tracked_seconds": tracked, "seconds": ticks}
    rows = [tick.get(name, np.zeros(len(ticks))) for name in TICK]
    np.column_stack(rows).astype("<f8").tofile(RankFiles(run.folder, rank).ticks)
    last = np.searchsorted(came, ticks, side="right")
    kept = sorted({number for until in last for number in range(max(0, until - BUFFER), until)})
    values = {"number": kept, "seconds": np.array(came)[kept] if kept else [], "bytes": [size] * len(kept)}
    values["meets"] = [1.0] * len(kept)
    np.column_stack([values[name] for name in ARRIVAL]).astype("<f8").tofile(
        RankFiles(run.folder, rank).arrivals
    )
