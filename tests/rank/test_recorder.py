"""track() and log(): what a rank's figures say, and that they cost it little."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from course_lib import RankError, Run, launch, log, place, track
from course_lib.rank import recorder
from course_lib.run_folder import RankFiles
from tests.support.cells import cell, quiet_launch
from tests.support.processes import wait_for

MIB = 1 << 20


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[recorder.Recorder]:
    """A recorder for this process, whose thread does not run: it notes when the test says so."""
    monkeypatch.setenv("COURSE_RUN", str(tmp_path))
    own = recorder.Recorder(RankFiles(tmp_path, 0))
    monkeypatch.setattr(recorder, "_recorder", own)
    yield own
    for file in (own._files or {}).values():
        file.close()


def read(own: recorder.Recorder, tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """What it has noted: the series, and the columns of a tick taken now."""
    own.tick()
    own.flush()
    run = Run(tmp_path, {"name": "mine", "world_size": 1, "state": "done"})
    return run.metrics[0], {name: float(column[-1]) for name, column in run.ticks(0).items()}


# --- track ------------------------------------------------------------------------------------------------

LOADER = DataLoader(TensorDataset(torch.zeros(10, 3), torch.zeros(10)), batch_size=4)
ITERABLES = {
    "a list of tensors": (lambda: [torch.zeros(4, 3)] * 5, 5, 20, 5),
    "a loader": (lambda: LOADER, 3, 10, 3),
    "a generator": (lambda: (torch.zeros(2) for _ in range(3)), 3, 6, math.nan),
    "dicts": (lambda: [{"ids": torch.zeros(8, 2), "mask": torch.zeros(3)}] * 2, 2, 16, 2),
    "transformers' batches": (lambda: [UserDict(ids=torch.zeros(8, 2))] * 2, 2, 16, 2),
    "nested": (lambda: [[({"x": torch.zeros(6)}, 1), 2]], 1, 6, 1),
    "arrays": (lambda: [np.zeros((7, 2))], 1, 7, 1),
    "numbers": (lambda: range(9), 9, 9, 9),
    "text": (lambda: ["ab", "cd"], 2, 2, 2),
    "scalars": (lambda: [torch.tensor(1.0)] * 2, 2, 2, 2),
    "empty batches": (lambda: [(), {}, torch.zeros(0)], 3, 2, 3),
    "nothing": (lambda: [], 0, 0, 0),
}


@pytest.mark.parametrize("kind", ITERABLES)
def test_steps_and_samples_are_counted(kind: str, mine: recorder.Recorder, tmp_path: Path) -> None:
    make, steps, samples, total = ITERABLES[kind]

    passed = list(track(make()))

    _, tick = read(mine, tmp_path)
    assert len(passed) == steps
    assert (tick["steps"], tick["samples"], tick["passes"]) == (steps, samples, 1)
    assert tick["pass_steps"] == steps
    np.testing.assert_equal(tick["pass_total"], total)


def test_batches_pass_through_untouched(mine: recorder.Recorder) -> None:
    batches = [object(), torch.zeros(3), {"a": 1}]

    for given, got in zip(batches, track(batches), strict=True):
        assert got is given


def test_a_total_may_be_given(mine: recorder.Recorder, tmp_path: Path) -> None:
    for _ in track((i for i in range(3)), total=12):
        pass
    assert read(mine, tmp_path)[1]["pass_total"] == 12


def test_several_passes(mine: recorder.Recorder, tmp_path: Path) -> None:
    for _ in range(3):
        for _ in track(LOADER):
            pass
    tick = read(mine, tmp_path)[1]
    assert (tick["samples"], tick["steps"], tick["passes"], tick["pass_steps"]) == (30, 9, 3, 3)


def test_only_the_time_inside_loops_counts(
    mine: recorder.Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    for _ in range(2):
        for _ in track(range(5)):
            clock.now += 1
        clock.now += 100  # a test pass, a checkpoint
    assert read(mine, tmp_path)[1]["tracked_seconds"] == 10


@pytest.mark.parametrize(
    ("batches", "waited", "worked"),  # batches: for how long each is waited for and worked at, in µs
    [
        ([(900, 0)] * 4, 3600, 0),
        ([(900, 700)] * 4, 3600, 2800),
        ([(50, 20)] * 4, 200, 20 + 3 * 50),  # at once, so taken for its own work; the first one is asked
        ([(50, 50), (900, 0), (900, 0)], 1850, 50 + 100 + 0),  # of the first long one too little is known
        ([(900, 0), (50, 0), (50, 0), (900, 600), (900, 600)], 2800, 50 + 100 + 600),
    ],
)
def test_how_long_the_training_waits_for_its_batches(
    batches: list[tuple[int, int]],
    waited: int,
    worked: int,
    mine: recorder.Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = {"perf_counter": 0.0, "thread_time": 0.0}

    def pass_by(waits: float, works: float) -> None:
        clocks["perf_counter"] += waits / 1e6
        clocks["thread_time"] += works / 1e6

    def loader() -> Iterator[int]:
        for each in batches:
            pass_by(*each)
            yield 0

    for name in clocks:
        monkeypatch.setattr(recorder.time, name, functools.partial(clocks.__getitem__, name))
    for _ in track(loader()):
        pass_by(7000, 7000)  # a step

    found = mine.loader_seconds + mine.at_once_seconds, mine.loader_cpu_seconds + mine.at_once_seconds
    assert found == pytest.approx((waited / 1e6, worked / 1e6))


def test_a_loop_that_is_left_ends_its_pass(
    mine: recorder.Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    for i in track(range(10)):
        clock.now += 1
        if i == 2:
            break

    def fails() -> None:
        for _ in track(range(10)):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    next(iter(track(range(3))))  # a look at one batch
    clock.now += 100
    tick = read(mine, tmp_path)[1]
    assert (tick["steps"], tick["tracked_seconds"]) == (2, 4)


def test_a_loop_inside_a_loop(
    mine: recorder.Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time counts once, and the outer loop's progress goes on where it was."""
    clock = Clock(monkeypatch)
    for step in track([torch.zeros(4)] * 6):
        clock.now += 1
        if step is not None and mine.steps == 2:
            for _ in track([torch.zeros(10)] * 3):
                clock.now += 1
            tick = read(mine, tmp_path)[1]
            assert (tick["pass_steps"], tick["pass_total"]) == (2, 6)
    clock.now += 100
    tick = read(mine, tmp_path)[1]
    assert (tick["steps"], tick["samples"], tick["tracked_seconds"]) == (9, 54, 9)


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_700_000_000.0
        monkeypatch.setattr(recorder.time, "time", lambda: self.now)


