"""The judges catch a sample of the mutants; `make mutants` tries all of them.

COURSE_DRAWS=1 python -m pytest tests/mutants -k sample      draws another sample, and so do 2, 3, …
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from course_lib.exercises import questions
from course_lib.exercises.question import QUESTIONS
from tests.mutants.answers import answers
from tests.mutants.mutate import mutants
from tests.mutants.run import UNCHANGED, Judged, Mutant, difference, equivalent, judged
from tests.support import forked

questions.load()
ASKED, OF_EACH = 10, 2


@pytest.mark.alone  # a judge's limit for ranks is some seconds, too short on a busy machine
def test_a_sample_is_caught() -> None:
    draws = os.environ.get("COURSE_DRAWS", "0")
    rng = random.Random(draws)
    chosen = rng.sample(answers(), ASKED)
    work = [(chosen[0], Mutant(UNCHANGED, chosen[0].source))]
    for answer in chosen:
        known = equivalent().get(answer.number, {})
        made = [each for each in mutants(answer.source) if each.change not in known]
        work += [(answer, each) for each in rng.sample(made, OF_EACH)]
    found = list(judged(work, draws, side_by_side=1))
    assert len(found) == 1 + ASKED * OF_EACH
    solution, *rest = found
    assert solution.caught == "", "the solution itself has all points"
    sources = {answer.number: answer.source for answer in chosen}
    missed = [_shown(each, sources[each.number]) for each in rest if not each.caught]
    assert not missed, "\n".join(missed)


@pytest.mark.alone
def test_a_judge_that_needs_a_folder_has_one() -> None:
    """Once it had none: all mutants of three questions looked caught, and so did the solutions."""
    (answer,) = [each for each in answers() if each.number == "10.3"]
    (found,) = judged([(answer, Mutant(UNCHANGED, answer.source))], "a seed", side_by_side=1)
    assert found.caught == "", "the solution itself has all points"


@pytest.mark.alone
def test_no_rank_begins_before_all_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank first connects to the store: its thread then holds a glibc lock, which a fork would keep."""
    forks = []

    def slow_fork() -> int:
        time.sleep(0.3)
        forks.append(time.time())
        return fork()

    fork = os.fork
    monkeypatch.setattr(os, "fork", slow_fork)
    began = forked.Door(QUESTIONS["01.1"], lambda: None)(_now, nprocs=3)
    assert len(forks) == 3
    assert min(began) >= forks[-1]


def _now(answer: Any) -> float:
    return time.time()


def _shown(each: Judged, source: str) -> str:
    return f"{each.number} missed: {each.mutant.change}{difference(source, each.mutant.source)}"


def test_each_equivalent_change_is_made_and_has_its_reason() -> None:
    known = equivalent()
    sources = {each.number: each.source for each in answers()}
    for number, changes in known.items():
        made = {each.change for each in mutants(sources[number])}
        assert changes.keys() <= made, f"{number}: {sorted(changes.keys() - made)}"
        for change, reason in changes.items():
            assert reason, change
            assert "\n" not in reason, change
