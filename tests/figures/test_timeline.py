"""The timeline: readable with few and many rows, in words, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course_lib import timeline
from course_lib.figures.style import COLORS
from tests.support.pictures import is_whole, overlapping

PHASES = ["start", "import", "rendezvous", "work"]


def made(rows: int, phases: list[str] = PHASES, begin: float = 0.0) -> list[tuple[Any, str, float, float]]:
    """Each row's phases one after the other, of very different lengths."""
    bars = []
    for row in range(rows):
        now = begin + 0.1 * row
        for number, phase in enumerate(phases):
            length = [0.3, 2.0, 0.004, 1.0, 0.05][(number + row) % 5]
            bars.append((row, phase, now, now + length))
            now += length
    return bars


def drawn(picture: Any) -> list[Rectangle]:
    return [patch for each in picture.figure.axes[0].containers for patch in each]


def test_phases_of_pictures_that_belong_together_keep_their_colours() -> None:
    picture = timeline(made(5, ["start", "wait"]), "t", first=["start", "step"])
    colors = {to_hex(each.get_facecolor()) for each in drawn(picture)}
    assert colors == {COLORS[0], COLORS[2]}
    (legend,) = picture.figure.legends
    assert [each.get_text() for each in legend.get_texts()] == ["start", "wait"]
    assert "step" not in picture.alt


@pytest.mark.parametrize("length", [4, 20, 60])
def test_a_legend_of_long_names_fits(length: int) -> None:
    picture = timeline(made(2, [f"{number}" * length for number in range(6)]), "t")
    picture.png()
    assert is_whole(picture.figure)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_it_is_readable(rows: int) -> None:
    picture = timeline(made(rows), "Every process imports")
    (axes,) = picture.figure.axes
    picture.png()
    assert overlapping(picture.figure) == []
    assert [each.get_text() for each in axes.get_yticklabels()] == [f"rank {row}" for row in range(rows)]
    heights = axes.get_ylim()
    assert heights[0] > heights[1], "the first row stands above"
    assert axes.get_xlabel() == "seconds"
    (legend,) = picture.figure.legends
    assert [each.get_text() for each in legend.get_texts()] == PHASES
    assert is_whole(picture.figure)


def test_bars_stand_where_they_were_measured() -> None:
    bars = [("a", "x", 100.5, 101.0), ("b", "x", 101.0, 103.0), ("b", "y", 103.0, 103.0)]
    found = drawn(timeline(bars, "t", since=100.0))
    assert [(round(each.get_x(), 9), round(each.get_width(), 9)) for each in found] == [
        (0.5, 0.5),
        (1.0, 2.0),
        (3.0, 0.0),
    ]


def test_a_bar_says_its_length_where_there_is_room() -> None:
    (axes,) = timeline([(0, "long", 0, 9.04), (0, "short", 9.04, 9.05)], "t").figure.axes
    assert [text.get_text() for text in axes.texts] == ["9.0 s"]
    (axes,) = timeline([(0, "a", 0, 0.05), (0, "b", 0.05, 0.55)], "t").figure.axes
    assert [text.get_text() for text in axes.texts] == ["50 ms", "0.50 s"]


def test_in_words() -> None:
    picture = timeline([(0, "import", 0, 1.5), (0, "work", 1.5, 2), ("program", "start", 0, 0.25)], "Slow")
    assert picture.alt == (
        "Slow. rank 0: import from 0.00 to 1.50 s, work from 1.50 to 2.00 s; "
        "program: start from 0.00 to 0.25 s."
    )


def test_a_short_picture_counts_in_milliseconds() -> None:
    picture = timeline([(0, "forward", 100.0, 100.05), (0, "backward", 100.05, 100.15)], "t", since=100.0)
    (axes,) = picture.figure.axes
    assert axes.get_xlabel() == "milliseconds"
    assert "20" in [text.get_text() for text in axes.get_xticklabels()]
    assert picture.alt == "t. rank 0: forward from 0 to 50 ms, backward from 50 to 150 ms."


def test_one_moment_alone_can_be_drawn() -> None:
    assert len(timeline([(0, "work", 0.0, 0.0)], "t").png()) > 1000
