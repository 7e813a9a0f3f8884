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
from torch.utils.data import TensorDataset

from ..asking import Ask, Finding, Refused, far, in_group, nearest, number, question, told

RANKS = 3  # an answer that counts on 2 must not pass
CLOSE = 1e-6  # answers may count in float32


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")


def _shared_out(count: int, ranks: list[list[int]], done: str) -> tuple[list[int], list[int], str]:
    """Of so many samples those that several ranks have, those that none has, and both in words."""
    times = Counter(itertools.chain(*ranks))
    twice = sorted(index for index, n in times.items() if n > 1)
    missing = sorted(set(range(count)) - set(times))
    several, none = (f"{len(each)} ({_some(each)})" if each else "0" for each in (twice, missing))
    return twice, missing, f"of {count} samples {several} are {done} more than once, {none} by nobody"


# --- 07.1 -------------------------------------------------------------------------------------------------

EQUAL = "all ranks get equally many samples"
ONCE = "no sample is drawn twice, and fewer are left out than there are ranks"
ORDER = "every epoch and every seed has its own order, the same one each time it is asked for"


@question("07.1", "shard(count, rank, world_size, epoch, seed)", {EQUAL: 1, ONCE: 1, ORDER: 1})
def shard(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed, epoch = rng.randrange(1000), rng.randrange(20)
    uneven = RANKS * rng.randint(8, 14) + rng.randint(1, RANKS - 1)
    even = RANKS * rng.randint(8, 14)
    calls = [(uneven, epoch, seed), (even, epoch, seed), (uneven, epoch + 1, seed)]
    calls += [(uneven, epoch, seed), (uneven, epoch, seed + 5000)]
    ranks = ask(_shards, calls, nprocs=RANKS)
    first, second, later, again, other = ([rank[call] for rank in ranks] for call in range(len(calls)))

    lengths = [list(map(len, each)) for each in (first, second)]
    equal = all(len(set(each)) == 1 for each in lengths) and min(map(min, lengths)) > 0
    seen = f"of {uneven} and of {even} samples the ranks get {lengths[0]} and {lengths[1]}"
    hint = "One sample too many on one rank, and it makes a step alone. To which length can the order be cut?"
    if not any(map(any, lengths)):
        hint = "Nothing comes back: what must the function return?"
    yield Finding(EQUAL, equal, seen, hint)

    drawn = _drawn_once(uneven, first)
    yield drawn if not drawn.ok else _drawn_once(even, second)

    shuffled = all(each != sorted(each) for each in first)
    seen = f"rank 0 draws {_some(first[0]) or 'nothing'}"
    if not any(first):
        hint = "Nothing is drawn yet."
    elif first != again:
        seen += f", and for the same epoch and seed, asked again, {_some(again[0])}"
        hint = "The dice are others each time. How are they made to start at a place of your choice?"
    elif not shuffled:
        hint = "They come in the order of the data set. Who shuffles?"
    elif first == later:
        seen += ", and the same in the next epoch"
        hint = "The epoch changes nothing. On what does the order depend?"
    else:
        seen += ", with another seed too"
        hint = "The seed changes nothing. On what does the order depend?"
    yield Finding(ORDER, shuffled and first == again and first not in (later, other), seen, hint)


def _drawn_once(count: int, shards: list[list[int]]) -> Finding:
    twice, missing, seen = _shared_out(count, shards, "drawn")
    if not any(shards):
        hint = "Nothing is drawn. What does each rank take of the order?"
    elif twice and all(each == shards[0] for each in shards):
        hint = "All ranks draw the same. Where does the rank come in?"
    elif len(twice) + count % RANKS == RANKS and not missing:
        hint = "That is padding. Here the rest must be left out instead."
    elif twice and missing and not _follow(*shards[:2]):
        hint = "The ranks deal from different packs of cards. What must they have in common?"
    elif twice:
        hint = "Two ranks take the same part of the order. How far apart do two samples of one rank lie?"
    else:
        hint = "More is left out than has to be. What is the largest number that can be divided?"
    return Finding(ONCE, not twice and len(missing) <= count % RANKS, seen, hint)


def _follow(one: list[int], other: list[int]) -> bool:
    """Do two ranks deal from the same pack: are neighbours on one mostly neighbours on the other?"""
    pairs = set(itertools.pairwise(one))
    return 2 * len(pairs & set(itertools.pairwise(other))) > len(pairs)


def _shards(answer: Any, calls: list[tuple[int, int, int]]) -> list[list[int]]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(1000 + rank)  # the ranks share nothing but what they are given
    random.seed(1000 + rank)
    found = []
    for count, epoch, seed in calls:
        given = answer(count, rank, RANKS, epoch, seed)
        try:
            indices = [operator.index(index) for index in given]
        except TypeError:
            raise Refused(f"shard(…) returns a list of indices; it returned {told(given)}") from None
        if outside := [index for index in indices if not 0 <= index < count]:
            raise Refused(f"of {count} samples rank {rank} draws {_some(outside)}; there are 0 … {count - 1}")
        found.append(indices)
    return found


# --- 07.2 -------------------------------------------------------------------------------------------------

ALL = "in each epoch the ranks read all the data together, the same amount each"
ORDERS = "every epoch has an order of its own"
RESUMED = "a training that begins at a later epoch gets the batches that it would have had"
EPOCHS = 4


@question("07.2", "batches(data, batch_size, epochs)", {ALL: 1, ORDERS: 1, RESUMED: 1})
def batches(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    count = RANKS * rng.randint(9, 14) + rng.randint(1, RANKS - 1)
    values = rng.sample(range(100, 1000), count)
    size, stop = rng.randint(2, 4), rng.randint(1, 2)
    ranks = ask(_batches, values, size, stop, nprocs=RANKS)
    for rank, each in enumerate(ranks):
        if isinstance(each, str):
            raise Refused(f"on rank {rank} {each}")
    whole, rest = ([dict(each[i]) for each in ranks] for i in range(2))  # by rank, by epoch: its values
    came = [sorted(each) for each in whole]
    if came != [list(range(EPOCHS))] * RANKS:
        raise Refused(f"epochs was range({EPOCHS}); your batches came with the epochs {came}, by rank")

    wrong = [epoch for epoch in range(EPOCHS) if not _complete([each[epoch] for each in whole], values)]
    epoch = (wrong or [0])[0]
    shards = [each[epoch] for each in whole]
    lengths = list(map(len, shards))
    missing = len(set(values).difference(*shards))
    seen = f"epoch {epoch}, {count} samples: the ranks read {lengths}, and {missing} are read by nobody"
    if not missing and min(lengths) == count:
        hint = "Each rank reads everything. Who tells the loader that there are other ranks?"
    elif len(set(lengths)) > 1:
        hint = (
            "The ranks make different numbers of steps, and one would wait for ever. What fills the shards?"
        )
    elif missing < RANKS and sum(lengths) < count:
        hint = "The rest is left out. Here it must be read, too: a few samples twice."
    elif epoch:
        hint = "Epoch 0 is complete, and a later one is not. Do all ranks know which epoch it is?"
    elif all(set(each) <= set(shards[0]) for each in shards):
        hint = "All ranks read the same part. Where does the rank come in?"
    else:
        hint = "The shards do not fit together. What must be the same on all ranks?"
    yield Finding(ALL, not wrong, seen, hint)

    orders = list(whole[0].values())  # rank 0 has no padding
    plain = all(each == sorted(each, key=values.index) for each in orders)
    own = not plain and all(a != b for a, b in itertools.combinations(orders, 2))
    seen = f"rank 0 reads {_some(whole[0][0])} in epoch 0, and {_some(whole[0][1])} in epoch 1"
    if plain:
        hint = "Nothing is shuffled. Who has to do it?"
    elif all(order == each[0] for each in whole for order in each.values()):
        hint = "The order of every epoch is that of the first. Who tells the sampler which epoch it is?"
    else:
        hint = "Two epochs have the same order. Is the sampler told of each one, before the loader begins?"
    yield Finding(ORDERS, own, seen, hint)

    went_on = rest[0].get(stop, [])
    seen = f"epoch {stop} begins on rank 0 with {_some(whole[0][stop])}"
    seen += f"; where the training begins with epoch {stop}, with {_some(went_on) or 'nothing'}"
    if not own:
        hint = "First every epoch needs an order of its own."
    elif went_on == whole[0][0]:
        hint = "The count starts at 0 again. Which number has the epoch that is going on?"
    else:
        hint = "Chance decides each time. What gives the same order again, in another process?"
    resumed = rest == [{epoch: each[epoch] for epoch in range(stop, EPOCHS)} for each in whole]
    yield Finding(RESUMED, own and resumed, seen, hint)


def _complete(shards: list[list[int]], values: list[int]) -> bool:
    drawn = list(itertools.chain(*shards))
    even = len(set(map(len, shards))) == 1
    return even and set(drawn) == set(values) and len(drawn) < len(values) + RANKS


@in_group
def _batches(answer: Any, values: list[int], batch_size: int, stop: int) -> Any:
    """What is drawn from the first epoch on, and from a later one, as pairs; or in words what is no batch."""
    found = []
    for start in (0, stop):
        torch.manual_seed(dist.get_rank() + 10 * (start + 1))  # nothing in common but what is given
        given = answer(TensorDataset(torch.tensor(values)), batch_size, range(start, EPOCHS))
        try:
            found.append(list(_read(given, batch_size).items()))
        except Refused as reason:
            return str(reason)  # the judge says on which rank
    return found


def _read(given: Any, batch_size: int) -> dict[int, list[int]]:
    """The values of each epoch."""
    if given is None or not hasattr(given, "__iter__"):
        raise Refused(f"batches(…) yields pairs (epoch, batch); it returned {told(given)}")
    drawn: dict[int, list[int]] = {}
    for each in given:
        if not isinstance(each, tuple | list) or len(each) != 2 or not isinstance(each[0], int):
            raise Refused(f"batches(…) yields pairs (epoch, batch); one was {told(each)}")
        epoch, batch = each
        while isinstance(batch, tuple | list) and len(batch) == 1:
            batch = batch[0]
        if not isinstance(batch, torch.Tensor):
            raise Refused(f"a batch is what the loader gives; one was {told(batch)}")
        if batch.numel() > batch_size:
            raise Refused(f"batch_size was {batch_size}, and a batch has {batch.numel()} samples")
        drawn.setdefault(epoch, []).extend(batch.flatten().tolist())
    return drawn


# --- 07.3 -------------------------------------------------------------------------------------------------

SHARED = "the ranks share the work: every sample is judged once"
EXACT = "every rank returns the accuracy of the whole set"
FEW = "also where there are fewer samples than ranks"
CLASSES = 4


@question("07.3", "accuracy(model, data)", {SHARED: 1, EXACT: 2, FEW: 1})
def accuracy(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    right = _rights(rng)
    count, truth = len(right), sum(right) / len(right)
    values, judged = _asked(ask, rng, right)
    twice, missing, seen = _shared_out(count, judged, "judged")
    shares = list(map(len, judged))
    if len(missing) == count:
        hint = "The model is not called. What does it say to the samples?"
    elif len(twice) == count:
        hint = "Each rank does all the work. What is this rank's part of it?"
    elif max(shares) == sum(shares):
        hint = "One rank works, and the others watch. What is each rank's part?"
    elif twice and not missing:
        hint = "That is padding. In a validation no rank waits for another's step, so no shard needs filling."
    elif missing and not twice:
        hint = "The rest is left out. It belongs to the set, too."
    else:
        hint = "The shards overlap and have holes. What must the ranks have in common?"
    once = not twice and not missing and max(shares) < count
    yield Finding(SHARED, once, f"{seen}; the ranks judge {shares}", hint)
    hint = _of_accuracy(values, truth, [[right[i] for i in each if i in range(count)] for each in judged])
    yield _returned(EXACT, values, right, hint)
    few = rng.sample([0, 1], 2)
    values, _ = _asked(ask, rng, few)
    yield _returned(FEW, values, few, "A rank may have nothing to judge. What does it add to the sums then?")


def _asked(ask: Ask, rng: random.Random, right: list[int]) -> tuple[list[float], list[list[int]]]:
    """Of each rank what it returned, and the samples that it judged."""
    labels = [rng.randrange(CLASSES) for _ in right]
    said = [(label + 1 - ok) % CLASSES for label, ok in zip(labels, right, strict=True)]  # or the next class
    ranks = ask(_judged, labels, said, rng.randrange(2**31), nprocs=RANKS)
    values, judged = ([each[name] for each in ranks] for name in ("value", "judged"))
    for rank, value in enumerate(values):
        if isinstance(value, str):
            raise Refused(f"accuracy(model, data) returns a number; on rank {rank} it returned {value}")
    return values, judged


def _returned(what: str, values: list[float], right: list[int], hint: str) -> Finding:
    truth = sum(right) / len(right)
    gaps = [far(value, truth) for value in values]
    rank = gaps.index(max(gaps))
    seen = f"{sum(right)} of {len(right)} are right, which is {truth:.4f}; rank {rank} returns "
    return Finding(what, max(gaps) < CLOSE, f"{seen}{values[rank]:.4f}", hint)


def _of_accuracy(values: list[float], truth: float, hits: list[list[int]]) -> str:
    """The hint for what the ranks returned, by what each of them got right."""
    if any(far(value, truth) < CLOSE for value in values):
        return "One rank knows it. Do the others get the same sums?"
    own = [sum(each) / max(1, len(each)) for each in hits]
    total, judged = sum(map(sum, hits)), sum(map(len, hits))
    share = total / max(1, judged)
    of_all = (
        (100 * truth, "That is in per cent. A share, from 0 to 1, is asked for."),
        (total, "That is a count. A share is one count divided by another."),
        (judged, "That is a count. A share is one count divided by another."),
        (sum(own), "That adds up shares. Which numbers may be added up over ranks?"),
        (sum(own) / RANKS, ALIKE),
        (share, "It is right for what was judged, which is not each sample once: see above."),
    )
    return nearest(
        values,
        (own, "That is each rank's own. What has to come together, before anything is divided?"),
        *(([value] * RANKS, hint) for value, hint in of_all),
        otherwise="How many are right, and how many are judged: both over all ranks, and only then divided.",
        within=CLOSE,
    )


ALIKE = "Each rank's share counts alike here, and the shards are not of one size. Divide later."


def _rights(rng: random.Random) -> list[int]:
    """Which samples the model gets right: no other way to count gives the same share."""
    while True:
        count = RANKS * rng.randint(5, 9) + rng.randint(1, RANKS - 1)
        right = [0] * RANKS + [int(rng.random() < 0.7) for _ in range(count - RANKS)]
        truth, size = sum(right) / count, -(-count // RANKS)
        dealt = [right[rank::RANKS] for rank in range(RANKS)]
        blocks = [right[rank * size : (rank + 1) * size] for rank in range(RANKS)]
        own = [[sum(each) / len(each) for each in cut] for cut in (dealt, blocks)]
        others = [*own[0], *own[1], *(sum(each) / RANKS for each in own)]
        padded, dropped = size * RANKS, count // RANKS * RANKS
        told_apart = all(sum(right) * judged % count for judged in (padded, dropped))  # no share of those
        if truth > 0.3 and told_apart and all(abs(each - truth) > 0.002 for each in others):
            return right


class _Noting(nn.Module):
    """Its logits stand in the sample; it notes whom it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # a model has a device, and a mode
        self.asked: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked += x[:, 0].long().tolist()
        return x[:, 1:] * self.scale


@in_group
def _judged(answer: Any, labels: list[int], said: list[int], seed: int) -> dict[str, Any]:
    indices = torch.arange(len(said))
    logits = torch.rand(len(said), CLASSES, generator=torch.Generator().manual_seed(seed))
    logits[indices, said] += 2
    data = TensorDataset(torch.cat([indices[:, None].float(), logits], dim=1), torch.tensor(labels))
    model = _Noting()
    return {"value": number(answer(model, data)), "judged": model.asked}
