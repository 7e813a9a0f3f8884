"""nn.DataParallel in the kernel itself, on one GPU, and what torch makes of the same GPU named twice."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.gpu.gpus import on_a_gpu

pytestmark = on_a_gpu


class Noted(torch.nn.Module):
    """A layer that notes each of its calls: the thread and the samples it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.calls: list[tuple[str, int]] = []  # replicas are shallow copies: they share this list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((threading.current_thread().name, len(x)))
        return self.layer(x)


def step(device_ids: list[int] | None) -> tuple[torch.Tensor, torch.Tensor, list[tuple[str, int]]]:
    """Output, gradient and calls of one forward and backward; None is without DataParallel."""
    torch.manual_seed(0)
    noted = Noted().to("cuda:0")
    model = noted if device_ids is None else torch.nn.DataParallel(noted, device_ids=device_ids)
    output = model(torch.linspace(-1, 1, 10 * 4, device="cuda:0").reshape(10, 4))
    output.square().mean().backward()
    assert noted.layer.weight.grad is not None
    return output.detach(), noted.layer.weight.grad, noted.calls


def test_on_one_gpu_it_is_the_model_itself() -> None:
    output, gradient, calls = step([0])

    plain_output, plain_gradient, _ = step(None)
    torch.testing.assert_close(output, plain_output)
    torch.testing.assert_close(gradient, plain_gradient)
    assert calls == [(threading.current_thread().name, 10)]


def test_the_same_gpu_twice() -> None:
    """Not documented: where torch takes it, two replicas in two threads give the same numbers."""
    try:
        output, gradient, calls = step([0, 0])
    except (RuntimeError, ValueError, AssertionError) as error:
        pytest.skip(f"this torch refuses device_ids=[0, 0]: {type(error).__name__}: {error}")

    print(f"device_ids=[0, 0]: {calls}")
    plain_output, plain_gradient, _ = step(None)
    torch.testing.assert_close(output, plain_output)
    torch.testing.assert_close(gradient, plain_gradient)
    assert sorted(size for _, size in calls) == [5, 5]
    assert len({thread for thread, _ in calls}) == 2
