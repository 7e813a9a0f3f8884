"""`check`: judges the answer to an exercise on fresh ranks, and shows what is wrong by its values.

A question (see `questions`) draws its inputs anew for each check, lets the answer work on them in fresh
ranks, and looks at properties of what came out: a memorised result does not pass, and a hang ends in seconds.
"""

from __future__ import annotations

import html
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..launcher.launch import launch
from ..report.failed import RankError, RankTimeout
from ..run.run import Run
from .progress import note

LIMIT_SECONDS = 20.0  # for an answer's work on the ranks, their start included
REPORT_LINES = 14  # of the report of a failure


@dataclass
class Finding:
    """One property of an answer: whether it holds, and if not, what shows it and where to look."""

    what: str
    points: float
    ok: bool = False
    seen: str = ""
    hint: str = ""


@dataclass
class Feedback:
    """The result of a check. Its repr is the points, which nbgrader reads as partial credit."""

    question: str
    findings: list[Finding] = field(default_factory=list)
    trouble: str = ""  # why nothing, or not all, could be judged

    @property
    def points(self) -> float:
        return sum(each.points for each in self.findings if each.ok)

    @property
    def most(self) -> float:
        return sum(each.points for each in self.findings)

    def __repr__(self) -> str:
        return f"{self.points:g}"

    def __str__(self) -> str:
        lines = [self._head(), *(f"  {line}" for line in self.trouble.splitlines())]
        for each in self.findings:
            lines.append(f"  {'✓' if each.ok else '✗'} {each.what}")
            lines += [f"      {text}" for text in self._notes(each)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for each in self.findings:
            notes = "<br>".join(map(html.escape, self._notes(each)))
            notes = f'<div style="margin-left:1.4em">{notes}</div>' if notes else ""
            mark = f'<b style="color:{"#009e73" if each.ok else "#d55e00"}">{"✓" if each.ok else "✗"}</b>'
            rows.append(f'<li style="list-style:none">{mark} {html.escape(each.what)}{notes}</li>')
        trouble = f"<pre>{html.escape(self.trouble)}</pre>" if self.trouble else ""
        return f'<b>{html.escape(self._head())}</b>{trouble}<ul style="padding-left:1em">{"".join(rows)}</ul>'

    def _head(self) -> str:
        return f"{self.question}: {self.points:g} of {self.most:g} points"

    @staticmethod
    def _notes(finding: Finding) -> list[str]:
        return [] if finding.ok else [text for text in (finding.seen, finding.hint) if text]


Judge = Callable[[Any, random.Random], Iterator[tuple[str, bool, str, str]]]


@dataclass
class Question:
    """What is asked: its properties with their points, and the judge of an answer."""

    properties: dict[str, float]
    judge: Judge


QUESTIONS: dict[str, Question] = {}


def question(number: str, properties: dict[str, float]) -> Callable[[Judge], Judge]:
    """Register the judge of a question.

    It is called with the answer and a source of randomness, and yields ``(property, holds, what was seen,
    hint)``; a property that it does not come to does not hold. It may raise `Refused`.
    """

    def register(judge: Judge) -> Judge:
        QUESTIONS[number] = Question(properties, judge)
        return judge

    return register


class Refused(Exception):
    """The answer is not of the kind that was asked for; the text says what is."""


def check(number: str, answer: Any) -> Feedback:
    """Judge an answer: ``check("06.1", average_gradients)`` (every exercise).

    Parameters
    ----------
    number
        The question's, as in ``"06.1"``.
    answer
        The function or class that the question asks for.

    Returns
    -------
    Feedback
        Points, and each property with ✓ or ✗; for an ✗ what was seen, and a hint. It never raises: what the
        answer raises, and where it hangs, is feedback.
    """
    from . import questions  # noqa: F401 – registers them

    if number not in QUESTIONS:
        known = ", ".join(sorted(QUESTIONS))
        return Feedback(str(number), trouble=f"there is no question {number!r}; there are {known}")
    asked = QUESTIONS[number]
    findings = {what: Finding(what, points) for what, points in asked.properties.items()}
    feedback = Feedback(number, list(findings.values()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they would go to stderr
            for what, ok, seen, hint in asked.judge(answer, random.Random()):
                finding = findings[what]
                finding.ok, finding.seen, finding.hint = bool(ok), seen, hint
    except Refused as reason:
        feedback.trouble = str(reason)
    except RankTimeout as error:
        feedback.trouble = f"your code was {_report(error)}"
    except RankError as error:
        feedback.trouble = f"your code failed: {_report(error)}"
    except KeyboardInterrupt:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        feedback.trouble = f"your code failed: {type(error).__name__}: {reason:.300}"
    note(number, feedback.points, feedback.most)
    return feedback


def observe(work: Callable[..., Any], *args: Any, nprocs: int = 1) -> list[Any]:
    """What `work` returns on fresh ranks, by rank: tensors, numbers, strings and containers of them."""
    run = launch(work, *args, nprocs=nprocs, device="cpu", timeout=LIMIT_SECONDS, dashboard=False)
    results = Run.open(run.folder).results  # read as plain data, whatever the answer has done
    if any(each is None for each in results):
        raise Refused("your code ended its process before it was done (sys.exit?)")
    return results


def a_function(answer: Any, form: str) -> None:
    """Refuse an answer that cannot be called; ``form`` says what was asked for."""
    if not callable(answer):
        raise Refused(f"{form} is a function; this is {answer!r:.60}, a {type(answer).__name__}")


def _report(error: RankError) -> str:
    lines = str(error).splitlines()
    return "\n".join(lines[:REPORT_LINES])
