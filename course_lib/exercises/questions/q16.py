"""The questions of lesson 16: masks that come again, and a loss by tokens over ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.work import in_group, refuse_unless
from ..inputs import gradients_of, hash_of_process, tensor
from ..judging import by_call, far, furthest, nearest
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number

NEAR, CLOSE = 1e-6, 1e-9  # for a gradient, which an answer may scale in float32, and for the mean loss
WORDS = 11  # in the vocabulary
IGNORED = -100

# --- 16.1 -------------------------------------------------------------------------------------------------

OTHERS = "another seed, epoch, step or rank hides other tokens"
AGAIN = "the same four numbers hide the same tokens, in every process"
HINTS_1 = {
    OTHERS: {
        "one number": "These differ in one of the four numbers. Does your seed depend on all of them?",
        "alike": "How do four numbers become one, so that no other four become the same?",
    },
    AGAIN: {"by chance": "What does your seed depend on, besides the four numbers?"},
}
LENGTH = 120
MASK = 4  # the id of [MASK]; those below are special
SIZES = (*(10**i for i in range(1, 7)), 16, 32, 64, 256, 1024, 2**16, 2**20)


@question(
    "16.1",
    "mask(ids, seed, epoch, step, rank)",
    {OTHERS: 3, AGAIN: 1},
    depends_on={AGAIN: OTHERS},
    hints=HINTS_1,
)
def mask(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    base = [rng.randrange(5, 1000), rng.randrange(1, 9), rng.randrange(1, 90), rng.randrange(1, 8)]
    places = [base] + [[value + (i == at) for i, value in enumerate(base)] for at in range(4)]
    a, b = rng.sample(range(4), 2)
    places.append([value + (i == a) - (i == b) for i, value in enumerate(base)])  # an equal sum
    # In a weighted sum, such as 1000 * step + rank, one number may make up for another's weight.
    places += [[size * (i == at) for i in range(4)] for at in range(4) for size in (1, *SIZES)]
    ids = [rng.randrange(MASK + 1, 400) for _ in range(LENGTH)]
    (first,), (again,) = (ask(_masks, ids, each, rng.randrange(2**31)) for each in (places, [base]))
    for labels in [*first, *again]:
        hidden = [label != IGNORED for label in labels]
        if not (3 < sum(hidden) < 40) or any(
            h and x != y for h, x, y in zip(hidden, labels, ids, strict=True)
        ):
            raise Refused("leave the lines below yours: they hide about 15 of 100 tokens")
    pairs = [(x, y) for y in range(len(places)) for x in range(y) if first[x] == first[y]]
    x, y = pairs[0] if pairs else (0, 0)
    seen = f"(seed, epoch, step, rank) = {tuple(places[x])} and {tuple(places[y])} hide the same tokens"
    changed = sum(one != other for one, other in zip(places[x], places[y], strict=True))
    yield Finding(OTHERS, not pairs, seen, "one number" if changed == 1 else "alike")
    yield Finding(
        AGAIN, again == first[:1], f"{tuple(base)} hides other tokens in another process", "by chance"
    )


@reports(lambda ids, places, _: [[int] * LENGTH] * len(places))
def _masks(answer: Any, ids: list[int], places: list[list[int]], process: int) -> list[list[int]]:
    torch.manual_seed(process)
    results = []
    with patch("builtins.hash", partial(hash_of_process, hash, process)):
        for place in places:
            answered = answer(torch.tensor([ids]), *place)
            two = isinstance(answered, tuple) and [*map(torch.is_tensor, answered)] == [True, True]
            refuse_unless(two, "mask(…) returns two tensors, inputs and labels", answered)
            results.append(answered[1].flatten().tolist())
    return results


# --- 16.2 -------------------------------------------------------------------------------------------------

GRADIENT = "every rank holds the gradient of the mean loss over all asked tokens of all ranks"
LOSS = "every rank returns that mean loss"
SILENT = "where a rank asks nothing, or all ranks, nothing is lost, and nothing is nan"
HINTS_2 = {
    GRADIENT: {
        "pieces": "Each piece has the same weight here, whether it asks for one token or for twenty.",
        "ranks": "It is right on each rank, but each rank weighs the same, with few asked tokens or many.",
        "ddp": "It is too small by a factor of the number of ranks. What does DDP divide by?",
        "counts": "Which tokens have a question, and on which ranks are they counted?",
    },
    LOSS: {"mean": "A mean over all ranks: which losses are added up, and what are they divided by?"},
    SILENT: {"nothing": "A rank without a question takes part, with nothing. And what is 0 divided by 0?"},
}
Piece = tuple[int, int, int]  # the numbers of sentences, of their tokens, and of tokens asked for


@question(
    "16.2",
    "backward_by_tokens(ddp, pieces)",
    {GRADIENT: 3, LOSS: 2, SILENT: 1},
    depends_on={LOSS: GRADIENT, SILENT: GRADIENT},
    hints=HINTS_2,
)
def backward_by_tokens(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, weights, silent = rng.choice((3, 4, 5)), rng.randrange(2**31), rng.randrange(3)
    plans = [_plan(rng, ranks, asking) for asking in ({*range(ranks)}, {*range(ranks)} - {silent}, {*()})]
    calls = [(rng.randrange(2**31), plan) for plan in plans]
    results = by_call(ask(_accumulated, weights, calls, nprocs=ranks))
    for (seed, plan), of_call in zip(calls, results, strict=True):
        asked = [[asked for _, _, asked in pieces] for pieces in plan]
        sums, losses = _sums(weights, seed, plan)
        tokens = sum(map(sum, asked)) or 1
        truth, loss = sum(map(sum, sums)) / tokens, sum(map(sum, losses)) / tokens
        talking = plan is plans[0]
        rank, gap = furthest(far(each["gradient"], truth) for each in of_call)
        seen = f"{ranks} ranks with {', '.join(str(sum(each)) for each in asked)} asked tokens: "
        words = f"rank {rank}'s gradient is off by {gap:.2g}"
        counted = list(zip(sums, asked, strict=True))
        means = [[each / count for each, count in zip(*of_rank, strict=True)] for of_rank in counted]
        own = [sum(each) / sum(count) for each, count in counted] if talking else []
        hint = nearest(
            of_call[0]["gradient"],
            (sum(map(sum, means)) / ranks / len(plan[0]), "pieces"),
            (sum(own) / ranks, "ranks"),
            (truth / ranks, "ddp"),
            otherwise="counts",
            within=NEAR,
        )
        yield Finding(
            GRADIENT if talking else SILENT, gap < NEAR, seen + words, hint if talking else "nothing"
        )
        off = [each["returned"] for each in of_call if far(each["returned"], loss) > CLOSE]
        words = f"{(off or [loss])[0]} was returned, and the mean loss is {loss:.10f}"
        yield Finding(LOSS if talking else SILENT, not off, seen + words, "mean" if talking else "nothing")


def _plan(rng: random.Random, ranks: int, asking: set[int]) -> list[list[Piece]]:
    """Draw three pieces per rank; the numbers of asked tokens differ within a rank and between ranks."""
    counts = [rng.sample(range(1, 5), 3) for _ in range(ranks)]
    counts = [
        [count + rank * 4 if rank in asking else 0 for count in each] for rank, each in enumerate(counts)
    ]
    return [[(rng.randint(4, 6), rng.randint(6, 8), count) for count in each] for each in counts]


def _network(seed: int) -> nn.Module:
    """Build a model from ids (sentences, length) to scores (sentences, length, WORDS)."""
    model = nn.Sequential(nn.Embedding(WORDS, 5), nn.Tanh(), nn.Linear(5, WORDS)).double()
    for place, value in enumerate(model.state_dict().values()):
        value.copy_(tensor(seed + place, tuple(value.shape)) / 2)
    return model


NUMBERS = sum(parameter.numel() for parameter in _network(0).parameters())


def _drawn(seed: int, plan: list[list[Piece]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Draw the pieces of each rank: ids, and labels that ask for some of them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(sentences: int, length: int, asked: int) -> tuple[Tensor, Tensor]:
        ids, labels = torch.randint(WORDS, (2, sentences, length), generator=generator)
        order = torch.randperm(labels.numel(), generator=generator).view(labels.shape)
        return ids, labels.masked_fill(order >= asked, IGNORED)

    return [[drawn(*piece) for piece in pieces] for pieces in plan]


def _sums(weights: int, seed: int, plan: list[list[Piece]]) -> tuple[list[list[Any]], list[list[float]]]:
    """Return, for each rank and piece, the gradient of the sum of its losses, and that sum."""
    model = _network(weights)
    gradients: list[list[Any]] = [[] for _ in plan]
    losses: list[list[float]] = [[] for _ in plan]
    for rank, pieces in enumerate(_drawn(seed, plan)):
        for ids, labels in pieces:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()
            gradients[rank].append(gradients_of(model))
            losses[rank].append(loss.item())
    return gradients, losses


@reports(
    lambda weights, calls: [{"gradient": ([NUMBER] * NUMBERS, None), "returned": (NUMBER, str)}] * len(calls)
)
@in_group
def _accumulated(answer: Any, weights: int, calls: list[tuple[int, list[list[Piece]]]]) -> list[Result]:
    model = _network(weights)
    ddp = DistributedDataParallel(model)
    results: list[Result] = []
    for seed, plan in calls:
        returned = number(answer(ddp, _drawn(seed, plan)[dist.get_rank()]))
        results.append({"gradient": gradients_of(model), "returned": returned})
    return results
