"""The judges find a sample of the mutants, drawn by date; `make mutants` takes all of them, in half an hour.

COURSE_MUTANT_DAY=740000 python -m pytest tests/mutants -k sample      as on that day
"""

from __future__ import annotations

import datetime
import os
import random

import pytest

from tests.mutants.answers import answers
from tests.mutants.mutate import mutants
from tests.mutants.run import UNCHANGED, Judged, Mutant, difference, equivalent, judged

QUESTIONS, OF_EACH = 10, 2


@pytest.mark.alone  # a judge waits some seconds for ranks, not for a machine with much else to do
def test_a_sample_by_date_is_caught() -> None:
    day = os.environ.get("COURSE_MUTANT_DAY") or str(datetime.date.today().toordinal())
    print(f"COURSE_MUTANT_DAY={day} draws the same sample again")
    dice = random.Random(day)
    chosen = dice.sample(answers(), QUESTIONS)
    work = [(chosen[0], Mutant(UNCHANGED, chosen[0].source))]
    for answer in chosen:
        known = equivalent().get(answer.number, {})
        made = [each for each in mutants(answer.source) if each.change not in known]
        work += [(answer, each) for each in dice.sample(made, OF_EACH)]
    found = list(judged(work, day, side_by_side=1))
    assert len(found) == 1 + QUESTIONS * OF_EACH
    solution, *rest = found
    assert solution.caught == "", "the solution itself has all points"
    sources = {answer.number: answer.source for answer in chosen}
    missed = [_shown(each, sources[each.number]) for each in rest if not each.caught]
    assert not missed, "\n".join([f"COURSE_MUTANT_DAY={day}", *missed])


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
