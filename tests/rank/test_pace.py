"""What a rank notes of its time and of the collectives it comes to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib import track
from course_lib.rank import pace, standstill
from course_lib.rank.memory import TICK_INTERVAL
from course_lib.rank.recorder import until_the_next_tick
from course_lib.run_folder import PACE, RankFiles
from tests.support.cells import quiet_launch


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_time_is_parted_as_it_was_spent() -> None:
    """The rank measures it besides: on a busy machine a loop takes longer than it should."""

    def work() -> dict[str, float]:
        own = dict.fromkeys(("tracked", "loader", "loader_cpu", "cpu"), 0.0)

        def spend(cpu: float, sleep: float, *names: tuple[str, str]) -> None:
            began, worked = time.perf_counter(), time.thread_time()
            busy(cpu)
            time.sleep(sleep)
            for name, cpu_name in names:
                own[name] += time.perf_counter() - began
                own[cpu_name] += time.thread_time() - worked

        def batches() -> Any:
            for _ in range(15):
                spend(0.02, 0.04, ("loader", "loader_cpu"), ("tracked", "cpu"))
                yield torch.zeros(3)

        for _ in track(batches()):
            spend(0.05, 0.03, ("tracked", "cpu"))
        time.sleep(0.5)  # outside of the loop
        return own

    run = quiet_launch(work, nprocs=1)

    spent = {name.removesuffix("_seconds"): float(column[-1]) for name, column in run.trace(0).pace().items()}
    (own,) = run.results
    assert 0.7 * own["tracked"] < spent["tracked"] < own["tracked"] + 0.2
    for name in ("loader", "loader_cpu", "cpu"):
        share = own[name] / own["tracked"]
        assert spent[name] / spent["tracked"] == pytest.approx(share, abs=0.1), name
    assert spent["process_cpu"] > spent["cpu"] - 0.05
    assert spent["cpu"] + spent["delay"] < spent["tracked"] + 0.1


def test_each_collective_has_its_moment_and_its_size() -> None:
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
        seen = run.trace(rank).arrivals()
        assert seen["number"].tolist() == list(range(1, 11))
        assert set(seen["bytes"]) == {800.0}
        for number, seconds in zip(seen["number"], seen["seconds"], strict=True):
            assert moments[int(number) - 1] <= seconds + 1e-3
            assert int(number) == 10 or seconds < moments[int(number)] + 1e-3


def entry(number: int, **other: Any) -> dict[str, Any]:
    return {
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "time_created_ns": number * 10**9,
        "input_sizes": [[2, 3], [4]],
        "input_dtypes": ["Float", "BFloat16"],
        "profiling_name": "gloo:all_reduce",
        **other,
    }


def test_a_collective_is_noted_once_and_a_new_group_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[dict[str, Any]] = []
    monkeypatch.setattr(
        standstill,
        "_flight_recorder",
        lambda **_: json.dumps({"entries": entries}).encode(),
    )
    own = pace.Pace(launched=0.5)
    assert own.arrivals() == []
    entries += [entry(2), entry(1), entry(7, is_p2p=True), entry(7, process_group=["3", "mine"])]
    assert own.arrivals() == [1, 0.5, 32, 1, 2, 1.5, 32, 1]
    assert own.arrivals() == []
    entries += [entry(3, profiling_name="gloo:broadcast")]
    assert own.arrivals() == [3, 2.5, 32, 0], "the root goes on, and waits for nobody"
    entries[:] = [entry(1)]
    assert own.arrivals() == [1, 0.5, 32, 1]
    entries[:] = [{"is_p2p": False}]
    assert own.arrivals() == [], "another form: nothing is known"


def a_thread(monkeypatch: pytest.MonkeyPatch, cpu: float, delay: float = 0.0) -> None:
    monkeypatch.setattr(pace, "_of_a_thread", lambda number: (cpu, delay))


def test_time_outside_of_loops_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    own, looks = (
        pace.Pace(launched=100.0),
        pace.Samples(test_each_collective_has_its_moment_and_its_size.__code__),
    )

    def read(now: float, *counted: Any) -> list[float]:
        row = own.read(now, 5, pace.Counted(*counted), looks)
        return row[:6] + row[7:8]

    a_thread(monkeypatch, cpu=3.0, delay=1.0)
    assert read(101.0, 0, 0, 0, 0.0, 0.0) == [], "no loop so far"
    a_thread(
        monkeypatch, cpu=3.75, delay=2.0
    )  # 0.25 s were worked before the loop began, half a second in it
    assert read(102.0, 0.5, 0.25, 0.125, 3.25, None) == [2.0, 5, 0.5, 0.25, 0.125, 0.5, 0.5]
    a_thread(monkeypatch, cpu=4.5, delay=2.0)  # the loop ended at 4.25, in between
    assert read(103.0, 1.0, 0.25, 0.125, 3.25, 4.25) == [3.0, 5, 1.0, 0.25, 0.125, 1.0, 0.5]
    a_thread(monkeypatch, cpu=5.0, delay=3.0)
    assert read(104.0, 1.0, 0.25, 0.125, 3.25, 4.25) == []
    a_thread(monkeypatch, cpu=6.0, delay=3.0)  # it began anew at 5.5
    assert read(105.0, 1.5, 0.25, 0.125, 3.25 + 5.5 - 4.25, None) == [5.0, 5, 1.5, 0.25, 0.125, 1.5, 0.5]


def test_where_the_system_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "TASK", "/nowhere/{}/{}")
    own, looks = pace.Pace(launched=0.0), pace.Samples(test_where_the_system_does_not_count.__code__)
    own.read(1.0, 0, pace.Counted(0, 0, 0, 0, 0), looks)
    row = own.read(2.0, 1, pace.Counted(1, 0, 0, 0, None), looks)
    assert math.isnan(row[5])
    assert math.isnan(row[7])
    looks.wait_and_look(threading.Event(), 0.01, 2, lambda: True)
    assert looks.asleep == 0


def test_where_a_rank_sleeps() -> None:
    """Rank 0 in a collective, rank 1 by itself, or, on a busy machine, there too: each measures it itself."""

    def work() -> float:
        files = RankFiles(Path(os.environ["COURSE_RUN"]), int(os.environ["RANK"]))
        least, slept, waited = torch.zeros(1), 0.0, 0.0

        def batches() -> Any:
            while least < 40:  # looks that found each rank asleep
                time.sleep(0.05)  # in the loader: no look counts
                yield torch.zeros(3)

        dist.init_process_group("gloo")
        for _ in track(batches()):
            began = time.perf_counter()
            if dist.get_rank() == 1:
                time.sleep(0.2)
            came = time.perf_counter()
            rows = np.fromfile(files.pace).reshape(-1, len(PACE))
            least.fill_(rows[-1, PACE.index("asleep_samples")] if len(rows) else 0)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            slept += came - began
            waited += time.perf_counter() - came
        return waited / (slept + waited)

    run = quiet_launch(work, nprocs=2, timeout=120)

    for rank in range(2):
        spent = run.trace(rank).pace()
        asleep = spent["asleep_samples"][-1]
        assert asleep < 30 * spent["tracked_seconds"][-1]
        assert spent["collective_samples"][-1] / asleep == pytest.approx(run.results[rank], abs=0.25)
    assert run.results[0] > 0.8


def test_hidden_communication_is_not_slept_for() -> None:
    """While a collective is under way beside it, a rank sleeps by itself, or for a thread of its own."""

    def work() -> list[tuple[int, int]]:
        dist.init_process_group("gloo")
        looks = pace.Samples(pace.Pace.read.__code__)
        looks._open()
        rank, over, seen = dist.get_rank(), threading.Event(), []

        def look() -> None:
            while not over.wait(0.01):
                looks.look()

        looker = threading.Thread(target=look)
        looker.start()
        for wait in (lambda: time.sleep(0.1), lambda: queue.Queue().get(timeout=0.1)):
            if rank == 0:
                under_way = dist.all_reduce(torch.zeros(3), async_op=True)
            before = looks.asleep, looks.in_collectives
            while looks.asleep <= before[0] + 5:  # a launch ends what never gets there
                with contextlib.suppress(queue.Empty):
                    wait()
            seen.append((looks.asleep - before[0], looks.in_collectives - before[1]))
            if rank == 1:
                under_way = dist.all_reduce(torch.zeros(3), async_op=True)
            under_way.wait()  # in a collective for as long as the other rank is late
        over.set()
        looker.join()
        return seen

    for asleep, in_collectives in quiet_launch(work, nprocs=2, timeout=120).results[0]:
        assert asleep > 5
        assert in_collectives <= 1, "but for the moment before"


def test_a_small_collective_overtakes_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that was called is over then, and an earlier one is not."""
    known = {"last_enqueued_collective": "2", "last_completed_collective": "2"}
    entries = [entry(1, retired=False, state="scheduled"), entry(2, retired=True, state="completed")]
    monkeypatch.setattr(
        standstill,
        "_flight_recorder",
        lambda **options: json.dumps({"pg_status": {"0": known}, "entries": entries}).encode(),
    )
    assert pace._under_way()
    entries[0]["retired"] = True
    assert not pace._under_way()
    known["last_enqueued_collective"] = "3"
    assert pace._under_way(), "it is cheaper to know, and enough"


