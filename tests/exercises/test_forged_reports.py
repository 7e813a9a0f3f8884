"""No forged report gains a point: neither a right one that lacks a part, nor a wrong one that is changed.

What the ranks of an answer report is recorded once, then changed and judged many times, without any rank.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from course_lib.exercises.question import QUESTIONS, Refused
from course_lib.exercises.shape import SHAPES, misfit, shape_of
from tests.exercises.forgeries import Report, constants, of_a_whole, of_one_place
from tests.exercises.test_questions import the_first_to_end
from tests.support.line_process import LineProcess

# What a rank alone can see, as whether a mode was changed, it can deny: that is the report of another answer.
LIES = ("bools: True", "bools: False", "text: ''")
# What no verdict rests on, what an answer may do once more or less, or what is right on other ranks, too: by
# question, words of the forgery
MAY_LACK = {
    "05.2": ("each says what the one before it says",),
    "06.1": ("all say what rank 0 says",),
    "06.2": ("all say what rank 0 says",),
    "07.2": ("each says what the one before it says",),
    "08.2": ("'file'", "'state'", "(2, 0, 2): gone", "with one item more"),
    "17.2": ("depth 3: with one item more",),  # the script has an argument
    "20.2": ("each says what the one before it says",),
}
# Points for the report of an earlier draw: for what a rank alone can see, and for what is alike in both draws
FOR_EARLIER = {"01.1": 2, "07.2": 1, "08.2": 1, "17.1": 1}


class Left:
    """An `Ask` whose ranks have left a report, whatever they are asked; it keeps the shape of the first."""

    def __init__(self, report: Report) -> None:
        self._left = iter(report)
        self.shape: Any = None

    def __call__(self, work: Any, *args: Any, nprocs: int = 1) -> list[Any]:
        assert work in SHAPES, "each work says the shape of its report"
        if self.shape is None:
            self.shape = shape_of(work, args)
        for told in self._left:
            return (told * nprocs)[:nprocs]  # one from each rank, however many there were in an earlier draw
        raise Refused("they left no more")

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        yield Path("/nowhere")


class Forger:
    """Has reports of a question judged, always for the same draw."""

    def __init__(self, number: str, process: LineProcess) -> None:
        self.number, self._process = number, process
        self.most = sum(QUESTIONS[number].properties.values())
        for _ in range(3):  # some judge durations, which a busy machine spoils
            self.right = self.report("solution", "drawn")
            points, left = self._judged(self.right)
            if points == self.most:
                break
        assert points == self.most
        self._shape = left.shape

    def report(self, kind: str, seed: str) -> Report:
        """What the ranks report of an answer; empty if one of them fails."""
        index = the_first_to_end(self.number) if kind == "wrong" else 0
        asked = {"number": self.number, "kind": kind, "index": index, "seed": seed, "report": True}
        told = self._process.ask(asked)
        assert told is not None
        return [] if told["failed"] else told["report"]

    def points(self, report: Report) -> float:
        """The points for a report. Whatever it holds, the judge does not fail."""
        if report and misfit(report[0], self._shape):  # as `question.Asking` finds, once all is drawn again
            return 0
        return self._judged(report)[0]

    def _judged(self, report: Report) -> tuple[float, Left]:
        points: dict[str, float] = {}
        left = Left(report)
        with contextlib.suppress(Refused):
            for found in QUESTIONS[self.number].findings(left, random.Random("drawn")):
                points[found.what] = found.points * found.ok
        return sum(points.values()), left


@pytest.mark.parametrize("number", QUESTIONS)
def test_a_forged_report_gains_nothing(number: str, process: LineProcess) -> None:
    forger = Forger(number, process)
    right, wrong = forger.right, forger.report("wrong", "drawn")
    unforged, earlier = forger.points(wrong), forger.points(forger.report("solution", "drawn earlier"))
    may_lack = MAY_LACK.get(number, ())
    gained = [words for words, forged in constants(right) if forger.points(forged) > 0]
    gained += [
        words
        for words, forged in (*of_a_whole(right), *of_one_place(right))
        if words not in LIES and not any(part in words for part in may_lack)
        if forger.points(forged) == forger.most
    ]
    gained += [
        f"a wrong one, {words}"
        for words, forged in of_a_whole(wrong)
        if words not in LIES and not any(part in words for part in may_lack)
        if forger.points(forged) > unforged
    ]
    assert gained == [], "\n".join(gained)
    assert earlier <= FOR_EARLIER.get(number, 0), "an earlier draw has points for what was drawn anew"
