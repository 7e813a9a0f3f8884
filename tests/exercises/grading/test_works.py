"""What of a question's own file crosses the walls."""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from course_lib.exercises.asking import Question, Refused
from course_lib.exercises.grading import judge


class Records:
    """A way to ask that keeps the first work of a judge, as it would cross."""

    def __init__(self, asked: Question) -> None:
        self.asked, self.crossed = asked, b""

    def __call__(self, work: Any, *args: Any, nprocs: int = 1) -> list[Any]:
        self.crossed = base64.b64decode(judge.sent(self.asked, work))
        raise Refused("that was all")

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        yield Path("/nowhere")


@pytest.mark.parametrize("number", sorted(judge.forms()))
def test_a_work_brings_no_judge_with_it(number: str) -> None:
    """What crosses are the functions that a work calls: none that judges."""
    ask = Records(judge.QUESTIONS[number])
    with contextlib.suppress(Refused):
        list(ask.asked.findings(ask, random.Random(3)))
    assert len(ask.crossed) > 100
    assert b"Finding" not in ask.crossed
