"""Charts: what they show, in what words, and that nothing in them overlaps."""

from __future__ import annotations

import io

import pytest
from matplotlib.colors import to_hex
from PIL import Image

from course_lib import bars, curves, stacked_bars
from course_lib.figures.style import COLORS, Picture
from tests.support.pictures import overlapping


def test_a_picture_shows_itself_and_reads_as_words() -> None:
    picture = curves({"a": ([1, 2, 4], [1.0, 2.0, 3.0])}, "A rises", "batch size", "samples/s")
    data, metadata = picture._repr_mimebundle_()
    assert Image.open(io.BytesIO(data["image/png"])).width > 600
    assert metadata["image/png"]["alt"] == "A rises. samples/s against batch size. a: from 1 to 3."
    assert "A rises" in data["text/plain"]


def test_bars_and_curves_label_their_axes() -> None:
    picture = bars({"parameters": 1.5, "activations": 12.0}, "Activations take most", "MiB", "{:.1f}")
    assert isinstance(picture, Picture)
    assert picture.figure.axes[0].get_xlabel() == "MiB"
    assert "activations: 12.0" in picture.alt
    assert overlapping(picture.figure) == []
    logarithmic = curves(
        {"a": ([1, 2, 4], [1e-8, 1e-7, 1e-6]), "b": ([1, 2, 4], [1.0, 2.0, 4.0])}, "t", "x", "y", True, True
    )
    axes = logarithmic.figure.axes[0]
    assert (axes.get_yscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "x", "y")
    stacked = stacked_bars({"a": {"part": 1.0}}, "t", "ms")
    assert stacked.figure.axes[0].get_xlabel() == "ms"
    assert overlapping(logarithmic.figure) == []


def test_bars_have_the_colour_of_what_follows_the_colon() -> None:
    picture = bars({"one": 1, "512: DP": 2, "512: DDP": 3, "128: DP": 2, "128: DDP": 3}, "t", "samples/s")
    drawn = [COLORS.index(to_hex(bar.get_facecolor())) for bar in picture.figure.axes[0].patches]
    assert drawn == [0, 1, 2, 1, 2]


def test_a_single_point_is_a_star() -> None:
    picture = curves({"one": ([1], [2]), "two": ([1, 2], [2, 3])}, "t", "step", "y")
    assert [line.get_marker() for line in picture.figure.axes[0].lines] == ["*", "o"]


def test_whole_numbers_have_whole_ticks() -> None:
    picture = curves({"a": (range(1, 6), [1, 2, 3, 4, 5])}, "t", "step", "y")
    picture.png()
    assert all(float(tick).is_integer() for tick in picture.figure.axes[0].get_xticks())


def test_a_line_that_lies_on_another_is_seen() -> None:
    x = [2, 3, 4]
    picture = curves({"formula": (x, x), "counted": (x, x)}, "t", "ranks", "y", dashed=["formula"])
    formula, counted = picture.figure.axes[0].lines
    assert (formula.is_dashed(), counted.is_dashed()) == (True, False)
    assert formula.get_zorder() > counted.get_zorder()


# --- bars of parts ---------------------------------------------------------------------------------------

PARTS = ["parameters", "gradients", "optimizer state", "activations", "outputs"]


def test_bars_that_are_all_equal_need_no_number() -> None:
    picture = stacked_bars({"a": {"x": 40, "y": 60}, "b": {"x": 100}}, "t", "%", form="")
    (axes,) = picture.figure.axes
    assert [each.get_text() for each in axes.texts if each.get_text()] == []
    assert axes.get_xlim() == (0, 100)
    assert "a: 100 (x 40, y 60)" in picture.alt


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
