"""The questions of lesson 05: all_reduce from messages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group
from ..inputs import LAYOUTS, seeds, tensor, with_layout
from ..judging import by_call, far, first_fault, first_wrong, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, Work, question
from ..shape import NUMBER, of_size, reports
from ..wording import told

FIRST = (3, 5)  # the world sizes tried first: no powers of two, for which a butterfly is right, too
LIMIT = 2**40  # of integers too large for float32; float64 holds them and their sums
Case = dict[str, Any]


def _whole(seed: int, size: int, dtype: str) -> Tensor:
    """Draw whole numbers, which have exact sums in any order."""
    if dtype == "int64":
        return tensor(seed, (size,), torch.int64)
    return torch.randint(-LIMIT, LIMIT, (size,), generator=torch.Generator().manual_seed(seed)).double()


WATCHED: Result = {"others": [str, ...], "sent": int, "messages": int, "to": [int, ...]}


def _watched(answer: Callable[..., Any], *args: Any) -> tuple[Any, Result]:
    """Call the answer in a rank; return its value and how it communicated with the other ranks."""
    with record_traffic() as seen:
        value = answer(*args)
    others = [f"dist.{name}" for name in seen.collectives() if name != "barrier"]
    others += ["the store"] * (seen.stored > 0)
    messages = sum(name == "send" for name, _ in seen.calls)
    return value, {"others": others, "sent": seen.sent(), "messages": messages, "to": sorted(seen.to)}


def _heard(ask: Ask, work: Work, cases: list[Case], count: int) -> list[list[Result]]:
    """Return what the ranks saw, by case and rank; refuse an answer that uses anything but messages."""
    by_rank = ask(work, cases, nprocs=count)
    for others in (call["others"] for calls in by_rank for call in calls):
        if others:
            raise Refused(f"{others[0]} does the work here; this time only messages are allowed")
    return by_call(by_rank)


def _none_by_another_way(results: list[Result], least: int) -> None:
    """Refuse a right result for which fewer numbers were sent than it takes: some came by another way."""
    sent, least = sum(result["sent"] for result in results), len(results) * least
    if sent < least:
        raise Refused(
            f"{len(results)} ranks sent {sent} numbers in messages, and at least {least} are needed. "
            "How did the rest get there? Only messages are allowed here"
        )


def _shown(numbers: Any) -> str:
    return f"{numbers[:3]}" if isinstance(numbers, list) else str(numbers)


# --- 05.1 -------------------------------------------------------------------------------------------------

FROM_LEFT, KEPT = "every rank gets its left neighbour's tensor", "its own tensor stays as it was"


@question("05.1", "pass_right(tensor)", {FROM_LEFT: 2, KEPT: 1}, rests={KEPT: FROM_LEFT})
@with_two_world_sizes(*FIRST)
def pass_right(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    size = rng.randrange(3, 9)
    forms = [([size], "float64"), ([2, size], "int64"), ([size], "float64"), ([], "float64")]
    cases: list[Case] = [{"shape": shape, "dtype": dtype} for shape, dtype in forms]
    cases = [case | {"seeds": seeds(rng, count)} for case in cases]
    cases.append(cases[2] | {"seeds": seeds(rng, count), "again": True})
    for call, (case, results) in enumerate(zip(cases, _heard(ask, _passed, cases, count), strict=True)):
        drawn = [_of_shape(case, rank).tolist() for rank in range(count)]
        gots = zip(results, drawn[-1:] + drawn[:-1], strict=True)
        right = [
            result["got"] == left and (result["shape"], result["dtype"]) == (case["shape"], case["dtype"])
            for result, left in gots
        ]
        shown = first_wrong(right)
        result, got, left = results[shown], results[shown]["got"], drawn[shown - 1]
        seen = f"{count} ranks: rank {shown} returned {_shown(got)}; "
        seen += f"rank {(shown - 1) % count} held {_shown(left)}"
        hint = "Has it arrived when you return it? A message that is only started is not there yet."
        if got == told(None):
            hint = "Nothing was returned. Return what was received."
        elif result["early"] == left != got:
            hint = "It was right when it was returned, but a later call wrote into it."
        elif isinstance(got, str) or result["shape"] != case["shape"]:
            hint = "Return a tensor, of the same size as the one that was given."
        elif result["dtype"] != case["dtype"]:
            seen += f"; its dtype is {result['dtype']}, and was {case['dtype']}"
            hint = "A message is received into a tensor of yours. Which dtype should it have?"
        elif got == drawn[(shown + 1) % count]:
            hint = "That is the right neighbour's. Which way do the messages go?"
        elif any(right):
            hint = "Some ranks have it and others do not. Do all do the same? Where does the last one send?"
        elif got == drawn[shown]:
            hint = "That is the rank's own. Which tensor was the message received into?"
        elif call:
            hint = "The first call was right. What does it leave behind for a later one, with another tensor?"
        yield Finding(FROM_LEFT, all(right), seen, hint)
        hint = "More was sent than is needed. Which rank should get a rank's tensor, and which should not?"
        yield _to_neighbours(FROM_LEFT, results, (1,), hint)
        kept = [result["own"] == own for result, own in zip(results, drawn, strict=True)]
        shown = first_wrong(kept)
        seen = f"rank {shown} held {_shown(drawn[shown])}, and holds {_shown(results[shown]['own'])} now"
        hint = "The message was received into the tensor that was to be sent. It needs another one."
        yield Finding(KEPT, all(kept), seen, hint)
        if all(right) and case["shape"]:  # the profiler cannot tell a single number from none
            _none_by_another_way(results, math.prod(case["shape"]))


def _to_neighbours(what: str, results: list[Result], steps: tuple[int, ...], hint: str) -> Finding:
    """Check that each rank sends to one rank only, that many steps further in the ring."""
    ranks = len(results)
    return first_fault(
        what,
        (
            (f"{ranks} ranks: rank {rank} sent to the ranks {', '.join(map(str, result['to']))}", hint)
            for rank, result in enumerate(results)
            if result["to"] not in ([[]] * (not result["sent"]) + [[(rank + step) % ranks] for step in steps])
        ),
    )


def _of_shape(case: Case, rank: int) -> Tensor:
    return _whole(case["seeds"][rank], math.prod(case["shape"]), case["dtype"]).view(case["shape"])


@reports(
    lambda cases: (
        [WATCHED | {"got": object, "early": object, "own": object, "shape": ([int, ...], None), "dtype": str}]
        * len(cases)
    )
)
@in_group
def _passed(answer: Any, cases: list[Case]) -> list[Result]:
    results, kept = [], []
    tensors: dict[str, Tensor] = {}  # by shape: a tensor may come again, with other numbers
    for case in cases:
        numbers = _of_shape(case, dist.get_rank())
        own = tensors[str(case["shape"])].copy_(numbers) if "again" in case else numbers
        tensors[str(case["shape"])] = own
        got, seen = _watched(answer, own)
        early = got.tolist() if isinstance(got, Tensor) else told(got)
        mine = isinstance(got, Tensor) and got.data_ptr() == own.data_ptr()  # which is filled again
        kept.append(got.clone() if mine else got)
        results.append(seen | {"early": early, "own": own.tolist()})
    for got, result in zip(kept, results, strict=True):  # as they are after all calls
        result |= {"got": result["early"], "shape": None, "dtype": ""}
        if isinstance(got, Tensor):
            result |= {"got": got, "shape": list(got.shape), "dtype": str(got.dtype).removeprefix("torch.")}
    return results


# --- 05.2 -------------------------------------------------------------------------------------------------

COMPLETE = "rank r's piece r is the sum over all ranks"
HALF = "no rank sends more than (n−1)/n of its tensor, and all goes round the ring"
ONE_RANKS = "That is one rank's piece, not a sum. Is it added up, and passed on from step to step?"
NEITHER = "In each step, send the piece that you added to last, and add what arrives to the next one."
ONE_MISSING = "One rank is missing from it. How many steps does a number need to go all the way round?"


@question("05.2", "reduce_scatter(pieces)", {COMPLETE: 2, HALF: 1}, rests={HALF: COMPLETE})
@with_two_world_sizes(*FIRST)
def reduce_scatter(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    few, many = rng.sample(range(2, 7), 2)
    forms = [([few], "float64", True), ([2, many], "int64", False), ([few], "float64", False)]
    cases: list[Case] = [{"shape": shape, "dtype": dtype, "views": views} for shape, dtype, views in forms]
    cases = [case | {"seeds": seeds(rng, count)} for case in cases]
    cases.append(cases[2] | {"seeds": seeds(rng, count), "again": True})
    for call, (case, results) in enumerate(zip(cases, _heard(ask, _scattered, cases, count), strict=True)):
        drawn = torch.stack([_pieces(case, rank) for rank in range(count)]).flatten(2)
        pieces = [torch.tensor(result["pieces"], dtype=drawn.dtype).flatten(1) for result in results]
        yield _of_sum(pieces, drawn, again=call > 0)
        total = drawn.sum(0)
        enough = (count - 1) * math.prod(case["shape"])
        yield _in_numbers(HALF, results, enough)
        hint = "In a ring, each rank sends to one neighbour only. Who passes it on?"
        yield _to_neighbours(HALF, results, (1, -1), hint)
        if all(results[r]["pieces"][r] == total[r].view(case["shape"]).tolist() for r in range(count)):
            _none_by_another_way(results, enough)


def _pieces(case: Case, rank: int) -> Tensor:
    count, size = len(case["seeds"]), math.prod(case["shape"])
    return _whole(case["seeds"][rank], count * size, case["dtype"]).view(count, *case["shape"])


def _of_pieces(case: Case) -> Any:
    return of_size(int if case["dtype"] == "int64" else NUMBER, len(case["seeds"]), *case["shape"])


def _of_sum(pieces: list[Tensor], drawn: Tensor, again: bool) -> Finding:
    """Check rank r's piece r; ``pieces`` and ``drawn`` are after and before the call, by rank and piece."""
    count, total = len(pieces), drawn.sum(0)
    right = [torch.equal(pieces[r][r], total[r]) for r in range(count)]
    shown = first_wrong(right)
    piece = pieces[shown][shown]
    seen = f"{count} ranks: piece {shown} of rank {shown} begins with {piece[0].item()}, "
    seen += f"the sum with {total[shown, 0].item()}"
    seen += f"; the ranks had {', '.join(str(own[shown, 0].item()) for own in drawn)}"
    complete = [[i for i in range(count) if torch.equal(mine[i], total[i])] for mine in pieces]
    without_one = [total[shown] - own[shown] for own in drawn]
    if torch.equal(torch.stack(pieces), drawn):
        hint = "No piece has changed. Is what arrives added to a piece, in place?"
    elif any(right):
        hint = "Some ranks are done and others are not. Do all make the same number of steps?"
    elif all(complete):
        hint = f"Each rank has a complete piece, but rank 0 has piece {complete[0][0]}. Which one goes first?"
    elif again:
        hint = "The first call was right. What does it leave behind for a later one, with other pieces?"
    else:
        known = [(own[shown], ONE_RANKS) for own in drawn] + [(total, ONE_MISSING) for total in without_one]
        hint = nearest(piece, *known, otherwise=NEITHER, within=0.5)
    return Finding(COMPLETE, all(right), seen, hint)


