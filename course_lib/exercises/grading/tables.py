"""Write the results of a batch: a table for other systems, pages for learners, and the class on one page."""

from __future__ import annotations

import csv
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...figures.charts import bars
from ...figures.tables import html_table
from ...run_folder import write_whole
from ..asking import QUESTIONS, Finding
from ..check import Feedback
from .grade import Graded

# nbgrader's export has these columns first; those that are not known here stay empty.
OF_NBGRADER = (
    *("assignment", "duedate", "timestamp", "student_id", "last_name", "first_name", "email"),
    *("raw_score", "late_submission_penalty", "score", "max_score"),
)
A_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # how a spreadsheet's formula begins
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; img-src 'self'">
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}td,th{{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}}
pre{{white-space:pre-wrap}}img{{max-width:100%}}</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


class Learner:
    """What one learner submitted; of several notebooks for one exercise, the one with most points counts."""

    def __init__(self, name: str, graded: Iterable[Graded]) -> None:
        self.name = name
        self.graded = list(graded)
        self.best: dict[str, Graded] = {}
        for each in self.graded:
            number = each.result.get("exercise")
            if number and (number not in self.best or each.points > self.best[number].points):
                self.best[number] = each

    def points(self, number: str) -> float | None:
        """Return the points for a question; None if no notebook with it was submitted."""
        exercise = self.best.get(number[:2])
        return exercise.result["questions"][number]["points"] if exercise else None

    def score(self, exercises: Sequence[str]) -> float:
        return sum(each.points for number, each in self.best.items() if number in exercises)

    @property
    def trouble(self) -> list[str]:
        return [f"{each.submission.name}: {word}" for each in self.graded for word in each.result["trouble"]]


def learners(graded: Iterable[Graded]) -> list[Learner]:
    found: dict[str, list[Graded]] = {}
    for each in graded:
        found.setdefault(each.submission.learner, []).append(each)
    return [Learner(name, of) for name, of in sorted(found.items())]


def exercises_of(everyone: Sequence[Learner], asked: Sequence[str]) -> list[str]:
    """Return the exercises that count: those asked for, or all that at least one learner submitted."""
    return sorted(set(asked) or {number for each in everyone for number in each.best})


def _questions(exercises: Sequence[str]) -> list[str]:
    return [number for number in sorted(QUESTIONS) if number[:2] in exercises]


def _most(number: str) -> float:
    return sum(QUESTIONS[number].properties.values())


def write_csv(path: Path, everyone: Sequence[Learner], exercises: Sequence[str]) -> None:
    """Write one row per learner; a question of an exercise not submitted is empty, and counts as 0."""
    questions = _questions(exercises)
    most = sum(map(_most, questions))
    with open(path, "w", newline="", encoding="utf-8") as file:
        names = [*OF_NBGRADER, *questions, "trouble"]
        writer = csv.DictWriter(file, names, quoting=csv.QUOTE_ALL)  # a spreadsheet may split at semicolons
        writer.writeheader()
        for each in everyone:
            score = each.score(exercises)
            row: dict[str, Any] = {number: _number(each.points(number)) for number in questions}
            row |= {"assignment": " ".join(exercises), "student_id": _text(each.name)}
            row |= {"raw_score": _number(score), "late_submission_penalty": 0, "score": _number(score)}
            writer.writerow(row | {"max_score": _number(most), "trouble": _text(" | ".join(each.trouble))})


def _number(points: float | None) -> str:
    return "" if points is None else f"{points:g}"


def _text(words: str) -> str:
    """Escape words so that a spreadsheet shows them and does not run them as a formula."""
    words = "".join(letter if letter.isprintable() else " " for letter in words)
    return f"'{words}" if words.lstrip().startswith(A_FORMULA) else words


