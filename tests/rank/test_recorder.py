"""track() and log() in real ranks: what their figures say."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from course_lib import RankError, Run, launch, log, place, track
from course_lib.rank import recorder
from course_lib.record.layout import RankFiles
from tests.support.cells import cell, quiet_launch
from tests.support.processes import wait_for

MIB = 1 << 20


def test_without_a_run_the_same_code_just_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_RUN", raising=False)

    assert list(track(iter("abc"))) == ["a", "b", "c"]
    log(loss=1.0)
    device, backend = place()
    assert (device.type, backend) in (("cpu", "gloo"), ("cuda", "nccl"))
    assert recorder.attach() is None


def test_the_figures_of_a_run_agree_with_each_other() -> None:
    def work() -> None:
        rank = int(os.environ["RANK"])
        loader = DataLoader(TensorDataset(torch.zeros(40, 2)), batch_size=4)
        for epoch in range(2):
            for step, _ in enumerate(track(loader)):
                log(loss=torch.tensor(1.0 / (1 + step + 10 * epoch + 100 * rank)))
                time.sleep(0.005)  # a step's work

    run = quiet_launch(work)

    for rank, series in enumerate(run.metrics):
        columns = [
            series[name] for name in ("seconds", "samples", "steps", "tracked_seconds", "memory_bytes")
        ]
        assert len({len(column) for column in columns}) == 1
        assert all(column.dtype == np.float64 for column in series.values())
        for column in columns[:4]:
            assert (np.diff(column) >= 0).all(), "it only grows"
        assert series["samples"][-1] == 80
        assert series["steps"][-1] == 20
        assert 20 * 0.005 <= series["tracked_seconds"][-1] <= series["seconds"][-1] <= run.seconds
        assert len(series["loss"]) == 20
        assert series["loss"][-1] == np.float32(1 / (20 + 100 * rank))
        assert run.trace(rank).latest() == {"loss": series["loss"][-1]}
        expected = 80 / series["tracked_seconds"][-1]
        assert run.samples_per_second(rank) == pytest.approx(expected)
    assert run.samples_per_second() == pytest.approx(run.samples_per_second(0) + run.samples_per_second(1))


def test_a_million_points() -> None:
    def work(count: int) -> None:
        for i in range(count):
            log(i=i)

    run = quiet_launch(work, 1_000_000, nprocs=1)

    np.testing.assert_array_equal(run.metrics[0]["i"], np.arange(1_000_000))
    assert (np.diff(run.metrics[0]["i.seconds"]) >= 0).all()
    assert run.trace(0).latest() == {"i": 999_999}
    held = run.metrics[0]["memory_bytes"]
    assert held.max() - held[0] < 100 * MIB, "what was written is not kept"


def test_several_threads_may_log() -> None:
    def work() -> None:
        def one(name: str) -> None:
            for i in range(5000):
                log(**{name: i, "same": i})

        threads = [threading.Thread(target=one, args=(f"name {i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    (series,) = quiet_launch(work, nprocs=1).metrics

    for i in range(4):
        np.testing.assert_array_equal(series[f"name {i}"], np.arange(5000))
    assert len(series["same"]) == 20_000


def test_a_gpu_that_fails_or_is_never_done_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "GPU_SECONDS", 0.05)
    own = recorder.Recorder(RankFiles(tmp_path, 0))
    own._thread.start()
    monkeypatch.setattr(own.series, "flush", lambda wait: True)
    own.close()
    assert not own._thread.is_alive()

    def fails() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    own = recorder.Recorder(RankFiles(tmp_path, 1))
    own._thread.start()
    monkeypatch.setattr(own.fingerprints, "flush", fails)
    assert [own._flush(), own._flush()] == [False, False]
    own.close()
    assert capsys.readouterr().err.count("course_lib: what was logged on a GPU cannot be read: Runt") == 1


def test_collectives_that_cannot_be_told_hide_no_failure() -> None:
    def work() -> None:
        def refuses() -> None:
            raise RuntimeError("no thread can be looked at")

        threading.enumerate = refuses
        raise ValueError("the cause")

    with pytest.raises(RankError, match="raised ValueError: the cause"):
        quiet_launch(work, nprocs=1)


def test_the_workers_of_a_loader_are_no_ranks() -> None:
    loading = cell("""
        from torch.utils.data import DataLoader, Dataset
        from course_lib import log, track

        class Loud(Dataset):
            def __len__(self):
                return 12

            def __getitem__(self, i):
                log(worker=i)
                print("loaded", i)
                return i

        def work():
            for batch in track(DataLoader(Loud(), batch_size=4, num_workers=2)):
                log(loss=1.0)
        """)

    run = quiet_launch(loading.work)

    for rank in range(2):
        assert run.metrics[rank]["steps"][-1] == 3
        assert len(run.metrics[rank]["loss"]) == 3
        assert "worker" not in run.metrics[rank]
        assert run.logs[rank].count("loaded") == 12


def test_device_and_backend_are_noted() -> None:
    run = quiet_launch(lambda: tuple(map(str, place())), device="cpu")

    assert run.results == [("cpu", "gloo")] * 2
    for rank in range(2):
        facts = run.facts(rank)
        assert (facts["device"], facts["backend"]) == ("cpu", "gloo")
        assert facts["pid"] != os.getpid()


def held(run: Run, rank: int = 0) -> float:
    return float(run.metrics[rank]["memory_bytes"][-1:].sum())


def test_a_rank_shows_the_memory_that_is_its_own(tmp_path: Path, course_home: Path) -> None:
    """The pages of torch that it shares are not its own; 200 MiB that it takes are, until it lets go."""

    def work() -> None:
        def reach(step: str) -> None:
            (tmp_path / f"{step}-{os.environ['RANK']}").touch()
            while not (tmp_path / step).exists():
                time.sleep(0.01)

        reach("start")
        block = torch.ones(50 * MIB, dtype=torch.float32) if os.environ["RANK"] == "0" else None
        reach("full")
        del block
        reach("empty")

    def at(step: str) -> Run:
        wait_for(lambda: all((tmp_path / f"{step}-{rank}").exists() for rank in range(2)))
        run = Run.open()
        ticks = [len(run.metrics[rank]["seconds"]) for rank in range(2)]
        wait_for(lambda: all(len(run.metrics[rank]["seconds"]) > ticks[rank] + 1 for rank in range(2)))
        return run

    thread = threading.Thread(target=launch, args=(work,), kwargs={"dashboard": False})
    thread.start()
    try:
        run = at("start")
        start = [held(run, rank) for rank in range(2)]
        print("a rank starts with", [round(each / MIB, 1) for each in start], "MiB")
        assert all(0 < each < 60 * MIB for each in start)
        (tmp_path / "start").touch()
        run = at("full")
        assert held(run, 0) - start[0] == pytest.approx(200 * MIB, rel=0.1)
        assert held(run, 1) - start[1] < 30 * MIB
        (tmp_path / "full").touch()
        run = at("empty")
        assert held(run, 0) - start[0] < 40 * MIB
        assert run.peak_memory_bytes(0) - start[0] == pytest.approx(200 * MIB, rel=0.1)
    finally:
        for step in ("start", "full", "empty"):
            (tmp_path / step).touch()
        thread.join(30)
