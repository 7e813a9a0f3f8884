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


def test_compare_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        compare({})
    with pytest.raises(ValueError, match="'silent' has no throughput"):
        compare({"silent": Run.create("silent", 1)})
