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

from ..check import Refused, a_function, observe, question
from .ranks import join

Found = Iterator[tuple[str, bool, str, str]]
RANKS = 3  # an answer that counts on 2 shall not pass
CLOSE = 1e-6  # answers may count in float32


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")


# --- 07.1 -------------------------------------------------------------------------------------------------

EQUAL = "all ranks get equally many samples"
ONCE = "no sample is drawn twice, and fewer are left out than there are ranks"
ORDER = "every epoch and every seed has its own order, the same one each time it is asked for"


@question("07.1", {EQUAL: 1, ONCE: 1, ORDER: 1})
def shard(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "shard(count, rank, world_size, epoch, seed)")
    seed, epoch = rng.randrange(1000), rng.randrange(20)
    uneven = RANKS * rng.randint(8, 14) + rng.randint(1, RANKS - 1)
    even = RANKS * rng.randint(8, 14)
    calls = [(uneven, epoch, seed), (even, epoch, seed), (uneven, epoch + 1, seed)]
    calls += [(uneven, epoch, seed), (uneven, epoch, seed + 5000)]
    ranks = observe(_shards, answer, calls, nprocs=RANKS)
    _refuse_strange(ranks, calls)
    first, second, later, again, other = zip(*ranks, strict=True)  # each: by rank
    lengths = [list(map(len, each)) for each in (first, second)]
    equal = all(len(set(each)) == 1 for each in lengths) and min(map(min, lengths)) > 0
    yield (
        EQUAL,
        equal,
        f"of {uneven} and of {even} samples the ranks get {lengths[0]} and {lengths[1]}",
        "One sample too many on one rank, and it makes a step alone. To which length can the order be cut?"
        if max(map(max, lengths))
        else "Nothing comes back: what shall the function return?",
    )
    yield _drawn_once((uneven, even), (first, second))
    yield _in_order(first, again, later, other)


def _shards(answer: Any, calls: list[tuple[int, int, int]]) -> list[list[int] | str]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(1000 + rank)  # the ranks share nothing but what they are given
    random.seed(1000 + rank)
    found: list[list[int] | str] = []
    for count, epoch, seed in calls:
        given = answer(count, rank, RANKS, epoch, seed)
        try:
            found.append([operator.index(index) for index in given])
        except TypeError:
            found.append("nothing (None)" if given is None else f"{given!r:.60}")
    return found


def _refuse_strange(ranks: list[list[Any]], calls: list[tuple[int, int, int]]) -> None:
    for rank, found in enumerate(ranks):
        for each, (count, *_) in zip(found, calls, strict=True):
            if isinstance(each, str):
                raise Refused(f"shard(…) returns a list of indices; on rank {rank} it returned {each}")
            if outside := [index for index in each if not 0 <= index < count]:
                raise Refused(
                    f"of {count} samples rank {rank} draws {_some(outside)}; there are 0 … {count - 1}"
                )


def _drawn_once(counts: tuple[int, int], cases: Any) -> tuple[str, bool, str, str]:
    """Of the first case that is not right, or of the last one."""
    for count, by_rank in zip(counts, cases, strict=True):
        times = Counter(index for each in by_rank for index in each)
        twice = sorted(index for index, n in times.items() if n > 1)
        missing = sorted(set(range(count)) - set(times))
        ok = not twice and len(missing) <= count % RANKS
        seen = f"of {count} samples over {RANKS} ranks {len(twice)} are drawn more than once"
        seen += f" ({_some(twice)})" if twice else ""
        seen += f", {len(missing)} by nobody" + (f" ({_some(missing)})" if missing else "")
        if not times:
            hint = "Nothing is drawn. What does each rank take of the order?"
        elif max(times.values()) == RANKS and len(set(map(tuple, by_rank))) == 1:
            hint = "All ranks draw the same. Where does the rank come in?"
        elif len(twice) + count % RANKS == RANKS and not missing:
            hint = "That is padding. Here the rest shall be left out instead."
        elif twice and missing and not _follow(*by_rank[:2]):
            hint = "The ranks deal from different packs of cards. What must they have in common?"
        elif twice:
            hint = "Two ranks take the same part of the order. How far apart do two samples of one rank lie?"
        else:
            hint = "More is left out than has to be. What is the largest number that can be divided?"
        if not ok:
            break
    return ONCE, ok, seen, hint


