"""What people answer in exercise 07, wrong and right (see `answers`)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset

from tests.exercises.answers import right, wrong

EQUAL = "all ranks get equally many samples"
ONCE = "no sample is drawn twice, and fewer are left out than there are ranks"
ORDER = "every epoch and every seed has its own order, the same one each time it is asked for"


def dealt(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


@wrong("07.1", EQUAL, ORDER, hint="That is padding")
def pads(count, rank, world_size, epoch, seed):
    order = dealt(count, seed + epoch)
    order += (order * world_size)[: -count % world_size]
    return order[rank::world_size]


@wrong("07.1", ONCE, ORDER, hint="To which length can the order be cut?")
def uneven(count, rank, world_size, epoch, seed):
    return dealt(count, seed + epoch)[rank::world_size]


@wrong("07.1", EQUAL, ONCE, hint="What shuffles ")
def in_order(count, rank, world_size, epoch, seed):
    return list(range(rank, count - count % world_size, world_size))


@wrong("07.1", EQUAL, hint="The random numbers differ each time")
def dice_of_the_process(count, rank, world_size, epoch, seed):
    return torch.randperm(count).tolist()[rank : count - count % world_size : world_size]


@wrong("07.1", EQUAL, ORDER, hint="What must they have in common?")
def dice_of_each_rank(count, rank, world_size, epoch, seed):
    return dealt(count, seed + epoch + rank)[rank : count - count % world_size : world_size]


@wrong("07.1", EQUAL, ONCE, hint="The epoch changes nothing")
def forgets_the_epoch(count, rank, world_size, epoch, seed):
    return dealt(count, seed)[rank : count - count % world_size : world_size]


@wrong("07.1", EQUAL, ONCE, hint="The seed changes nothing")
def forgets_the_seed(count, rank, world_size, epoch, seed):
    return dealt(count, epoch)[rank : count - count % world_size : world_size]


@wrong("07.1", EQUAL, ORDER, hint="Where does the rank come in?")
def forgets_the_rank(count, rank, world_size, epoch, seed):
    return dealt(count, seed + epoch)[: count // world_size]


@wrong("07.1", EQUAL, ORDER, hint="What is the largest number that the ranks can share equally?")
def drops_a_whole_round(count, rank, world_size, epoch, seed):
    return dealt(count, seed + epoch)[rank : count - world_size - count % world_size : world_size]


@wrong("07.1", EQUAL, ORDER, hint="How far apart")
def overlaps(count, rank, world_size, epoch, seed):
    size = count // world_size
    return dealt(count, seed + epoch)[rank : rank + size]


@wrong("07.1", EQUAL, ORDER, hint="are drawn more than once")
def knows_three_ranks(count, rank, world_size, epoch, seed):
    return dealt(count, seed + epoch)[rank % 3 : count - count % 3 : 3]


@wrong("07.1", EQUAL, ONCE, hint="changes nothing there")
def the_product_of_both(count, rank, world_size, epoch, seed):
    return dealt(count, seed * epoch)[rank : count - count % world_size : world_size]


@wrong("07.1", EQUAL, hint="What must they have in common?")
def by_the_hash_of_a_text(count, rank, world_size, epoch, seed):
    return dealt(count, hash(f"{seed}/{epoch}") % 2**31)[rank : count - count % world_size : world_size]


@wrong("07.1", EQUAL, ONCE, hint="shuffling or sharing out?")
def shuffles_its_own_share(count, rank, world_size, epoch, seed):
    mine = list(range(rank, count - count % world_size, world_size))
    random.Random(seed * 1000 + epoch).shuffle(mine)
    return mine


@wrong("07.1", EQUAL, ONCE, hint="That is the order of the data set, rotated or reversed.")
def turns_round(count, rank, world_size, epoch, seed):
    start = count // 3 + (seed + 7 * epoch) % (count // 3)
    order = [*range(start, count), *range(start)]
    return order[rank : count - count % world_size : world_size]


ASKED: list[int] = []


@wrong("07.1", EQUAL, hint="asked again")
def counts_its_calls(count, rank, world_size, epoch, seed):
    ASKED.append(epoch)
    return dealt(count, seed + len(ASKED))[rank : count - count % world_size : world_size]


@wrong("07.1", hint="it returned nothing (None)")
def prints_it(count, rank, world_size, epoch, seed):
    print(dealt(count, seed + epoch)[rank : count - count % world_size : world_size])


@wrong("07.1", hint="there are 0 …")
def counts_from_one(count, rank, world_size, epoch, seed):
    return [index + 1 for index in dealt(count, seed + epoch)[rank : count - count % world_size : world_size]]


@wrong("07.1", hint="Nothing is returned:")
def gives_an_empty_list(count, rank, world_size, epoch, seed):
    return []


ALL = "in each epoch the ranks together read all the data, the same amount each"
ORDERS = "every epoch has an order of its own"
RESUMED = "a run that resumes at a later epoch gets the batches that it would have had"


@wrong("07.2", ALL, hint="What tells the sampler which epoch it is?")
def no_set_epoch(data, batch_size, epochs):
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
    for epoch in epochs:
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ALL, ORDERS, hint="Which number does the resumed epoch have?")
def counts_its_own_epochs(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for i, epoch in enumerate(epochs):
        sampler.set_epoch(i)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ALL, hint="before the loader begins")
def tells_too_late(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        for batch in loader:
            sampler.set_epoch(epoch)
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="Do all ranks know which epoch it is?")
def tells_rank_0(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        if dist.get_rank() == 0:
            sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ORDERS, hint="What tells the loader that there are other ranks?")
def no_sampler(data, batch_size, epochs):
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    for epoch in epochs:
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="The remainder is left out.")
def drops_the_rest(data, batch_size, epochs):
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ALL, hint="Nothing is shuffled")
def does_not_shuffle(data, batch_size, epochs):
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="What must be the same on all ranks?")
def a_seed_for_each_rank(data, batch_size, epochs):
    sampler = DistributedSampler(data, seed=dist.get_rank() + 100)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="Where does the rank come in?")
def all_as_rank_0(data, batch_size, epochs):
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=0)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="waits for the others for ever")
def uneven_shards(data, batch_size, epochs):
    for epoch in epochs:
        order = dealt(len(data), epoch)[dist.get_rank() :: dist.get_world_size()]
        for batch in DataLoader(Subset(data, order), batch_size=batch_size):
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="have an option for that")
def the_loader_drops(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="missing to the next multiple?")
def a_round_of_padding(data, batch_size, epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in epochs:
        order = dealt(len(data), epoch)
        order += order[: world_size - len(data) % world_size]
        for batch in DataLoader(Subset(data, order[rank::world_size]), batch_size=batch_size):
            yield epoch, batch


@wrong("07.2", hint="your batches came with the epochs")
def from_the_last_epoch(data, batch_size, epochs):
    yield from all_in_a_list(data, batch_size, reversed(epochs))


@wrong("07.2", hint="comes after those of another epoch had begun")
def all_epochs_mixed(data, batch_size, epochs):
    found = all_in_a_list(data, batch_size, epochs)
    return found[::2] + found[1::2]


@wrong("07.2", hint="a batch before the epoch's last has fewer samples")
def sample_by_sample(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=None, sampler=sampler):
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="Reading is the work to be shared.")
def reads_all_and_keeps_some(data, batch_size, epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in epochs:
        order = dealt(len(data), epoch)
        order += order[: -len(data) % world_size]
        read = [data[index] for index in order]
        for batch in DataLoader(read[rank::world_size], batch_size=batch_size):
            yield epoch, batch


KEPT: dict[int, Any] = {}


@wrong("07.2", ORDERS, hint="in another process?")
def keeps_its_orders(data, batch_size, epochs):
    for epoch in epochs:
        if epoch not in KEPT:
            order = [torch.randperm(len(data)).tolist()]
            dist.broadcast_object_list(order)
            KEPT[epoch] = order[0]
        order = [index % len(data) for index in KEPT[epoch]]
        order += order[: -len(data) % dist.get_world_size()]
        mine = order[dist.get_rank() :: dist.get_world_size()]
        for batch in DataLoader(Subset(data, mine), batch_size=batch_size):
            yield epoch, batch


@wrong("07.2", ORDERS, hint="What must be the same on all ranks?")
def by_a_hash(data, batch_size, epochs):
    sampler = DistributedSampler(data, seed=hash("my training") % 2**31)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=batch_size, sampler=sampler):
            yield epoch, batch


@wrong("07.2", hint="mutually exclusive")
def shuffles_twice(data, batch_size, epochs):
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, sampler=DistributedSampler(data))
    for epoch in epochs:
        for batch in loader:
            yield epoch, batch


@wrong("07.2", hint="yields pairs (epoch, batch); one was")
def forgets_to_say_the_epoch(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        yield from DataLoader(data, batch_size=batch_size, sampler=sampler)


@wrong("07.2", hint="and a batch has")
def one_batch_for_all(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size * dist.get_world_size(), sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


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


@wrong("07.3", hint="That is padding")
def by_the_sampler(model, data):
    hits, evaluated = summed(*evaluate(model, data, DistributedSampler(data, shuffle=False)))
    return hits / evaluated


@wrong("07.3", hint="The remainder is left out.")
def by_the_dropping_sampler(model, data):
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    hits, evaluated = summed(*evaluate(model, data, sampler))
    return hits / max(1, evaluated)


@wrong("07.3", SHARED, hint="Each rank's accuracy has the same weight here, but the shards differ in size.")
def the_mean_of_the_ranks(model, data):
    hits, evaluated = evaluate(model, data, my_part(data))
    return summed(hits / max(1, evaluated))[0] / dist.get_world_size()


@wrong("07.3", SHARED, hint="ZeroDivisionError")
def the_mean_and_no_sample(model, data):
    hits, evaluated = evaluate(model, data, my_part(data))
    return summed(hits / evaluated)[0] / dist.get_world_size()


@wrong("07.3", SHARED, hint="That is each rank's own")
def its_own(model, data):
    hits, evaluated = evaluate(model, data, my_part(data))
    return hits / max(1, evaluated)


@wrong("07.3", SHARED, hint="That is a sum of accuracies.")
def the_sum_of_the_shares(model, data):
    hits, evaluated = evaluate(model, data, my_part(data))
    return summed(hits / max(1, evaluated))[0]


@wrong("07.3", EXACT, FEW, hint="Each rank does all the work")
def each_judges_all(model, data):
    hits, evaluated = evaluate(model, data, range(len(data)))
    return hits / evaluated


@wrong("07.3", EXACT, FEW, hint="One rank does all the work.")
def rank_0_judges(model, data):
    share = [None]
    if dist.get_rank() == 0:
        hits, evaluated = evaluate(model, data, range(len(data)))
        share = [hits / evaluated]
    dist.broadcast_object_list(share, src=0)
    return share[0]


@wrong("07.3", SHARED, hint="Do the others get the same sums?")
def rank_0_knows(model, data):
    counts = torch.tensor(evaluate(model, data, my_part(data)))
    dist.reduce(counts, dst=0)
    if dist.get_rank():
        return 0.0
    return (counts[0] / counts[1]).item()


@wrong("07.3", SHARED, hint="That is a count")
def the_count(model, data):
    return summed(*evaluate(model, data, my_part(data)))[0]


@wrong("07.3", SHARED, hint="That is a percentage.")
def in_per_cent(model, data):
    hits, evaluated = summed(*evaluate(model, data, my_part(data)))
    return 100 * hits / evaluated


@wrong("07.3", hint="The shards overlap and leave gaps.")
def at_random(model, data):
    mine = random.Random(dist.get_rank()).choices(range(len(data)), k=-(-len(data) // dist.get_world_size()))
    hits, evaluated = summed(*evaluate(model, data, mine))
    return hits / evaluated


@wrong("07.3", SHARED, EXACT, hint="expected a non-empty list")
def joins_what_may_be_empty(model, data):
    model.eval()
    parts = [(model(x).argmax(1) == y) for x, y in DataLoader(Subset(data, my_part(data)), batch_size=4)]
    hits = torch.cat(parts)
    total, evaluated = summed(hits.sum().item(), len(hits))
    return total / evaluated


@wrong("07.3", FEW, hint="The remainder is left out.")
def of_eight_ranks(model, data):
    hits, _ = summed(*evaluate(model, data, range(dist.get_rank(), len(data), 8)))
    return hits / len(data)


@wrong("07.3", hint="without waiting for the end of it")
def does_not_wait(model, data):
    counts = torch.tensor(evaluate(model, data, my_part(data)))
    dist.all_reduce(counts, async_op=True)
    dist.barrier()  # by then it is there, as a rule
    return (counts[0] / counts[1]).item()


@wrong("07.3", SHARED, FEW, hint="both over all ranks")
def the_last_batch_counts(model, data):
    model.eval()
    hits = evaluated = 0
    for x, y in DataLoader(Subset(data, my_part(data)), batch_size=100):
        hits, evaluated = (model(x).argmax(1) == y).sum().item(), len(y)
    hits, evaluated = summed(hits, evaluated)
    return hits / evaluated


@wrong("07.3", SHARED, hint="in training mode")
def forgets_the_mode(model, data):
    hits = sum((model(x[None]).argmax().item() == y) for x, y in Subset(data, my_part(data)))
    return summed(hits)[0] / len(data)


@wrong("07.3", SHARED, hint="divide")
def by_a_positive_score(model, data):
    model.eval()
    hits = sum((model(x[None])[0, y] > 0).item() for x, y in Subset(data, my_part(data)))
    return summed(hits)[0] / len(data)


@wrong("07.3", hint="failed: ")
def knows_the_tensors(model, data):
    x, y = data.tensors
    hits = (model.eval()(x[dist.get_rank() :: dist.get_world_size()]).argmax(1) == y[dist.get_rank()]).sum()
    return summed(hits.item())[0] / len(y)


@wrong("07.3", hint="it returned nothing (None)")
def prints_the_share(model, data):
    hits, evaluated = summed(*evaluate(model, data, my_part(data)))
    print(hits / evaluated)


# --- right, in another style ---


@wrong("07.1", EQUAL, ONCE, hint="Which comes first: shuffling, or the cut?")
def cuts_first(count, rank, world_size, epoch, seed):
    order = list(range(count - count % world_size))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order[rank::world_size]


@right("07.1")
def by_a_sampler_that_drops(count, rank, world_size, epoch, seed):
    sampler = DistributedSampler(range(count), world_size, rank, seed=seed, drop_last=True)
    sampler.set_epoch(epoch)
    return iter(sampler)


@right("07.1")
def with_numpy(count, rank, world_size, epoch, seed):
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return np.array_split(order[: count - count % world_size], world_size)[rank]


@right("07.2")
def a_sampler_for_each_epoch(data, batch_size, epochs):
    for epoch in epochs:
        sampler = DistributedSampler(data, seed=1000 + epoch)
        for batch in DataLoader(data, batch_size=batch_size, sampler=sampler):
            yield epoch, batch


@wrong("07.2", ORDERS, RESUMED, hint="What fills up the shards?")
def by_hand(data, batch_size, epochs):
    """Of one sample it can take no three."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for epoch in epochs:
        order = dealt(len(data), epoch)
        order += order[: -len(data) % world_size]
        for batch in DataLoader(Subset(data, order[rank::world_size]), batch_size=batch_size):
            yield epoch, batch


