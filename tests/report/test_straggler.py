"""The rank that is late again and again has a name; where none is, none has."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib import Run, track
from course_lib.record.layout import ARRIVAL, RankFiles
from course_lib.report.straggler import collective_arrivals, straggler
from tests.support.cells import quiet_launch
from tests.support.runs import made_run


def training() -> None:
    """Steps of a fixed length, which rank 0 takes 20 % longer for."""
    dist.init_process_group("gloo")
    for _ in track(range(40)):
        time.sleep(0.12 if dist.get_rank() == 0 else 0.1)
        dist.all_reduce(torch.ones(1000))


@pytest.mark.alone
@pytest.mark.flaky(reruns=1)
def test_a_rank_slowed_by_a_fifth_is_named() -> None:
    run = quiet_launch(training, nprocs=3)

    found = straggler(run)

    assert found is not None
    assert found.rank == 0
    assert 0.01 < found.seconds < 0.03
    assert found.step_seconds > 0.12
    assert straggler(Run.open(run.folder)) == found, "from the folder, too"


def arrived(run: Run, *by_rank: np.ndarray, first: int = 1, meets: bool = True) -> Run:
    """Let rank r come to collective first + i at second by_rank[r][i]."""
    for rank, seconds in enumerate(by_rank):
        same = np.ones(len(seconds))
        rows = np.column_stack([first + np.arange(len(seconds)), seconds, meets * same])
        assert rows.shape[1] == len(ARRIVAL)
        with RankFiles(run.folder, rank).arrivals.open("ab") as file:
            file.write(rows.astype("<f8").tobytes())
    return run


EVERY = np.arange(0, 5, 0.1)  # made_run's steps take 0.1 s


def test_what_is_no_straggler() -> None:
    rng = np.random.default_rng(0)
    assert straggler(made_run(2)) is None, "nobody called a collective"
    assert straggler(arrived(made_run(1), EVERY)) is None, "alone"
    assert straggler(arrived(made_run(2), EVERY[:15], EVERY[:15] + 0.02)) is None, "for a moment"
    assert straggler(arrived(made_run(2), EVERY, EVERY + 0.004)) is None, "4 % of a step"
    assert straggler(arrived(made_run(2), EVERY, EVERY + rng.normal(0, 0.02, 50))) is None, (
        "now one, now the other"
    )
    assert straggler(arrived(made_run(3), EVERY, EVERY + 0.02, EVERY + 0.02)) is None, (
        "two are: the work is uneven"
    )
    once = EVERY.copy()
    once[7] += 3
    assert straggler(arrived(made_run(2), EVERY, once)) is None, "late once, by much"


def test_the_straggler_in_numbers() -> None:
    found = straggler(arrived(made_run(3), EVERY, EVERY + 0.03, EVERY + 0.01))
    assert found is not None
    assert (found.rank, found.seconds) == (1, pytest.approx(0.02))
    assert str(found) == ("rank 1 is late again and again: the others wait 20 ms for it in a step of 100 ms")


def test_only_the_collectives_that_all_were_seen_at_count() -> None:
    """In a run of many, each rank sees some of them; a group that was made anew counts from 1."""
    run = arrived(made_run(2), EVERY[:30], EVERY[10:] + 0.03)  # rank 1 was first seen at another number
    arrived(run, EVERY + 5, EVERY[5:] + 5.03 - 0.5, first=1)
    numbers, seconds = collective_arrivals(run)
    assert numbers.tolist() == list(range(1, 46))
    np.testing.assert_allclose(seconds[:, 1] - seconds[:, 0], 0.03, atol=1e-9)


def test_arrivals_cut_short() -> None:
    run = arrived(made_run(2), EVERY, EVERY + 0.03)
    path = RankFiles(run.folder, 1).arrivals
    path.write_bytes(path.read_bytes()[:-5])
    assert len(collective_arrivals(run)[0]) == len(EVERY) - 1
    path.unlink()
    assert len(collective_arrivals(run)[0]) == 0
    assert straggler(run) is None
