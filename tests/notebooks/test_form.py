"""The form of lessons and exercises, whoever wrote them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks import form
from tests.notebooks.execute import CORE, DEEPER, ROOT, read
from tests.notebooks.minutes import rounded, teach

LINES = 25  # in a code cell, at most
LESSONS = sorted([*CORE.glob("*.ipynb"), *DEEPER.glob("*.ipynb")])
NOTEBOOKS = [*LESSONS, *sorted((ROOT / "solutions").glob("*.ipynb"))]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: str(path.relative_to(CORE).with_suffix("")))
def test_a_lesson_is_within_the_limits(path: Path) -> None:
    assert form.over(path) == []


def test_a_core_lesson_needs_nothing_of_a_deeper_notebook_and_leads_to_each() -> None:
    for path in sorted(CORE.glob("*.ipynb")):
        cells = read(path).cells
        assert [cell.source for cell in cells if cell.cell_type == "code" and "deeper/" in cell.source] == []
        lines = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown").splitlines()
        for each in DEEPER.glob(f"{path.stem[:2]}_*.ipynb"):
            begins = f"Deeper, {rounded(teach(each))} min:"
            linked = [line for line in lines if f"](deeper/{each.name})" in line and line.startswith(begins)]
            assert len(linked) == 1, f"{path.stem} has one line '{begins} …' with a link to {each.name}"
    listed = (CORE / "README.md").read_text()
    assert [path.name for path in LESSONS if f"]({path.relative_to(CORE)})" not in listed] == []
    numbers = {path.stem[:2] for path in CORE.glob("*.ipynb")}
    assert {each.stem[:2] for each in DEEPER.glob("*.ipynb")} <= numbers


def test_what_is_wrong_with_a_lesson_is_counted(tmp_path: Path) -> None:
    code = [
        new_code_cell("guess('a', 'b')\nguess('c', 'd')"),
        new_code_cell("1 + 1", outputs=[new_output("execute_result", {"text/plain": "2"})]),
        new_code_cell("a\n" * 16 + "b\n" * 10),
        new_code_cell("c\n" * 99, metadata={"jupyter": {"source_hidden": True}}),
        new_code_cell("guesses('a')"),
    ]
    text = "It took 3 s (a (long) while), see below: lesson 05. **Change it.**\n\n" + "word " * 61
    path = tmp_path / "31_lesson.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell(text), *code]), path)
    wrong = "\n".join(form.over(path))
    for told in (
        "longest cell: 26, at most 25",
        "brackets in brackets: 1, at most 0",
        "paragraphs over 60 words: 1, at most 0",
        "banned words: 1, at most 0",
        "guesses: 2, at least 3",
        "to do: 1, at least 3",
        "2 guesses, 1 answers in guesses(…)",
        "the output that answers guess('a', 'b') is not folded",
    ):
        assert told in wrong
    assert form.counts(path)["visible lines"] == 2 + 1 + 26 + 1
    code[1].metadata["jupyter"] = {"outputs_hidden": True}
    code[-1].source = "guesses('a', 'e')"
    nbformat.write(new_notebook(cells=[new_markdown_cell(text), *code]), path)
    wrong = "\n".join(form.over(path))
    assert "the answer 'e' is none of ['c', 'd']" in wrong
    assert "folded" not in wrong


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_cell_is_short(path: Path) -> None:
    shown = [cell for cell in read(path).cells if cell.cell_type == "code" and not form.folds(cell, "source")]
    code = {cell.id: cell.source.splitlines() for cell in shown}
    assert code
    assert {name: len(lines) for name, lines in code.items() if len(lines) > LINES} == {}


def test_a_lesson_leads_on_to_its_exercise_and_the_next() -> None:
    lessons = sorted(CORE.glob("*.ipynb"))
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
    for path in LESSONS:
        for cell in read(path).cells:
            text = " ".join(str(output) for output in cell.get("outputs", []))
            text = re.sub(r"[Rr]ecorded on [^:]*:", "", text)  # a recording names the torch of its own day
            named |= {(path.stem, version) for version in re.findall(r"\btorch (\d+\.\d+\.\d+)", text)}
    assert {stem for stem, _ in named} >= {"00_start_here"}
    assert {each for each in named if each[1] != tested} == set()