# --- log --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (3, 3.0),
        (True, 1.0),
        (0.25, 0.25),
        (10**300, 1e300),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[0.5]], dtype=torch.bfloat16), 0.5),
        (torch.tensor(7), 7.0),
        (torch.tensor(2.0, requires_grad=True) * 2, 4.0),
        (torch.nn.Parameter(torch.ones(1)), 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(9), 9.0),
        (np.array(1.5), 1.5),
        (math.nan, math.nan),
        (-math.inf, -math.inf),
        (torch.tensor(math.nan), math.nan),
    ],
)
@pytest.mark.filterwarnings("error::UserWarning", "error::DeprecationWarning")
def test_a_number_of_any_kind_is_kept(
    value: Any, kept: float, mine: recorder.Recorder, tmp_path: Path
) -> None:
    log(value=value)

    np.testing.assert_array_equal(read(mine, tmp_path)[0]["value"], [kept])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "got None"),
        ("0.5", "got '0.5'"),
        (b"1", "got b'1'"),
        ([1.0], r"got \[1.0\]"),
        (1 + 2j, r"got \(1\+2j\)"),
        (torch.tensor(1j), "got tensor"),
        (10**400, "got 1000"),
        (torch.zeros(3, 2), r"got a tensor of shape \(3, 2\).*mean"),
        (torch.zeros(0), r"got a tensor of shape \(0,\)"),
        (np.zeros(3), "got array"),
        (lambda: 1, "got <function"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value: Any, shown: str, mine: recorder.Recorder) -> None:
    with pytest.raises(ValueError, match=rf"log\(accuracy=…\) takes one number, and {shown}") as caught:
        log(loss=1, accuracy=value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["samples", "seconds", "steps", "memory_bytes", "tracked_seconds"])
def test_a_name_of_the_runs_own_figures_is_refused(
    name: str, mine: recorder.Recorder, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"log\({name}=…\).*choose another"):
        log(**{name: 1.0})
    assert len(read(mine, tmp_path)[0]["samples"]) == 1


