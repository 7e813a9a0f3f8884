"""What people answer in exercise 07, wrong and right (see `answers`)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset

from tests.exercises.answers import right, wrong

DEALT = "the ranks share one order: each sample is read, and only the padding twice"
ORDER = "every epoch and every seed has its own order, the same one in every process"


def padded(count: int, world_size: int, seed: int) -> list[int]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order + order[: -count % world_size]


@wrong("07.1", DEALT, hint="no change")
def forgets_the_epoch(count, rank, world_size, epoch, seed=0):
    return padded(count, world_size, seed)[rank::world_size]


@wrong("07.1", DEALT, hint="no change")
def forgets_the_seed(count, rank, world_size, epoch, seed=0):
    return padded(count, world_size, epoch)[rank::world_size]


@wrong("07.1", hint="by chance")
def dice_of_the_process(count, rank, world_size, epoch, seed=0):
    order = torch.randperm(count).tolist()
    return (order + order[: -count % world_size])[rank::world_size]


@wrong("07.1", ORDER, hint="other orders")
def dice_of_each_rank(count, rank, world_size, epoch, seed=0):
    return padded(count, world_size, seed + 100 * epoch + rank)[rank::world_size]


@wrong("07.1", ORDER, hint="all alike")
def forgets_the_rank(count, rank, world_size, epoch, seed=0):
    return padded(count, world_size, seed + epoch)[::world_size]


@wrong("07.1", ORDER, hint="overlap")
def steps_of_one(count, rank, world_size, epoch, seed=0):
    return padded(count, world_size, seed + epoch)[rank : rank + -(-count // world_size)]


@wrong("07.1", hint="nothing")
def prints_it(count, rank, world_size, epoch, seed=0):
    print(padded(count, world_size, seed + epoch)[rank::world_size])


@wrong("07.1", hint="there are 0 …")
def counts_from_one(count, rank, world_size, epoch, seed=0):
    return [index + 1 for index in padded(count, world_size, seed + epoch)[rank::world_size]]


@right("07.1")
def by_the_sampler(count, rank, world_size, epoch, seed=0):
    sampler = DistributedSampler(range(count), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    return iter(sampler)


@right("07.1")
def with_numpy(count, rank, world_size, epoch, seed=0):
    order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return np.split(np.array(order + order[: -count % world_size]), world_size)[rank].tolist()


SHARED = "the ranks share the work: every sample is evaluated once"
EXACT = "every rank returns the accuracy of the whole set"
FEW = "also where there are fewer samples than ranks"


def evaluate(model: Any, data: Any, indices: Any) -> tuple[int, int]:
    """(right, evaluated)"""
    hits = evaluated = 0
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(Subset(data, list(indices)), batch_size=4):
            hits += (model(x).argmax(1) == y).sum().item()
            evaluated += len(y)
    return hits, evaluated


def my_part(data: Any) -> range:
    return range(dist.get_rank(), len(data), dist.get_world_size())


def summed(*numbers: float) -> list[float]:
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


@wrong("07.2", hint="padding")
def with_the_samplers_padding(model, data):
    hits, evaluated = summed(*evaluate(model, data, DistributedSampler(data, shuffle=False)))
    return hits / evaluated


@wrong("07.2", hint="remainder")
def by_the_dropping_sampler(model, data):
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    hits, evaluated = summed(*evaluate(model, data, sampler))
    return hits / max(1, evaluated)


@wrong("07.2", hint="overlap")
def at_random(model, data):
    mine = random.Random(dist.get_rank()).choices(range(len(data)), k=-(-len(data) // dist.get_world_size()))
    hits, evaluated = summed(*evaluate(model, data, mine))
    return hits / evaluated


@wrong("07.2", EXACT, FEW, hint="all")
def each_judges_all(model, data):
    hits, evaluated = evaluate(model, data, range(len(data)))
    return hits / evaluated


@wrong("07.2", SHARED, hint="means")
def the_mean_of_the_ranks(model, data):
    hits, evaluated = evaluate(model, data, my_part(data))
    return summed(hits / max(1, evaluated))[0] / dist.get_world_size()


@wrong("07.2", SHARED, EXACT, hint="empty")
def one_over_no_rank(model, data):
    hits, evaluated = evaluate(model, data, my_part(data))
    hits, evaluated = summed(hits, max(1, evaluated))
    return hits / evaluated


@wrong("07.2", SHARED, hint="own")
def its_own(model, data):
    hits, evaluated = evaluate(model, data, my_part(data))
    return hits / max(1, evaluated)


@wrong("07.2", SHARED, hint="one rank")
def rank_0_knows(model, data):
    counts = torch.tensor(evaluate(model, data, my_part(data)))
    dist.reduce(counts, dst=0)
    if dist.get_rank():
        return 0.0
    return (counts[0] / counts[1]).item()


@wrong("07.2", SHARED, hint="sums")
def the_count(model, data):
    return summed(*evaluate(model, data, my_part(data)))[0]


@right("07.2")
def in_blocks_of_the_set(model, data):
    size = -(-len(data) // dist.get_world_size())
    start = dist.get_rank() * size
    hits, _ = evaluate(model, data, range(len(data))[start : start + size])
    return summed(hits)[0] / len(data)


@right("07.2")
def gathers_the_counts(model, data):
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, evaluate(model, data, my_part(data)))
    return torch.tensor(sum(hits for hits, _ in counts) / sum(evaluated for _, evaluated in counts))
