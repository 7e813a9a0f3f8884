"""The questions of lesson 05: all_reduce from messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..check import Refused, a_function, observe, question
from .ranks import join

Found = Iterator[tuple[str, bool, str, str]]
RANKS = 3  # no power of two, and more than a pair
REST = "This rests on what is above; that comes first."
# How torch's own functions call a process group; a message is `send`. Not every torch has all of them.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
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
    for attribute, name in COLLECTIVES.items():
        if hasattr(group, attribute):
            setattr(group, attribute, noted(getattr(group, attribute), name))
    return messages, called


def _messages_alone(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        if each["called"]:
            raise Refused(f"dist.{each['called'][0]} does the work here; this time there are messages alone")


def _shaped(held: Any, size: int) -> bool:
    return isinstance(held, torch.Tensor) and held.numel() == size


def _shown(held: Any) -> str:
    if not isinstance(held, torch.Tensor):
        return f"{held!r:.40}"
    return f"{[round(each, 3) for each in held.flatten().tolist()[:3]]}"


# --- 05.1 -------------------------------------------------------------------------------------------------

FROM_LEFT, KEPT = "every rank gets its left neighbour's tensor", "its own tensor stays as it was"


@question("05.1", {FROM_LEFT: 2, KEPT: 1})
def pass_right(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "pass_right(tensor)")
    seeds, size = [rng.randrange(2**31) for _ in range(RANKS)], rng.randrange(3, 9)
    held = observe(_passed, answer, seeds, size, nprocs=RANKS)
    _messages_alone(held)
    drawn = [_numbers(seed, size) for seed in seeds]
    right = [_shaped(held[r]["got"], size) and held[r]["got"].equal(drawn[r - 1]) for r in range(RANKS)]
    shown = right.index(False) if False in right else 0
    got = held[shown]["got"]
    seen = f"rank {shown} returned {_shown(got)}; rank {(shown - 1) % RANKS} held {_shown(drawn[shown - 1])}"
    if got is None:
        hint = "Nothing was returned. What came in has to be handed back at the end."
    elif not _shaped(got, size):
        hint = "What is returned is a tensor, of the same size as the one that was given."
    elif got.equal(drawn[(shown + 1) % RANKS]):
        hint = "That is the right neighbour's. Which way do the messages go?"
    elif any(right):
        hint = "Some ranks have it and others do not. Do all do the same, and where does the last one send?"
    elif got.equal(drawn[shown]):
        hint = "That is the rank's own. Which tensor did the message come into?"
    else:
        hint = "Has it arrived when you hand it back? A message that is only started is not there yet."
    yield FROM_LEFT, all(right), seen, hint
    kept = [held[r]["own"].equal(drawn[r]) for r in range(RANKS)]
    shown = kept.index(False) if False in kept else 0
    seen = f"rank {shown} held {_shown(drawn[shown])}, and holds {_shown(held[shown]['own'])} now"
    if not all(right):
        yield KEPT, False, REST if all(kept) else seen, REST
    else:
        yield (
            KEPT,
            all(kept),
            seen,
            "The message came into the tensor that was to be sent. It needs another one.",
        )


def _passed(answer: Any, seeds: list[int], size: int) -> dict[str, Any]:
    join()
    _, called = _watched()
    own = _numbers(seeds[dist.get_rank()], size)
    got = answer(own)
    got = got.detach().clone() if isinstance(got, torch.Tensor) else got if got is None else repr(got)
    return {"got": got, "own": own, "called": called}


# --- 05.2 -------------------------------------------------------------------------------------------------

COMPLETE, HALF = "rank r's piece r is the sum over all ranks", "no rank sends more than (n−1)/n of its tensor"


@question("05.2", {COMPLETE: 2, HALF: 1})
def reduce_scatter(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "reduce_scatter(pieces)")
    seeds, length = [rng.randrange(2**31) for _ in range(RANKS)], rng.randrange(2, 7)
    held = observe(_scattered, answer, seeds, length, nprocs=RANKS)
    _messages_alone(held)
    drawn = [list(_numbers(seed, RANKS * length).split(length)) for seed in seeds]
    total = [sum(each) for each in zip(*drawn, strict=True)]
    right = [held[r]["pieces"][r].equal(total[r]) for r in range(RANKS)]
    shown = right.index(False) if False in right else 0
    piece = held[shown]["pieces"][shown]
    seen = f"piece {shown} of rank {shown} begins with {piece[0]:g}, the sum with {total[shown][0]:g}"
    seen += f"; the ranks had {', '.join(f'{each[shown][0]:g}' for each in drawn)}"
    elsewhere = [
        next((i for i in range(RANKS) if held[r]["pieces"][i].equal(total[i])), None) for r in range(RANKS)
    ]
    if all(held[r]["pieces"][i].equal(drawn[r][i]) for r in range(RANKS) for i in range(RANKS)):
        hint = "No piece has changed. Is what comes in added to a piece, in place?"
    elif any(right):
        hint = "Some ranks are done and others are not. Do all do the same number of steps?"
    elif None not in elsewhere:
        hint = (
            f"Each rank has a complete piece, but rank 0 has piece {elsewhere[0]}. Which one must go first?"
        )
    elif any(piece.equal(each[shown]) for each in drawn):
        hint = "That is one rank's piece, not a sum. Is it added up, and passed on from step to step?"
    elif any(piece.equal(drawn[a][shown] + drawn[b][shown]) for a, b in ((0, 1), (0, 2), (1, 2))):
        hint = "Two ranks are in it, and there are three. How many steps does a number need to go all round?"
    else:
        hint = (
            "In each step: send what you added to in the step before, and add what comes to the next piece."
        )
    yield COMPLETE, all(right), seen, hint
    yield HALF, *_in_bytes(held, all(right), RANKS - 1, length * 8)


def _scattered(answer: Any, seeds: list[int], length: int) -> dict[str, Any]:
    join()
    messages, called = _watched()
    tensor = _numbers(seeds[dist.get_rank()], RANKS * length)
    answer(list(tensor.split(length)))
    return {
        "pieces": [each.clone() for each in tensor.split(length)],
        "sent": sum(messages),
        "called": called,
    }


def _in_bytes(held: list[dict[str, Any]], right: bool, pieces: int, piece: int) -> tuple[bool, str, str]:
    """Whether no rank sends more than so many pieces of so many bytes; counted for a right answer alone."""
    sent = [each["sent"] for each in held]
    most = max(range(RANKS), key=lambda rank: sent[rank])
    seen = f"rank {most} sent {sent[most]} bytes, and {pieces * piece} are enough"
    if not right:
        return False, seen, REST
    if sent[most] > min(sent):
        return (
            sent[most] <= pieces * piece,
            seen,
            "One rank sends more than the others. Who is in the middle?",
        )
    return (
        sent[most] <= pieces * piece,
        seen,
        "One piece in each step is enough, and n − 1 steps for each half. What goes out beyond that?",
    )


# --- 05.3 -------------------------------------------------------------------------------------------------

SUM, ANY_SIZE, BYTES = (
    "every rank holds the sum, in the tensor that it gave",
    "also for sizes that the ranks do not divide",
    "no rank sends more than 2(n−1)/n of the tensor",
)


@question("05.3", {SUM: 2, ANY_SIZE: 1, BYTES: 1})
def all_reduce(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "all_reduce(tensor)")
    seeds, length = [rng.randrange(2**31) for _ in range(RANKS)], rng.randrange(2, 7)
    held = observe(_reduced, answer, seeds, [RANKS * length], nprocs=RANKS)
    _messages_alone(held)
    drawn = [_numbers(seed, RANKS * length) for seed in seeds]
    right, seen, hint = _summed([each["tensors"][0] for each in held], drawn)
    yield SUM, right, seen, hint
    yield BYTES, *_in_bytes(held, right, 2 * (RANKS - 1), length * 8)
    if not right:
        yield ANY_SIZE, False, "not tried", REST
        return
    sizes = [RANKS * length + 1, RANKS * length + 2, 1, 2]
    rng.shuffle(sizes)
    held = observe(_reduced, answer, seeds, sizes, nprocs=RANKS)
    for i, size in enumerate(sizes):
        whole, seen, _ = _summed([each["tensors"][i] for each in held], [_numbers(s, size) for s in seeds])
        if not whole:
            hint = "How long is the last piece when it does not come out even? And can a piece be empty?"
            yield ANY_SIZE, False, f"{size} numbers: {seen}", hint
            return
    yield ANY_SIZE, True, "", ""


def _summed(held: list[torch.Tensor], drawn: list[torch.Tensor]) -> tuple[bool, str, str]:
    total = torch.stack(drawn).sum(0)
    right = [each.shape == total.shape and each.equal(total) for each in held]
    if all(right):
        return True, "", ""
    shown = right.index(False)
    if held[shown].shape != total.shape:
        return False, f"rank {shown} holds {held[shown].numel()} numbers now", "The size must not change."
    place = int((held[shown] != total).nonzero()[0])
    is_, had = held[shown][place].item(), [each[place].item() for each in drawn]
    seen = f"number {place} of rank {shown} is {is_:g}, the sum {total[place]:g}"
    seen += f"; the ranks had {', '.join(f'{each:g}' for each in had)}"
    if all(each.equal(own) for each, own in zip(held, drawn, strict=True)):
        hint = "Nothing has changed. The sum belongs into the tensor that was given, in place."
    elif any(right):
        hint = "One rank holds the sum. How does it come to all the others?"
    elif all(bool((each == total).any()) for each in held):
        hint = "Each rank holds a part of the sum: that is the first half. What brings the parts to everyone?"
    elif is_ in had:
        hint = "That is one rank's number, not a sum."
    elif abs(is_ * RANKS - total[place].item()) < 1e-6:
        hint = "That is the mean. Nobody asked to divide."
    else:
        hint = "Some rank's numbers are missing in it, or are in it twice. Try it with 1, 10 and 100."
    return False, seen, hint


def _reduced(answer: Any, seeds: list[int], sizes: list[int]) -> dict[str, Any]:
    join()
    messages, called = _watched()
    tensors = []
    for size in sizes:
        tensor = _numbers(seeds[dist.get_rank()], size)
        answer(tensor)
        tensors.append(tensor)
    return {"tensors": tensors, "sent": sum(messages), "called": called}
