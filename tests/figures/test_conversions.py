"""The map of conversions: it shows what was tried, in words too, and says what is missing."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Annotation, Text
from PIL import Image

from course_lib import conversion_map
from course_lib.figures.conversions import COPIED, REFUSED, SHARED


def row(call: str = "f(x)", source: str = "list", target: str = "CPU tensor", **found: Any) -> dict[str, Any]:
    plain = {"shares": False, "dtype": "kept", "lost": [], "error": ""}
    return {"call": call, "source": source, "target": target} | plain | found


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def arrows(figure: Any) -> list[FancyArrowPatch]:
    return [each.arrow_patch for each in figure.findobj(Annotation)]


ROWS = [
    row("copies(l)"),
    row("shares(a)", "NumPy array", shares=True),
    row("loses(l)", dtype="float64 → float32", lost=["0.1", "2²⁴+1"]),
    row("refuses(a)", "NumPy array", error="ValueError", dtype=""),
    row("stays(t)", "CPU tensor", shares=True),
]


def test_it_reads_as_words() -> None:
    picture = conversion_map(ROWS)
    assert picture.alt == (
        "Of 5 conversions, 2 share memory and 1 change a number. "
        "copies(l) from list to CPU tensor: copied, kept, exact; "
        "shares(a) from NumPy array to CPU tensor: shared, kept, exact; "
        "loses(l) from list to CPU tensor: copied, float64 → float32, loses 0.1, 2²⁴+1; "
        "refuses(a) from NumPy array to CPU tensor: refused, ValueError; "
        "stays(t) from CPU tensor to CPU tensor: shared, kept, exact."
    )
    data, metadata = picture._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == picture.alt
    assert Image.open(io.BytesIO(data["image/png"])).width > 600


def test_each_arrow_has_the_colour_of_what_was_found() -> None:
    from matplotlib.colors import to_hex

    drawn = arrows(conversion_map(ROWS).figure)
    assert [to_hex(each.get_edgecolor()) for each in drawn] == [COPIED, SHARED, COPIED, REFUSED, SHARED]
    assert [each.get_linestyle() for each in drawn] == ["-", "-", "--", ":", "-"]


def test_a_result_that_is_turned_round_turns_the_picture() -> None:
    turned = [each | {"shares": not each["shares"]} for each in ROWS]
    assert conversion_map(turned).alt.startswith("Of 5 conversions, 2 share memory")
    assert "copies(l) from list to CPU tensor: shared" in conversion_map(turned).alt


def test_the_forms_stand_in_the_order_that_was_given() -> None:
    def heads(**order: Any) -> list[str]:
        figure = conversion_map(ROWS, **order).figure
        found = {text.get_text(): text.get_position()[0] for text in figure.findobj(Text)}
        names = [name for name in ("list", "CPU\ntensor", "NumPy\narray") if name in found]
        return sorted(names, key=found.__getitem__)

    assert heads() == ["list", "CPU\ntensor", "NumPy\narray"]
    assert heads(forms=["list", "NumPy array", "CPU tensor", "never used"]) == [
        "list",
        "NumPy\narray",
        "CPU\ntensor",
    ]
    assert heads(forms=["NumPy array"]) == ["NumPy\narray", "list", "CPU\ntensor"]


def test_a_title_of_ones_own() -> None:
    assert "My map" in texts(conversion_map(ROWS, title="My map").figure)


@pytest.mark.parametrize("count", [1, 5, 24])
def test_no_text_lies_on_another(count: int) -> None:
    lossy = {"dtype": "float64 → float32", "lost": ["2²⁴+1", "2⁵³+1", "0.1"]}
    rows = [row(f"from_numpy(a{i})", "NumPy array", **lossy) for i in range(count)]
    rows += [row("t.clone()", "CPU tensor"), row("t.to()", "CPU tensor", "device tensor")]
    rows += [row("[n]", "number", "list")]
    figure = conversion_map(rows).figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible()
    ]
    boxes = [(text, box) for text, box in boxes if box.width]
    for at, (text, box) in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0, f"{text} is cut"
        assert box.x1 <= figure.bbox.x1, f"{text} is cut"
        for other, another in boxes[at + 1 :]:
            assert not box.overlaps(another), f"{text} lies on {other}"


def test_nothing_tried_is_said() -> None:
    with pytest.raises(ValueError, match="at least one conversion"):
        conversion_map([])


def test_a_missing_key_is_named() -> None:
    broken = row("t.numpy()")
    del broken["shares"], broken["lost"]
    with pytest.raises(ValueError, match=r"the conversion 't\.numpy\(\)' lacks lost, shares"):
        conversion_map([row(), broken])


def test_numpy_booleans_and_generators_will_do() -> None:
    picture = conversion_map(row(shares=np.bool_(True)) for _ in range(2))
    assert picture.alt.startswith("Of 2 conversions, 2 share memory")
