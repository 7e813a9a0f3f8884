"""A question of an exercise: what it asks for, and the judge, which yields findings on an answer.

A judge reaches an answer only through `Ask`: ``ask(work, *args, nprocs=3)`` runs ``work(answer, *args)`` on
fresh ranks (`in_rank`) and returns each rank's report, as plain data. So the judge never holds the answer or
runs its code, a work contains no expected value, and only JSON crosses between them. A judge refuses reports
without the shape that stands next to the work (`shape`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from .shape import misfit, shape_of
from .wording import shown

REST = "This depends on what is above: fix that first."

SO_FAR = "it held as far as your code got"

GO_ON = "It counts once the whole check has run: what stopped your code is shown above."

MISSHAPEN = (
    "the check's report is malformed ({}). Does your code change something that Python, torch "
    "or the course relies on?"
)

Result = dict[str, Any]  # what a work reports of one call on one rank, as plain data
Work = Callable[..., Any]  # called with the answer, then with the judge's arguments


class Ask(Protocol):
    """The only way for a judge to reach an answer."""

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        """Run ``work(answer, *args)`` on ranks; return each rank's numbers, strings, lists and dicts.

        Raises
        ------
        Refused
            The answer is not of the kind that is asked for, as `Question.accepts` or the work found.
        """

    def folder(self) -> contextlib.AbstractContextManager[Path]:
        """Provide an empty folder for the ranks; the judge may be unable to reach it."""


class Asking:
    """An `Ask` that refuses a report without the shape that its work must give (see `shape.reports`)."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        reports = self._ask(work, *args, nprocs=nprocs)
        if where := misfit(reports, shape_of(work, args)):
            raise Refused(MISSHAPEN.format(where))
        return reports

    def folder(self) -> contextlib.AbstractContextManager[Path]:
        return self._ask.folder()


class Refused(Exception):
    """The answer is not of the kind asked for, or cannot be judged; the message says why."""


@dataclass
class Finding:
    """One property of an answer: whether it holds and, if not, what shows that and where to look."""

    what: str
    ok: bool = False
    seen: str = ""
    hint: str = ""
    points: float = 0.0


Judge = Callable[[Ask, random.Random], Iterator[Finding]]


@dataclass
class Question:
    """A question: the signature and properties of a right answer, the points for each, and the judge."""

    signature: str  # "pass_right(tensor)"
    properties: dict[str, float]
    judge: Judge
    accepts: Callable[[Any, str], None]
    depends_on: Mapping[str, str] = field(default_factory=dict)  # as in `question`
    hints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # as in `question`

    @property
    def most(self) -> float:
        """The points of an answer that has all properties."""
        return float(sum(self.properties.values()))

    def findings(self, ask: Ask, rng: random.Random) -> Iterator[Finding]:
        """Yield a finding for every property; a property that the judge does not reach does not hold.

        Of several findings on a property, the first that does not hold counts. If a property does not hold,
        those that depend on it do not either. If the judge raises after every property has held, none of them
        counts: the rest of the judge might have refuted any of them.
        """
        judged: dict[str, Finding] = {}
        trouble: Exception | None = None
        try:
            with _as_in_a_fresh_process():
                for finding in self.judge(Asking(ask), rng):
                    if finding.what not in judged or judged[finding.what].ok:
                        judged[finding.what] = finding
        except Exception as error:
            trouble = error
            if all(what in judged and judged[what].ok for what in self.properties):
                judged = {what: Finding(what, False, SO_FAR, GO_ON) for what in judged}
        holds: dict[str, bool] = {}
        for what, points in self.properties.items():
            finding = judged.get(what, Finding(what))
            if what in judged and what in self.depends_on and not holds[self.depends_on[what]]:
                finding.seen = "it is not counted yet" if finding.ok else finding.seen
                finding.ok, finding.hint = False, REST
            finding.hint = self.hints.get(what, {}).get(finding.hint, finding.hint)
            finding.ok, finding.points = bool(finding.ok), points
            holds[what] = finding.ok
            yield finding
        if trouble is not None:
            raise trouble


QUESTIONS: dict[str, Question] = {}


def a_function(answer: Any, signature: str) -> None:
    """Refuse an answer that cannot be called."""
    if not callable(answer):
        raise Refused(f"{signature} is a function; this is {shown(answer)}")


def a_module(answer: Any, signature: str) -> None:
    """Refuse an answer that is not a subclass of `torch.nn.Module`."""
    if not (isinstance(answer, type) and issubclass(answer, torch.nn.Module)):
        raise Refused(f"{signature} is a class, an nn.Module; this is {shown(answer)}")


def question(
    number: str,
    signature: str,
    properties: dict[str, float],
    accepts: Callable[[Any, str], None] = a_function,
    depends_on: Mapping[str, str] | None = None,
    hints: Mapping[str, Mapping[str, str]] | None = None,
) -> Callable[[Judge], Judge]:
    """Register the decorated function as the judge of a question.

    Parameters
    ----------
    number
        The question's number, as in ``"05.1"``.
    signature
        What is asked for, as a learner writes it: ``"pass_right(tensor)"``.
    properties
        What a right answer does, in words, and the points for each.
    accepts
        Refuses an answer of another kind, in the rank: `a_function` or `a_module`.
    depends_on
        For a property, an earlier one without which it does not count.
    hints
        For a property, the faults that its judge names in a finding's ``hint``, each with the sentence that
        the learner reads.
    """

    def register(judge: Judge) -> Judge:
        QUESTIONS[number] = Question(signature, properties, judge, accepts, depends_on or {}, hints or {})
        return judge

    return register


@contextlib.contextmanager
def _as_in_a_fresh_process() -> Iterator[None]:
    """Shield a judge from the notebook's torch settings, and the notebook's RNG state from the judge."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device == torch.device("cpu") else device)
