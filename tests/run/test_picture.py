"""The picture of a run: what it shows, in what words, and that nothing in it overlaps."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from course_lib import Run
from course_lib.run.picture import MANY_RANKS, RunFigure, throughput
from tests.support.pictures import overlapping
from tests.support.runs import made_run


@pytest.mark.parametrize("ranks", [1, 2, MANY_RANKS + 1])
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
    first, background = live.live_png(), live._background
    live.update(run)
    assert live.live_png() == first
    assert live._background is background, "which costs most"
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
        assert len(mine.lines) >= 2
        for line, other_line in zip(mine.lines, theirs.lines, strict=True):
            assert np.array_equal(line.get_xydata(), other_line.get_xydata(), equal_nan=True)
