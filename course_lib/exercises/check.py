"""`check`: judge the answer to an exercise on fresh ranks, and show what is wrong by its values.

A question (see `questions`) draws new inputs for each check, runs the answer on them in fresh ranks, and
checks properties of the output: a memorised result does not pass, and a hang ends in seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import html
import json
import os
import random
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..launcher import forkserver
from ..launcher.forkserver import wait_until_loaded, warm_up
from ..launcher.launch import Launch, start
from ..pickling import dumps
from ..report.facts import RankState, Report
from ..report.failed import RankError, RankTimeout
from . import questions
from .in_rank.work import answer_file, answer_in_a_rank
from .inputs import folder
from .judging import read
from .leftover_processes import LeftoversEnd
from .progress import note
from .question import QUESTIONS, Ask, Finding, Question, Refused, Work
from .sharing import note_try
from .wording import reason, told

LIMIT_SECONDS = 20.0  # for an answer's work on the ranks, their start included
ALL_SECONDS = 30.0  # for all that a judge asks in one check
SPAWNED = 5  # times as long where ranks are not forked: each loads PyTorch when it starts
MOST_BYTES = 16 << 20  # that a rank may report
MOST_LETTERS = 600  # characters of what was seen, or of a line of a failure's report
REPORT_LINES = 14  # of a failure's report
ENDLESS = "The check was still reading what your code returned. Does it ever end?"
TOO_MUCH = "In a check, a rank may use 1 GiB of memory. Does what your code makes or returns ever end?"
ABORTED = (
    "gloo aborts where the tensors of one call differ from rank to rank. Do all ranks use the same size,"
    " shape and dtype, on the sending and on the receiving side?"
)
QUESTIONS_FOLDER = str(Path(__file__).with_name("questions")) + os.sep


@dataclass
class Feedback:
    """The result of a check. Its repr is the points, which nbgrader reads as partial credit."""

    question: str
    findings: list[Finding] = field(default_factory=list)
    trouble: str = ""  # why nothing, or not everything, could be judged

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
            lines.append(f"  {self._mark(each)} {each.what}")
            lines += [f"      {text}" for text in self._notes(each)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for each in self.findings:
            notes = "<br>".join(map(html.escape, self._notes(each)))
            notes = f'<div style="margin-left:1.4em">{notes}</div>' if notes else ""
            mark = f'<b style="color:{"#009e73" if each.ok else "#d55e00"}">{self._mark(each)}</b>'
            rows.append(f'<li style="list-style:none">{mark} {html.escape(each.what)}{notes}</li>')
        trouble = f"<pre>{html.escape(self.trouble)}</pre>" if self.trouble else ""
        return f'<b>{html.escape(self._head())}</b>{trouble}<ul style="padding-left:1em">{"".join(rows)}</ul>'

    def _head(self) -> str:
        return f"{self.question}: {self.points:g} of {self.most:g} points"

    def _mark(self, finding: Finding) -> str:
        """Return ✓, ✗ for the first property that does not hold, – for later ones: the first may be why."""
        first = next((each for each in self.findings if not each.ok), None)
        return "✓" if finding.ok else "✗" if finding is first else "–"

    def _notes(self, finding: Finding) -> list[str]:
        """Say what shows that the first property does not hold, and where to look."""
        if self._mark(finding) != "✗":
            return []
        return [text[:MOST_LETTERS] for text in (finding.seen, finding.hint) if text]


def check(number: str, answer: Any) -> Feedback:
    """Judge an answer: ``check("06.1", average_gradients)`` (every exercise).

    Parameters
    ----------
    number
        The question's number, as in ``"06.1"``.
    answer
        The function or class that the question asks for.

    Returns
    -------
    Feedback
        Points, and a mark for each property; at the ✗ what was seen, and a hint. An answer's exceptions and
        hangs are reported as feedback, too: `check` itself raises only if you interrupt it.
    """
    questions.load()
    if not isinstance(number, str) or number not in QUESTIONS:
        known = ", ".join(sorted(QUESTIONS))
        name = number if isinstance(number, str) else told(number)
        return Feedback(name, trouble=f"there is no question {name!r}; the questions are {known}")
    feedback = judged(number, RankRunner(QUESTIONS[number], answer), random.Random())
    note(number, feedback.points, feedback.most)
    note_try(number, feedback.points)
    return feedback


class Troubled(Exception):
    """Nothing, or not everything, could be judged; the message tells the learner why."""


def judged(number: str, ask: Ask, rng: random.Random) -> Feedback:
    """Run a question's judge and return its findings as feedback, with whatever went wrong meanwhile."""
    feedback = Feedback(number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they would go to stderr
            for found in QUESTIONS[number].findings(ask, rng):
                feedback.findings.append(found)
    except (Refused, Troubled) as why:
        feedback.trouble = str(why)
    except RankError as error:
        feedback.trouble = in_words(error)
    except Exception as error:
        feedback.trouble = f"your code failed: {reason(error)}"
    return feedback


def in_words(error: RankError) -> str:
    """Describe for the learner how an answer failed on the ranks."""
    lines = [line[:MOST_LETTERS] for line in str(error).splitlines()[:REPORT_LINES]]
    if isinstance(error, RankTimeout):
        lines[0] = f"your code was {lines[0]}"
        hint = ENDLESS if any(map(_is_in_the_judge, error.report.states)) else ""
    else:
        lines[0] = f"your code failed: {lines[0]}"
        hint = _hint(error.report)
    return "\n".join([*lines, *(["", hint] if hint else [])])


def _is_in_the_judge(state: RankState) -> bool:
    """Return whether a rank was in a question's code, called from no line of the learner's."""
    return bool(state.stack) and state.stack[0][0].startswith(QUESTIONS_FOLDER) and state.position is None


def _hint(report: Report) -> str:
    failures = report.failures
    if any(failure.kind == "raised" and failure.short_of_memory for failure in failures):
        return TOO_MUCH
    aborted = [line for failure in failures if failure.signal == "SIGABRT" for line in failure.last_lines]
    return ABORTED if any("gloo::" in line for line in aborted) else ""  # the class of gloo's exception


def pickled(answer: Any) -> bytes:
    """Pickle an answer for the ranks, in a thread, since this may run the answer's own code.

    Raises
    ------
    Refused
        Pickling it raises an error, or does not end.
    """
    sent: list[bytes] = []
    why: list[str] = []

    def send() -> None:
        try:
            sent.append(dumps(answer))
        except BaseException as error:  # SystemExit, too; the notebook's interrupt never reaches a thread
            why.append(reason(error))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    if thread.is_alive():
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        why = [f"it was not pickled after {LIMIT_SECONDS:g} s"]
    if not sent:
        raise Refused(f"your answer cannot be sent to the ranks: {why[0]}")
    return sent[0]


class RankRunner:
    """The notebook's `question.Ask`: it sends the answer to fresh ranks and gets JSON back.

    This process unpickles nothing that the ranks leave behind.
    """

    def __init__(self, asked: Question, answer: Any) -> None:
        self._asked, self._answer = asked, answer
        self._pickled: bytes | None = None
        self._left: float | None = None

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        if self._pickled is None:
            self._pickled = pickled(self._answer)
        kind = self._asked.accepts, self._asked.signature
        given = kind, work, self._pickled, json.loads(json.dumps(args))
        warm_up()
        wait_until_loaded(threading.Event())  # for seconds, the first time: the answer's limit begins later
        if self._left is None:  # `METHOD` is known by now
            self._left = ALL_SECONDS * (1 if forkserver.METHOD == "forkserver" else SPAWNED)
        limit, began = seconds_for(self._left), time.monotonic()
        try:
            texts = told_by_ranks(answer_in_a_rank, given, nprocs, limit)
        finally:
            self._left -= time.monotonic() - began
        return [read(text) for text in texts]

    def folder(self) -> contextlib.AbstractContextManager[Path]:
        """Provide an empty folder, and remove it afterwards."""
        return folder()


def seconds_for(left: float) -> float:
    """Return how long an answer may work on the ranks, given the seconds left for the whole check.

    Raises
    ------
    Refused
        No time is left.
    """
    if left <= 0:
        raise Refused(f"your code was not done after {ALL_SECONDS:g} s, in all calls of the check")
    return min(LIMIT_SECONDS, left)


def told_by_ranks(work: Work, given: tuple[Any, ...], nprocs: int, limit: float) -> list[str]:
    """Run a work on fresh ranks and return the text that each of them leaves, unexamined.

    Raises
    ------
    RankError
        A rank failed, or they were not done after ``limit`` seconds.
    Refused
        A rank ended without leaving an answer.
    """
    asked = Launch(work, given, nprocs=nprocs, device="cpu", timeout=limit, unpickle=False)
    run = start(asked, view=LeftoversEnd)
    texts = []
    for rank in range(nprocs):
        try:
            with open(answer_file(run.folder, rank), "rb") as file:
                texts.append(file.read(MOST_BYTES).decode(errors="replace"))
        except OSError:
            raise Refused("your code ended its process before it was done (sys.exit?)") from None
    return texts
