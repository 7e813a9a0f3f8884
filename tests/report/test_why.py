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

    print(verdict)
    assert verdict.cause == cause
    assert words in verdict.sentence
    assert why(Run.open(run.folder)) == verdict, "from the folder, too"


# --- runs as ranks would have left them ---------------------------------------------------------------------


def spent(
    ranks: int, seconds: float = 5.0, calls: int = 1, size: float = 4.0, lag: float = 0.0, **parts: Any
) -> Run:
    """A run of steps of 0.1 s; parts are shares of the time, for all ranks or as a list, by rank."""
    run = made_run(ranks, seconds)
    times = np.arange(0, seconds, 0.1) + 0.1
    for rank in range(ranks):
        rows = np.zeros((len(times), len(PACE)))
        rows[:, PACE.index("seconds")] = rows[:, PACE.index("tracked_seconds")] = times
        rows[:, PACE.index("steps")] = np.round(times * 10)
        for name, share in parts.items():
            own = share[rank] if isinstance(share, list) else share
            rows[:, PACE.index(f"{name}_seconds")] = times * own
        rows.astype("<f8").tofile(RankFiles(run.folder, rank).pace)
        count = calls * len(times)
        arrivals = np.zeros((count, len(ARRIVAL)))
        arrivals[:, 0] = np.arange(count)
        arrivals[:, 1] = np.arange(count) * 0.1 / max(1, calls) + lag * (rank == 1)
        arrivals[:, 2] = size / max(1, calls)
        arrivals.astype("<f8").tofile(RankFiles(run.folder, rank).arrivals)
    return run


@pytest.mark.parametrize(
    ("parts", "cause", "words"),
    [
        ({"cpu": 0.9}, "computing", "90% of the time the ranks compute"),
        ({"cpu": 0.9, "loader": 0.4, "loader_cpu": 0.35}, "loader", "make their batches themselves"),
        ({"cpu": 0.3, "delay": 0.4}, "shared cores", "2 ranks, and all else that this machine does"),
        ({"cpu": 0.4, "calls": 0}, "unknown", "no cause is large"),
        ({"cpu": 0.4, "size": 5e7}, "communication", "1.0 of them, 47.7 MiB in all"),
        ({"cpu": 0.02, "size": 5e6}, "communication", "4.77 MiB in all"),  # a slow machine's bytes are slow
        ({"cpu": 0.4, "size": 5e3}, "little work", "4.88 KiB in all"),
        ({"cpu": 0.4, "delay": 0.25, "size": 5e3}, "shared cores", "25% of the time a rank was ready"),
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
