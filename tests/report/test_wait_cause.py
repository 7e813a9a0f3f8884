"""Why ranks wait, by what is known of each: whose calls differ, who is missing, who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from course_lib.report.cause_words import MOST_RANKS, cause_text
from course_lib.report.facts import Call, RankState
from course_lib.report.wait_cause import wait_cause_of

ORDER = "; every rank has to call new_group for every group, in the same order"
WORLD = "0"


def collective(number: int, name: str = "all_reduce", group: str = WORLD, **more: Any) -> Call:
    return Call(name, group, number, **({"sizes": [[4]], "dtypes": ["Float"]} | more))


def barrier(number: int, line: int) -> Call:
    return collective(number, "barrier", place=("/course/train.py", line, "save"))


def message(name: str, other: int, tag: int = 0) -> Call:
    return Call(name, number=tag, ranks=[other])


def new_group(number: int, *ranks: int) -> Call:
    return Call("new_group", number=number, ranks=list(ranks))


def state(
    waits_in: Call | None = None,
    called: dict[str, int] | None = None,
    groups: dict[str, list[int]] | None = None,
    recent: list[Call] | None = None,
) -> RankState:
    """A rank that has stood still for a second, and has called what it waits in."""
    called = {WORLD: 0} | (called or {})
    if waits_in and waits_in.group:
        called[waits_in.group] = waits_in.number or 0
        recent = [*(recent or []), waits_in]
    its = {"called": called, "groups": groups or {}, "recent": recent or []}
    return RankState(0, "at work", seconds=1.0, waits_in=waits_in, **its)


def why(*states: RankState) -> str:
    ranks = [replace(each, rank=rank) for rank, each in enumerate(states)]
    return cause_text(wait_cause_of(ranks), ranks)


PAIRS = [{"1": [0, 1]}, {"1": [0, 1]}, {"2": [2, 3]}, {"2": [2, 3]}]
TWO = {"1": [0, 1], "2": [0, 1]}
CASES = {
    "late in a pair, and the other pair is further": (
        [
            state(collective(1, group="1"), groups=PAIRS[0]),
            state(groups=PAIRS[1]),
            state(collective(1), {"2": 1}, PAIRS[2]),
            state(collective(1), {"2": 1}, PAIRS[3]),
        ],
        "rank 1 never called all_reduce of group [0, 1] (collective 1), in which rank 0 waited; "
        "ranks 2, 3 waited for ranks 0, 1 in all_reduce (collective 1)",
    ),
    "the members are known from the late rank alone": (
        [state(collective(1, group="5")), state(groups={"5": [0, 1]}), state()],
        "rank 1 never called all_reduce of group [0, 1] (collective 1), in which rank 0 waited",
    ),
    "groups in another order": (
        [state(collective(1, group="1"), groups=TWO), state(collective(1, group="2"), groups=TWO)],
        "ranks 0, 1 waited for each other: "
        "rank 0 in all_reduce of group 1 = [0, 1] (collective 1) for rank 1, "
        "rank 1 in all_reduce of group 2 = [0, 1] (collective 1) for rank 0",
    ),
    "a circle of three, beside one who waits for it": (
        [
            state(message("recv", 1)),
            state(message("recv", 2)),
            state(message("recv", 0)),
            state(collective(1)),
        ],
        "ranks 0, 1, 2 waited for each other: rank 0 in recv for rank 1, rank 1 in recv for rank 2, "
        "rank 2 in recv for rank 0",
    ),
    "a message that no rank sends": (
        [state(message("recv", 1)), state(), state(message("recv", 1))],
        "rank 1 never sent what ranks 0, 2 waited for in recv",
    ),
    "a message that no rank receives": (
        [state(message("send", 1)), state()],
        "rank 1 never received what rank 0 sent, and rank 0 waited in send",
    ),
    "a message on its way": ([state(message("recv", 1)), state(message("send", 0))], ""),
    "a message with another tag": (
        [state(message("recv", 1, tag=3)), state(message("send", 0, tag=4))],
        "ranks 0, 1 waited for each other: rank 0 in recv (tag 3) for rank 1, "
        "rank 1 in send (tag 4) for rank 0",
    ),
    "a receiver beside a barrier": (
        [state(message("recv", 1)), state(collective(1, "barrier"))],
        "ranks 0, 1 waited for each other: rank 0 in recv for rank 1, "
        "rank 1 in barrier (collective 1) for rank 0",
    ),
    "late in new_group": (
        [state(new_group(1, 0, 1)), state(), state(collective(1, "barrier"))],
        "rank 1 never called new_group([0, 1]), in which rank 0 waited; "
        "rank 2 waited for ranks 0, 1 in barrier (collective 1)",
    ),
    "all in new_group": ([state(new_group(1, 0, 1)), state(new_group(1, 0, 1))], ""),
    "out of new_group already": ([state(new_group(1, 0, 1)), state(groups={"1": [0, 1]})], ""),
    "a local group in another order": (
        [state(new_group(2, 0, 1), groups={"ab": [0, 2]}), state(new_group(1, 0, 1)), state()],
        "ranks 0, 1 waited for each other: rank 0 in new_group([0, 1]), its group 2, for rank 1, "
        "rank 1 in new_group([0, 1]), its group 1, for rank 0" + ORDER,
    ),
    "each pair by itself": (
        [state(groups={"1": [0, 1]}), state(), state(groups={"1": [2, 3]}), state(groups={"1": [2, 3]})],
        "the ranks made different groups: new_group 1 is [0, 1] on rank 0 and [2, 3] on ranks 2, 3" + ORDER,
    ),
    "each one its own group": ([state(groups={"1": [0]}), state(groups={"1": [1]})], ""),
    "monitored_barrier": (
        [state(Call("monitored_barrier", ranks=[0, 1])), state()],
        "rank 1 never called monitored_barrier of group [0, 1], in which rank 0 waited",
    ),
    "a later difference is none yet": (
        [state(collective(3)), state(collective(3)), state(recent=[collective(4, "barrier")])],
        "rank 2 never called all_reduce (collective 3), in which ranks 0, 1 waited",
    ),
    "one that rank 0 called alone, before": (
        [
            state(barrier(3, 9), recent=[barrier(1, 4), barrier(2, 4)]),
            state(called={WORLD: 2}, recent=[barrier(1, 4), barrier(2, 9)]),
        ],
        "rank 1 never called barrier (collective 3), in which rank 0 waited; "
        "the last that they all called was at line 4 on rank 0 and at line 9 on rank 1",
    ),
    "another type of one of many": (
        [state(collective(1, dtypes=["Float", "Long", each])) for each in ("Float", "Long")],
        "the ranks do not match: "
        "collective 1 is all_reduce of shape [4] of float32, int64, float32 on rank 0 "
        "and all_reduce of shape [4] of float32, int64, int64 on rank 1",
    ),
    "another type, as far as torch tells, that reads the same": (
        [state(collective(1, dtypes=["Float"])), state(collective(1, dtypes=["float32"]))],
        "the ranks do not match: collective 1 is all_reduce of shape [4] of float32 on ranks 0, 1",
    ),
    "to another rank": (
        [state(collective(1, "reduce", root=0)), state(collective(1, "reduce", root=1))],
        "the ranks do not match: collective 1 is reduce to rank 0 on rank 0 and reduce to rank 1 on rank 1",
    ),
    "from another rank": (
        [
            state(collective(1, "broadcast", root=0)),
            state(collective(2, "barrier"), recent=[collective(1, "broadcast")]),
            state(collective(1, "broadcast", root=1)),
        ],
        "the ranks do not match: collective 1 is broadcast from rank 0 on rank 0 "
        "and broadcast from rank 1 on rank 2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_why_ranks_wait(case: str) -> None:
    states, expected = CASES[case]
    assert why(*states) == expected


def test_a_wait_in_passing_is_no_circle() -> None:
    """Its bucket is on the way, and the rank computes: it will call what the other waits in."""
    busy = replace(state(collective(1, group="1"), groups=TWO), seconds=None)
    told = why(busy, state(collective(1, group="2"), groups=TWO))
    assert "each other" not in told


def test_a_rank_that_is_silent_is_missing_where_its_stack_is_elsewhere() -> None:
    silent = replace(state(), called=None, silent=5.0)
    missing = "rank 1 never called barrier (collective 1), in which rank 0 waited"
    assert why(state(collective(1, "barrier")), silent).startswith(missing)
    assert "never" not in why(state(collective(1, "barrier")), replace(silent, function="barrier"))


def test_many_ranks_are_not_all_named() -> None:
    ranks = list(range(MOST_RANKS + 3))
    states = [state(collective(1, group="1"), groups={"1": ranks})] + [state()] * (len(ranks) + 1)
    assert "of group [0, 1, 2, 3, 4, 5, 6, 7 and 3 more] (collective 1)" in why(*states)