def _follow(one: list[int], other: list[int]) -> bool:
    """Do two ranks deal from the same pack: are neighbours on one mostly neighbours on the other?"""
    pairs = set(itertools.pairwise(one))
    return 2 * len(pairs & set(itertools.pairwise(other))) > len(pairs)


def _in_order(first: Any, again: Any, later: Any, other: Any) -> tuple[str, bool, str, str]:
    shuffled = all(list(each) != sorted(each) for each in first)
    ok = shuffled and first == again and first != later and first != other
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
        seen += ", with another seed too" if first == other else ""
        hint = "The seed changes nothing. On what does the order depend?"
    return ORDER, ok, seen, hint


# --- 07.2 -------------------------------------------------------------------------------------------------

ALL = "in each epoch the ranks read all the data together, and equally much each"
ORDERS = "every epoch has an order of its own"
RESUMED = "a training that begins at a later epoch gets the batches that it would have had"


@question("07.2", {ALL: 1, ORDERS: 1, RESUMED: 1})
def batches(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "batches(data, batch_size, epochs)")
    count = RANKS * rng.randint(9, 14) + rng.randint(1, RANKS - 1)
    values = rng.sample(range(100, 1000), count)
    size, last = rng.randint(2, 4), 4
    stop = rng.randint(1, 2)
    ranks = observe(_batches, answer, values, size, last, stop, nprocs=RANKS)
    for rank, each in enumerate(ranks):
        if "fault" in each:
            raise Refused(f"on rank {rank} {each['fault']}")
    whole = [each["whole"] for each in ranks]  # by rank, by epoch: values in their order
    if [sorted(each) for each in whole] != [list(range(last))] * RANKS:
        raise Refused(
            f"epochs was range({last}); your batches came with the epochs "
            f"{[sorted(each) for each in whole]}, by rank"
        )
    wrong = next((e for e in range(last) if not _complete(whole, e, values)), None)
    epoch = 0 if wrong is None else wrong
    lengths = [len(each[epoch]) for each in whole]
    missing = len(set(values) - {value for each in whole for value in each[epoch]})
    seen = f"epoch {epoch}, {count} samples: the ranks read {lengths}, and {missing} are read by nobody"
    if not missing and min(lengths) == count:
        hint = "Each rank reads everything. Who tells the loader that there are other ranks?"
    elif len(set(lengths)) > 1:
        hint = (
            "The ranks make different numbers of steps, and one would wait for ever. What fills the shards?"
        )
    elif missing < RANKS and sum(lengths) < count:
        hint = "The rest is left out. Here it shall be read, too: a few samples twice."
    elif epoch:
        hint = "Epoch 0 is complete, and a later one is not. Do all ranks know which epoch it is?"
    elif all(set(each[0]) <= set(whole[0][0]) for each in whole):
        hint = "All ranks read the same part. Where does the rank come in?"
    else:
        hint = "The shards do not fit together. What must be the same on all ranks?"
    yield ALL, wrong is None, seen, hint
    same = [e for e in range(1, last) if all(each[e] == each[0] for each in whole)]
    plain = all(each == sorted(each, key=values.index) for each in whole[0].values())  # rank 0 has no padding
    ok = not same and not plain and len({tuple(each) for each in whole[0].values()}) == last
    seen = f"rank 0 reads {_some(whole[0][0])} in epoch 0, and {_some(whole[0][1])} in epoch 1"
    if plain:
        hint = "Nothing is shuffled. Who has to do it?"
    elif len(same) == last - 1:
        hint = "The order of every epoch is that of the first. Who tells the sampler which epoch it is?"
    else:
        hint = "Two epochs have the same order. Is the sampler told of each one, before the loader begins?"
    yield ORDERS, ok, seen, hint
    rest = [each["rest"] for each in ranks]
    expected = [{e: each[e] for e in range(stop, last)} for each in whole]
    seen = f"epoch {stop} begins on rank 0 with {_some(whole[0][stop])}"
    seen += f"; where the training begins with epoch {stop}, with {_some(rest[0].get(stop, [])) or 'nothing'}"
    if not ok:
        hint = "First every epoch needs an order of its own."
    elif rest[0].get(stop) == whole[0][0]:
        hint = "The count starts at 0 again. Which number has the epoch that is going on?"
    else:
        hint = "Chance decides each time. What gives the same order again, in another process?"
    yield RESUMED, ok and rest == expected, seen, hint


