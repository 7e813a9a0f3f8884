"""The shapes of reports, and where one is not of its shape."""

from __future__ import annotations

import math
from typing import Any

import pytest

from course_lib.exercises.question import Finding, Question, Refused, a_function
from course_lib.exercises.shape import NUMBER, TENSOR, misfit, of_size, reports, shape_of

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("shape", "fit", "others"),
    [
        (bool, [True, False], [1, 0, None, "", []]),
        (int, [0, -1, 2**62], [True, 1.0, NAN, 2**63, 10**400, "1", None]),
        (float, [0, 1.5, -2], [NAN, INF, True, 2**63, "1.5", None, [1.5]]),
        (NUMBER, [0, 1.5, NAN, -INF], [True, 10**400, "nan", None, []]),
        (
            TENSOR,
            [1, NAN, [], [1.0], [[1], [2.5]], [[], []], [True]],
            ["", [""], [1, [1]], [[1], []], None, {}],
        ),
        (str, ["", "a"], [None, 1, ["a"]]),
        (None, [None], [0, "", False, []]),
        ("done", ["done"], ["", "Done", None]),
        (object, [None, NAN, {}, [[]]], []),
        ([int, str], [[1, "a"]], [[], [1], ["a", 1], [1, "a", 1], None, {}]),
        ([], [[]], [[1], {}, None]),
        ([int, ...], [[], [1], [1, 2]], [[1, None], [1.5], {}, None]),
        ([int, int, ...], [[1], [1, 2, 3]], [[], [None], [1, None]]),
        ({"a": int}, [{"a": 1}], [{}, {"a": 1, "b": 1}, {"b": 1}, {"a": None}, [1], None]),
        ({str: int}, [{}, {"a": 1, "b": 2}], [{"a": "1"}, []]),
        ((int, None, [str, ...]), [1, None, [], ["a"]], ["a", [1], {}]),
        (of_size(int, 2, 1), [[[1], [2]]], [[1, 2], [[1]], [[1], [2], [3]], [[1], []]]),
    ],
)
def test_what_is_of_a_shape(shape: Any, fit: list[Any], others: list[Any]) -> None:
    assert [value for value in fit if misfit([value], shape)] == []
    assert [value for value in others if not misfit([value], shape)] == []


def test_where_a_report_is_not_of_its_shape() -> None:
    shape = [{"sums": [float, ...]}, (None, {"why": str})]
    right = [{"sums": [1.0]}, {"why": ""}]
    assert misfit([right, [{"sums": []}, None]], shape) == ""
    assert misfit([right, [{"sums": [1.0, NAN]}, None]], shape) == "rank 1, at [0]['sums'][1]"
    assert misfit([[{"sums": []}, {"why": 3}]], shape) == "rank 0, at [1]['why']"
    assert misfit([right, []], shape) == "rank 1"


def test_lists_without_an_end_are_of_no_shape() -> None:
    endless: Any = []
    for _ in range(5000):
        endless = [endless]
    assert misfit([endless], TENSOR) == "rank 0"


def test_a_shape_goes_by_the_arguments_and_the_rank() -> None:
    @reports(lambda sizes: lambda rank: [int] * sizes[rank])
    def work(answer: Any, sizes: list[int]) -> list[int]:
        return []

    shape = shape_of(work, ([1, 2],))
    assert misfit([[5], [5, 5]], shape) == ""
    assert misfit([[5], [5]], shape) == "rank 1"
    assert misfit([None], shape_of(len, ())) == "", "a work that says nothing may report anything"


def test_a_judge_never_meets_a_report_of_another_shape() -> None:
    @reports(lambda: [int, ...])
    def work(answer: Any) -> list[int]:
        return []

    def judge(ask: Any, rng: Any) -> Any:
        yield Finding("a", sum(ask(work)[0]) == 3)

    asked = Question("f()", {"a": 1}, judge, a_function)
    assert [found.ok for found in asked.findings(lambda *_, nprocs=1: [[1, 2]], None)] == [True]
    with pytest.raises(Refused, match=r"report is malformed \(rank 0, at \[1\]\)"):
        list(asked.findings(lambda *_, nprocs=1: [[1, None]], None))
