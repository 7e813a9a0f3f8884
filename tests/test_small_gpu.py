"""Two ranks on one GPU of 16 GB (a T4): what lessons and programs compute on a GPU alone fits there.

By arithmetic: nothing here ran on a GPU. What they compute everywhere fits into the few GiB of main memory
that a learner has (README), all ranks together.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu import figures

MIB = 2**20
T4 = 15_360 * MIB  # as nvidia-smi lists it
CONTEXT = 1343 * MIB  # of a process that uses the GPU, before its first model: Hugging Face, 2022


def names_of(lesson: str, *cells: str) -> dict[str, Any]:
    """What cells of a lesson bind."""
    names: dict[str, Any] = {"nn": nn, "torch": torch, "F": F}
    for cell in figures.cells_of(lesson, *cells):
        figures.executed(*cell, names)
    return names


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


def workloads() -> Iterator[tuple[str, int, int]]:
    """What, how many processes at once, and the bytes of each. A new one belongs in here."""
    one = names_of("02", "l02-05: ConvNet", "l02-42: sizes")
    small = importlib.import_module("scripts.common").ConvNet
    program = importlib.import_module("scripts.train_ddp")
    with torch.device("meta"):  # sizes without memory
        digits = [torch.empty(batch, 1, 28, 28) for batch in (64, 120, 128, 500, one["sizes"][-1])]
        yield f"02, batch {one['sizes'][-1]}", 1, needed_bytes(one["ConvNet"](64), digits[4])
        yield "03, two replicas, batch 120 on each", 1, 2 * needed_bytes(small(64), digits[1])
        yield "06, one rank, batch 128", 1, needed_bytes(small(64), digits[2])
        yield "06, two ranks, batch 64", 2, needed_bytes(small(64), digits[0])
        yield "train_*.py, two ranks, batches of 500", 2, needed_bytes(program.ConvNet(64), digits[3])
    yield "01, a transfer in five buffers", 1, 5 * 2**17 * 1024


def test_they_fit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(figures.LESSONS)
    for what, processes, count in workloads():
        left = T4 - (processes + 1) * CONTEXT  # the kernel may use the GPU, too
        print(f"{what}: {processes} × {count / MIB:,.0f} MiB of {left / MIB:,.0f} MiB")
        assert 2 * processes * count < left, what
