"""The fingerprints of what all ranks should hold alike: of what, when, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from course_lib import Run, track
from course_lib.rank import fingerprints as module
from course_lib.rank.fingerprints import FREE, SHARE, Fingerprints, fingerprints, whole_parameters
from course_lib.record.layout import RankFiles
from course_lib.record.run_record import RunRecord
from course_lib.record.series import Series
from course_lib.record.trace import Check


def of(tensor: Any) -> int:
    (value,) = fingerprints([tensor]).tolist()
    assert 0 <= value < 2**53, "a float64 holds it exactly"
    return value


BLOCK = 1000
LARGE = 2 * BLOCK + 3  # of 8-byte words: two blocks, and a rest


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [1, 5, 8 * LARGE + 1])
def test_one_element_makes_the_difference(dtype: torch.dtype, size: int) -> None:
    zeros = torch.zeros(size, dtype=dtype)
    assert of(zeros) == of(zeros.clone())
    seen = {of(zeros)}
    for place in {0, size // 3, size - 1}:
        one = zeros.clone()
        one[place] = 1
        seen.add(of(one))
    assert len(seen) == 1 + len({0, size // 3, size - 1}), "which one it is makes another"


@pytest.mark.parametrize(("a", "b"), [(1.0, 2.0), (1.0, 4.0), (1.0, -1.0), (0.0, -0.0), (1.0, 1 + 2**-52)])
def test_each_bit_counts(a: float, b: float) -> None:
    for size in (1, 7, LARGE):
        same, other = (torch.full((size,), value, dtype=torch.float64) for value in (a, a))
        other[size // 2] = b
        assert of(same) != of(other)
    signs = torch.ones(LARGE, dtype=torch.float64)
    assert of(signs) != of(-signs), "nor do many vanish in a sum"
    nan = torch.full((3,), math.nan)
    assert of(nan) == of(nan.clone()), "bit by bit, it is equal to itself"


def test_only_the_values_count() -> None:
    """Not how they lie in memory: another rank may have them in another order there, or at an odd place."""
    values = torch.randn(300, 400)
    assert of(values) == of(values.t().contiguous().t()) == of(torch.cat([values[0, :1], values.ravel()])[1:])
    moved = values.clone()
    moved[[3, 200]] = moved[[200, 3]]
    assert of(moved) != of(values) != of(values.t())
    assert of(torch.zeros(())) == of(torch.zeros(1))
    assert of(torch.zeros(0)) == 0


class Sharded(torch.Tensor):
    """Stands for a DTensor."""

    def __init__(self, *_: Any) -> None:
        self.placements = [self]

    def is_replicate(self) -> bool:
        return False


class Whole(Sharded):
    def is_replicate(self) -> bool:
        return True

    def to_local(self) -> torch.Tensor:
        return torch.ones(2)


NO_VALUES: dict[str, Callable[[], Any]] = {
    "sharded": lambda: Sharded(torch.zeros(2)),
    "on meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.zeros(2).to_sparse(),
}


@pytest.mark.parametrize("kind", NO_VALUES)
def test_what_no_rank_holds_whole_is_left_out(kind: str) -> None:
    parameters = {"odd": NO_VALUES[kind](), "plain": torch.zeros(1), "replicated": Whole(torch.zeros(2))}
    model = SimpleNamespace(named_parameters=parameters.items)
    assert list(whole_parameters(model)) == ["plain", "replicated"]
    del parameters["plain"], parameters["replicated"]
    for nothing in (model, [torch.zeros(1)]):
        with pytest.raises(ValueError, match=f"holds a parameter of this {type(nothing).__name__} whole"):
            track([], same=nothing)


class Rank:
    """A rank whose clock is moved by its steps and fingerprints alone."""

    def __init__(self, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.spent, self.cost = 0.0, 0.0, 0.0
        self.folder, self.number, self.patch = folder, number, monkeypatch
        with self:
            self.own = Fingerprints(Series(RankFiles(folder, number), launched=0.0))

    def __enter__(self) -> None:
        self.patch.setattr(module.time, "perf_counter", lambda: self.now)
        self.patch.setattr(module, "whole_parameters", self.parameters)

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()

    def parameters(self, _: Any) -> dict[str, torch.Tensor]:
        self.now, self.spent = self.now + self.cost, self.spent + self.cost
        return {"weight": torch.zeros(1)}

    def train(self, steps: Iterable[int], cost: float, step: float = 1.0) -> set[Check]:
        self.cost = cost
        with self:
            for _ in self.own.taken(steps, None):
                self.now += step
        return self.checks()

    def checks(self) -> set[Check]:
        record = RunRecord(self.folder, {"name": "x", "world_size": 2, "state": "done"})
        return set(Run(record).trace(self.number).fingerprints())


@pytest.mark.parametrize("cost", [0.0001, 0.01, 0.3, 20.0])
def test_they_take_less_than_a_hundredth_of_the_time(
    cost: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, 0, monkeypatch)
    checks = rank.train(range(20_000), cost)
    assert rank.spent < 0.01 * rank.now + FREE + 2 * cost, "of the first ones, nothing is known yet"
    assert rank.spent > 0.25 * SHARE * rank.now or cost < 0.1, "nor are they much more seldom than they may"
    assert len(checks) < 3000
    assert {Check(0, 1, 0), Check(0, 1, 1), Check(0, 1, 20_000)} <= checks


def test_short_passes_are_spared_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, 0, monkeypatch)
    for _ in range(2000):
        rank.train(range(3), cost=1.0)
    assert rank.spent < 0.01 * rank.now + 3
    assert len({check.number for check in rank.checks()}) > 5


def test_ranks_that_choose_differently_have_steps_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is slow, and one has a batch less in each pass."""
    fast, slow = (Rank(tmp_path, number, monkeypatch) for number in range(2))
    for _ in range(3):
        fast.train(range(500), cost=0.03)
        slow.train(range(499), cost=0.2)
    common = fast.checks() & slow.checks()
    assert len(fast.checks()) > len(slow.checks())
    for number in (1, 2, 3):
        assert len([check for check in common if check.number == number]) >= 5
    assert {Check(0, 2, 0), Check(0, 3, 0)} <= common


def test_a_loop_that_is_left_early_and_one_inside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, 0, monkeypatch)
    with rank:
        for i in rank.own.taken(range(10), None):
            rank.now += 1
            assert list(rank.own.taken("ab", None)) == ["a", "b"] or i
            if i == 2:
                break
    assert {(check.number, check.step) for check in rank.checks()} >= {(1, 0), (1, 1), (1, 2), (2, 2), (4, 2)}
    assert (1, 3) not in {(check.number, check.step) for check in rank.checks()}, "that step was not over"


def test_a_device_that_is_full_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(tmp_path, 0, monkeypatch)

    def full(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rank, "parameters", full)
    rank.train(range(100), cost=0.0)
    assert rank.checks() == set()
    said = capsys.readouterr().err
    assert said.count("course_lib: track(…, same=…) no longer compares: OutOfMemoryError('CUDA out of") == 1