@reports(lambda cases: [WATCHED | {"pieces": _of_pieces(case)} for case in cases])
@in_group
def _scattered(answer: Any, cases: list[Case]) -> list[Result]:
    results: list[Result] = []
    pieces: list[Tensor] = []
    for case in cases:
        whole = _pieces(case, dist.get_rank())
        if "again" in case:  # the same ones, with other numbers
            for piece, numbers in zip(pieces, whole, strict=True):
                piece.copy_(numbers)
        else:
            pieces = list(whole) if case["views"] else [piece.clone() for piece in whole]
            given = list(pieces)
        given[:] = pieces
        held = [piece.view_as(piece) for piece in pieces]  # as somebody else holds the same memory
        _, seen = _watched(answer, given)
        results.append(seen | {"pieces": torch.stack(held)})
    return results


def _in_numbers(what: str, results: list[Result], enough: int, messages: int | None = None) -> Finding:
    """Check that no rank sends more than ``enough`` numbers, or more than ``messages`` messages."""
    for unit, most in (("messages", messages), ("sent", enough)):
        sent = [result[unit] for result in results]
        rank, largest = furthest(sent)
        if most is not None and largest > most:
            hint = (
                "One piece in each step is enough, with n − 1 steps for each half. What is sent beyond that?"
            )
            if unit == "messages":
                hint = (
                    "A message has a latency, however small it is. What can travel together, in one message?"
                )
            elif largest > min(sent):
                hint = "One rank sends more than the others. Does everything go through it?"
            name = "numbers" if unit == "sent" else "messages"
            seen = f"{len(results)} ranks: rank {rank} sent {largest} {name}, and {most} are enough"
            return Finding(what, False, seen, hint)
    return Finding(what, True)


