"""Two ranks on one GPU of 16 GB (a T4): what lessons and programs compute on a GPU alone fits there.

By arithmetic: nothing here ran on a GPU. What they compute everywhere fits into the few GiB of main memory
that a learner has (README), all ranks together.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib import LivePeak
from tests.gpu import figures

ROOT = Path(__file__).parents[1]
MIB = 2**20
T4 = 15_360 * MIB  # as nvidia-smi lists it
CONTEXT = 1343 * MIB  # of a process that uses the GPU, before its first model: published, in lesson 02
OWN_SIZES = re.compile(r"(?<![\d.])(\d{2,})(?:, [\d.e-]+\))? if [^#\n]*(?:gpu|cuda|accelerator)")


def names_of(monkeypatch: pytest.MonkeyPatch, name: str, *cells: str) -> dict[str, Any]:
    """What cells of a lesson bind."""
    monkeypatch.setitem(figures.FIGURES, name, figures.Figure(cells, ""))
    names: dict[str, Any] = {"nn": nn, "torch": torch, "F": F}
    for filename, tree in figures.cells_of(name):
        figures.executed(filename, tree, names)
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


def workloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int, int]]:
    """What, how many processes at once, and the bytes of each."""
    monkeypatch.syspath_prepend(ROOT / "lessons")
    one = names_of(monkeypatch, "02_small_gpu", "l02-05: ConvNet", "l02-42: sizes")
    three = names_of(monkeypatch, "03_small_gpu", "l03-c10")
    program = importlib.import_module("scripts.train_ddp")
    deep = names_of(monkeypatch, "15_small_gpu", "torch", "resnet8: resnet8", "amp-gpu: NETS")
    with torch.device("meta"):  # sizes without memory
        digits = [torch.empty(batch, 1, 28, 28) for batch in (64, 120, 128, 500, one["sizes"][-1])]
        yield f"02, batch {one['sizes'][-1]}", 1, needed_bytes(one["ConvNet"](64), digits[4])
        yield "03, two replicas, batch 120 on each", 1, 2 * needed_bytes(three["ConvNet"](64), digits[1])
        yield "06, one rank, batch 128", 1, needed_bytes(three["ConvNet"](64), digits[2])
        yield "06, two ranks, batch 64", 2, needed_bytes(three["ConvNet"](64), digits[0])
        yield "train_*.py, two ranks, batches of 500", 2, needed_bytes(program.ConvNet(64), digits[3])
        for name, (build, size, batches) in deep["NETS"].items():
            pictures = torch.empty(batches[-1], 3, size, size)
            yield f"15, {name}, batch {len(pictures)}", 1, needed_bytes(build(10), pictures)
    yield "01, a transfer in five buffers", 1, 5 * 2**17 * 1024


def test_they_fit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, processes, count in workloads(monkeypatch):
        left = T4 - (processes + 1) * CONTEXT  # the kernel may use the GPU, too
        print(f"{what}: {processes} × {count / MIB:,.0f} MiB of {left / MIB:,.0f} MiB")
        assert 2 * processes * count < left, what


def test_the_arithmetic_covers_what_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "lessons")
    network = importlib.import_module("scripts.train_ddp").ConvNet
    x, labels = torch.rand(64, 1, 28, 28), torch.zeros(64, dtype=torch.int64)
    with LivePeak() as live:
        model = network(16)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
    assert 0.5 < max(live.history) / needed_bytes(network(16), x) < 1


def test_no_other_size_is_larger_on_a_gpu() -> None:
    """A new one belongs in the list above, and then in this one."""
    found = {}
    for path in sorted((ROOT / "lessons").glob("*.ipynb")) + sorted((ROOT / "lessons/scripts").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            text = "\n".join("".join(cell["source"]) for cell in cells)
        if numbers := OWN_SIZES.findall(text):
            found[path.stem] = numbers
    assert found == {
        "01_tensors_and_devices": ["2048"],  # 2048² numbers: 16 MiB
        "02_one_device_baseline": ["64"],
        "03_data_parallel": ["64"],
        "06_ddp_with_spawn": ["64"],
        "15_imagenet_style": ["20"],  # times
        "train_ddp": ["64"],
        "train_resume": ["64"],
        "train_spawn": ["64"],
    }
