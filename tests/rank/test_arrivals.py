"""When a rank called its collectives is noted, and each is noted once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.rank import recorder, standstill
from course_lib.rank.memory import TICK_INTERVAL
from course_lib.rank.recorder import Recorder, until_the_next_tick
from course_lib.record.layout import RankFiles
from tests.support.cells import quiet_launch


def test_each_collective_has_its_moment() -> None:
    def work() -> list[float]:
        dist.init_process_group("gloo")
        moments = []
        for _ in range(10):  # no more than the flight recorder keeps: a busy rank may read it late
            time.sleep(0.05)
            moments.append(time.time() - float(os.environ["COURSE_STARTED"]))
            dist.all_reduce(torch.zeros(100, dtype=torch.float64))
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1), group=group)  # not of all: it is not counted
        return moments

    run = quiet_launch(work, nprocs=2)

    for rank, moments in enumerate(run.results):
        seen = run.trace(rank).arrivals
        assert seen["number"].tolist() == list(range(1, 11))
        for number, seconds in zip(seen["number"], seen["seconds"], strict=True):
            assert moments[int(number) - 1] <= seconds + 1e-3
            assert int(number) == 10 or seconds < moments[int(number)] + 1e-3


def entry(number: int, **other: Any) -> dict[str, Any]:
    return {
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "time_created_ns": number * 10**9,
        "profiling_name": "gloo:all_reduce",
        **other,
    }


def test_a_collective_is_noted_once_and_a_new_group_counts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_STARTED", "0.5")
    entries: list[dict[str, Any]] = []
    for module in (recorder, standstill):
        monkeypatch.setattr(
            module, "flight_recorder", lambda *_, **__: json.dumps({"entries": entries}).encode()
        )
    own = Recorder(RankFiles(tmp_path, 0))
    assert own.arrivals() == []
    entries += [entry(2), entry(1), entry(7, is_p2p=True), entry(7, process_group=["3", "mine"])]
    assert own.arrivals() == [1, 0.5, 1, 2, 1.5, 1]
    assert own.arrivals() == []
    entries += [entry(3, profiling_name="gloo:broadcast")]
    assert own.arrivals() == [3, 2.5, 0], "the root goes on, and waits for nobody"
    entries[:] = [entry(1)]
    assert own.arrivals() == [1, 0.5, 1]
    entries[:] = [{"is_p2p": False}]
    assert own.arrivals() == [], "another form: nothing is known"


@pytest.mark.parametrize("now", [10.0, 10.03, 10.0999, 12345.678])
def test_all_ranks_look_at_the_same_moments(now: float) -> None:
    then = (now + until_the_next_tick(now)) / TICK_INTERVAL
    assert then == pytest.approx(round(then), abs=1e-4)
    assert TICK_INTERVAL / 4 < until_the_next_tick(now) <= 1.25 * TICK_INTERVAL + 1e-9
