"""The table of marks: what it shows and says, that nothing overlaps, what it refuses."""

from __future__ import annotations

import pytest

from course_lib import grid
from tests.support.pictures import overlapping

ROWS = ["send, recv", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"]


@pytest.mark.parametrize("columns", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_every_cell_has_its_mark_and_nothing_overlaps(columns: int, rows: int) -> None:
    names = [ROWS[i % 4] + " " * (i // 4) for i in range(rows)]
    states = ["works", "refuses", "wrong", "crashes", "not here"]
    cells = {
        f"gloo {i}\nGPU": {name: states[(i + j) % 5] for j, name in enumerate(names)} for i in range(columns)
    }
    picture = grid(cells, "What this build can do")
    texts = [text.get_text() for text in picture.figure.axes[0].texts]
    expected = [
        dict(zip(states, "✓✗≠!–", strict=True))[s] for column in cells.values() for s in column.values()
    ]
    assert texts == expected
    assert overlapping(picture.figure) == []
    assert len(picture.png()) > 1000


def test_it_reads_as_words() -> None:
    cells = {
        "gloo\nCPU": {"a": "works", "b": "refuses", "c": "works"},
        "nccl": dict.fromkeys("abc", "not here"),
    }
    assert grid(cells, "T").alt == "T. gloo, CPU: works: a, c; refuses: b. nccl: not here: all 3."


def test_the_legend_names_the_marks_that_are_there() -> None:
    picture = grid({"gloo": {"a": "works", "b": "refuses"}}, "T")
    assert picture.figure.axes[0].get_xlabel().split() == ["✓", "works", "✗", "refuses"]
