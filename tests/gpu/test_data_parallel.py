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


def step(device_ids: list[int] | None) -> tuple[torch.Tensor, torch.Tensor | None, list[tuple[str, int]]]:
    """Output, gradient and calls of one forward and backward; None is without DataParallel."""
    torch.manual_seed(0)
    noted = Noted().to("cuda:0")
    model = noted if device_ids is None else torch.nn.DataParallel(noted, device_ids=device_ids)
    output = model(torch.linspace(-1, 1, 10 * 4, device="cuda:0").reshape(10, 4))
    output.square().mean().backward()
    return output.detach(), noted.layer.weight.grad, noted.calls


@pytest.mark.parametrize("device_ids", [[0], [0, 0]], ids=["on one GPU", "on the same GPU twice"])
def test_it_computes_what_the_model_does(device_ids: list[int]) -> None:
    """Not documented: where torch takes a GPU twice, there are two replicas in two threads."""
    try:
        *numbers, calls = step(device_ids)
    except (RuntimeError, ValueError, AssertionError) as error:
        if device_ids == [0]:
            raise
        pytest.skip(f"this torch refuses device_ids=[0, 0]: {type(error).__name__}: {error}")
    torch.testing.assert_close(numbers, list(step(None)[:2]))
    assert sorted(size for _, size in calls) == [10 // len(device_ids)] * len(device_ids)
    threads = {thread for thread, _ in calls}
    assert len(threads) == len(device_ids)
    assert (threading.current_thread().name in threads) == (device_ids == [0])
