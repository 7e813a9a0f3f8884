"""Each cause that keeps a training run from being faster is made on purpose.

All of them sleep for known times, so that the shares are known beforehand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course_lib import RankError, RankTimeout, Run, track, why
from course_lib.launcher import why as why_module
from course_lib.record.run_record import newest_first

UNIT = 0.02  # seconds; what a step of DDP takes besides is a tenth of it at most


class Loader:
    """Batches of ``size`` samples; each takes ``seconds`` to come."""

    def __init__(self, size: int, seconds: float, count: int = 10) -> None:
        self.size, self.seconds, self.count = size, seconds, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.count):
            time.sleep(self.seconds)
            yield torch.ones(self.size, 1)


def training(
    batch_size: int = 8,
    loader: float = 0.0,
    sync: float = 0.0,
    late: float = 0.0,
    step: float = 0.0,
    sample: float = UNIT / 8,
    beside: float = 0.0,
    epochs: int = 1000,
) -> None:
    """Train with known times, in seconds: for a batch to come, for a step's gradients to be summed up, for
    each step; and for each sample: on every rank, more on rank 1 (``late``), more beside other ranks."""
    dist.init_process_group("gloo")
    ddp = DDP(nn.Linear(1, 1))
    alone, rank = dist.get_world_size() == 1, dist.get_rank()

    def slowly(_, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are strings
        time.sleep(0.0 if alone else sync)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, slowly)
    sample += late * (rank == 1) + beside * (not alone)
    for _ in range(epochs):
        for batch in track(Loader(batch_size, loader)):
            time.sleep(step + sample * len(batch))
            ddp(batch).sum().backward()


QUIET: dict[str, Any] = {"device": "cpu", "dashboard": False}


@pytest.mark.alone
@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize(
    ("times", "costs"),
    [
        ({"sample": UNIT / 4}, {}),
        ({"loader": UNIT}, {"loader": 0.5}),
        ({"sync": UNIT}, {"communication": 0.5}),
        ({"late": UNIT / 8}, {"straggler": 0.5}),
        ({"step": UNIT, "sample": 0.0}, {"little work": 1.0}),
        ({"beside": UNIT / 8}, {"sharing": 0.5}),
        ({"step": 2 * UNIT, "nprocs": 1}, {"little work": 2 / 3}),
    ],
)
def test_each_cause_is_found(times: Any, costs: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why_module, "ROUNDS", 2)  # sleep does not vary much, and this saves a minute
    for trial_seconds in (0.15, 0.6, 2.4):  # "unknown" is right on a noisy machine: it asks for longer ones
        verdict = why(training, **{"nprocs": 2, **times}, **QUIET, trial_seconds=trial_seconds)
        if verdict.cause != "unknown":
            break
    assert verdict.cause == (max(costs, key=costs.__getitem__) if costs else "computing"), verdict
    large = {cause: share for cause, share in verdict.costs.items() if share > 0.15}
    assert large == pytest.approx(costs, abs=0.1), verdict


def own_loop() -> None:
    if os.environ["WORLD_SIZE"] == "1":
        raise ValueError("it needs a rank 1")
    for _ in track(range(10**6)):
        time.sleep(0.001)


def test_what_is_tried_and_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = why(own_loop, nprocs=2, device="cpu", trial_seconds=0.1)
    rows = [list(row.values()) for row in verdict.rows]
    skipped = {way: last for way, rates, _, last in rows if rates == "–"}
    assert skipped == {
        "no gradient sync": "not known: the function makes no DistributedDataParallel",
        "one rank": "not known: rank 0 raised ValueError: it needs a rank 1",
    }
    ways = ["as it is", "first batches repeated", "no gradient sync", "one rank"]
    rounds = (1, ways), (2, ways[1::-1]), (3, ways[:2])  # two ways are given up in the first
    said = [f"why: round {number} of 3: {'; '.join(tried)}" for number, tried in rounds]
    assert capsys.readouterr().out.splitlines() == said


def shares_its_batch(batch_size: int = 8) -> None:
    for batch in track(Loader(min(batch_size, 10) // int(os.environ["WORLD_SIZE"]), 0.0, count=10**6)):
        time.sleep(0.001 * len(batch))


def test_other_work_is_no_comparison_and_no_run_is_left(course_home: Any) -> None:
    verdict = why(shares_its_batch, nprocs=2, **QUIET, trial_seconds=0.1)
    rows = {row["way"]: row["times as fast"] for row in verdict.rows}
    assert rows["one rank"] == "not known: a step of rank 0 has 2 times as many samples, and not 1"
    assert (
        rows["first batches repeated, × 4"]
        == "not known: a step of rank 0 has 1.2 times as many samples, and not 4"
    )
    assert newest_first() == [], "not of those that failed either"


def test_a_training_that_fails_or_is_over_too_soon(course_home: Any) -> None:
    def fails() -> None:
        raise KeyError("no such thing")

    with pytest.raises(RankError, match="no such thing") as caught:
        why(fails, nprocs=1, **QUIET)
    assert Run.open().folder == caught.value.run.folder, "its report can be read"
    with pytest.raises(ValueError, match=r"had done 0 steps inside track.* measured, it does 10"):
        why(lambda: None, nprocs=1, **QUIET)
    with pytest.raises(ValueError, match=r"a rank had done 10 steps inside track"):
        why(training, epochs=1, nprocs=1, **QUIET)
    with pytest.raises(RankTimeout):
        why(lambda: time.sleep(60), nprocs=1, timeout=1.0, **QUIET)
    with pytest.raises(ValueError, match="trial_seconds"):
        why(training, nprocs=1, trial_seconds=-1.0, **QUIET)