def test_names_of_any_text_stay_apart(mine: recorder.Recorder, tmp_path: Path) -> None:
    names = ["loss", "Größe 批", "a\nb", "c\rd", "e\u2028f", "g\x0bh", "", "loss/train"]

    for i, name in enumerate(names):
        log(**{name: i})

    series, _ = read(mine, tmp_path)
    kept = {name: list(values) for name, values in series.items()}
    for i, name in enumerate(names):
        assert kept[name.replace("\n", " ").replace("\r", " ")] == [i]


def test_a_tensor_that_changes_later_is_kept_as_it_was(mine: recorder.Recorder, tmp_path: Path) -> None:
    total = torch.zeros(1)
    for _ in range(3):
        total += 1
        log(total=total)
    np.testing.assert_array_equal(read(mine, tmp_path)[0]["total"], [1, 2, 3])


def test_each_value_knows_when_it_was(
    mine: recorder.Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mine, "_launched", 1_700_000_000.0)
    clock = Clock(monkeypatch)
    for step, _ in enumerate(track([torch.zeros(8)] * 4)):
        clock.now += 1
        log(loss=1 / (step + 1))
        if step % 2:
            log(accuracy=step)
    series, _ = read(mine, tmp_path)

    np.testing.assert_allclose(series["loss"], [1, 1 / 2, 1 / 3, 1 / 4])
    np.testing.assert_array_equal(series["loss.seconds"], [1, 2, 3, 4])
    np.testing.assert_array_equal(series["loss.samples"], [0, 8, 16, 24])
    np.testing.assert_array_equal(series["accuracy"], [1, 3])
    np.testing.assert_array_equal(series["accuracy.samples"], [8, 24])


# --- where nothing watches --------------------------------------------------------------------------------


def test_without_a_run_the_same_code_just_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_RUN", raising=False)

    assert list(track(iter("abc"))) == ["a", "b", "c"]
    log(loss=1.0)
    device, backend = place()
    assert (device.type, backend) in (("cpu", "gloo"), ("cuda", "nccl"))
    assert recorder.attach() is None


# --- in a rank --------------------------------------------------------------------------------------------


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


def test_what_was_logged_before_a_kill_is_kept() -> None:
    def work() -> None:
        folder = Path(os.environ["COURSE_RUN"])
        log(loss=0.5)
        while not (folder / "rank-0.points").stat().st_size:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)

    with pytest.raises(RankError, match="SIGKILL") as caught:
        quiet_launch(work, nprocs=1)
    np.testing.assert_array_equal(caught.value.run.metrics[0]["loss"], [0.5])


def test_what_was_logged_just_before_an_exception_is_kept() -> None:
    def work() -> None:
        for i, _ in enumerate(track(range(7))):
            log(i=i)
            if i == 5:
                raise ValueError("six steps")

    with pytest.raises(RankError) as caught:
        quiet_launch(work)
    failed = caught.value.rank
    assert isinstance(failed, int)
    series = caught.value.run.metrics[failed]
    np.testing.assert_array_equal(series["i"], np.arange(6))
    assert series["steps"][-1] == 5


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


def test_a_full_disk_ends_the_figures_and_not_the_training(
    mine: recorder.Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(loss=1.0)
    read(mine, tmp_path)
    assert mine._files is not None
    mine._files["points"] = open("/dev/full", "wb", buffering=0)

    log(loss=2.0)
    series, _ = read(mine, tmp_path)
    log(accuracy=3.0)
    mine.tick()
    mine.flush()

    assert list(series["loss"]) == [1.0]
    told = capsys.readouterr().err
    assert told.count("the figures of rank 0 end here: [Errno 28] No space left on device") == 1


def test_a_new_name_does_not_wait_for_the_gpu(mine: recorder.Recorder, tmp_path: Path) -> None:
    """The recorder's thread waits for the GPU to reach a value; training goes on, with other names too."""
    asked, reached = threading.Event(), threading.Event()

    class CudaEvent:
        def synchronize(self) -> None:
            asked.set()
            assert reached.wait(60)

    log(loss=1.0)
    mine._pending[0] = (*mine._pending[0][:3], (torch.tensor(2.0), CudaEvent()))
    thread = threading.Thread(target=mine.flush)
    thread.start()
    assert asked.wait(60)
    logging = threading.Thread(target=log, kwargs={"accuracy": 3.0}, daemon=True)
    logging.start()
    logging.join(20)
    waited = logging.is_alive()
    reached.set()
    thread.join()

    assert not waited
    series, _ = read(mine, tmp_path)
    assert (list(series["loss"]), list(series["accuracy"])) == ([2.0], [3.0])


# --- memory -----------------------------------------------------------------------------------------------


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
