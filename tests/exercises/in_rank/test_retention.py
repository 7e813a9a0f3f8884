"""What forward passes keep in memory is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from course_lib.exercises.in_rank.retention import watch_retention


@pytest.mark.parametrize(
    ("way", "kept"),
    [
        ("one after the other", [3, 3, 3]),
        ("by autograd.grad", [3, 3, 3]),
        ("backward at the end", [3, 6, 9]),
        ("retains the graphs", [3, 6, 9]),
        ("drops them", [3, 3, 3]),
        ("without graphs", []),
    ],
)
def test_a_pass_counts_until_its_graph_is_used_up_or_gone(way: str, kept: list[int]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1), nn.Tanh())
    retained, losses = watch_retention(model, len), []
    with torch.set_grad_enabled(way != "without graphs"):
        for _ in range(3):
            output = model(torch.ones(3, 2))
            loss = output.sum()
            if way == "one after the other":
                losses.append(loss)  # a graph that is used up keeps nothing
                loss.backward()
            elif way == "by autograd.grad":
                torch.autograd.grad(loss, list(model.parameters()))
            elif way == "retains the graphs":
                losses.append(loss)
                loss.backward(retain_graph=True)
            elif way == "backward at the end":
                losses.append(loss)
            del output, loss
    if way == "backward at the end":
        sum(losses).backward()
    assert retained == kept


def test_gradients_are_those_of_an_unwatched_model() -> None:
    one, other = (nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid()) for _ in range(2))
    other.load_state_dict(one.state_dict())
    watch_retention(one, len)
    for model in (one, other):
        x = torch.ones(3, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_pass_that_fails_counts_for_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    retained = watch_retention(model, len)
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    model(torch.ones(4, 2)).sum().backward()
    assert retained == [4]
