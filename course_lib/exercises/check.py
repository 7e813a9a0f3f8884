"""`check`: judges the answer to an exercise on fresh ranks, and shows what is wrong by its values.

A question (see `questions`) draws its inputs anew for each check, lets the answer work on them in fresh
ranks, and looks at properties of what came out: a memorised result does not pass, and a hang ends in seconds.
"""

from __future__ import annotations

import html
import json
import random
import warnings
from dataclasses import dataclass, field
from typing import Any

from ..launcher.launch import start
from ..report.failed import RankError, RankTimeout
from ..run_folder import RankFiles
from .asking import QUESTIONS, Finding, Question, Refused, Work, answer_in_a_rank, read
from .progress import note

LIMIT_SECONDS = 20.0  # for an answer's work on the ranks, their start included
MOST_BYTES = 16 << 20  # that a rank may tell of an answer
REPORT_LINES = 14  # of the report of a failure


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
    feedback = Feedback(number)

    def ask(work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        return ask_ranks(asked, answer, work, args, nprocs)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they would go to stderr
            for found in asked.findings(ask, random.Random()):
                feedback.findings.append(found)
    except Refused as reason:
        feedback.trouble = str(reason)
    except RankTimeout as error:
        feedback.trouble = f"your code was {_report(error)}"
    except RankError as error:
        feedback.trouble = f"your code failed: {_report(error)}"
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        feedback.trouble = f"your code failed: {type(error).__name__}: {reason:.300}"
    note(number, feedback.points, feedback.most)
    return feedback


def ask_ranks(asked: Question, answer: Any, work: Work, args: tuple[Any, ...], nprocs: int) -> list[Any]:
    """The notebook's way to ask (`asking.Ask`): the answer goes to fresh ranks, and JSON comes back.

    Nothing that the ranks leave behind is unpickled here.
    """
    given = (asked.takes, asked.form), work, answer, json.loads(json.dumps(args))
    run = start(answer_in_a_rank, given, {}, nprocs, "cpu", LIMIT_SECONDS, dashboard=False, trusted=False)
    texts = []
    for rank in range(nprocs):
        try:
            with open(RankFiles(run.folder, rank).answer, "rb") as file:
                texts.append(file.read(MOST_BYTES).decode(errors="replace"))
        except OSError:
            raise Refused("your code ended its process before it was done (sys.exit?)") from None
    return [read(text) for text in texts]


def _report(error: RankError) -> str:
    lines = str(error).splitlines()
    return "\n".join(lines[:REPORT_LINES])
