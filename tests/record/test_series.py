"""What a rank logs is written as it was, and what is no number is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from course_lib import Run
from course_lib.rank.fingerprints import Fingerprints
from course_lib.record import series as series_module
from course_lib.record.layout import TICK, RankFiles
from course_lib.record.run_record import RunRecord
from course_lib.record.series import Series


@pytest.fixture
def series(tmp_path: Path) -> Iterator[Series]:
    """The series of rank 0 in a run's folder, where no thread writes."""
    own = Series(RankFiles(tmp_path, 0), launched=0.0)
    yield own
    own.close()


def written(series: Series, tmp_path: Path) -> dict[str, np.ndarray]:
    """What is in the files."""
    series.flush()
    return Run(RunRecord(tmp_path, {"name": "mine", "world_size": 1, "state": "done"})).metrics[0]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (3, 3.0),
        (True, 1.0),
        (0.25, 0.25),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[0.5]], dtype=torch.bfloat16), 0.5),
        (torch.tensor(2.0, requires_grad=True) * 2, 4.0),
        (torch.nn.Parameter(torch.ones(1)), 1.0),
        (np.float32(0.5), 0.5),
        (np.array(1.5), 1.5),
        (math.nan, math.nan),
    ],
)
@pytest.mark.filterwarnings("error::UserWarning", "error::DeprecationWarning")
def test_a_number_of_any_kind_is_kept(value: Any, kept: float, series: Series, tmp_path: Path) -> None:
    series.point("value", value, samples=0)

    np.testing.assert_array_equal(written(series, tmp_path)["value"], [kept])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "got None"),
        ("half", "got 'half'"),
        ([1.0], r"got \[1.0\]"),
        (10**400, "got 1000"),
        (torch.zeros(3, 2), r"got a tensor of shape \(3, 2\).*mean"),
        (np.zeros(3), "got array"),
        (lambda: 1, "got <function"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value: Any, shown: str, series: Series) -> None:
    with pytest.raises(ValueError, match=rf"log\(accuracy=…\) takes one number, and {shown}") as caught:
        series.point("accuracy", value, samples=0)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["samples", "seconds", "steps", "memory_bytes", "tracked_seconds"])
def test_a_name_of_the_runs_own_figures_is_refused(name: str, series: Series, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"log\({name}=…\).*choose another"):
        series.point(name, 1.0, samples=0)
    assert not RankFiles(tmp_path, 0).names.exists()


def test_names_of_any_text_stay_apart(series: Series, tmp_path: Path) -> None:
    names = ["loss", "Größe 批", "a\nb", "c\rd", "e\u2028f", "g\x0bh", "", "loss/train"]

    for i, name in enumerate(names):
        series.point(name, i, samples=0)

    kept = {name: list(values) for name, values in written(series, tmp_path).items()}
    for i, name in enumerate(names):
        assert kept[name.replace("\n", " ").replace("\r", " ")] == [i]


def test_a_tensor_that_changes_later_is_kept_as_it_was(series: Series, tmp_path: Path) -> None:
    total = torch.zeros(1)
    for _ in range(3):
        total += 1
        series.point("total", total, samples=0)
    np.testing.assert_array_equal(written(series, tmp_path)["total"], [1, 2, 3])


def test_each_value_knows_when_it_was(
    series: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4):
        monkeypatch.setattr(series_module, "time", SimpleNamespace(time=lambda step=step: step + 0.5))
        series.point("loss", 1 / (step + 1), samples=8 * step)
        if step % 2:
            series.point("accuracy", step, samples=8 * step)
    found = written(series, tmp_path)

    np.testing.assert_allclose(found["loss"], [1, 1 / 2, 1 / 3, 1 / 4])
    np.testing.assert_array_equal(found["loss.seconds"], [0.5, 1.5, 2.5, 3.5])
    np.testing.assert_array_equal(found["loss.samples"], [0, 8, 16, 24])
    np.testing.assert_array_equal(found["accuracy"], [1, 3])
    np.testing.assert_array_equal(found["accuracy.samples"], [8, 24])


def test_a_full_disk_ends_the_figures_and_not_the_training(
    series: Series, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series.point("loss", 1.0, samples=0)
    written(series, tmp_path)
    assert series._files is not None
    series._files["points"] = open("/dev/full", "wb", buffering=0)

    series.point("loss", 2.0, samples=0)
    found = written(series, tmp_path)
    series.point("accuracy", 3.0, samples=0)
    series.append("ticks", [0.0] * len(TICK))
    series.flush()

    assert list(found["loss"]) == [1.0]
    told = capsys.readouterr().err
    assert told.count("the figures of rank 0 end here: [Errno 28] No space left on device") == 1


def test_a_restarted_rank_goes_on_after_its_last_whole_row(series: Series, tmp_path: Path) -> None:
    for i in range(3):
        series.append("ticks", [i] * len(TICK))
    series.point("loss", 1.0, samples=0)
    series.flush()
    ticks = RankFiles(tmp_path, 0).ticks
    ticks.write_bytes(ticks.read_bytes()[:-5])  # it was killed while it wrote

    again = Series(RankFiles(tmp_path, 0), launched=0.0)
    assert again.last_tick == dict.fromkeys(TICK, 1.0)
    again.append("ticks", [9.0] * len(TICK))
    again.point("accuracy", 2.0, samples=0)
    again.point("loss", 3.0, samples=0)
    found = written(again, tmp_path)
    again.close()

    assert list(found["seconds"]) == [0.0, 1.0, 9.0]
    assert (list(found["loss"]), list(found["accuracy"])) == ([1.0, 3.0], [2.0])


def on_gpu(series: Series, event: Any, value: float = 2.0) -> None:
    """Log a value that is there once an event has happened."""
    series.point("loss", 1.0, samples=0)
    series._pending[-1] = (*series._pending[-1][:3], (torch.tensor(value), event))


class Reached:
    """An event of a GPU that only looks: nobody may wait for it."""

    there = False

    def query(self) -> bool:
        return self.there

    def elapsed_time(self, _: Reached) -> float:
        return 1.0


def test_nobody_waits_for_a_gpu_that_is_not_done(series: Series, tmp_path: Path) -> None:
    """Behind a collective that never ends, the recorder's thread would be stuck, too."""
    event = Reached()
    series.point("loss", 1.0, samples=0)
    on_gpu(series, event)
    assert series.flush()
    found = Fingerprints(series)
    found._pending.append(([((0, 1, 1), ["weight"], torch.tensor([7]), event, event)], 0.0))
    assert found.flush()
    event.there = True
    assert not series.flush()
    assert not found.flush()
    assert list(written(series, tmp_path)["loss"]) == [1.0, 2.0]
    assert list((tmp_path / "rank-0.tensors").read_text().split()) == ["weight"]
