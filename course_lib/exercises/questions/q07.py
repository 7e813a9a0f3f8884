"""The questions of lesson 07: shards, their order, and an accuracy over all ranks."""

from __future__ import annotations

import itertools
import operator
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from ..in_rank.work import in_group
from ..inputs import own_randomness
from ..judging import Faults, by_call, far, first_fault, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, told

CLOSE = 1e-6  # an answer may divide in float32


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "") if numbers else "nothing"


def _shared_out(count: int, ranks: list[list[int]]) -> tuple[list[int], list[int], str]:
    """Return the samples that several ranks have, those that no rank has, and both in words."""
    times = Counter(itertools.chain(*ranks))
    twice = sorted(index for index, n in times.items() if n > 1)
    missing = sorted(set(range(count)) - set(times))
    several, none = (f"{len(samples)} ({_some(samples)})" if samples else "0" for samples in (twice, missing))
    return twice, missing, f"{len(ranks)} ranks, {count} samples: {several} more than once, {none} not at all"


# --- 07.1 -------------------------------------------------------------------------------------------------

DEALT = "the ranks share one order: each sample is read, and only the padding twice"
ORDER = "every epoch and every seed has its own order, the same one in every process"
PROCESSES = 2  # each is asked for all ranks
Call = tuple[int, int, int, int]  # samples, ranks, epoch, seed


