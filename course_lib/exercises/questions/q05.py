"""The questions of lesson 05: all_reduce from messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..asking import Ask, Finding, Refused, Work, in_group, nearest, question, told

RANKS = 3  # no power of two, and more than a pair
# How torch's own functions call a process group; a message is `send`. Not every torch has all of them.
COLLECTIVES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "reduce": ("reduce",),
    "broadcast": ("broadcast",),
    "all_gather": ("allgather", "_allgather_base", "all_gather_single"),
    "gather": ("gather", "gather_single"),
    "scatter": ("scatter",),
    "reduce_scatter": ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
}


def _numbers(seed: int, size: int) -> torch.Tensor:
    """Whole numbers in float64: their sums are exact, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-999, 1000, (size,), generator=generator).double()


def _watched() -> tuple[list[int], list[str]]:
    """Note from now on the bytes of each message that this rank sends, and the collectives that it calls."""
    messages: list[int] = []
    called: list[str] = []
    group = dist.ProcessGroup
    send = group.send

    def counted(self: Any, tensors: list[torch.Tensor], *rest: Any, **named: Any) -> Any:
        messages.append(sum(each.nbytes for each in tensors))
        return send(self, tensors, *rest, **named)

    def noted(real: Any, name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            called.append(name)
            return real(self, *args, **named)

        return call

    group.send = counted
    for name, attributes in COLLECTIVES.items():
        for attribute in filter(partial(hasattr, group), attributes):
            setattr(group, attribute, noted(getattr(group, attribute), name))
    return messages, called


def _heard(ask: Ask, work: Work, *args: Any) -> list[dict[str, Any]]:
    """What came of an answer on each rank; refused where a collective does the work."""
    held = ask(work, *args, nprocs=RANKS)
    for each in held:
        if each["called"]:
            raise Refused(f"dist.{each['called'][0]} does the work here; this time there are messages alone")
    return held


def _first_wrong(right: list[bool]) -> int:
    """The rank that is shown: the first that is not right, or 0."""
    return right.index(False) if False in right else 0


def _shown(held: Any) -> str:
    return f"{[round(each, 3) for each in held[:3]]}" if isinstance(held, list) else held


# --- 05.1 -------------------------------------------------------------------------------------------------

FROM_LEFT, KEPT = "every rank gets its left neighbour's tensor", "its own tensor stays as it was"


@question("05.1", "pass_right(tensor)", {FROM_LEFT: 2, KEPT: 1}, rests={KEPT: FROM_LEFT})
def pass_right(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds, size = [rng.randrange(2**31) for _ in range(RANKS)], rng.randrange(3, 9)
    held = _heard(ask, _passed, seeds, size)
    drawn = [_numbers(seed, size).tolist() for seed in seeds]
    right = [held[r]["got"] == drawn[r - 1] for r in range(RANKS)]
    shown = _first_wrong(right)
    got = held[shown]["got"]
    seen = f"rank {shown} returned {_shown(got)}; rank {(shown - 1) % RANKS} held {_shown(drawn[shown - 1])}"
    if got == told(None):
        hint = "Nothing was returned. What came in has to be handed back at the end."
    elif not isinstance(got, list) or len(got) != size:
        hint = "What is returned is a tensor, of the same size as the one that was given."
    elif got == drawn[(shown + 1) % RANKS]:
        hint = "That is the right neighbour's. Which way do the messages go?"
    elif any(right):
        hint = "Some ranks have it and others do not. Do all do the same, and where does the last one send?"
    elif got == drawn[shown]:
        hint = "That is the rank's own. Which tensor did the message come into?"
    else:
        hint = "Has it arrived when you hand it back? A message that is only started is not there yet."
    yield Finding(FROM_LEFT, all(right), seen, hint)
    kept = [held[r]["own"] == drawn[r] for r in range(RANKS)]
    shown = _first_wrong(kept)
    seen = f"rank {shown} held {_shown(drawn[shown])}, and holds {_shown(held[shown]['own'])} now"
    hint = "The message came into the tensor that was to be sent. It needs another one."
    yield Finding(KEPT, all(kept), seen, hint)


@in_group
def _passed(answer: Any, seeds: list[int], size: int) -> dict[str, Any]:
    _, called = _watched()
    own = _numbers(seeds[dist.get_rank()], size)
    got = answer(own)
    got = got.flatten().tolist() if isinstance(got, torch.Tensor) else told(got)
    return {"got": got, "own": own, "called": called}


# --- 05.2 -------------------------------------------------------------------------------------------------

COMPLETE, HALF = "rank r's piece r is the sum over all ranks", "no rank sends more than (n−1)/n of its tensor"


@question("05.2", "reduce_scatter(pieces)", {COMPLETE: 2, HALF: 1}, rests={HALF: COMPLETE})
def reduce_scatter(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds, length = [rng.randrange(2**31) for _ in range(RANKS)], rng.randrange(2, 7)
    held = _heard(ask, _scattered, seeds, length)
    drawn = torch.stack([_numbers(seed, RANKS * length).view(RANKS, length) for seed in seeds])
    total = drawn.sum(0).tolist()
    drawn = drawn.tolist()  # by rank, by piece
    pieces = [each["pieces"] for each in held]
    right = [pieces[r][r] == total[r] for r in range(RANKS)]
    shown = _first_wrong(right)
    piece = pieces[shown][shown]
    seen = f"piece {shown} of rank {shown} begins with {piece[0]:g}, the sum with {total[shown][0]:g}"
    seen += f"; the ranks had {', '.join(f'{each[shown][0]:g}' for each in drawn)}"
    complete = [[i for i in range(RANKS) if mine[i] == total[i]] for mine in pieces]
    of_pairs = [torch.tensor(drawn[a][shown]) + torch.tensor(drawn[b][shown]) for a, b in PAIRS]
    if pieces == drawn:
        hint = "No piece has changed. Is what comes in added to a piece, in place?"
    elif any(right):
        hint = "Some ranks are done and others are not. Do all do the same number of steps?"
    elif all(complete):
        hint = (
            f"Each rank has a complete piece, but rank 0 has piece {complete[0][0]}. Which one must go first?"
        )
    else:
        hint = nearest(
            piece,
            *((each[shown], ONE_RANKS) for each in drawn),
            *((pair, TWO_RANKS) for pair in of_pairs),
            otherwise="In each step: send what you added to in the step before, and add what comes to the "
            "next piece.",
            within=0.5,
        )
    yield Finding(COMPLETE, all(right), seen, hint)
    yield _in_bytes(HALF, held, RANKS - 1, length * 8)


PAIRS = ((0, 1), (0, 2), (1, 2))
ONE_RANKS = "That is one rank's piece, not a sum. Is it added up, and passed on from step to step?"
TWO_RANKS = "Two ranks are in it, and there are three. How many steps does a number need to go all round?"


@in_group
def _scattered(answer: Any, seeds: list[int], length: int) -> dict[str, Any]:
    messages, called = _watched()
    tensor = _numbers(seeds[dist.get_rank()], RANKS * length)
    answer(list(tensor.split(length)))
    return {"pieces": tensor.view(RANKS, length), "sent": sum(messages), "called": called}


def _in_bytes(what: str, held: list[dict[str, Any]], pieces: int, piece: int) -> Finding:
    """Whether no rank sends more than so many pieces of so many bytes."""
    sent = [each["sent"] for each in held]
    most = max(range(RANKS), key=lambda rank: sent[rank])
    if sent[most] > min(sent):
        hint = "One rank sends more than the others. Who is in the middle?"
    else:
        hint = "One piece in each step is enough, and n − 1 steps for each half. What goes out beyond that?"
    seen = f"rank {most} sent {sent[most]} bytes, and {pieces * piece} are enough"
    return Finding(what, sent[most] <= pieces * piece, seen, hint)


# --- 05.3 -------------------------------------------------------------------------------------------------

SUM, ANY_SIZE, BYTES = (
    "every rank holds the sum, in the tensor that it gave",
    "also for sizes that the ranks do not divide",
    "no rank sends more than 2(n−1)/n of the tensor",
)


@question(
    "05.3",
    "all_reduce(tensor)",
    {SUM: 2, ANY_SIZE: 1, BYTES: 1},
    rests={ANY_SIZE: SUM, BYTES: SUM},
)
def all_reduce(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds, length = [rng.randrange(2**31) for _ in range(RANKS)], rng.randrange(2, 7)
    held = _heard(ask, _reduced, seeds, [RANKS * length])
    summed = _summed([each["tensors"][0] for each in held], seeds, RANKS * length)
    yield summed
    yield _in_bytes(BYTES, held, 2 * (RANKS - 1), length * 8)
    if not summed.ok:
        yield Finding(ANY_SIZE, False, "not tried")
        return
    sizes = [RANKS * length + 1, RANKS * length + 2, 1, 2]
    rng.shuffle(sizes)
    held = ask(_reduced, seeds, sizes, nprocs=RANKS)
    for i, size in enumerate(sizes):
        of_size = _summed([each["tensors"][i] for each in held], seeds, size)
        if not of_size.ok:
            hint = "How long is the last piece when it does not come out even? And can a piece be empty?"
            yield Finding(ANY_SIZE, False, f"{size} numbers: {of_size.seen}", hint)
            return
    yield Finding(ANY_SIZE, True)


def _summed(held: list[list[float]], seeds: list[int], size: int) -> Finding:
    drawn = [_numbers(seed, size).tolist() for seed in seeds]
    total = [sum(each) for each in zip(*drawn, strict=True)]
    right = [each == total for each in held]
    if all(right):
        return Finding(SUM, True)
    shown = right.index(False)
    if len(held[shown]) != size:
        seen = f"rank {shown} holds {len(held[shown])} numbers now"
        return Finding(SUM, False, seen, "The size must not change.")
    place = next(i for i in range(size) if held[shown][i] != total[i])
    is_, had = held[shown][place], [each[place] for each in drawn]
    seen = f"number {place} of rank {shown} is {is_:g}, the sum {total[place]:g}"
    seen += f"; the ranks had {', '.join(f'{each:g}' for each in had)}"
    if held == drawn:
        hint = "Nothing has changed. The sum belongs into the tensor that was given, in place."
    elif any(right):
        hint = "One rank holds the sum. How does it come to all the others?"
    elif all(any(a == b for a, b in zip(each, total, strict=True)) for each in held):
        hint = "Each rank holds a part of the sum: that is the first half. What brings the parts to everyone?"
    else:
        hint = nearest(
            is_,
            *((each, "That is one rank's number, not a sum.") for each in had),
            (total[place] / RANKS, "That is the mean. Nobody asked to divide."),
            otherwise="Some rank's numbers are missing in it, or are in it twice. Try it with 1, 10 and 100.",
            within=1e-6,
        )
    return Finding(SUM, False, seen, hint)


@in_group
def _reduced(answer: Any, seeds: list[int], sizes: list[int]) -> dict[str, Any]:
    messages, called = _watched()
    tensors = []
    for size in sizes:
        tensor = _numbers(seeds[dist.get_rank()], size)
        answer(tensor)
        tensors.append(tensor.flatten())
    return {"tensors": tensors, "sent": sum(messages), "called": called}
