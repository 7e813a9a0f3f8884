"""The door between a judge and an answer: what crosses it, and how findings become points."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from course_lib.exercises.in_rank.work import in_group, run_work
from course_lib.exercises.judging import (
    far,
    furthest,
    in_digits,
    place_of_furthest,
    read,
    with_two_world_sizes,
)
from course_lib.exercises.question import REST, Ask, Finding, Question, Refused, a_function
from course_lib.exercises.wording import number, told

ASKED = (a_function, "f(x)")


def crossed(work: Any, answer: Any = len, *args: Any) -> Any:
    return read(run_work(ASKED, work, answer, args))


# --- what crosses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "arrives"),
    [
        ((1, [2.5, None, True]), [1, [2.5, None, True]]),
        (2**70, 2**70),
        ({"a": torch.tensor([[1.5], [0.1]], dtype=torch.float64)}, {"a": [[1.5], [0.1]]}),
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
        (np.arange(3), [0, 1, 2]),
        (np.float32(0.5), 0.5),
        (math.inf, math.inf),
        (torch.ones(2, device="meta"), "tensor(..., device='meta', size=(2,)), a Tensor"),
        ({1, 2}, "{1, 2}, a set"),
        (b"x", "b'x', a bytes"),
    ],
)
def test_plain_data_crosses_and_all_else_as_words(seen: Any, arrives: Any) -> None:
    assert crossed(lambda answer: seen) == arrives


def test_not_a_number_crosses() -> None:
    assert math.isnan(crossed(lambda answer: torch.tensor(math.nan)))


def test_a_refusal_crosses() -> None:
    def refuses(answer: Any) -> None:
        raise Refused("no list")

    with pytest.raises(Refused, match="no list"):
        crossed(refuses)
    with pytest.raises(Refused, match=r"f\(x\) is a function; this is 3, an int"):
        crossed(lambda answer: 1, 3)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"other": 1}', "[" * 100_000])
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        read(text)


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __float__(self) -> float:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (torch.tensor([2.5]), 2.5),
        (np.int64(4), 4.0),
        (None, "nothing (None)"),
        (True, "True, a bool"),
        ("3", "'3', a str"),
        (torch.ones(2), "tensor([1., 1.]), a Tensor"),
        (Odd(), "an Odd"),
    ],
)
def test_a_number_or_what_it_is_in_words(value: Any, expected: Any) -> None:
    assert number(value) == expected


def test_long_words_are_cut() -> None:
    assert len(told("x" * 1000)) < 80


# --- what a judge compares with ----------------------------------------------------------------------------


def test_how_far_apart() -> None:
    assert far([1.0, 2.0], torch.tensor([1.0, 4.0])) == 2.0
    assert far([], []) == 0.0
    for strange in ([1.0], [1.0, math.nan], [1.0, math.inf], "words", None, [[1.0], [1.0, 2.0]], 2**2000):
        assert far(strange, [1.0, 2.0]) == math.inf


def test_numbers_that_differ_look_different() -> None:
    assert in_digits(1.5, 2.0) == ["1.5", "2"]
    assert in_digits(1.23456, 1.23457) == ["1.23456", "1.23457"]
    assert in_digits(0.1, 0.1 + 2**-55) == ["0.10000000000000001", "0.10000000000000003"]
    assert in_digits(math.nan, 1.0) == ["nan", "1"]


def test_the_furthest_rank_and_number() -> None:
    assert furthest(iter([1.0, 3.0, 3.0])) == (1, 3.0)
    right = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert place_of_furthest([1.0, 4.0, 3.5], right) == 1
    assert place_of_furthest([9.0, 2.0, math.nan], right) == 2
    assert place_of_furthest(torch.tensor([[1.0, 1.5], [1.0, 5.0]]), 1.0) == 3


def test_two_world_sizes_are_judged_before_any_counts() -> None:
    asked: list[int] = []

    def judge(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
        yield Finding(f"with {ranks}")
        asked.append(ranks)

    findings = with_two_world_sizes()(judge)(None, random.Random(1))

    assert next(findings).what == f"with {asked[0]}"
    assert len(asked) == 2
    assert next(findings).what == f"with {asked[1]}"
    assert len(set(asked)) == 2
    assert set(asked) <= {2, 3, 4, 5}
    both = with_two_world_sizes(3, 5)(judge)
    assert {next(both(None, random.Random(seed))).what for seed in range(20)} == {"with 3", "with 5"}


# --- findings ----------------------------------------------------------------------------------------------


def question_of(
    *yielded: Finding, depends_on: dict[str, str] | None = None, trouble: bool = False
) -> Question:
    def judge(ask: Ask, rng: random.Random) -> Iterator[Finding]:
        yield from yielded
        if trouble:
            raise Refused("no more")

    return Question("f(x)", {"a": 1, "b": 2, "c": 4}, judge, a_function, depends_on or {})


def judged(asked: Question) -> dict[str, tuple[bool, str, str]]:
    return {
        finding.what: (finding.ok, finding.seen, finding.hint)
        for finding in asked.findings(None, random.Random())
    }


def test_what_is_not_judged_does_not_hold() -> None:
    assert judged(question_of(Finding("b", True))) == {
        "a": (False, "", ""),
        "b": (True, "", ""),
        "c": (False, "", ""),
    }


def test_the_first_case_that_does_not_hold_is_shown() -> None:
    cases = [
        Finding("a", True),
        Finding("a", False, "first"),
        Finding("a", True),
        Finding("a", False, "later"),
    ]
    assert judged(question_of(*cases))["a"] == (False, "first", "")


def test_what_rests_on_another_counts_with_it_alone() -> None:
    properties = judged(
        question_of(
            Finding("a", False, "wrong", "look"),
            Finding("b", True, "fine"),
            Finding("c", False, "not fine", "look there"),
            depends_on={"b": "a", "c": "b"},
        )
    )
    assert properties["a"] == (False, "wrong", "look")
    assert properties["b"] == (False, "it is not counted yet", REST)
    assert properties["c"] == (False, "not fine", REST)


def test_what_was_judged_before_the_trouble_counts() -> None:
    findings = question_of(Finding("b", True), trouble=True).findings(None, random.Random())
    reached = [(finding.what, finding.ok, finding.points) for finding in itertools.islice(findings, 3)]
    with pytest.raises(Refused, match="no more"):
        next(findings)
    assert reached == [("a", False, 1), ("b", True, 2), ("c", False, 4)]


def test_a_judge_works_as_in_a_fresh_process_and_leaves_the_notebook_as_it_is() -> None:
    seen = []

    def judge(ask: Ask, rng: random.Random) -> Iterator[Finding]:
        made = torch.rand(1)
        seen.append((made.dtype, made.device.type, torch.is_grad_enabled()))
        yield Finding("a", True)

    asked = Question("f(x)", {"a": 1}, judge, a_function)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            list(asked.findings(None, random.Random()))
            assert (torch.get_default_dtype(), torch.ones(1).device.type) == (torch.float64, "meta")
            assert not torch.is_grad_enabled()
        assert torch.equal(torch.get_rng_state().to("cpu"), before.to("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert seen == [(torch.float32, "cpu", True)]


def test_a_refusal_on_one_rank_of_a_group_is_heard_at_once() -> None:
    """The others do not wait for it until the check's limit."""
    from course_lib.exercises.check import RankRunner

    asked = question_of()
    with pytest.raises(Refused, match="rank 1 will not"):
        RankRunner(asked, len)(refuses_on_one, nprocs=3)


@in_group
def refuses_on_one(answer: Any) -> int:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise Refused("rank 1 will not")
    return 0


def test_arguments_cross_as_json() -> None:
    from course_lib.exercises.check import RankRunner

    assert RankRunner(question_of(), len)(given, (1, 2), {"a": (3,)}) == [[[1, 2], {"a": [3]}]]
    with pytest.raises(TypeError, match="not JSON serializable"):
        RankRunner(question_of(), len)(given, torch.ones(1))


def given(answer: Any, *args: Any) -> Any:
    return json.loads(json.dumps(args))