@question(
    "07.1",
    "by_hand(count, rank, world_size, epoch, seed)",
    {DEALT: 2, ORDER: 2},
    hints={
        DEALT: {
            "all alike": "All ranks read the same. Where does the rank come in?",
            "other orders": "The ranks deal from different orders. What must they have in common?",
            "overlap": "The padded order gives each rank the same number of samples. Which are this rank's?",
            "nothing": "Nothing comes back. Which part of the order does each rank read?",
        },
        ORDER: {
            "by chance": "The order differs in another process. What makes it start from the same state?",
            "no change": "Epoch or seed changes nothing here. On which two numbers must the order depend?",
        },
    },
)
def by_hand(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    one, other = rng.sample(range(2, 7), 2)
    uneven = [n * rng.randint(20, 28) + rng.randint(1, n - 1) for n in (one, other)]
    epochs, seeds = (0, 1, rng.randint(7, 20)), (0, rng.randint(5000, 9000))
    calls: list[Call] = [(uneven[0], one, epoch, seed) for epoch in epochs for seed in seeds]
    calls += [(uneven[1], other, *calls[-1][2:]), (one * rng.randint(20, 28), one, *calls[-1][2:])]
    processes = ask(_by_hand, calls, rng.randrange(2**31), nprocs=PROCESSES)
    for call, (first, _) in zip(calls, by_call(processes), strict=True):
        yield _of_a_deal(*call[:2], first)
    yield first_fault(ORDER, _faults_of_order(calls, *processes))


def _of_a_deal(count: int, ranks: int, shards: list[list[int]]) -> Finding:
    twice, missing, seen = _shared_out(count, shards)
    size = -(-count // ranks)
    neighbours = [set(itertools.pairwise(shard)) for shard in shards]
    hint = "overlap"
    if not any(shards):
        hint = "nothing"
    elif all(shard == shards[0] for shard in shards):
        hint = "all alike"
    elif twice and all(len(neighbours[0] & others) < size / 4 for others in neighbours[1:]):  # few by chance
        hint = "other orders"
    holds = not missing and all(len(shard) == size for shard in shards)  # so only the padding is read twice
    return Finding(DEALT, holds, f"{seen}; they read {[len(shard) for shard in shards]}", hint)


def _faults_of_order(calls: list[Call], first: list[Any], again: list[Any]) -> Faults:
    for call, one, other in zip(calls, first, again, strict=True):
        if one != other or not any(one):
            seen = f"rank 0 reads {_some(one[0])} in epoch {call[2]} with seed {call[3]}"
            yield f"{seen}; in another process {_some(other[0])}", "by chance"
    orders = {call[2:]: shards for call, shards in zip(calls, first, strict=True) if call[:2] == calls[0][:2]}
    for one, other in itertools.combinations(orders, 2):
        if sum(map(operator.eq, one, other)) == 1 and orders[one] == orders[other]:
            seen = f"for the epochs and seeds {one} and {other} rank 0 reads {_some(orders[one][0])}"
            yield seen, "no change"


@reports(lambda calls, _: [[[int, ...]] * ranks for _, ranks, *_ in calls])
def _by_hand(answer: Any, calls: list[Call], seed: int) -> list[list[list[int]]]:
    with own_randomness(seed + int(os.environ["RANK"])):  # the processes share only what they are given
        return [[_shard(answer, call, rank) for rank in range(call[1])] for call in calls]


def _shard(answer: Any, call: Call, rank: int) -> list[int]:
    count, ranks, epoch, seed = call
    given = answer(count, rank, ranks, epoch, seed)
    try:
        shard = [] if given is None else [operator.index(index) for index in given]
    except TypeError:
        raise Refused(f"by_hand(…) returns a list of indices; it returned {told(given)}") from None
    if outside := [index for index in shard if not 0 <= index < count]:
        raise Refused(f"of {count} samples rank {rank} reads {_some(outside)}; there are 0 … {count - 1}")
    return shard


# --- 07.2 -------------------------------------------------------------------------------------------------

SHARED = "the ranks share the work: every sample is evaluated once"
EXACT = "every rank returns the accuracy of the whole set"
FEW = "also where there are fewer samples than ranks"
EVALUATED: list[int] = []  # samples evaluated by this rank, with any copy of the model


@question(
    "07.2",
    "accuracy(model, data)",
    {SHARED: 2, EXACT: 3, FEW: 1},
    hints={
        SHARED: {
            "padding": "That is padding. No rank waits for another's step here: why fill up a shard?",
            "remainder": "The remainder is left out. It belongs to the set, too.",
            "all": "One rank does all the work, or every rank does. What is this rank's part of it?",
            "overlap": "Each sample belongs to one rank, and each rank has some. Which are this rank's?",
        },
        EXACT: {
            "own": "That is each rank's own. What is added up over the ranks before anything is divided?",
            "one rank": "One rank has it. Do the others get the same sums?",
            "means": "Each rank's accuracy counts the same here, but shards differ in size. Divide later.",
            "sums": "Count the right ones and all of them, both over all ranks, and only then divide.",
        },
        FEW: {"empty": "A rank may have nothing to evaluate. What does it add to the sums then?"},
    },
)
def accuracy(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from _of_sets(ask, rng)
    ranks = rng.randint(3, 5)
    few = rng.sample([0, 1, *rng.choices([0, 1], k=ranks - 3)], ranks - 1)
    (results,) = _asked(ask, rng, [few], ranks)
    _, missing, _ = _shared_out(len(few), [result["evaluated"] for result in results])
    holds, seen, _ = _of_values(results, few)
    yield Finding(FEW, holds and not missing, seen, "empty")


@with_two_world_sizes()
def _of_sets(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    """Judge the accuracies of two sets, one after the other, from the same ranks."""
    rights = [_rights(rng, ranks, many) for many in rng.sample([6, 110], 2)]  # a few samples, and many
    for right, results in zip(rights, _asked(ask, rng, rights, ranks), strict=True):
        evaluated = [result["evaluated"] for result in results]
        twice, missing, seen = _shared_out(len(right), evaluated)
        shares = list(map(len, evaluated))
        even = max(shares) <= 2 * -(-len(right) // ranks) and min(shares) > 0
        hint = "overlap"
        if max(shares) >= len(right):
            hint = "all"
        elif twice and not missing:
            hint = "padding"
        elif missing and not twice:
            hint = "remainder"
        seen += f"; they evaluate {shares}"
        yield Finding(SHARED, not twice and not missing and even, seen, hint)
        yield Finding(EXACT, *_of_values(results, right))


def _of_values(results: list[Result], right: list[int]) -> tuple[bool, str, str]:
    """Judge the values that the ranks returned, by the samples that each evaluated and got right."""
    values, truth = [result["value"] for result in results], sum(right) / len(right)
    rank, gap = furthest(far(value, truth) for value in values)
    seen = f"{sum(right)} of {len(right)} are right, which is {truth:.4f}; rank {rank} of {len(values)}"
    hits = [[right[i] for i in result["evaluated"] if i in range(len(right))] for result in results]
    own = [sum(hits) / max(1, len(hits)) for hits in hits]
    mean = [sum(own) / len(own)] * len(own)
    hint = nearest(values, (own, "own"), (mean, "means"), otherwise="sums", within=CLOSE)
    if any(far(value, truth) < CLOSE for value in values):
        hint = "one rank"
    return gap < CLOSE, f"{seen} returns {values[rank]:.4f}", hint


def _asked(ask: Ask, rng: random.Random, rights: list[list[int]], ranks: int) -> list[list[Result]]:
    """Return, for each set and rank, the value returned and the samples evaluated."""
    calls = []
    for right in rights:
        classes = rng.randint(3, 6)
        labels = [rng.randrange(classes) for _ in right]
        # The label if the model is right, else the next class
        said = [(label + 1 - ok) % classes for label, ok in zip(labels, right, strict=True)]
        calls.append({"classes": classes, "labels": labels, "said": said, "seed": rng.randrange(2**31)})
    by_rank = ask(_evaluated, calls, nprocs=ranks)
    for value in (call["value"] for results in by_rank for call in results):
        if isinstance(value, str):
            raise Refused(f"accuracy(model, data) returns a number; it returned {value}")
    return by_call(by_rank)


def _rights(rng: random.Random, ranks: int, a_rank: int) -> list[int]:
    """Draw which samples the model gets right, about ``a_rank`` on each; a wrong count changes the share."""
    while True:
        count = ranks * a_rank + rng.randint(1, ranks - 1)
        right = [0] * ranks + [int(rng.random() < 0.7) for _ in range(count - ranks)]
        truth, dealt = sum(right) / count, [right[rank::ranks] for rank in range(ranks)]
        own = [sum(part) / len(part) for part in dealt]
        if truth > 0.3 and all(abs(other - truth) > 0.02 / a_rank for other in (*own, sum(own) / ranks)):
            return right


class _Samples(Dataset):
    """A map-style dataset with nothing but a length and samples."""

    def __init__(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[operator.index(index)]


class _Lookup(nn.Module):
    """A model that finds its scores in the sample, and records which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # this gives the model a device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        EVALUATED.extend(x[:, 0].long().tolist())
        return x[:, 1:] * self.scale


@reports(lambda calls: [{"value": (NUMBER, str), "evaluated": [int, ...]}] * len(calls))
@in_group
def _evaluated(answer: Any, calls: list[dict[str, Any]]) -> list[Result]:
    results = []
    for call in calls:
        generator, indices = torch.Generator().manual_seed(call["seed"]), torch.arange(len(call["said"]))
        scores = torch.randn(len(indices), call["classes"], generator=generator)
        scores[indices, call["said"]] = scores.amax(1) + 0.1
        inputs = torch.cat([indices[:, None].float(), scores], dim=1)
        data = _Samples(list(zip(inputs, torch.tensor(call["labels"]), strict=True)))
        EVALUATED.clear()
        with own_randomness(call["seed"] + dist.get_rank()):
            value = number(answer(_Lookup().train(), data))
        results.append({"value": value, "evaluated": list(EVALUATED)})
    return results
