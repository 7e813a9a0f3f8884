"""Write the scores of a class: a table for other systems, pages for learners, and the class on one page."""

from __future__ import annotations

import csv
import hashlib
import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...figures.tables import html_table
from ...files import write_whole
from ..page import page
from ..question import QUESTIONS
from .batch import Graded
from .score import Score

# The first columns of nbgrader's export; those that the course does not know stay empty.
OF_NBGRADER = (
    *("assignment", "duedate", "timestamp", "student_id", "last_name", "first_name", "email"),
    *("raw_score", "late_submission_penalty", "score", "max_score"),
)
A_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # how a spreadsheet's formula begins


class LearnerGrades:
    """What a learner submitted; of several notebooks for an exercise, the one with most points counts."""

    def __init__(self, name: str, graded: Iterable[Graded]) -> None:
        self.name = name
        self.graded = list(graded)
        self.best: dict[str, Graded] = {}
        for entry in self.graded:
            number = entry.score.exercise
            if number and (number not in self.best or entry.score.points > self.best[number].score.points):
                self.best[number] = entry

    def points(self, number: str) -> float | None:
        """Return the points for a question; None if no notebook with it was submitted."""
        exercise = self.best.get(number[:2])
        return exercise.score.feedback[number].points if exercise else None

    def total(self, exercises: Sequence[str]) -> float | None:
        """Return the points; None if a submission could not be graded, for no fault of the learner's."""
        if self.has_no_grade:
            return None
        return sum(entry.score.points for number, entry in self.best.items() if number in exercises)

    @property
    def has_no_grade(self) -> bool:
        return any(entry.score.ungraded for entry in self.graded)

    @property
    def trouble(self) -> list[str]:
        return [f"{entry.submission.name}: {words}" for entry in self.graded for words in notes(entry.score)]


def notes(score: Score) -> list[str]:
    """Return what stands beside the points of a submission."""
    again = f"it has no grade yet: {score.ungraded}. The same command grades it again"
    return [*score.trouble, *[again] * bool(score.ungraded)]


def learners(graded: Iterable[Graded]) -> list[LearnerGrades]:
    by_learner: dict[str, list[Graded]] = {}
    for entry in graded:
        by_learner.setdefault(entry.submission.learner, []).append(entry)
    return [LearnerGrades(name, of) for name, of in sorted(by_learner.items())]


def exercises_of(everyone: Sequence[LearnerGrades], asked: Sequence[str]) -> list[str]:
    """Return the exercises that count: those asked for, or all that at least one learner submitted."""
    return sorted(set(asked) or {number for learner in everyone for number in learner.best})


def _questions(exercises: Sequence[str]) -> list[str]:
    return [number for number in sorted(QUESTIONS) if number[:2] in exercises]


def write_csv(path: Path, everyone: Sequence[LearnerGrades], exercises: Sequence[str]) -> None:
    """Write one row per learner; a question of an exercise not submitted is empty, and counts as 0.

    Where a submission could not be graded, the score is empty.
    """
    questions = _questions(exercises)
    most = sum(QUESTIONS[number].most for number in questions)
    with open(path, "w", newline="", encoding="utf-8") as file:
        names = [*OF_NBGRADER, *questions, "trouble"]
        writer = csv.DictWriter(file, names, quoting=csv.QUOTE_ALL)  # a spreadsheet may split at semicolons
        writer.writeheader()
        for learner in everyone:
            score = _number(learner.total(exercises))
            row: dict[str, Any] = {number: _number(learner.points(number)) for number in questions}
            row |= {"assignment": " ".join(exercises), "student_id": _text(learner.name)}
            row |= {"raw_score": score, "late_submission_penalty": 0, "score": score}
            writer.writerow(row | {"max_score": _number(most), "trouble": _text(" | ".join(learner.trouble))})


def _number(points: float | None) -> str:
    return "" if points is None else f"{points:g}"


def _text(words: str) -> str:
    """Escape words so that each reader finds the same columns, and no spreadsheet runs them as a formula.

    Different names of submissions stay different, since their backslashes are doubled. Quotation marks become
    typographic ones: not all readers know that two in a row stand for one.
    """
    kept = [each if each.isprintable() and each != "\u201d" else ascii(each)[1:-1] for each in words]
    words = "".join(kept).replace('"', "\u201d")
    return f"'{words}" if words.lstrip().startswith((*A_FORMULA, "'")) else words


def write_report(folder: Path, everyone: Sequence[LearnerGrades], exercises: Sequence[str]) -> None:
    """Write ``index.html``, with the class, and for each learner a page with the feedback."""
    questions = _questions(exercises)
    folder.mkdir(parents=True, exist_ok=True)
    most = sum(QUESTIONS[number].most for number in questions)
    head = "".join(f"<th>{name}</th>" for name in ("learner", f"of {most:g}", *questions, "trouble"))
    rows = [f"<tr>{head}</tr>"]
    for learner in everyone:
        hashed = hashlib.sha256(learner.name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        file = f"learner-{re.sub('[^A-Za-z0-9]+', '-', learner.name)[:40]}-{hashed}.html"
        write_whole(folder / file, page(learner.name, _feedback_for(learner, exercises)))
        points = [learner.total(exercises), *map(learner.points, questions)]
        cells = [_number(value) or "–" for value in points] + [html.escape("; ".join(learner.trouble)[:300])]
        link = f'<a href="{file}">{html.escape(learner.name)}</a>'
        rows.append(f"<tr><td>{link}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    missed = f"<h2>What goes wrong most</h2>{html_table(most_missed(everyone))}"
    write_whole(folder / "index.html", page("The class", f"<table>{''.join(rows)}</table>{missed}"))


def most_missed(everyone: Sequence[LearnerGrades], rows: int = 10) -> list[dict[str, str]]:
    """Return the properties that fail for most learners, worst first."""
    scores = [entry.score for learner in everyone for entry in learner.best.values()]
    judged = [feedback for score in scores for feedback in score.feedback.values()]
    missed = Counter((one.question, bad.what) for one in judged for bad in one.findings if not bad.ok)
    worst = sorted(missed.items(), key=lambda item: (-item[1], item[0]))[:rows]
    return [{"question": n, "property": what, "learners": str(count)} for (n, what), count in worst]


def _feedback_for(learner: LearnerGrades, exercises: Sequence[str]) -> str:
    parts = []
    for entry in learner.graded:
        score = entry.score
        counts = learner.best.get(score.exercise or "") is entry and score.exercise in exercises
        points = "no grade" if score.ungraded else f"{score.points:g} of {score.most:g} points"
        parts.append(f"<h2>{html.escape(entry.submission.name)}: {points}</h2>")
        parts += [] if counts or score.ungraded else ["<p>It does not count.</p>"]
        parts += [f"<p>Note: {html.escape(words)}</p>" for words in notes(score)]
        parts += [feedback._repr_html_() for feedback in score.feedback.values()]
    return "\n".join(parts)
