"""Pictures: what they show, in what words, and that nothing in them overlaps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from course_lib import Run, bars, compare, curves
from course_lib.figures.charts import Picture
from course_lib.rank.recorder import TICK
from course_lib.run.picture import MANY_RANKS, RunFigure, throughput
from tests.support.pictures import overlapping


def made_run(world_size: int, seconds: float = 5.0, rate: float = 1000.0, name: str = "train") -> Run:
    """A run as ranks would have left it: each at ``rate`` samples/s, rank r ends with (r + 1) · 100 MiB."""
    run = Run.create(name, world_size)
    for rank in range(world_size):
        time = np.arange(0, seconds, 0.1) + 0.1
        rows = np.full((len(time), len(TICK)), np.nan)
        columns: dict[str, Any] = {
            "seconds": time,
            "samples": time * rate,
            "steps": time * 10,
            "tracked_seconds": time,
            "passes": 1,
            "pass_steps": time * 10,
            "pass_total": seconds * 10,
            "memory_bytes": time / time[-1] * (rank + 1) * 100 * 2**20,
        }
        for field, values in columns.items():
            rows[:, TICK.index(field)] = values
        rows.astype("<f8").tofile(run.folder / f"rank-{rank}.ticks")
    return run


def test_a_picture_shows_itself_and_reads_as_words() -> None:
    picture = curves({"a": ([1, 2, 4], [1.0, 2.0, 3.0])}, "A rises", "batch size", "samples/s")
    data, metadata = picture._repr_mimebundle_()
    assert Image.open(io.BytesIO(data["image/png"])).width > 600
    assert metadata["image/png"]["alt"] == "A rises. samples/s against batch size. a: from 1 to 3."
    assert "A rises" in data["text/plain"]


@pytest.mark.parametrize("ranks", [1, 2, 4, MANY_RANKS + 1])
def test_a_runs_picture_has_labels_units_and_nothing_overlaps(ranks: int) -> None:
    picture = made_run(ranks).plot()
    left, right = picture.figure.axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("seconds since the launch", "MiB")
    assert right.get_ylabel() == "samples/s"
    assert f"{ranks * 100:,} MiB" in left.get_title(loc="left")
    assert overlapping(picture.figure) == []
    assert f"rank {ranks - 1}: peak memory {ranks * 100:,} MiB" in picture.alt


def test_a_run_that_measured_nothing_has_a_picture_all_the_same() -> None:
    picture = Run.create("empty", 2).plot()
    assert len(picture.png()) > 1000
    assert "no track()" in picture.figure.axes[1].get_title(loc="left")


def test_throughput_is_samples_over_the_time_inside_track() -> None:
    seconds = np.arange(0.1, 6, 0.1)
    inside = np.minimum(seconds, 3.0)  # 3 s in a loop, then 3 s elsewhere
    ticks = {"seconds": seconds, "samples": 500 * inside, "tracked_seconds": inside}
    _, rate = throughput(ticks)
    assert np.allclose(rate[(seconds > 1) & (seconds < 3)], 500)
    assert np.isnan(rate[seconds > 4.2]).all()


@pytest.mark.parametrize("ranks", [2, MANY_RANKS])
def test_the_live_picture_moves_and_grows(ranks: int) -> None:
    live = RunFigure(live=True)
    run = made_run(ranks, seconds=1)
    live.update(run)
    first = live.live_png()
    live.update(run)
    assert live.live_png() == first
    live.update(made_run(ranks, seconds=20))
    second = live.live_png()
    assert second != first
    assert live.memory.get_xlim()[1] >= 20
    assert Image.open(io.BytesIO(second)).size == Image.open(io.BytesIO(first)).size


def test_the_live_picture_shows_what_the_final_one_shows() -> None:
    run = made_run(2)
    live, final = RunFigure(live=True), RunFigure()
    live.update(run)
    final.update(run)
    for mine, theirs in zip(live.figure.axes, final.figure.axes, strict=True):
        assert mine.get_title(loc="left") == theirs.get_title(loc="left")
        assert len(mine.lines) == 2
        for one, other in zip(mine.lines, theirs.lines, strict=True):
            assert np.array_equal(one.get_xydata(), other.get_xydata(), equal_nan=True)


@pytest.mark.parametrize("rate", [100, 500, 4000])
def test_a_live_picture_taken_over_from_another_run_is_like_a_new_one(rate: int) -> None:
    used, new = RunFigure(live=True), RunFigure(live=True)
    used.update(made_run(2, seconds=30))
    used.live_png()
    run = made_run(2, rate=rate)
    for live in (used, new):
        live.update(Run.create("not begun", 2))
        live.update(run)
    for mine, theirs in zip(used.figure.axes, new.figure.axes, strict=True):
        assert mine.get_xlim() == theirs.get_xlim()
        assert theirs.get_ylim()[1] / 5 < mine.get_ylim()[1] < theirs.get_ylim()[1] * 5
        assert mine.get_title(loc="left") == theirs.get_title(loc="left")
        for one, other in zip(mine.lines, theirs.lines, strict=True):
            assert np.array_equal(one.get_xydata(), other.get_xydata(), equal_nan=True)
    background = used._background
    used.update(run)
    assert used._background is background  # which costs most


def test_compare_tells_the_ratio() -> None:
    picture = compare({"one rank": made_run(1), "two ranks": made_run(2, rate=800)})
    assert "two ranks: 1.60 × one rank" in picture.alt
    assert picture.figure.axes[1].get_xlabel() == "MiB, the rank with the most"
    assert overlapping(picture.figure) == []


def test_compare_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        compare({})
    with pytest.raises(ValueError, match="'silent' has no throughput"):
        compare({"silent": Run.create("silent", 1)})


def test_bars_and_curves_label_their_axes(tmp_path: Path) -> None:
    picture = bars({"parameters": 1.5, "activations": 12.0}, "Activations take most", "MiB", "{:.1f}")
    assert isinstance(picture, Picture)
    assert picture.figure.axes[0].get_xlabel() == "MiB"
    assert "activations: 12.0" in picture.alt
    assert overlapping(picture.figure) == []
    picture.save(str(tmp_path / "bars.svg"))
    assert "<svg" in (tmp_path / "bars.svg").read_text()
    logarithmic = curves(
        {"a": ([1, 2, 4], [1e-8, 1e-7, 1e-6]), "b": ([1, 2, 4], [1.0, 2.0, 4.0])}, "t", "x", "y", True, True
    )
    assert logarithmic.figure.axes[0].get_yscale() == "log"
    assert overlapping(logarithmic.figure) == []


def test_whole_numbers_have_whole_ticks() -> None:
    picture = curves({"a": (range(1, 6), [1, 2, 3, 4, 5])}, "t", "step", "y")
    picture.png()
    assert all(float(tick).is_integer() for tick in picture.figure.axes[0].get_xticks())
