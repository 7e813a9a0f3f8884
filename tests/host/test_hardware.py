"""The machine's card: what it counts, how it reads, within a container too."""

from __future__ import annotations

import os
import types
from pathlib import Path

import psutil
import pytest
import torch

from course_lib import machine
from course_lib.host.hardware import cores, memory

module = __import__("sys").modules["course_lib.host.hardware"]


def test_counts_what_the_system_counts() -> None:
    found = machine()
    assert 1 <= found.cores <= os.cpu_count()
    total, available = memory()
    assert 0 < available <= total <= psutil.virtual_memory().total
    built = found.rows["Backends"].partition("(")[0]
    assert ("gloo" in built) is torch.distributed.is_gloo_available()


@pytest.mark.parametrize(("gpus", "plan"), [(1, "1 GPU rank, nccl"), (4, "4 GPU ranks, nccl")])
def test_with_gpus_a_rank_for_each(monkeypatch: pytest.MonkeyPatch, gpus: int, plan: str) -> None:
    properties = types.SimpleNamespace(name="A GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = machine()
    assert found.rows["The course will use"].startswith(f"{plan}: one rank ")
    assert found.rows["Accelerators"].splitlines() == [f"cuda:{i} A GPU, 80.0 GiB" for i in range(gpus)]
    assert f"cuda:{gpus - 1} A GPU" in repr(found)


def test_text_and_card_say_the_same() -> None:
    found = machine()
    card = found._repr_html_()
    for title, text in found.rows.items():
        assert title in repr(found)
        assert title in card
        assert text.splitlines()[0] in repr(found)
        assert text.splitlines()[0] in card


def test_a_hostile_name_cannot_break_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "accelerators", lambda: ["cuda:0 <script>"])
    assert "<script>" not in machine()._repr_html_()


def test_a_containers_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    total = psutil.virtual_memory().total
    assert (cores(), memory()[0]) == (64, total), "no such files"

    for quota, expected in {"max 100000": 64, "150000 100000": 2, "1000 100000": 1}.items():
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert cores() == expected

    (tmp_path / "memory.stat").write_text("inactive_file 500\nactive_file 9\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert memory()[0] == total
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory() == (5000, 2500), "what can be dropped is free"
    (tmp_path / "memory.current").write_text("6000\n")
    assert memory() == (5000, 0)