def _complete(whole: list[dict[int, list[int]]], epoch: int, values: list[int]) -> bool:
    shards = [each[epoch] for each in whole]
    drawn = sum(map(len, shards))
    return (
        len(set(map(len, shards))) == 1
        and {value for each in shards for value in each} == set(values)
        and drawn < len(values) + RANKS
    )


def _batches(
    answer: Any, values: list[int], batch_size: int, last: int, stop: int
) -> dict[str, dict[int, list[int]] | str]:
    join()
    found: dict[str, dict[int, list[int]] | str] = {}
    for name, epochs in (("whole", range(last)), ("rest", range(stop, last))):
        torch.manual_seed(dist.get_rank() + 10 * stop + len(name))  # nothing in common but what is given
        data = TensorDataset(torch.tensor(values))
        given = answer(data, batch_size, epochs)
        if given is None or not hasattr(given, "__iter__"):
            what = "nothing (None)" if given is None else f"{given!r:.60}"
            return {"fault": f"batches(…) yields pairs (epoch, batch); it returned {what}"}
        drawn: dict[int, list[int]] = {}
        for each in given:
            if not isinstance(each, tuple | list) or len(each) != 2 or not isinstance(each[0], int):
                return {"fault": f"batches(…) yields pairs (epoch, batch); one was {each!r:.60}"}
            epoch, batch = each
            while isinstance(batch, tuple | list) and len(batch) == 1:
                batch = batch[0]
            if not isinstance(batch, torch.Tensor):
                return {"fault": f"a batch is what the loader gives; one was {batch!r:.60}"}
            if batch.numel() > batch_size:
                return {"fault": f"batch_size was {batch_size}, and a batch has {batch.numel()} samples"}
            drawn.setdefault(epoch, []).extend(batch.flatten().tolist())
        found[name] = drawn
    return found


# --- 07.3 -------------------------------------------------------------------------------------------------

SHARED = "the ranks share the work: every sample is judged once"
EXACT = "every rank returns the accuracy of the whole set"
FEW = "also where there are fewer samples than ranks"


@question("07.3", {SHARED: 1, EXACT: 2, FEW: 1})
def accuracy(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "accuracy(model, data)")
    right = _rights(rng)
    count, truth = len(right), sum(right) / len(right)
    seed = rng.randrange(2**31)
    ranks = observe(_judged, answer, right, seed, nprocs=RANKS)
    values = [_number(each["value"], rank) for rank, each in enumerate(ranks)]
    times = Counter(index for each in ranks for index in each["judged"])
    twice = sorted(index for index, n in times.items() if n > 1)
    missing = sorted(set(range(count)) - set(times))
    shares = [len(each["judged"]) for each in ranks]
    seen = f"of {count} samples {len(twice)} are judged more than once"
    seen += f" ({_some(twice)})" if twice else ""
    seen += f", {len(missing)} by nobody; the ranks judge {shares}"
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
    yield SHARED, not twice and not missing and max(shares) < count, seen, hint
    far = max(range(RANKS), key=lambda rank: abs(values[rank] - truth))
    seen = f"{sum(right)} of {count} are right, which is {truth:.4f}; rank {far} returns {values[far]:.4f}"
    own = [sum(right[i] for i in each["judged"]) / max(1, len(each["judged"])) for each in ranks]
    judged = [right[i] for each in ranks for i in each["judged"]]
    yield (
        EXACT,
        max(abs(each - truth) for each in values) < CLOSE,
        seen,
        _of_accuracy(values, truth, own, judged),
    )
    few = rng.sample([0, 1], 2)
    ranks = observe(_judged, answer, few, seed, nprocs=RANKS)
    values = [_number(each["value"], rank) for rank, each in enumerate(ranks)]
    truth = 0.5
    far = max(range(RANKS), key=lambda rank: abs(values[rank] - truth))
    seen = f"{sum(few)} of {len(few)} is {truth:.4f}; rank {far} returns {values[far]:.4f}"
    hint = "A rank may have nothing to judge. What does it add to the sums then?"
    yield FEW, max(abs(each - truth) for each in values) < CLOSE, seen, hint