@pytest.mark.parametrize(
    ("over_before", "over_after", "inside"), [(1, 2, 1), (2, 2, 0), (2, 1, 1)], ids=["ends", "none", "begins"]
)
def test_a_collective_that_ends_during_the_look_was_slept_in(
    monkeypatch: pytest.MonkeyPatch, over_before: int, over_after: int, inside: int
) -> None:
    """The main thread may wake while the file is read that says where it sleeps, and be far away then."""
    known = {"last_enqueued_collective": 2, "last_completed_collective": over_before}

    def pread(*where: Any) -> bytes:
        known["last_completed_collective"] = over_after
        return pace.FUTEX + b" 0x7f"

    monkeypatch.setattr(pace, "status", lambda: json.dumps({"pg_status": {"0": known}}).encode())
    monkeypatch.setattr(pace, "collectives", list)
    monkeypatch.setattr(pace.os, "pread", pread)
    looks = pace.Samples(pace.Pace.read.__code__)
    looks.look()
    assert (looks.asleep, looks.in_collectives) == (1, inside)


def test_only_the_threads_that_carry_collectives_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def thread(number: int, name: str, delay: float) -> None:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        (tmp_path / str(number) / "comm").write_text(name + "\n")
        (tmp_path / str(number) / "schedstat").write_text(f"5 {delay * 1e9:.0f} 7\n")

    monkeypatch.setattr(pace, "TASKS", str(tmp_path))
    monkeypatch.setattr(pace, "TASK", f"{tmp_path}/{{}}/{{}}")
    carriers = pace.Carriers()
    thread(1, "python", 3.0)
    thread(2, "python", 0.25)  # just begun, and not named yet
    assert carriers.without_core() == 0
    thread(2, "pt_gloo_runloop", 0.5)
    assert carriers.without_core() == 0.5
    thread(2, "pt_gloo_runloop", 0.75)
    thread(3, "gloo_tcp_loop", 0.25)
    assert carriers.without_core() == 1.0
    shutil.rmtree(tmp_path / "2")  # a group was destroyed
    assert carriers.without_core() == 1.0


@pytest.mark.parametrize("now", [10.0, 10.03, 10.0999, 12345.678])
def test_all_ranks_look_at_the_same_moments(now: float) -> None:
    then = (now + until_the_next_tick(now)) / TICK_INTERVAL
    assert then == pytest.approx(round(then), abs=1e-4)
    assert TICK_INTERVAL / 4 < until_the_next_tick(now) <= 1.25 * TICK_INTERVAL + 1e-9
