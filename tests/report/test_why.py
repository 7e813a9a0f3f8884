"""Each cause that keeps a run from being faster is made on purpose, and named."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib import Run, track, why
from course_lib.hardware import cores
from course_lib.run_folder import ARRIVAL, PACE, RankFiles
from tests.support.cells import quiet_launch
from tests.support.runs import made_run


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def a_slow_loader() -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(20):
            time.sleep(0.1)
            yield torch.zeros(3)

    dist.init_process_group("gloo")
    for _ in track(batches()):
        dist.all_reduce(torch.zeros(3))


def steps_for(seconds: float) -> Iterator[int]:
    """Until a rank says that the time is over: they agree in each step, by a tiny all_reduce."""
    until = time.time() + seconds
    for step in track(itertools.count()):
        over = torch.tensor(float(time.time() > until))
        dist.all_reduce(over)
        if over:
            return
        yield step


def large_tensors() -> None:
    dist.init_process_group("gloo")
    gradients = torch.zeros(2**23)  # 32 MiB
    for _ in steps_for(3):
        dist.all_reduce(gradients)


def tiny_steps() -> None:
    dist.init_process_group("gloo")
    for _ in steps_for(3):  # nothing more
        pass


def a_late_rank() -> None:
    dist.init_process_group("gloo")
    for _ in track(range(30)):
        time.sleep(0.05 + 0.1 * (dist.get_rank() == 1))
        dist.all_reduce(torch.zeros(3))


def more_ranks_than_cores() -> None:
    for _ in track(range(20)):
        busy(0.1)


@pytest.mark.alone
@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize(
    ("training", "ranks", "cause", "words"),
    [
        (a_slow_loader, 2, "loader", "more workers where there are cores"),
        (large_tensors, 2, "communication", "MiB in all"),
        (tiny_steps, 2, "little work", "a larger batch"),
        (a_late_rank, 2, "straggler", "rank 1 is late again and again"),
        (more_ranks_than_cores, 4 * math.ceil(cores()), "shared cores", "Fewer ranks help"),
    ],
)
def test_each_cause_is_named(training: Any, ranks: int, cause: str, words: str) -> None:
    run = quiet_launch(training, nprocs=ranks)
    verdict = why(run)
    assert verdict.cause == cause, verdict
    assert words in verdict.sentence
    assert why(Run.open(run.folder)) == verdict, "from the folder, too"


# --- runs as ranks would have left them ---------------------------------------------------------------------


def spent(
    ranks: int,
    seconds: float = 5.0,
    calls: int = 1,
    size: float = 4.0,
    lag: Any = 0.0,
    meets: bool = True,
    inside: float = 1.0,
    looks: int = 100,
    **parts: Any,
) -> Run:
    """A run of steps of 0.1 s; parts are shares of a step, for all ranks or as a list, by rank.

    A share may be an array, with an entry for each step. Rank 1 comes ``lag`` seconds late to each collective
    (an array: to each by so much, and where it is negative rank 0 does). Of the looks that found a rank
    asleep, ``inside`` is the share that found it in a collective.
    """
    run = made_run(ranks, seconds)
    steps = 1 + np.arange(round(seconds * 10))
    for rank in range(ranks):
        rows = np.zeros((len(steps), len(PACE)))
        rows[:, PACE.index("seconds")] = rows[:, PACE.index("tracked_seconds")] = steps / 10
        rows[:, PACE.index("steps")] = steps
        rows[:, PACE.index("asleep_samples")] = steps / steps[-1] * looks
        rows[:, PACE.index("collective_samples")] = steps / steps[-1] * looks * inside * bool(calls)
        for name, share in parts.items():
            own = share[rank] if isinstance(share, list) else share
            rows[:, PACE.index(f"{name}_seconds")] = np.cumsum(own * np.full(len(steps), 0.1))
        rows.astype("<f8").tofile(RankFiles(run.folder, rank).pace)
        numbers = np.arange(calls * len(steps))
        late = np.repeat(lag * np.ones(len(steps)), calls)
        own_lag = np.maximum(0, late) * (rank == 1) + np.maximum(0, -late) * (rank == 0)
        arrivals = np.column_stack(
            [
                numbers,
                numbers * 0.1 / max(1, calls) + own_lag,
                np.full(len(numbers), size / max(1, calls)),
                np.full(len(numbers), meets),
            ]
        )
        assert arrivals.shape[1] == len(ARRIVAL)
        arrivals.astype("<f8").tofile(RankFiles(run.folder, rank).arrivals)
    return run


NOW_AND_THEN = np.arange(50) % 10 >= 7  # three of ten steps: a pause of 0.3 s every second
IN_TURNS = np.where(np.arange(50) % 2, 0.05, -0.05)


@pytest.mark.parametrize(
    ("parts", "cause", "words"),
    [
        ({"cpu": 0.9}, "computing", "90% of the time the ranks compute"),
        ({"cpu": 0.9, "loader": 0.4, "loader_cpu": 0.35}, "loader", "make their batches themselves"),
        ({"cpu": 0.3, "delay": 0.4}, "shared cores", "2 ranks, and all else that this machine does"),
        ({"cpu": 0.4, "calls": 0}, "unknown", "60% of the time a rank waits, in no"),
        (
            {"cpu": 0.4, "inside": 0.1},
            "unknown",
            "54% of the time a rank waits, in no",
        ),
        ({"cpu": 0.4, "looks": 5}, "unknown", "fewer than 6 looks do not tell"),
        ({"cpu": 0.4, "inside": 0.6, "size": 5e7}, "communication", "waits 36 ms for its collectives"),
        ({"cpu": 0.7, "lag": IN_TURNS}, "unknown", "the work is uneven"),
        ({"cpu": 0.5, "lag": 0.04 * NOW_AND_THEN}, "little work", "waits 40 ms for its collectives"),
        ({"cpu": 0.45, "lag": IN_TURNS}, "little work", "waits 30 ms for its collectives"),
        ({"cpu": [0.9, 0.5], "lag": 0.04, "meets": False}, "unknown", "which too few were seen"),
        (
            {"cpu": 1 - 0.9 * NOW_AND_THEN, "size": 5e7},
            "unknown",
            "wait in their collectives, but",
        ),
        ({"cpu": 0.95, "lag": 0.04}, "computing", "95% of the time the ranks compute"),
        (
            {"cpu": 0.7, "loader": 0.9 * NOW_AND_THEN},
            "unknown",
            "its loader, but not in most steps",
        ),
        (
            {"cpu": 0.5, "delay": 0.9 * NOW_AND_THEN, "size": 5e3},
            "unknown",
            "gets no core, but not in most steps",
        ),
        ({"cpu": 0.4, "size": 5e7}, "communication", "1.0 of them, 47.7 MiB in all"),
        ({"cpu": 0.02, "size": 5e6}, "communication", "4.77 MiB in all"),  # a slow machine's bytes are slow
        ({"cpu": 0.4, "size": 5e3}, "little work", "4.88 KiB in all"),
        ({"cpu": 0.4, "delay": 0.25, "size": 5e3}, "shared cores", "25% of the time a rank, or"),
        ({"cpu": 0.9, "lag": 0.007}, "computing", "nothing else holds them up"),
        ({"cpu": 0.9, "lag": 0.01}, "straggler", "the others wait 10 ms for it in a step of 100 ms"),
        ({"cpu": [0.5, 0.9], "lag": 0.04}, "straggler", "Computing takes 90% of its time, and 50% of theirs"),
        ({"cpu": 0.5, "loader": [0.0, 0.45], "lag": 0.045}, "straggler", "Loader takes 45% of its time"),
        ({"cpu": 0.5, "lag": 0.045}, "straggler", "it sleeps, or waits for something of its own"),
        ({"cpu": 0.9, "seconds": 0.9}, "unknown", "of ranks 0, 1 less than 1 s"),
        ({"cpu": math.nan, "delay": math.nan, "loader": 0.1}, "unknown", "this system does not say"),
        ({"cpu": math.nan, "delay": math.nan, "loader": 0.5}, "loader", "50% of the time"),
    ],
)
def test_the_verdict_is_the_largest_part_that_could_be_saved(
    parts: dict[str, Any], cause: str, words: str
) -> None:
    verdict = why(spent(2, **parts))
    assert (verdict.cause, words in verdict.sentence) == (cause, True), verdict
    assert verdict.cause in repr(verdict)
    assert f"<b>{cause}</b>" in verdict._repr_html_()


def test_one_rank_alone_that_kept_all_cores_busy() -> None:
    two = spent(2, cpu=0.9, process_cpu=0.9)
    full, half = (
        spent(1, calls=0, cpu=0.9, process_cpu=0.9 * cores()),
        spent(1, calls=0, cpu=0.9, process_cpu=0.4),
    )

    assert why(two, full).cause == "shared cores"
    assert "one rank alone kept" in why(two, full).sentence
    assert why(two, half).cause == "computing"
    assert why(two, two).cause == "computing", "not of one rank"
    assert why(spent(2, cpu=0.5, loader=0.4), full).cause == "loader", "what can be mended comes first"


def test_on_a_gpu_only_the_loader_can_be_told() -> None:
    run = spent(2, cpu=0.3)
    for rank in range(2):
        RankFiles(run.folder, rank).facts.write_text('{"device": "cuda:0"}')
    assert (why(run).cause, "take a profile" in why(run).sentence) == ("unknown", True)


def test_a_run_that_measured_nothing() -> None:
    assert why(made_run(2)).sentence.startswith("of ranks 0, 1 less than 1 s inside track(loader) is known")
    assert why(Run.create("silent", 0)).cause == "unknown"
