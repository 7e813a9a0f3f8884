"""Several runs side by side."""

from __future__ import annotations

import pytest

from course_lib import Run, compare
from tests.support.pictures import overlapping
from tests.support.runs import made_run


def test_compare_tells_the_ratio() -> None:
    picture = compare({"one rank": made_run(1), "two ranks": made_run(2, rate=800)})
    assert "two ranks: 1.60 × one rank" in picture.alt
    assert picture.figure.axes[1].get_xlabel() == "MiB, the rank with the most"
    assert overlapping(picture.figure) == []


def test_of_repeated_runs_the_median_counts_and_no_difference_that_a_round_denies() -> None:
    one = [made_run(1, rate=rate) for rate in (500, 400, 900)]
    twice = [made_run(1, rate=rate) for rate in (1000, 880, 1800)]
    clear = compare({"one": one, "two": twice})
    assert clear.alt.startswith("two: 2.00 × one. one: 500 (400 to 900) samples/s")
    assert overlapping(clear.figure) == []
    assert compare({"one": one, "two": [*twice[:2], one[0]]}).alt.startswith("two and one: now one is faster")
    with pytest.raises(ValueError, match="3 runs of 'one' cannot be compared with 2"):
        compare({"one": one, "two": twice[:2]})
    with pytest.raises(ValueError, match="'none' has no throughput"):
        compare({"one": one, "none": []})


def test_compare_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        compare({})
    with pytest.raises(ValueError, match="'silent' has no throughput"):
        compare({"silent": Run.create("silent", 1)})
