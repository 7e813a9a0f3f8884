"""How much memory a rank holds."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from course_lib.rank import memory

MIB = 1 << 20


def test_on_a_gpu_the_figures_are_of_the_one_that_the_rank_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder has a thread of its own, whose current device stays the first one."""

    def stats(gpu: int) -> dict[str, Any]:
        of = {"allocated_bytes": [0, 3, 0][gpu], "reserved_bytes": [0, 5, 2][gpu]}
        return {name: {"all": {"current": held, "peak": 2 * held}} for name, held in of.items()}

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    assert list(memory.Memory().read().values()) == [3, 5, 6]


def test_memory_is_followed_between_its_exact_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = memory.Memory()
    first = mine.read()["memory_bytes"]
    monkeypatch.setattr(mine, "_cost", math.inf)  # the exact one is too dear from now on
    block = np.ones(100 * MIB, dtype=np.uint8)
    assert mine.read()["memory_bytes"] - first == pytest.approx(100 * MIB, rel=0.1)
    del block
    assert mine.read()["memory_bytes"] - first < 10 * MIB


def test_the_walk_over_the_pages_is_taken_often_at_the_start_and_seldom_in_a_long_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, taken, cost, minutes = 0.0, [], 0.01, 5

    class Process:
        def memory_info(self) -> SimpleNamespace:
            return SimpleNamespace(rss=2, shared=1)

        def memory_full_info(self) -> SimpleNamespace:
            nonlocal now
            taken.append(now)
            now += cost
            return SimpleNamespace(uss=1)

    monkeypatch.setattr(memory, "psutil", SimpleNamespace(Process=Process))
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now))
    mine = memory.Memory()
    while now < 60 * minutes:
        mine.read()
        now += memory.TICK_INTERVAL

    assert sum(at < 10 for at in taken) == 3
    assert sum(cost for at in taken if at > 60) <= 0.0011 * 60 * (minutes - 1)
    assert len(taken) > 60 * minutes / (cost * memory.Memory.SELDOM + 1), "it goes on"
