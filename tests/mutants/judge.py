"""Judge mutants, one per line on stdin, in a separate process: `python -m tests.mutants.judge`.

`check` runs each answer in fresh processes, so what one mutant leaves behind does not affect the next. `run`
notices a mutant that ends this process or never ends.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import types
from collections.abc import Iterator
from typing import Any

import torch

from course_lib.exercises import questions
from course_lib.exercises.check import Feedback, check
from course_lib.exercises.question import QUESTIONS, Ask, Finding, Judge
from tests.mutants.answers import made
from tests.support import forked
from tests.support.line_process import serve

questions.load()
check_module = importlib.import_module("course_lib.exercises.check")  # not the function of the same name


def caught(number: str, answer: Any, seed: str) -> str:
    """Return why an answer misses points with the numbers that a seed draws; empty if it has all points."""
    check_module.random = types.SimpleNamespace(Random=lambda: random.Random(seed))
    torch.manual_seed(random.Random(seed).randrange(2**31))
    feedback: Feedback = check(number, answer)
    if feedback.points == feedback.most > 0:
        return ""
    if feedback.trouble:
        return feedback.trouble
    wrong = next((each for each in feedback.findings if not each.ok and each.seen), feedback.findings[0])
    return f"✗ {wrong.what}: {wrong.seen} – {wrong.hint}"


def judge(asked: dict[str, Any]) -> dict[str, Any]:
    """Judge a mutant: return why it was caught, and with which seed; both are empty if it was not."""
    try:
        answer = made(asked["before"], asked["source"], asked["name"])
    except Exception as error:
        return {"caught": f"it cannot be defined: {type(error).__name__}: {error}", "seed": ""}
    for seed in asked["seeds"]:
        why = caught(asked["number"], answer, seed)
        if forked.NOT_DONE in why:  # on a busy machine, right answers time out, too
            why = caught(asked["number"], answer, seed)
        if why:
            return {"caught": why, "seed": seed}
    return {"caught": "", "seed": ""}


def first_miss(judge: Judge) -> Judge:
    """Let a judge stop at the first property that an answer lacks: here no more is needed."""

    def hasty(ask: Ask, rng: random.Random) -> Iterator[Finding]:
        for found in judge(ask, rng):
            yield found
            if not found.ok:
                return

    return hasty


def main() -> None:
    """Judge mutants until stdin closes."""
    assert hasattr(check_module, "Door")
    check_module.Door = forked.Door
    check_module.note = lambda *_: None  # a mutant is no learner's progress
    for number, question in QUESTIONS.items():
        QUESTIONS[number] = dataclasses.replace(question, judge=first_miss(question.judge))
    forked.get_ready()
    serve(judge)


if __name__ == "__main__":
    main()
