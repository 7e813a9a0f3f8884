"""`four_moves`: the pictures of lesson 03 show what has moved so far; the moves are right."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.fixture
def four_moves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(LESSONS)
    return importlib.import_module("scripts.four_moves")


@pytest.mark.parametrize("replicas", [2, 4, 5])
def test_a_picture_has_what_has_moved_so_far(four_moves: Any, replicas: int) -> None:
    for move, name in enumerate(four_moves.MOVES, 1):
        picture = four_moves.moves(move, replicas)
        texts = [each.get_text() for each in picture.figure.axes[0].texts]
        assert sum(text.startswith("chunk ") for text in texts) == replicas
        assert sum(text.startswith("replica ") for text in texts) == (replicas if move >= 2 else 0)
        assert [text for text in texts if text[:1].isdigit()][-1] == f"{move} {name}"
        assert f"Move {move} of 5, {name}" in picture.alt


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_by_hand_is_as_one_device(four_moves: Any, number: int) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(5, 3).double(), torch.randn(7, 5, dtype=torch.float64)
    gradients = []
    for output in (model(x), four_moves.data_parallel(model, [torch.device("cpu")] * number, x)):
        model.zero_grad()
        output.square().mean().backward()
        gradients.append((output, *(each.grad for each in model.parameters())))
    torch.testing.assert_close(*gradients)


def test_device_0_holds_more(four_moves: Any) -> None:
    model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    held = four_moves.count_memory([torch.device("cpu")] * 2, model, [x], torch.mean)
    first, second = held["device 0"], held["device 1"]
    assert first["weights"] == second["weights"] == first["gradients"]
    assert first["optimizer state"] == pytest.approx(2 * first["weights"], rel=0.01)
    assert second["gradients"] == second["optimizer state"] == second["outputs"] == 0
