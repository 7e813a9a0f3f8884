"""Where each rank stood at the end, as data: told from what the ranks wrote down, and from a real hang."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import RankTimeout, Run, launch, log, stalls
from tests.support.programs import Jump, all_at

TORCH = "/venv/site-packages/torch/distributed/distributed_c10d.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("course_lib.report.stacks.is_learners", lambda file: file.startswith("/course/"))
    return Run.create("train", 1, started=time.time() - 10)


def record(run: Run, *stack: tuple[str, str], **more: Any) -> None:
    places = [(file, 12, function) for file, function in stack]
    text = json.dumps({"since": run.started + 4, "stack": places, "pending": []} | more)
    (run.folder / "rank-0.where").write_text(text)


@pytest.mark.parametrize(
    ("stack", "more", "doing"),
    [
        (
            [(TORCH, "all_reduce"), (TORCH, "wrapper"), ("/course/cell.py", "train")],
            {},
            "waits in all_reduce",
        ),
        (
            [("/torch/_t.py", "backward"), ("/course/cell.py", "f")],
            {"pending": [1]},
            "waits in backward",
        ),
        ([("/torch/serialization.py", "save"), ("/course/cell.py", "train")], {}, "is in save"),
        ([("/course/cell.py", "train")], {}, "is at a line of its own"),
    ],
)
def test_where_a_rank_stood(run: Run, stack: Any, more: Any, doing: str) -> None:
    record(run, *stack, **more)
    run.record.end("failed")

    (stall,) = stalls(Run.open(run.folder))
    assert (stall.rank, stall.doing) == (0, doing)
    assert stall.since == pytest.approx(4)
    assert stall.until == pytest.approx(10, abs=0.5)
    assert stall.line == "cell.py, line 12"


@pytest.mark.parametrize(
    ("file", "doing"),
    [("rank-0.result", "has returned"), ("rank-0.failure.json", "has failed"), ("other", "is gone")],
)
def test_a_rank_that_stood_nowhere(run: Run, file: str, doing: str) -> None:
    record(run, ("/course/cell.py", "train"))
    if file == "other":
        (run.folder / "rank-0.where").unlink()
    (run.folder / file).touch()
    run.record.end("failed")

    (stall,) = stalls(run)
    assert (stall.doing, stall.line) == (doing, "")
    assert 0 <= stall.since <= stall.until


def test_who_waits_for_whom_in_a_real_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_sleeps() -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        log(ready=time.time())
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    begins = one_sleeps.__code__.co_firstlineno
    Jump(monkeypatch, lambda: all_at(begins + 6, begins + 5))
    with pytest.raises(RankTimeout) as caught:
        launch(one_sleeps, nprocs=2, device="cpu", timeout=300, dashboard=False)

    waits, sleeps = stalls(caught.value.run)
    assert (waits.rank, waits.doing) == (0, "waits in all_reduce")
    assert waits.line.endswith("dist.all_reduce(torch.ones(1))")
    assert (sleeps.rank, sleeps.doing) == (1, "is at a line of its own")
    assert sleeps.line.endswith("time.sleep(600)")
    for stall in (waits, sleeps):
        assert 0 < stall.since < stall.until <= caught.value.run.seconds
        run = caught.value.run
        ready = run.metrics[stall.rank]["ready"][0] - run.facts(stall.rank)["launched"]
        assert stall.since > ready - 0.5, "its thread looks ten times a second"