def write_report(folder: Path, everyone: Sequence[Learner], exercises: Sequence[str]) -> None:
    """Write ``index.html`` (the class, with a figure), a page per learner, and ``grades.json`` (points)."""
    questions = _questions(exercises)
    folder.mkdir(parents=True, exist_ok=True)
    rows, summary = [], []
    for each in everyone:
        page = f"learner-{re.sub('[^A-Za-z0-9]+', '-', each.name)[:40]}-{_short(each.name)}.html"
        _write_page(folder / page, each.name, _page_of(each, exercises))
        points = {number: each.points(number) for number in questions}
        score = each.score(exercises)
        cells = "".join(f"<td>{_number(value) or '–'}</td>" for value in points.values())
        name = f'<td><a href="{page}">{html.escape(each.name)}</a></td>'
        trouble = f"<td>{html.escape('; '.join(each.trouble)[:300])}</td>"
        rows.append(f"<tr>{name}<td>{score:g}</td>{cells}{trouble}</tr>")
        summary.append({"learner": each.name, "score": score, "points": points, "trouble": each.trouble})
    most = sum(map(_most, questions))
    whole = {"exercises": list(exercises), "max_score": most, "learners": summary}
    write_whole(folder / "grades.json", json.dumps(whole, indent=1))
    head = "".join(f"<th>{name}</th>" for name in ("learner", f"of {most:g}", *questions, "trouble"))
    body = [f"<p>{len(everyone)} learners, exercises {', '.join(exercises) or '(none)'}.</p>"]
    if questions and everyone:
        lost = lost_share(everyone, questions)
        if any(lost.values()):
            picture = bars(lost, _worst(lost), "points not reached (%)")
            picture.save(str(folder / "class.png"))
            body.append(f'<p><img src="class.png" alt="{html.escape(picture.alt)}"></p>')
        body.append(f"<h2>What goes wrong most</h2>{html_table(most_missed(everyone))}")
    body.append(f"<h2>Who</h2><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
    _write_page(folder / "index.html", "The class", "\n".join(body))


def _write_page(path: Path, title: str, body: str) -> None:
    """Write a page; lone surrogates, which JSON may contain but a UTF-8 file cannot, are escaped."""
    page = PAGE.format(title=html.escape(title), body=body)
    write_whole(path, page.encode("utf-8", "backslashreplace").decode())


def _short(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def lost_share(everyone: Sequence[Learner], questions: Sequence[str]) -> dict[str, float]:
    """Return, for each question, how many percent of its points those who submitted it did not reach."""
    found = {}
    for number in questions:
        reached = [points for each in everyone if (points := each.points(number)) is not None]
        found[number] = 100 * (1 - sum(reached) / len(reached) / _most(number)) if reached else 0.0
    return found


def _worst(lost: dict[str, float]) -> str:
    worst = [number for number, share in lost.items() if share == max(lost.values())]
    if len(worst) == 1:
        return f"Question {worst[0]} goes wrong most"
    return f"{len(worst)} questions go wrong most: {', '.join(worst[:6])}{' …' * (len(worst) > 6)}"


def most_missed(everyone: Sequence[Learner], rows: int = 10) -> list[dict[str, str]]:
    """Return the properties that fail for most learners, worst first."""
    missed: dict[tuple[str, str], int] = {}
    for each in everyone:
        for exercise in each.best.values():
            for number, found in exercise.result["questions"].items():
                for finding in found["findings"]:
                    key = number, finding["what"]
                    missed[key] = missed.get(key, 0) + (not finding["ok"])
    worst = sorted((item for item in missed.items() if item[1]), key=lambda item: (-item[1], item[0]))[:rows]
    return [{"question": n, "property": what, "learners": str(count)} for (n, what), count in worst]


def feedback_of(number: str, found: dict[str, Any]) -> Feedback:
    """Return the feedback as the learner would have seen it."""
    findings = [
        Finding(each["what"], each["ok"], each["seen"], each["hint"], each["points"])
        for each in found["findings"]
    ]
    return Feedback(number, findings, found["trouble"])


def _page_of(learner: Learner, exercises: Sequence[str]) -> str:
    parts = []
    for each in learner.graded:
        result = each.result
        counts = learner.best.get(result.get("exercise") or "") is each and result["exercise"] in exercises
        parts.append(f"<h2>{html.escape(each.submission.name)}: {each.points:g} of {each.most:g} points</h2>")
        parts += [] if counts else ["<p>It does not count.</p>"]
        parts += [f"<p>Note: {html.escape(word)}</p>" for word in result["trouble"]]
        parts += [feedback_of(n, found)._repr_html_() for n, found in result["questions"].items()]
    return "\n".join(parts)