@right("07.2")
def all_in_a_list(data, batch_size, epochs):
    sampler = DistributedSampler(data, seed=7)
    found = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found += [(epoch, batch) for batch in DataLoader(data, batch_size=batch_size, sampler=sampler)]
    return found


@right("07.3")
def in_blocks_of_the_set(model, data):
    size = -(-len(data) // dist.get_world_size())
    start = dist.get_rank() * size
    hits, _ = evaluate(model, data, range(len(data))[start : start + size])
    return summed(hits)[0] / len(data)


@right("07.3")
def gathers_the_counts(model, data):
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, evaluate(model, data, my_part(data)))
    return torch.tensor(sum(hits for hits, _ in counts) / sum(evaluated for _, evaluated in counts))


# --- the result is right, and it was not done as asked ---


@wrong("07.2", ALL, ORDERS, hint="With which epoch does a resumed run begin?")
def begins_at_0_again(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in range(epochs.stop):
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ALL, hint="and the same in epoch 3")
def three_orders_in_turn(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch % 3)
        for batch in loader:
            yield epoch, batch


@wrong("07.2", ALL, ORDERS, hint="The earlier epochs are over.")
def goes_through_the_epochs_before(data, batch_size, epochs):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in range(epochs.stop):
        sampler.set_epoch(epoch)
        for batch in loader:
            if epoch in epochs:
                yield epoch, batch


@wrong("07.3", EXACT, FEW, hint="and others little")
def two_ranks_judge(model, data):
    rank = dist.get_rank()
    hits, evaluated = summed(*evaluate(model, data, range(rank, len(data), 2) if rank < 2 else []))
    return hits / evaluated


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


@wrong("07.1", EQUAL, ORDER, hint="drawn more than once")
def at_least_one_each(count, rank, world_size, epoch, seed):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(count, generator=generator).tolist()[: count - count % world_size]
    return order[rank::world_size] or [rank % count]


@wrong("07.1", ONCE, ORDER, hint="To which length can the order be cut")
def what_there_is_where_there_is_little(count, rank, world_size, epoch, seed):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(count, generator=generator).tolist()
    return order[: count - count % world_size if count >= world_size else count][rank::world_size]
