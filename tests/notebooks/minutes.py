"""Estimate by a rule the minutes that a lesson takes to teach and its exercise to solve.

    python -m tests.notebooks.minutes

The table is in exercises/README.md, and its numbers are in the first cell of each notebook; `test_minutes.py`
checks both against what the notebooks contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from tests.notebooks.execute import CORE, DEEPER, ROOT

SPOKEN, READ = 130, 200  # words per minute
SHOWN, WRITTEN = 20, 1  # lines of code per minute
PREDICTS, LOOKS_AT, TRIES = 1.5, 0.5, 4  # minutes for a guess, a picture, and a question's checks
STEP = 5  # minutes to round to: more precision would be pretence
SOLUTION = re.compile(r"### BEGIN SOLUTION(.*?)### END SOLUTION", re.DOTALL)
ANSWERS = re.compile(r"<details>.*?</details>", re.DOTALL)  # to a quiz, read afterwards


@dataclass(frozen=True)
class Minutes:
    """The minutes for a lesson, its deeper notebooks and its exercise, not rounded."""

    name: str
    teach: float
    solve: float
    deeper: dict[Path, float] = field(default_factory=dict)

    def row(self) -> str:
        """Return the row of the table."""
        deeper = sum(map(rounded, self.deeper.values())) or "–"
        solve = rounded(self.solve) if self.solve else "–"
        return f"| {self.name} | {rounded(self.teach)} | {deeper} | {solve} |"


def of_all() -> list[Minutes]:
    """Return the minutes for each lesson, in order."""
    return [
        Minutes(
            path.stem[:2],
            teach(path),
            _solve(path.name),
            {each: teach(each) for each in sorted(DEEPER.glob(f"{path.stem[:2]}_*.ipynb"))},
        )
        for path in sorted(CORE.glob("*.ipynb"))
    ]


def table() -> str:
    """Return the table in Markdown."""
    every = of_all()
    minutes = [
        sum(each.teach for each in every),
        sum(sum(each.deeper.values()) for each in every),
        sum(each.solve for each in every),
    ]
    return "\n".join(
        [
            "| lesson | minutes to teach | deeper | minutes to solve its exercise |",
            "| --- | --- | --- | --- |",
            *(each.row() for each in every),
            "| all | {:.0f} h | {:.0f} h | {:.0f} h |".format(*(each / 60 for each in minutes)),
        ]
    )


def teach(path: Path) -> float:
    """Return the minutes that a lesson or a deeper notebook takes: folded code is not read."""
    texts, codes = _parts(path)
    pictures = sum("image/png" in output.get("data", {}) for cell in codes for output in cell.outputs)
    read = [cell.source for cell in codes if not cell.metadata.get("jupyter", {}).get("source_hidden")]
    guesses = sum(text.count("**Predict") for text in texts)
    guesses += sum(len(re.findall(r"\bguess\(", cell.source)) for cell in codes)
    return _words(texts) / SPOKEN + _lines(read) / SHOWN + guesses * PREDICTS + pictures * LOOKS_AT


def _solve(name: str) -> float:
    if not (ROOT / "exercises" / name).exists():
        return 0.0
    texts, codes = _parts(ROOT / "exercises" / name)
    questions = sum(cell.source.startswith("check(") for cell in codes)
    solutions = [
        each for cell in _parts(ROOT / "solutions" / name)[1] for each in SOLUTION.findall(cell.source)
    ]
    return _words(texts) / READ + questions * TRIES + _lines(solutions) / WRITTEN


def _parts(path: Path) -> tuple[list[str], list[Any]]:
    cells = nbformat.read(path, as_version=4).cells
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
