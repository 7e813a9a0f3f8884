"""What `why` changes in a rank: batches come again without their loader, and DDP does not synchronize."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from course_lib import track
from course_lib.launcher.launch import Launch, start
from course_lib.rank import recorder as recorder_module
from course_lib.rank import trial
from course_lib.rank.recorder import Recorder
from course_lib.rank.trial import MOST_KEPT, batches_of
from course_lib.record.layout import NO_GRADIENT_SYNC, REPEATED_BATCHES, TRIAL, RankFiles


class Read(list[int]):
    """A data set that notes what was read."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))
        self.seen: list[int] = []

    def __getitem__(self, i: int) -> int:  # type: ignore[override]
        self.seen.append(i)
        return i


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_kept", {})


@pytest.fixture
def without_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIAL, REPEATED_BATCHES)


def passed(loader: Any) -> Any:
    """What `track` passes on."""
    return batches_of(loader)


def test_the_first_batches_come_again_and_nothing_else_is_read(without_a_loader: None) -> None:
    """The loader is a new one in each epoch, as in many programs."""
    data = Read(24)
    for _ in range(3):
        batches = passed(DataLoader(data, batch_size=4))
        assert [batch.tolist()[0] for batch in batches] == [0, 4, 8, 12, 0, 4]
    assert data.seen == list(range(4 * MOST_KEPT))


def test_other_loops_and_loaders_of_another_length_have_their_own(without_a_loader: None) -> None:
    for loader in ([7, 8], [1, 2, 3], []):
        assert list(passed(loader)) == loader, "fewer than are kept"
    assert list(passed([5, 6])) == [5, 6], "at another place"


def test_without_a_length_it_goes_on(without_a_loader: None) -> None:
    batches = passed(iter(range(6)))
    assert list(itertools.islice(batches, 10)) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_only_in_such_a_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loader = [1, 2]
    assert batches_of(loader) is loader
    monkeypatch.setenv(TRIAL, NO_GRADIENT_SYNC)
    assert batches_of(loader) is loader
    monkeypatch.setenv(TRIAL, REPEATED_BATCHES)
    monkeypatch.setenv("COURSE_RUN", str(tmp_path))
    recorder = Recorder(RankFiles(tmp_path, 0))
    monkeypatch.setattr(recorder_module, "_recorder", recorder)
    for first in (1, 3):
        assert list(track([first, 2])) == [1, 2], "one loop"
    assert list(track([3, 2])) == [3, 2], "another one"
    recorder.series.close()


def test_programs_that_take_a_batch_apart_get_a_whole_one_again(without_a_loader: None) -> None:
    loader = [{"x": [torch.zeros(2)], "y": 1} for _ in range(6)]
    for batch in passed(loader):
        batch.pop("y")
        batch["x"].clear()


def test_numbers_of_steps_are_no_batches(without_a_loader: None) -> None:
    assert batches_of(range(9)) == range(9)


def test_ddp_does_not_synchronize_whatever_the_program_sets() -> None:
    def gradients() -> list[float]:
        dist.init_process_group("gloo")
        found = []
        for options in ({}, {"find_unused_parameters": True}):
            ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), **options)
            for step in range(4):
                ddp.zero_grad()
                if step == 1:
                    with ddp.no_sync():
                        ddp(torch.ones(1)).backward()
                    ddp.zero_grad()
                if step == 2:
                    ddp.require_backward_grad_sync = True
                ddp(torch.full((1,), float(dist.get_rank()))).backward()
                found.append(ddp.module.weight.grad.item())
        return found

    assert start(Launch(gradients, nprocs=2)).results == [[0.5] * 8] * 2
    run = start(Launch(gradients, nprocs=2, environment={TRIAL: NO_GRADIENT_SYNC}))
    assert run.results == [[0.0] * 8, [1.0] * 8]
    assert all(run.facts(rank)["ddp"] for rank in range(2))
