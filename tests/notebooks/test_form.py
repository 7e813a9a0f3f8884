"""The form of lessons and exercises, whoever wrote them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.notebooks.execute import ROOT, read

LINES = 25  # in a code cell, at most
NOTEBOOKS = sorted([*(ROOT / "lessons").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_cell_is_short(path: Path) -> None:
    code = {cell.id: cell.source.splitlines() for cell in read(path).cells if cell.cell_type == "code"}
    assert code
    assert {name: len(lines) for name, lines in code.items() if len(lines) > LINES} == {}


def test_a_lesson_leads_on_to_its_exercise_and_the_next() -> None:
    lessons = sorted((ROOT / "lessons").glob("[0-9]*.ipynb"))
    for path, following in itertools.zip_longest(lessons, lessons[1:]):
        last = read(path).cells[-1]
        assert last.cell_type == "markdown", path.stem
        if (ROOT / "exercises" / path.name).exists():
            assert f"](../exercises/{path.name})" in last.source, path.stem
        if following:
            assert f"]({following.name})" in last.source, path.stem


def test_the_saved_outputs_name_the_torch_that_was_tested() -> None:
    (tested,) = re.findall(r"(?m)^torch==(\S+)$", (ROOT / "constraints.txt").read_text())
    named = set()
    for path in sorted((ROOT / "lessons").glob("[0-9]*.ipynb")):
        for cell in read(path).cells:
            text = " ".join(str(output) for output in cell.get("outputs", []))
            text = re.sub(r"[Rr]ecorded on [^:]*:", "", text)  # a recording names the torch of its own day
            named |= {(path.stem, version) for version in re.findall(r"\btorch (\d+\.\d+\.\d+)", text)}
    assert {stem for stem, _ in named} >= {"00_start_here"}
    assert {each for each in named if each[1] != tested} == set()
