"""Stacked bars: sums, colours, words, and that nothing in them overlaps."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from course_lib import stacked_bars
from course_lib.figures.charts import COLORS
from tests.support.pictures import overlapping

PARTS = ["parameters", "gradients", "optimizer state", "activations", "outputs"]


def test_words_and_sums() -> None:
    picture = stacked_bars({"device 0": {"a": 1.0, "b": 2.5}, "device 1": {"a": 1.0}}, "More", "MiB")
    assert picture.alt == "More. MiB. device 0: 3.5 (a 1.0, b 2.5); device 1: 1.0 (a 1.0)."
    (axes,) = picture.figure.axes
    assert [text.get_text() for text in axes.texts] == ["3.5", "1.0"]


def test_a_part_has_one_colour_and_begins_where_the_last_one_ends() -> None:
    picture = stacked_bars({"x": {"a": 1.0, "b": 2.0}, "y": {"b": 4.0}}, "T", "s")
    (axes,) = picture.figure.axes
    drawn = [(to_hex(bar.get_facecolor()), bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert drawn == [
        (COLORS[0], 0, 1),
        (COLORS[0], 0, 0),
        (COLORS[1], 1, 2),
        (COLORS[1], 0, 4),
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_nothing_overlaps(count: int) -> None:
    bars = {f"loss outside: device {i}": {part: 10.0 * (i + 1) for part in PARTS} for i in range(count)}
    assert overlapping(stacked_bars(bars, "Device 0 carries more", "MiB of live tensors").figure) == []


def test_bars_of_nothing_are_drawn() -> None:
    assert "x: 0.0" in stacked_bars({"x": {"a": 0.0}, "y": {"a": 0}}, "T", "MiB").alt


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "at least one bar"),
        ({"x": {}}, "at least one bar"),
        ({"x": {"a": -1.0}}, "cannot be -1.0: 'a' of 'x'"),
        ({"x": {"a": float("nan")}}, "cannot be nan"),
        ({"x": {str(i): 1.0 for i in range(8)}}, "8 parts are more than the 7 colours"),
    ],
)
def test_what_cannot_be_drawn_is_refused(values: dict[str, dict[str, float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stacked_bars(values, "T", "MiB")
