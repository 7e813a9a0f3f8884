"""Keep each question's best points in `home()`, not in the course's checkout."""

from __future__ import annotations

import contextlib
import html
import json

from ..figures.tables import html_table, text_table
from ..files import locked, write_whole
from ..host.home import CourseHomeError, home

PARTS = {
    "08": "First ranks, 00 to 08",
    "13": "Right and robust, 09 to 13",
    "20": "Scale, 14 to 20",
}  # by its last exercise


def note(number: str, points: float, most: float) -> None:
    """Keep a question's best result; a check goes on if the folder cannot be written to."""
    with contextlib.suppress(OSError, CourseHomeError), one_at_a_time():
        best = results()
        if points >= best.get(number, (-1.0, most))[0]:
            best[number] = (points, most)
            write_whole(home() / "progress.json", json.dumps(best))


def one_at_a_time() -> contextlib.AbstractContextManager[bool]:
    """Let one kernel at a time read and write; without locks, the last one to write wins."""
    return locked(home() / "progress.lock")


def results() -> dict[str, tuple[float, float]]:
    """Return, for each question ever checked, the points reached and the points available."""
    try:
        kept = json.loads((home() / "progress.json").read_text())
        return {str(number): (float(points), float(most)) for number, (points, most) in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class Progress:
    """The best result of each question, shown as a table."""

    def __init__(self, rows: list[dict[str, str]], points: float, most: float, shared: str = "") -> None:
        self._rows, self._head = rows, f"{points:g} of {most:g} points{shared}"

    def __repr__(self) -> str:
        return f"{self._head}\n{text_table(self._rows)}"

    def _repr_html_(self) -> str:
        return f"<p><b>{html.escape(self._head)}</b></p>{html_table(self._rows)}"


def progress() -> Progress:
    """Show how far you are with the exercises (lesson 00).

    Returns
    -------
    Progress
        For each exercise, the points that its questions have given at best, and a mark for each of them; for
        each of the course's three parts, whether it is done. If they are shared (`share_progress`), it says
        so.
    """
    from . import questions
    from .question import QUESTIONS
    from .sharing import shared_where

    questions.load()
    best = results()
    exercises: dict[str, list[tuple[float, float, str]]] = {}  # for each question: points, of how many, mark
    for number, asked in sorted(QUESTIONS.items()):
        points = min(best.get(number, (0.0, 0.0))[0], asked.most)
        mark = "✓" if points == asked.most else "begun" if number in best else "–"
        exercises.setdefault(number.split(".")[0], []).append((points, asked.most, mark))
    rows: list[dict[str, str]] = []
    part: list[tuple[float, float, str]] = []
    for exercise, of_it in exercises.items():
        rows.append(_row(exercise, of_it, "  ".join(mark for _, _, mark in of_it)))
        part += of_it
        if exercise in PARTS:
            done = all(mark == "✓" for _, _, mark in part)
            rows.append(_row(PARTS[exercise], part, "✓ done" if done else ""))
            part = []
    every = [each for of_it in exercises.values() for each in of_it]
    return Progress(rows, sum(each[0] for each in every), sum(each[1] for each in every), shared_where())


def _row(name: str, questions: list[tuple[float, float, str]], marks: str) -> dict[str, str]:
    points, most = sum(each[0] for each in questions), sum(each[1] for each in questions)
    return {"exercise": name, "points": f"{points:g} of {most:g}", "": marks}
