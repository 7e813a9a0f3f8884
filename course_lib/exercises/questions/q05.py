"""The questions of lesson 05: half an all_reduce, from messages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..in_rank.traffic import noting_bytes, record_traffic
from ..in_rank.work import in_group
from ..inputs import seeds, tensor
from ..judging import by_call, first_wrong, furthest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, Work, question
from ..shape import NUMBER, of_size, reports
from ..wording import told

FIRST = (3, 5)  # the world sizes tried first: no powers of two, for which a butterfly would be right, too
LIMIT = 2**30  # of whole numbers that float32 cannot hold, but float64 can, and their sums
Case = dict[str, Any]


def _whole(seed: int, shape: list[int], dtype: str) -> Tensor:
    """Draw whole numbers, which have exact sums in any order; each takes 8 bytes."""
    if dtype == "int64":
        return tensor(seed, tuple(shape), torch.int64)
    return torch.randint(-LIMIT, LIMIT, shape, generator=torch.Generator().manual_seed(seed)).double()


WATCHED: Result = {"others": [str, ...], "bytes": int, "to": [int, ...]}


def _watched(answer: Callable[..., Any], *args: Any) -> tuple[Any, Result]:
    """Call the answer in a rank; return its value, its collectives, what it sent, and to whom."""
    shares: list[float] = []  # `noting_bytes` divides a message's bytes by the number of other ranks
    with record_traffic() as seen, noting_bytes(shares.append):
        value = answer(*args)
    others = [name for name in seen.collectives() if name != "barrier"]
    sent = round(sum(shares) * (dist.get_world_size() - 1))
    return value, {"others": others, "bytes": sent, "to": sorted(seen.to)}


def _heard(ask: Ask, work: Work, cases: list[Case], count: int) -> list[list[Result]]:
    """Return what the ranks saw, by case and rank; refuse an answer that uses anything but messages."""
    by_rank = ask(work, cases, nprocs=count)
    for others in (call["others"] for calls in by_rank for call in calls):
        if others:
            raise Refused(f"dist.{others[0]} does the work here; this time only messages are allowed")
    return by_call(by_rank)


def _shown(numbers: Any) -> str:
    return f"{numbers[:3]}" if isinstance(numbers, list) else str(numbers)


# --- 05.1 -------------------------------------------------------------------------------------------------

FROM_LEFT, KEPT = "every rank gets its left neighbour's tensor", "its own tensor stays as it was"
TO_RIGHT = "each rank sends to its right neighbour only"


@question(
    "05.1",
    "pass_right(tensor)",
    {FROM_LEFT: 2, TO_RIGHT: 1, KEPT: 1},
    depends_on={KEPT: FROM_LEFT},
    hints={
        FROM_LEFT: {
            "another form": "A message fills a tensor of yours. Which shape and dtype must this have?",
            "the other way": "That is the right neighbour's. Which way do the messages go?",
            "not all alike": "Some ranks have it, others do not. Where does the last one send?",
            "not what came": "That is not what was sent. Into which tensor did it go, and was it there yet?",
        },
        TO_RIGHT: {"to others": "Which rank should get a rank's tensor, and which should not?"},
        KEPT: {"overwritten": "The message went into the tensor that is sent. It needs a tensor of its own."},
    },
)
@with_two_world_sizes(*FIRST)
def pass_right(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    size = rng.randrange(3, 9)
    cases: list[Case] = [{"shape": [size], "dtype": "float64"}, {"shape": [2, size], "dtype": "int64"}]
    cases = [case | {"seeds": seeds(rng, count)} for case in cases]
    for case, results in zip(cases, _heard(ask, _passed, cases, count), strict=True):
        drawn = [_whole(seed, case["shape"], case["dtype"]).tolist() for seed in case["seeds"]]
        got, form = [result["got"] for result in results], [case["dtype"], case["shape"]]
        right = [got[rank] == drawn[rank - 1] and results[rank]["form"] == form for rank in range(count)]
        shown = first_wrong(right)
        seen = f"{count} ranks: rank {shown} returned {_shown(got[shown])}, {results[shown]['form']}; "
        seen += f"rank {(shown - 1) % count} held {_shown(drawn[shown - 1])}, {form}"
        fault = "not what came"
        if results[shown]["form"] != form:
            fault = "another form"
        elif got[shown] == drawn[(shown + 1) % count]:
            fault = "the other way"
        elif any(right):
            fault = "not all alike"
        yield Finding(FROM_LEFT, all(right), seen, fault)
        to = [result["to"] for result in results]
        seen = f"{count} ranks, from rank 0 on: they sent to the ranks {to}"
        yield Finding(TO_RIGHT, to == [[(rank + 1) % count] for rank in range(count)], seen, "to others")
        own = [result["own"] for result in results]
        shown = first_wrong(mine == before for mine, before in zip(own, drawn, strict=True))
        seen = f"rank {shown} held {_shown(drawn[shown])}, and holds {_shown(own[shown])} now"
        yield Finding(KEPT, own == drawn, seen, "overwritten")


@reports(lambda cases: [WATCHED | {"got": object, "own": object, "form": [str, [int, ...]]}] * len(cases))
@in_group
def _passed(answer: Any, cases: list[Case]) -> list[Result]:
    results = []
    for case in cases:
        own = _whole(case["seeds"][dist.get_rank()], case["shape"], case["dtype"])
        got, seen = _watched(answer, own)
        seen |= {"got": told(got), "own": own.tolist(), "form": ["no tensor", []]}
        if isinstance(got, Tensor):
            seen |= {"got": got.tolist(), "form": [str(got.dtype).removeprefix("torch."), list(got.shape)]}
        results.append(seen)
    return results


# --- 05.2 -------------------------------------------------------------------------------------------------

COMPLETE = "rank r's piece r is the sum over all ranks"
HALF = "no rank sends more than (n−1)/n of its numbers, and all goes round the ring"


@question(
    "05.2",
    "reduce_scatter(pieces)",
    {COMPLETE: 4, HALF: 2},
    depends_on={HALF: COMPLETE},
    hints={
        COMPLETE: {
            "nothing changed": "No piece has changed. Is what arrives added to a piece, in place?",
            "another piece": "Each rank has a complete piece, but not its own. Which one goes first?",
            "not all alike": "Some ranks are done and others are not. Do all make the same number of steps?",
            "no sum": "In each of n − 1 steps: send what you added to last, and add to the next one.",
        },
        HALF: {
            "too much": "One piece in each step, n − 1 steps: what is sent beyond that?",
            "through one rank": "One rank sends more than the others. Does everything go through it?",
            "no ring": "In a ring, each rank sends to one neighbour only. Who passes it on?",
        },
    },
)
@with_two_world_sizes(*FIRST)
def reduce_scatter(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    few, many = rng.sample(range(2, 7), 2)
    forms = [([few], "float64", True), ([2, many], "int64", False)]
    cases: list[Case] = [{"shape": shape, "dtype": dtype, "views": views} for shape, dtype, views in forms]
    cases = [case | {"seeds": seeds(rng, count)} for case in cases]
    for case, results in zip(cases, _heard(ask, _scattered, cases, count), strict=True):
        drawn = torch.stack([_pieces(case, rank) for rank in range(count)])
        yield _of_sum([torch.tensor(result["pieces"], dtype=drawn.dtype) for result in results], drawn)
        sent, enough = [result["bytes"] for result in results], (count - 1) * 8 * math.prod(case["shape"])
        rank, most = furthest(sent)
        seen = f"{count} ranks: rank {rank} sent {most} bytes, and {enough} are enough"
        yield Finding(HALF, most <= enough, seen, "through one rank" if most > min(sent) else "too much")
        to = [result["to"] for result in results]
        steps = [[[(rank + step) % count] for rank in range(count)] for step in (1, -1)]
        yield Finding(
            HALF, to in steps, f"{count} ranks, from rank 0 on: they sent to the ranks {to}", "no ring"
        )


def _pieces(case: Case, rank: int) -> Tensor:
    return _whole(case["seeds"][rank], [len(case["seeds"]), *case["shape"]], case["dtype"])


def _of_sum(pieces: list[Tensor], drawn: Tensor) -> Finding:
    """Check rank r's piece r; by rank and piece, ``drawn`` is from before the call, ``pieces`` from after."""
    count, total = len(pieces), drawn.sum(0)
    right = [torch.equal(pieces[rank][rank], total[rank]) for rank in range(count)]
    shown = first_wrong(right)
    first = [each[shown].flatten()[0].item() for each in (pieces[shown], total, *drawn)]
    seen = f"{count} ranks: piece {shown} of rank {shown} begins with {first[0]}, the sum with {first[1]}; "
    seen += f"the ranks had {', '.join(map(str, first[2:]))}"
    fault = "no sum"
    if torch.equal(torch.stack(pieces), drawn):
        fault = "nothing changed"
    elif any(right):
        fault = "not all alike"
    elif all(any(map(torch.equal, mine, total)) for mine in pieces):
        fault = "another piece"
    return Finding(COMPLETE, all(right), seen, fault)


def _of_pieces(case: Case) -> Any:
    return of_size(int if case["dtype"] == "int64" else NUMBER, len(case["seeds"]), *case["shape"])


@reports(lambda cases: [WATCHED | {"pieces": _of_pieces(case)} for case in cases])
@in_group
def _scattered(answer: Any, cases: list[Case]) -> list[Result]:
    results: list[Result] = []
    for case in cases:
        pieces = list(_pieces(case, dist.get_rank()))
        if not case["views"]:
            pieces = [piece.clone() for piece in pieces]
        _, seen = _watched(answer, list(pieces))  # a copy: another tensor in the list changes none of ours
        results.append(seen | {"pieces": torch.stack(pieces).tolist()})
    return results
