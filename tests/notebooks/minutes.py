"""Estimate by a rule the minutes that a lesson takes to teach and its exercise to solve.

    python -m tests.notebooks.minutes

The table is in exercises/README.md, and its numbers are in the first cell of each notebook; `test_minutes.py`
checks both against what the notebooks contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import nbformat

from tests.notebooks.execute import ROOT

SPOKEN, READ = 130, 200  # words per minute
SHOWN, WRITTEN = 20, 1  # lines of code per minute
PREDICTS, LOOKS_AT, TRIES = 1.5, 0.5, 4  # minutes for a prediction, a picture, and a question's checks
STEP = 5  # minutes to round to: more precision would be pretence
SOLUTION = re.compile(r"### BEGIN SOLUTION(.*?)### END SOLUTION", re.DOTALL)
ANSWERS = re.compile(r"<details>.*?</details>", re.DOTALL)  # to a quiz, read afterwards


@dataclass(frozen=True)
class Minutes:
    """The minutes for a lesson and its exercise, not rounded."""

    name: str
    teach: float
    solve: float

    def row(self) -> str:
        """Return the row of the table."""
        return f"| {self.name} | {rounded(self.teach)} | {rounded(self.solve) if self.solve else '–'} |"


def of_all() -> list[Minutes]:
    """Return the minutes for each lesson, in order."""
    return [
        Minutes(path.stem[:2], _teach(path.name), _solve(path.name))
        for path in sorted((ROOT / "lessons").glob("*.ipynb"))
    ]


def table() -> str:
    """Return the table in Markdown."""
    every = of_all()
    rows = [each.row() for each in every]
    hours = [sum(each.teach for each in every) / 60, sum(each.solve for each in every) / 60]
    rows.append("| all | {:.0f} h | {:.0f} h |".format(*hours))
    return "\n".join(
        ["| lesson | minutes to teach | minutes to solve its exercise |", "| --- | --- | --- |", *rows]
    )


def _teach(name: str) -> float:
    texts, codes = _parts("lessons", name)
    pictures = sum("image/png" in output.get("data", {}) for cell in codes for output in cell.outputs)
    predictions = sum(text.count("**Predict") for text in texts)
    return (
        _words(texts) / SPOKEN
        + _lines(cell.source for cell in codes) / SHOWN
        + predictions * PREDICTS
        + pictures * LOOKS_AT
    )


def _solve(name: str) -> float:
    if not (ROOT / "exercises" / name).exists():
        return 0.0
    texts, codes = _parts("exercises", name)
    questions = sum(cell.source.startswith("check(") for cell in codes)
    solutions = [each for cell in _parts("solutions", name)[1] for each in SOLUTION.findall(cell.source)]
    return _words(texts) / READ + questions * TRIES + _lines(solutions) / WRITTEN


def _parts(folder: str, name: str) -> tuple[list[str], list[Any]]:
    cells = nbformat.read(ROOT / folder / name, as_version=4).cells
    texts = [ANSWERS.sub("", cell.source) for cell in cells if cell.cell_type == "markdown"]
    return texts, [cell for cell in cells if cell.cell_type == "code"]


def _words(texts: Iterable[str]) -> int:
    return sum(len(re.findall(r"\w+", text)) for text in texts)


def _lines(sources: Iterable[str]) -> int:
    return sum(bool(line.strip()) for source in sources for line in source.splitlines())


def rounded(minutes: float) -> int:
    """Round as in the table and in the first cells of the notebooks."""
    return max(STEP, STEP * round(minutes / STEP))


if __name__ == "__main__":
    print(table())
