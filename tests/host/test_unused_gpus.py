"""Why a GPU is not used: each machine is imitated by the files and answers that such a one gives."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib import machine
from course_lib.host import hardware

DRIVER_FILE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri Aug 21 00:08:40 UTC 2026\nGCC version: 12.3.0\n"
)
OPEN_DRIVER_FILE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n"


def imitate(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    present: int = 2,
    used: int = 0,
    cuda: str | None = "13.0",
    driver: str = "580.82.07",
    text: str = DRIVER_FILE,
    given: bool = True,
    container: bool = False,
    environment: dict[str, str] | None = None,
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment or {}).items():
        monkeypatch.setenv(name, value)
    if driver:
        (folder / "version").write_text(text.format(driver))
    for number, (vendor, kind) in enumerate([("0x8086", "0x060000"), *[("0x10de", "0x030200")] * present]):
        device = folder / "pci" / f"0000:{number:02}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (folder / "dev").mkdir()
    if given:
        (folder / "dev" / "nvidiactl").touch()
    for name, path in {"DRIVER": "version", "DEVICES": "dev", "PCI": "pci"}.items():
        monkeypatch.setattr(hardware, name, folder / path)
    monkeypatch.setattr(hardware, "_in_container", lambda: container)
    seen_by_nvml = present if driver and given else 0  # whatever torch can do with them
    properties = types.SimpleNamespace(name="Tesla T4", total_memory=15 * 2**30)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    for name, answer in {
        "is_available": used > 0,
        "device_count": used or seen_by_nvml,
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


MACHINES: dict[str, tuple[dict[str, Any], str]] = {
    "a torch for the CPU": (
        {"cuda": None},
        "this torch (2.14.1) is built for the CPU, not for 2 NVIDIA GPUs: install another",
    ),
    "a driver that is too old": (
        {"driver": "550.54.15"},
        "torch is built for CUDA 13.0, which needs driver 580 or newer; this is 550.54.15: install",
    ),
    "an open one, too": (
        {"driver": "570.124.06", "text": OPEN_DRIVER_FILE},
        "this is 570.124.06: install",
    ),
    "no driver": (
        {"driver": "", "given": False, "present": 1},
        "no driver is loaded for 1 NVIDIA GPU: install NVIDIA's driver, 580",
    ),
    "a container without GPUs": (
        {"given": False, "container": True},
        "the container gets 0 of this machine's 2 NVIDIA GPUs: start it with --gpus all",
    ),
    "hidden": (
        {"environment": {"CUDA_VISIBLE_DEVICES": ""}},
        "CUDA_VISIBLE_DEVICES='' shows 0 of 2 NVIDIA GPUs: unset it to use all",
    ),
    "a job of Slurm": (
        {"present": 8, "used": 2, "environment": {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0,1"}},
        "the job was given 2 of this node's 8 NVIDIA GPUs: ask for more with --gpus-per-node",
    ),
    "one that fell off the bus": (
        {"used": 1},
        "torch can use 1 of 2 NVIDIA GPUs: `nvidia-smi` says how the others are",
    ),
    "all are used": ({"used": 2}, ""),
    "none is there": ({"present": 0, "driver": "", "given": False, "cuda": None}, ""),
}


@pytest.mark.parametrize("name", MACHINES)
def test_it_is_said_with_the_one_thing_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imitated, expected = MACHINES[name]
    imitate(monkeypatch, tmp_path, **imitated)
    told = hardware.unused_gpus()
    assert expected in told if expected else told == ""
    assert machine().rows.get("Not used", "") == told


def test_gpus_behind_an_old_driver_are_none_for_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch.cuda.device_count() asks NVML, and counts them."""
    imitate(monkeypatch, tmp_path, driver="550.54.15")
    assert torch.cuda.device_count() == 2
    plan = "2 CPU ranks, gloo: torch can use no GPU, so ranks are CPU processes"
    assert machine().rows["The course will use"] == plan
