"""What a rank counts of its loops, without a recorder and without files."""

from __future__ import annotations

import math
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from course_lib.rank import counters as counters_module
from course_lib.rank.counters import Counters


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(counters_module.time, "perf_counter", lambda: self.now)


LOADER = DataLoader(TensorDataset(torch.zeros(10, 3), torch.zeros(10)), batch_size=4)
ITERABLES = {
    "a list of tensors": (lambda: [torch.zeros(4, 3)] * 5, 5, 20, 5),
    "a loader": (lambda: LOADER, 3, 10, 3),
    "a generator": (lambda: (torch.zeros(2) for _ in range(3)), 3, 6, math.nan),
    "dicts": (lambda: [{"ids": torch.zeros(8, 2), "mask": torch.zeros(3)}] * 2, 2, 16, 2),
    "transformers' batches": (lambda: [UserDict(ids=torch.zeros(8, 2))] * 2, 2, 16, 2),
    "nested": (lambda: [[({"x": torch.zeros(6)}, 1), 2]], 1, 6, 1),
    "arrays": (lambda: [np.zeros((7, 2))], 1, 7, 1),
    "numbers": (lambda: range(9), 9, 9, 9),
    "scalars": (lambda: [torch.tensor(1.0)] * 2, 2, 2, 2),
    "empty batches": (lambda: [(), {}, torch.zeros(0)], 3, 2, 3),
    "nothing": (lambda: [], 0, 0, 0),
}


@pytest.mark.parametrize("kind", ITERABLES)
def test_steps_and_samples_are_counted(kind: str) -> None:
    counters = Counters()
    make, steps, samples, total = ITERABLES[kind]

    passed = list(counters.counted(make()))

    tick = counters.read()
    assert len(passed) == steps
    assert (tick["steps"], tick["samples"], tick["passes"]) == (steps, samples, 1)
    assert tick["pass_steps"] == steps
    np.testing.assert_equal(tick["pass_total"], total)


def test_batches_pass_through_untouched() -> None:
    counters = Counters()
    batches = [object(), torch.zeros(3), {"a": 1}]

    for given, got in zip(batches, counters.counted(batches), strict=True):
        assert got is given


def test_a_total_may_be_given() -> None:
    counters = Counters()
    for _ in counters.counted((i for i in range(3)), total=12):
        pass
    assert counters.read()["pass_total"] == 12


def test_a_loop_that_is_left_ends_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    clock = Clock(monkeypatch)
    for i in counters.counted(range(10)):
        clock.now += 1
        if i == 2:
            break

    def fails() -> None:
        for _ in counters.counted(range(10)):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    next(iter(counters.counted(range(3))))  # a look at one batch
    clock.now += 100
    tick = counters.read()
    assert (tick["steps"], tick["tracked_seconds"]) == (2, 4)


def test_a_loop_inside_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts once, and the outer loop's progress goes on where it was."""
    counters = Counters()
    clock = Clock(monkeypatch)
    for step in counters.counted([torch.zeros(4)] * 6):
        clock.now += 1
        if step is not None and counters.steps == 2:
            for _ in counters.counted([torch.zeros(10)] * 3):
                clock.now += 1
            tick = counters.read()
            assert (tick["pass_steps"], tick["pass_total"]) == (2, 6)
    clock.now += 100
    tick = counters.read()
    assert (tick["steps"], tick["samples"], tick["tracked_seconds"]) == (9, 54, 9)


def test_when_the_last_step_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds inside loops: a rate is samples between two such moments, however long a step takes."""
    clock, counters = Clock(monkeypatch), Counters()
    assert counters.read()["stepped_seconds"] == 0
    for epoch in range(2):
        for step in counters.counted(range(3)):
            assert counters.read()["stepped_seconds"] == 6 * epoch + 2 * step
            clock.now += 2
            assert counters.read()["tracked_seconds"] == 6 * epoch + 2 * step + 2
        clock.now += 100
        assert counters.read()["stepped_seconds"] == 6 * epoch + 6


def test_a_restarted_rank_goes_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, before = Clock(monkeypatch), Counters()
    for _ in before.counted([torch.zeros(4)] * 3):
        clock.now += 1
    after = Counters(before.read())
    for _ in after.counted([torch.zeros(4)] * 2):
        clock.now += 1
    tick = after.read()
    assert (tick["samples"], tick["steps"], tick["passes"], tick["pass_steps"]) == (20, 5, 2, 2)
    assert (tick["tracked_seconds"], tick["stepped_seconds"]) == (5, 5)