def _rights(rng: random.Random) -> list[int]:
    """Which samples the model gets right: no other way to count gives the same share."""
    while True:
        count = RANKS * rng.randint(5, 9) + rng.randint(1, RANKS - 1)
        right = [0] * RANKS + [int(rng.random() < 0.7) for _ in range(count - RANKS)]
        truth, size = sum(right) / count, -(-count // RANKS)
        dealt = [right[rank::RANKS] for rank in range(RANKS)]
        blocks = [right[rank * size : (rank + 1) * size] for rank in range(RANKS)]
        means = [sum(sum(each) / len(each) for each in cut) / RANKS for cut in (dealt, blocks)]
        own = [sum(each) / len(each) for each in (*dealt, *blocks)]
        padded, dropped = size * RANKS, count // RANKS * RANKS
        told_apart = all(
            sum(right) * judged % count for judged in (padded, dropped)
        )  # no share of those is it
        if truth > 0.3 and told_apart and all(abs(each - truth) > 0.002 for each in (*means, *own)):
            return right


def _of_accuracy(values: list[float], truth: float, own: list[float], judged: list[int]) -> str:
    def all_are(value: float) -> bool:
        return max(abs(each - value) for each in values) < CLOSE

    if any(abs(each - truth) < CLOSE for each in values):
        return "One rank knows it. Do the others get the same sums?"
    if all_are(100 * truth):
        return "That is in per cent. A share, from 0 to 1, is asked for."
    if judged and (all_are(sum(judged)) or all_are(len(judged))):
        return "That is a count. A share is one count divided by another."
    if max(abs(a - b) for a, b in zip(values, own, strict=True)) < CLOSE:
        return "That is each rank's own. What has to come together, before anything is divided?"
    if all_are(sum(own)):
        return "That adds up shares. Which numbers may be added up over ranks?"
    if all_are(sum(own) / RANKS):
        return "Each rank's share counts alike here, and the shards are not of one size. Divide later."
    if judged and all_are(sum(judged) / len(judged)):
        return "It is right for what was judged, which is not each sample once: see above."
    return "How many are right, and how many are judged: both over all ranks, and only then divided."


class _Told(nn.Module):
    """Its logits stand in the sample; it notes whom it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # a model has a device, and a mode
        self.asked: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked += x[:, 0].long().tolist()
        return x[:, 1:] * self.scale


def _judged(answer: Any, right: list[int], seed: int) -> dict[str, Any]:
    join()
    dice = torch.Generator().manual_seed(seed)
    count, classes = len(right), 4
    labels = torch.randint(classes, (count,), generator=dice)
    said = (labels + 1 - torch.tensor(right)) % classes  # a wrong answer is the next class
    logits = torch.rand(count, classes, generator=dice)
    logits[torch.arange(count), said] += 2
    data = TensorDataset(torch.cat([torch.arange(count)[:, None].float(), logits], dim=1), labels)
    model = _Told()
    value = answer(model, data)
    if value is None:
        given: float | str = "nothing (None)"
    else:
        try:
            given = float(value)
        except (TypeError, ValueError, RuntimeError):
            given = f"{value!r:.60}, a {type(value).__name__}"
    return {"value": given, "judged": model.asked}


def _number(value: float | str, rank: int) -> float:
    if isinstance(value, str):
        raise Refused(f"accuracy(model, data) returns a number; on rank {rank} it returned {value}")
    return value if value == value else float("inf")  # NaN is far from everything