# --- 05.3 -------------------------------------------------------------------------------------------------

SUM = "every rank holds the sums, in the tensors that it gave"
ANY_SIZE = "also where the count of all numbers is no multiple of the number of ranks"
ODD = "How long is the last piece when there is a remainder? And can a piece be empty?"
COST = "no rank sends more than 2(n−1)/n of all numbers, nor more than 2(n−1) messages"


@question("05.3", "all_reduce(tensors)", {SUM: 2, ANY_SIZE: 1, COST: 1}, rests={ANY_SIZE: SUM, COST: SUM})
@with_two_world_sizes(*FIRST)
def all_reduce(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    some = rng.randrange(2, 5)
    even = [[[some * count]], [[count, some], [], [2 * count - 1], [0]]]
    odd = [[[count + 1]], [[]], [[0]], [[2, count], [count - 1]]]
    cases = [
        {"shapes": shapes, "dtype": dtype, "seeds": seeds(rng, count), "layouts": rng.sample(LAYOUTS, 4)}
        for shapes, dtype in zip(even + odd, ["float64", "int64", *["float64"] * 4], strict=True)
    ]
    cases[0]["layouts"] = ["plain"]
    cases.insert(1, cases[0] | {"seeds": seeds(rng, count), "again": True})
    cases[-1]["layouts"] = ["turned", "every second"]
    for call, (case, results) in enumerate(zip(cases, _heard(ask, _reduced, cases, count), strict=True)):
        finding = _summed([result["numbers"] for result in results], case, again=call > 0)
        if call > len(even):  # after `even` and one case again
            finding.what = ANY_SIZE
            if not finding.ok:
                finding.hint = ODD
            yield finding
            continue
        yield finding
        enough = 2 * (count - 1) * _count(case) // count
        yield _in_numbers(COST, results, enough, 2 * (count - 1))
        if finding.ok:
            _none_by_another_way(results, enough)


def _count(case: Case) -> int:
    return sum(map(math.prod, case["shapes"]))


def _summed(sums: list[list[float]], case: Case, again: bool) -> Finding:
    """Check the sums; ``sums`` has all numbers of each rank, in the order of its tensors."""
    count = len(sums)
    drawn = [_whole(seed, _count(case), case["dtype"]).tolist() for seed in case["seeds"]]
    total = [sum(numbers) for numbers in zip(*drawn, strict=True)]
    right = [numbers == total for numbers in sums]
    if all(right):
        return Finding(SUM, True)
    shown = right.index(False)
    begins = f"{count} ranks, tensors of the shapes {', '.join(map(str, case['shapes']))}: "
    if len(sums[shown]) != len(total):
        seen = f"{begins}rank {shown} holds {len(sums[shown])} numbers now"
        return Finding(SUM, False, seen, "The sizes must not change.")
    place = next(i for i in range(len(total)) if sums[shown][i] != total[i])
    got, had = sums[shown][place], [own[place] for own in drawn]
    seen = f"{begins}number {place} of rank {shown} is {got}, the sum {total[place]}"
    seen += f"; the ranks had {', '.join(map(str, had))}"
    if sums == drawn:
        hint = "Nothing has changed. The sums belong in the tensors that were given, in place."
    elif any(right):
        hint = "Some ranks hold the sums. How do the others get them?"
    elif again:
        hint = "The first call was right. What is new in a later one: shapes, layouts in memory, a dtype?"
    elif far(got, total[place]) < 1e-5 * max(1.0, abs(total[place])):
        hint = "That is right to about seven digits, which is what float32 keeps. In which dtype do you add?"
    elif all(any(a == b for a, b in zip(numbers, total, strict=True)) for numbers in sums):
        hint = "Each rank holds a part of the sum: that is the first half. What brings the parts to everyone?"
    else:
        hint = nearest(
            got,
            *((own, "That is one rank's number, not a sum.") for own in had),
            (total[place] / count, "That is the mean. The sum is asked for."),
            otherwise="Some rank's numbers are missing from it, or in it twice. Try it with 1, 10 and 100.",
            within=1e-6 * max(1.0, abs(total[place])),
        )
    return Finding(SUM, False, seen, hint)


@reports(lambda cases: [WATCHED | {"numbers": [NUMBER, ...]}] * len(cases))
@in_group
def _reduced(answer: Any, cases: list[Case]) -> list[Result]:
    results: list[Result] = []
    tensors: list[Tensor] = []
    for case in cases:
        sizes = list(map(math.prod, case["shapes"]))
        numbers = _whole(case["seeds"][dist.get_rank()], sum(sizes), case["dtype"]).split(sizes)
        if "again" in case:  # the same ones, with other numbers
            for tensor, part in zip(tensors, numbers, strict=True):
                tensor.copy_(part.view_as(tensor))
        else:
            tensors = [
                with_layout(part.clone().view(shape), layout)
                for part, shape, layout in zip(numbers, case["shapes"], case["layouts"], strict=False)
            ]
            given = list(tensors)
        held = [tensor.view_as(tensor) for tensor in tensors]  # as somebody else holds the same memory
        _, seen = _watched(answer, given)
        results.append(seen | {"numbers": [x for tensor in held for x in tensor.flatten().tolist()]})
    return results
