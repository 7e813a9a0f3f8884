"""`scripts/bandwidth.py`: what its clock counts, and where it learns how many ranks a node has."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

SCRIPTS = Path(__file__).parents[2] / "lessons" / "scripts"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS.parent)
    return importlib.import_module("scripts.bandwidth")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_clock_stops_before_the_result_is_checked(
    module: Any, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    class Ranks(list[int]):
        def __iter__(self) -> Iterator[int]:  # the check adds them up
            clock[0] += 100
            return super().__iter__()

    def work(tensor: torch.Tensor) -> None:
        clock[0] += 2

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    module.measure("alone", work, Ranks([0]), 64, 3, torch.device("cpu"))
    assert json.loads(capsys.readouterr().out)["seconds"] == 2
    assert clock[0] >= 4 * 102, "each result was checked"


@pytest.mark.parametrize(("devices", "counted"), [(["ib0", "eth0"], 1_050), ([], 3_050)])
def test_what_passes_a_bond_is_counted_once(
    devices: list[str], counted: int, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container no interface is a device: then all are counted but `lo`."""
    rows = {"lo": 7_000, "eth0": 1_000, "ib0": 50, "bond0": 2_000}
    table = "\n".join(f"{card:>6}: {'1 ' * 8}{sent} {'1 ' * 7}" for card, sent in rows.items())
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text(f"head\nhead\n{table}\n")
    for card in devices:
        (tmp_path / "sys/class/net" / card / "device").mkdir(parents=True)
    monkeypatch.setattr(module, "Path", lambda *parts: tmp_path.joinpath(*Path(*parts).parts[1:]))
    assert module.sent() == counted


def test_a_wrong_sum_is_no_measurement(module: Any, alone: None) -> None:
    with pytest.raises(AssertionError, match="alone"):
        module.measure("alone", lambda tensor: tensor.add_(1), [0], 64, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("told", "world_size", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, 4, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 32, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "LOCAL_WORLD_SIZE": "4"}, 8, 4),
        ({}, 4, "there are 4 ranks, and 'nothing' is said"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, 4, "and '3,1' is said"),
    ],
)
def test_ranks_of_a_node(
    told: dict[str, str], world_size: int, expected: int | str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, int):
        assert module.ranks_per_node(world_size) == expected
    else:
        with pytest.raises(SystemExit, match=f"LOCAL_WORLD_SIZE; .*{expected}"):
            module.ranks_per_node(world_size)


@pytest.mark.parametrize("program", ["bandwidth", "train_ddp", "train_imagenet", "train_albert"])
@pytest.mark.parametrize(("visible", "expected"), [(8, "cuda:3"), (1, "cuda:0")])
def test_a_program_without_course_lib_takes_the_gpu_that_it_sees(
    program: str, visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --gpus-per-task=1 each rank sees one GPU, whatever its LOCAL_RANK."""
    monkeypatch.syspath_prepend(SCRIPTS.parent)
    names: dict[str, Any] = {"torch": torch, "os": importlib.import_module("os")}
    text = (SCRIPTS / f"{program}.py").read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    (place,) = [node for node in functions if node.name == "place"]
    exec(ast.unparse(place), names)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    device, backend = names["place"]()
    assert (str(device), backend) == (expected, "nccl")
