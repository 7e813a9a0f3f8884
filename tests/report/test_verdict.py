"""What `why` makes of figures: an effect counts if it is larger than the spread, and the largest is named."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.record.layout import NO_GRADIENT_SYNC, REPEATED_BATCHES
from course_lib.report.verdict import AS_IT_IS, LARGER_BATCH, ONE_RANK, Verdict, verdict_on_trials


def tried(spread: float = 2.0, **ways: Any) -> Verdict:
    """Judge made-up trials of two ranks: by way the median rates; the three rounds differ by ``spread``.

    A way that is left out is as fast as the unchanged run, one with the rates None was not tried.
    """
    names = {"repeated": REPEATED_BATCHES, "no_sync": NO_GRADIENT_SYNC, "one": ONE_RANK}
    medians = {AS_IT_IS: ways.pop("as_it_is", [100.0, 100.0])}
    medians |= {name: ways.pop(short, medians[AS_IT_IS]) for short, name in names.items()}
    medians[LARGER_BATCH] = ways.pop("larger", medians[REPEATED_BATCHES])
    assert not ways
    skipped = {way: "not known: it failed" for way, rates in medians.items() if rates is None}
    trials = {
        way: [
            [rate + shift for rate in (rates[:1] if way == ONE_RANK else rates)]
            for shift in (0.0, spread / 2, -spread / 2)
        ]
        for way, rates in medians.items()
        if rates is not None
    }
    return verdict_on_trials(trials, skipped)


CASES: list[tuple[dict[str, Any], str, dict[str, float]]] = [
    ({}, "computing", {}),
    ({"repeated": [200, 200]}, "loader", {"loader": 0.5}),
    ({"no_sync": [200, 200], "one": [200]}, "communication", {"communication": 0.5}),
    ({"no_sync": [100, 200]}, "straggler", {"straggler": 0.5}),
    ({"as_it_is": [100] * 4, "no_sync": [200, 100, 200, 101]}, "straggler", {"straggler": 0.5}),
    ({"as_it_is": [100] * 4, "no_sync": [100, 100, 100, 200]}, "computing", {}),
    ({"one": [200]}, "sharing", {"sharing": 0.5}),
    ({"larger": [400, 400]}, "little work", {"little work": 1.0}),
    # a larger batch gains no more than communication explains: that is not told twice
    (
        {"no_sync": [200, 200], "one": [200], "larger": [160, 160]},
        "communication",
        {"communication": 0.5},
    ),
    # ranks that wait for each other do not share what the one alone has
    ({"as_it_is": [50, 50], "no_sync": [100, 100], "one": [100]}, "communication", {"communication": 0.5}),
    # a loader's cost is no part of what a step costs
    ({"repeated": [200, 200], "larger": [200, 200]}, "loader", {"loader": 0.5}),
    # several at once: each has its own cost, and the largest is the cause
    (
        {"repeated": [125, 125], "no_sync": [200, 200], "one": [400], "larger": [500, 500]},
        "communication",
        {"communication": 0.5, "sharing": 0.25, "loader": 0.2, "little work": 0.3},
    ),
    # what could not be tried may be it, unless another cause is found
    ({"no_sync": None, "one": [200]}, "sharing", {"sharing": 0.5}),
    ({"no_sync": None}, "unknown", {}),
    ({"repeated": None, "larger": [400, 400]}, "unknown", {}),  # it lacks what it is compared with
    # what is slower, or hardly faster, is no cause
    ({"repeated": [50, 50], "no_sync": [95, 95], "larger": [40, 40]}, "computing", {}),
    ({"repeated": [109, 109]}, "computing", {}),
    # what the spread may explain is none, and where it is large, nothing can be said
    ({"repeated": [140, 140], "spread": 50}, "unknown", {}),
    ({"repeated": [160, 160], "spread": 50}, "loader", {"loader": 0.375}),
    ({"spread": 9}, "computing", {}),
    ({"spread": 11}, "unknown", {}),
]


@pytest.mark.parametrize(("ways", "cause", "costs"), CASES)
def test_the_cause_is_what_costs_most(ways: dict[str, Any], cause: str, costs: dict[str, float]) -> None:
    verdict = tried(**ways)
    assert verdict.cause == cause, verdict
    assert verdict.costs == pytest.approx(costs, abs=0.02)
    assert verdict.cause in repr(verdict)


def test_the_sentence_has_the_figures() -> None:
    assert tried(no_sync=[200, 200], one=[200]).sentence == (
        "without gradient synchronization a rank does 200 samples/s instead of 100: 50% of the time goes into"
        " it, or into waiting there for whichever rank is late. More work between two all_reduces helps: a"
        " larger batch, or accumulation."
    )
    late = tried(no_sync=[200, 100], one=[200]).sentence
    assert late.endswith("rank 1 does 100 samples/s, and the others 200: they wait for it.")
    assert "the spread of its rounds (up to 50%)" in tried(spread=50).sentence


def test_the_table_shows_every_way() -> None:
    trials = {AS_IT_IS: [[1000.0, 1010.0], [1020.0, 1000.0], [990.0, 1005.0]]}
    trials[REPEATED_BATCHES] = [[2000.0, 2000.0]] * 3
    trials[NO_GRADIENT_SYNC] = [[1000.0, 1001.0]] * 3
    verdict = verdict_on_trials(trials, {ONE_RANK: "not known: ValueError: it needs a rank 1"})
    assert [list(row.values()) for row in verdict.rows] == [
        ["as it is", "1,000 · 1,005", "990 to 1,000", ""],
        ["first batches repeated", "2,000 · 2,000", "2,000", "× 2.00"],
        ["no gradient sync", "1,000 · 1,001", "1,000", "× 1.00, within the spread"],
        ["one rank", "–", "–", "not known: ValueError: it needs a rank 1"],
    ]
