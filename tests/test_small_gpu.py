"""Two ranks on one GPU of 16 GB (a T4): what lessons and programs compute on a GPU alone fits there.

By arithmetic: nothing here ran on a GPU. What they compute everywhere fits into the few GiB of main memory
that a learner has (README), all ranks together.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu import figures

MIB = 2**20
T4 = 15_360 * MIB  # as nvidia-smi lists it
CONTEXT = 1343 * MIB  # of a process that uses the GPU, before its first model: Hugging Face, 2022


def needed_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Weights, gradients, Adam's two averages, what autograd keeps, the largest of it twice more."""
    kept: dict[int, Any] = {}
    own = {each.untyped_storage()._cdata for each in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64, device=x.device)).backward()
    counts = [storage.nbytes() for storage in kept.values()]
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    return 4 * weights + sum(counts) + 2 * max(counts)


def test_the_largest_fit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of batch sizes on one device, and programs with two ranks; all others take less."""
    monkeypatch.syspath_prepend(figures.LESSONS)
    sweep: dict[str, Any] = {"nn": nn, "torch": torch, "F": F}
    for cell in figures.cells_of("02", "l02-05: ConvNet", "l02-42: sizes"):
        figures.executed(*cell, sweep)
    program = importlib.import_module("scripts.train_ddp")
    with torch.device("meta"):  # sizes without memory
        for ranks, convnet, batch_size in (
            (1, sweep["ConvNet"], sweep["sizes"][-1]),
            (2, program.ConvNet, 500),
        ):
            count = needed_bytes(convnet(64), torch.empty(batch_size, 1, 28, 28))
            left = T4 - (ranks + 1) * CONTEXT  # the kernel may use the GPU, too
            print(f"{ranks} × {count / MIB:,.0f} MiB of {left / MIB:,.0f} MiB")
            assert 2 * ranks * count < left
