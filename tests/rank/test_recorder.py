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

from course_lib import log, place, track
from course_lib.rank import recorder
from course_lib.record.layout import TICK, RankFiles
from course_lib.record.trace import peak_bytes
from tests.support.cells import quiet_launch
from tests.support.processes import wait_for

MIB = 1 << 20


def test_without_a_run_the_same_code_just_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_RUN", raising=False)

    assert list(track(iter("abc"), same=torch.nn.Linear(1, 1))) == ["a", "b", "c"]
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


def test_several_threads_may_log_and_one_very_often() -> None:
    def work() -> None:
        def one(name: str) -> None:
            for i in range(5000):
                log(**{name: i, "same": i})

        threads = [threading.Thread(target=one, args=(f"name {i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(500_000):
            log(many=i)

    (series,) = quiet_launch(work, nprocs=1).metrics

    for i in range(4):
        np.testing.assert_array_equal(series[f"name {i}"], np.arange(5000))
    assert len(series["same"]) == 20_000
    np.testing.assert_array_equal(series["many"], np.arange(500_000))
    held = series["memory_bytes"]
    assert held.max() - held[0] < 60 * MIB, "what was written is not kept"


def test_a_gpu_that_fails_or_is_never_done_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "GPU_SECONDS", 0.05)
    own = recorder.Recorder(RankFiles(tmp_path, 0))
    own._thread.start()
    monkeypatch.setattr(own.series, "flush", lambda: True)
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


def test_collectives_that_cannot_be_told_hide_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> None:
        raise RuntimeError("no thread can be looked at")

    own = recorder.Recorder(RankFiles(tmp_path, 0))
    monkeypatch.setattr(threading, "enumerate", refuses)
    own.note_collectives()  # which would raise before the failure is reported


def test_what_a_forked_process_logs_is_not_its_ranks() -> None:
    """Such as the workers of a DataLoader."""

    def work() -> None:
        for step in track(range(3)):
            if os.fork() == 0:
                log(forked=step)
                os._exit(0)
            os.wait()
            log(loss=step)

    (series,) = quiet_launch(work, nprocs=1).metrics

    assert series["steps"][-1] == 3
    assert list(series["loss"]) == [0, 1, 2]
    assert "forked" not in series


def test_a_rank_shows_the_memory_that_is_its_own() -> None:
    """The pages of torch that it shares are not its own; 200 MiB that it takes are, until it lets go."""

    def work() -> list[int]:
        rank = int(os.environ["RANK"])
        ticks = RankFiles(Path(os.environ["COURSE_RUN"]), rank).ticks

        def rows() -> int:
            return ticks.stat().st_size // (8 * len(TICK)) if ticks.exists() else 0

        def later() -> int:
            """Wait for two more rows; return the number of the last."""
            before = rows()
            wait_for(lambda: rows() > before + 1)
            return rows() - 1

        start = later()
        block = torch.ones(50 * MIB, dtype=torch.float32) if rank == 0 else None
        full = later()
        del block
        return [start, full, later()]

    run = quiet_launch(work, nprocs=2)

    held = [run.metrics[rank]["memory_bytes"][run.results[rank]] for rank in range(2)]
    print("a rank starts with", [round(each[0] / MIB, 1) for each in held], "MiB")
    assert all(0 < each[0] < 60 * MIB for each in held)
    start, full, empty = held[0]
    assert full - start == pytest.approx(200 * MIB, rel=0.1)
    assert empty - start < 40 * MIB
    assert peak_bytes(run.trace(0).ticks) - start == pytest.approx(200 * MIB, rel=0.1)
    assert held[1][1] - held[1][0] < 30 * MIB
