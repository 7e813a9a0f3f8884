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
from torch.utils.data import Dataset, TensorDataset

from ..in_rank.work import in_group
from ..inputs import fresh_copies, own_randomness
from ..judging import Faults, by_call, far, first_fault, first_wrong, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, told

CLOSE = 1e-6  # tolerance: an answer may compute in float32


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")


def _shared_out(count: int, ranks: list[list[int]], done: str) -> tuple[list[int], list[int], str]:
    """Return the samples that several ranks have, those that no rank has, and both in words."""
    times = Counter(itertools.chain(*ranks))
    twice = sorted(index for index, n in times.items() if n > 1)
    missing = sorted(set(range(count)) - set(times))
    several, none = (f"{len(samples)} ({_some(samples)})" if samples else "0" for samples in (twice, missing))
    words = f"{len(ranks)} ranks, {count} samples: {several} are {done} more than once, {none} by no rank"
    return twice, missing, words


# --- 07.1 -------------------------------------------------------------------------------------------------

EQUAL = "all ranks get equally many samples"
ONCE = "no sample is drawn twice, and fewer are left out than there are ranks"
ORDER = "every epoch and every seed has its own order, the same one each time it is asked for"
PROCESSES = 4  # asked for the second time, a rank is another process
Call = tuple[int, int, int, int, int]  # samples, ranks, epoch, seed; which process is rank 0
KEEPS = "Each rank keeps its samples, in another order. Which comes first: shuffling or sharing out?"


@question("07.1", "shard(count, rank, world_size, epoch, seed)", {EQUAL: 1, ONCE: 1, ORDER: 1})
def shard(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    one, other = rng.sample(range(2, 7), 2)
    uneven, even = ([ranks * rng.randint(20, 28) for ranks in (one, other)] for _ in range(2))
    uneven = [count + rng.randint(1, ranks - 1) for count, ranks in zip(uneven, (one, other), strict=True)]
    epochs, seeds = (0, 1, rng.randint(7, 20)), (0, rng.randint(5000, 9000))
    main: Call = (uneven[0], one, epochs[2], seeds[1], 0)
    calls: list[Call] = [main, (even[0], *main[1:])]
    calls += [(count, other, epochs[2], seeds[1], 0) for count in (uneven[1], even[1])]
    calls += [(uneven[1], 1, epochs[1], seeds[1], 0), (*main[:4], 1)]  # a single rank; `main` elsewhere
    calls.append(
        (rng.randint(1, max(one, other) - 1), max(one, other), epochs[1], seeds[1], 0)
    )  # none for all
    calls += [(uneven[0], one, epoch, seed, 0) for epoch in epochs for seed in seeds]
    calls = list(dict.fromkeys(calls))
    processes = ask(_shards, calls, rng.randrange(2**31), nprocs=PROCESSES)
    shards = {}
    for call, of_call in zip(calls, by_call(processes), strict=True):
        shards[call] = [of_call[_player(rank, call)][str(rank)] for rank in range(call[1])]
    for call, came in shards.items():
        yield _of_lengths(call, came)
        yield _drawn_once(call[0], came)
    yield first_fault(ORDER, _faults_of_order(main, shards, epochs, seeds))


def _of_lengths(call: Call, shards: list[list[int]]) -> Finding:
    lengths = [len(shard) for shard in shards]
    seen = f"of {call[0]} samples the {call[1]} ranks get {lengths}"
    hint = "With one sample more, a rank makes a step alone. To which length can the order be cut?"
    if not any(lengths):
        hint = "Nothing is returned: what should the function return?"
    return Finding(EQUAL, len(set(lengths)) == 1 and (lengths[0] > 0 or call[0] < call[1]), seen, hint)


def _faults_of_order(
    main: Call, shards: dict[Call, list[list[int]]], epochs: tuple[int, ...], seeds: tuple[int, ...]
) -> Faults:
    """Yield what is wrong with the orders, and hints."""
    first, again = shards[main], shards[*main[:4], 1]
    seen = f"rank 0 draws {_some(first[0]) or 'nothing'}"
    if not any(first):
        yield seen, "Nothing is drawn yet."
    if first != again:
        rank = first_wrong(map(operator.eq, first, again))
        seen = f"rank {rank} draws {_some(first[rank])}; asked again for the same epoch and seed, in another"
        seen += f" process, {_some(again[rank])}"
        yield (
            seen,
            "The random numbers differ each time. How do you make them start from a state that you choose?",
        )
    for call, came in shards.items():
        if call[0] < call[1]:
            continue
        if any(shard == sorted(shard) for shard in came):
            yield (
                f"a rank draws {_some(came[0])}",
                "They come in the order of the data set. What shuffles them?",
            )
        if any(map(_regular, came)):
            seen = f"a rank draws {_some(came[0])} (epoch {call[2]}, seed {call[3]})"
            yield seen, "That is the order of the data set, rotated or reversed. What shuffles it?"
    by = {(epoch, seed): shards[*main[:2], epoch, seed, 0] for epoch in epochs for seed in seeds}
    alike = [pair for pair in itertools.combinations(by, 2) if sum(map(operator.eq, *pair)) == 1]
    for one, other in alike:
        same = "epoch" if one[1] == other[1] else "seed"
        seen = f"for the epochs and seeds {one} and {other} rank 0 draws {_some(by[one][0])} and"
        seen += f" {_some(by[other][0])}"
        if by[one] == by[other]:
            yield seen, f"The {same} changes nothing there. On what does the order depend?"
        if all(set(a) == set(b) for a, b in zip(by[one], by[other], strict=True)):
            yield seen, KEEPS
    left_out = [set(range(main[0])).difference(*came) for came in by.values()]
    if left_out[0] and all(samples == left_out[0] for samples in left_out):
        seen = f"of {main[0]} samples {_some(sorted(left_out[0]))} are left out in every epoch"
        yield seen, "The model never learns from them. Which comes first: shuffling, or the cut?"


def _regular(indices: list[int]) -> bool:
    """Whether more than half of the neighbouring indices differ by the same step."""
    steps = Counter(b - a for a, b in itertools.pairwise(indices))
    return max(steps.values(), default=0) >= len(indices) / 2


def _drawn_once(count: int, shards: list[list[int]]) -> Finding:
    ranks = len(shards)
    twice, missing, seen = _shared_out(count, shards, "drawn")
    hint = "More is left out than necessary. What is the largest number that the ranks can share equally?"
    if not any(shards):
        hint = "Nothing is drawn. Which part of the order does each rank take?"
    elif twice and all(shard == shards[0] for shard in shards):
        hint = "All ranks draw the same. Where does the rank come in?"
    elif len(twice) + count % ranks == ranks and not missing:
        hint = "That is padding. Here the rest must be left out instead."
    elif twice and missing and not _follow(*shards[:2]):
        hint = "The ranks take their shards from different orders. What must they have in common?"
    elif twice:
        hint = "Two ranks take the same part of the order. How far apart do two samples of one rank lie?"
    return Finding(ONCE, not twice and len(missing) <= count % ranks, seen, hint)


def _follow(one: list[int], other: list[int]) -> bool:
    """Whether two ranks share one shuffle: most neighbours on one are neighbours on the other."""
    pairs = set(itertools.pairwise(one))
    return 2 * len(pairs & set(itertools.pairwise(other))) > len(pairs)


def _player(rank: int, call: Call) -> int:
    """Return the process that plays this rank in a call."""
    return (rank + call[-1]) % PROCESSES


def _played(process: int, call: Call) -> list[int]:
    return [rank for rank in range(call[1]) if _player(rank, call) == process]


@reports(
    lambda calls, _: lambda process: [{str(r): [int, ...] for r in _played(process, call)} for call in calls]
)
def _shards(answer: Any, calls: list[Call], seed: int) -> list[dict[int, list[int]]]:
    """Return, for each call, the shards of the ranks that this process plays."""
    process, results = int(os.environ["RANK"]), []
    with own_randomness(seed + process):  # the processes share only what they are given
        for call in calls:
            (count, ranks, epoch, own_seed, _), mine = call, _played(process, call)
            results.append({rank: _shard(answer, count, rank, ranks, epoch, own_seed) for rank in mine})
    return results


def _shard(answer: Any, count: int, rank: int, *place: int) -> list[int]:
    given = answer(count, rank, *place)
    try:
        indices = [operator.index(index) for index in given]
    except TypeError:
        raise Refused(f"shard(…) returns a list of indices; it returned {told(given)}") from None
    if outside := [index for index in indices if not 0 <= index < count]:
        raise Refused(f"of {count} samples rank {rank} draws {_some(outside)}; there are 0 … {count - 1}")
    return indices


# --- 07.2 -------------------------------------------------------------------------------------------------

ALL = "in each epoch the ranks together read all the data, the same amount each"
ORDERS = "every epoch has an order of its own"
RESUMED = "a run that resumes at a later epoch gets the batches that it would have had"
EPOCHS = 4


@question("07.2", "batches(data, batch_size, epochs)", {ALL: 1, ORDERS: 1, RESUMED: 1})
@with_two_world_sizes()
def batches(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    size, stop = rng.randint(3, 4), rng.randint(1, 2)
    # the last batch is short
    lengths = [size * rng.randint(4, 6) + rng.randint(2, size - 1) for _ in range(2)]
    uneven, even = lengths[0] * ranks - rng.randint(1, ranks - 1), lengths[1] * ranks
    data = [rng.sample(range(100, 1000), count) for count in (uneven, even)]
    few = rng.randint(1, max(1, (ranks - 1) // 2))  # samples: with 3 ranks or more, fewer than half of them
    data.append(rng.sample(range(100, 1000), few))
    calls = [(data[0], 0, EPOCHS), (data[0], stop, EPOCHS), (data[1], 0, 2), (data[2], 0, 2)]
    calls.append((data[1], 0, 1))  # in one epoch, a rank that reads everything reads more than its share
    results = ask(_batches, calls, size, rng.randrange(2**31), nprocs=ranks)
    for rank, of_rank in enumerate(results):
        if isinstance(of_rank, str):
            raise Refused(f"with {ranks} ranks, on rank {rank} {of_rank}")
    whole, rest, *others = (
        [_by_epoch(rank[call]["drawn"]) for rank in results] for call in range(len(calls))
    )
    came = [list(of_rank) for of_rank in whole]
    if came != [list(range(EPOCHS))] * ranks:
        raise Refused(f"epochs was range({EPOCHS}); your batches came with the epochs {came}, by rank")

    yield _of_epochs(whole, data[0], size)
    shared = True
    for rank, of_rank in enumerate(results):
        for call in (0, len(calls) - 1):
            read, kept = of_rank[call]["read"], sum(len(epoch) for _, epoch in of_rank[call]["drawn"])
            seen = f"rank {rank} of {ranks} reads {read} samples, and gets {kept} of them"
            hint = "Reading is the work to be shared. Are samples chosen before they are read, or afterwards?"
            shared = shared and read <= 1.5 * kept
            yield Finding(ALL, read <= 1.5 * kept, seen, hint)
    for (values, first, end), drawn in zip(calls[2:], others, strict=True):
        all_epochs = [{epoch: of_rank.get(epoch, []) for epoch in range(first, end)} for of_rank in drawn]
        yield _of_epochs(all_epochs, values, size)

    orders = whole[0]  # rank 0 has no padding
    place = {value: i for i, value in enumerate(data[0])}
    places = [[place.get(value, -1) for value in order] for order in orders.values()]
    plain = all(order == sorted(order) or _regular(order) for order in places)
    alike = [(a, b) for a, b in itertools.combinations(orders, 2) if orders[a] == orders[b]]
    own = not plain and not alike
    seen = f"rank 0 reads {_some(whole[0][0])} in epoch 0, and {_some(whole[0][1])} in epoch 1"
    if plain:
        hint = "Nothing is shuffled. What should do it?"
    elif all(order == of_rank[0] for of_rank in whole for order in of_rank.values()):
        hint = "The order of every epoch is that of the first. What tells the sampler which epoch it is?"
    elif alike:
        a, b = alike[0]
        seen = f"rank 0 reads {_some(orders[a])} in epoch {a}, and the same in epoch {b}"
        hint = "Two epochs have the same order. Is the sampler told of each one, before the loader begins?"
    yield Finding(ORDERS, own, seen, hint)

    of_rest = [{epoch: of_rank[epoch] for epoch in range(stop, EPOCHS)} for of_rank in whole]
    other = first_wrong(map(operator.eq, rest, of_rest))
    unlike = [epoch for epoch, order in of_rest[other].items() if rest[other].get(epoch) != order]
    epoch = (unlike or [stop])[0]
    went_on = rest[other].get(epoch, [])
    seen = f"epoch {epoch} begins on rank {other} with {_some(whole[other][epoch])}"
    seen += f"; in a run that begins with epoch {stop}, with {_some(went_on) or 'nothing'}"
    hint = "The order is random each time. What gives the same order again, in another process?"
    if rest[other].keys() != of_rest[other].keys():
        seen = f"epochs was range({stop}, {EPOCHS}); on rank {other} your batches came with {[*rest[other]]}"
        hint = "With which epoch does a resumed run begin?"
    elif not own:
        hint = "First every epoch needs an order of its own."
    elif went_on == whole[other][0]:
        hint = "The count starts at 0 again. Which number does the resumed epoch have?"
    yield Finding(RESUMED, own and rest == of_rest, seen, hint)
    for rank, of_rank in enumerate(results):
        read, kept = of_rank[1]["read"], sum(map(len, rest[rank].values()))
        seen = f"the run begins with epoch {stop}: rank {rank} reads {read} samples, and gets {kept}"
        hint = "The earlier epochs are over. What gives an epoch's order without reading the earlier ones?"
        yield Finding(RESUMED, not shared or read < kept + len(whole[rank][0]) / 2, seen, hint)


def _by_epoch(drawn: list[Any]) -> dict[int, list[int]]:
    epochs = dict(drawn)
    if len(epochs) < len(drawn):
        raise Refused("an epoch came twice")
    return epochs


def _of_epochs(drawn: list[dict[int, list[int]]], values: list[int], size: int) -> Finding:
    """Check that each epoch is complete; ``drawn`` is what was read, by rank and epoch."""
    ranks, count = len(drawn), len(values)
    wrong = [epoch for epoch in drawn[0] if not _complete([of_rank[epoch] for of_rank in drawn], values)]
    epoch = (wrong or [0])[0]
    shards = [of_rank[epoch] for of_rank in drawn]
    lengths = list(map(len, shards))
    missing = len(set(values).difference(*shards))
    seen = f"epoch {epoch}, {count} samples: the ranks read {lengths}, and {missing} are read by nobody"
    hint = "The shards do not fit together. What must be the same on all ranks?"
    if not missing and min(lengths) == count:
        hint = "Each rank reads everything. What tells the loader that there are other ranks?"
    elif len(set(lengths)) > 1:
        hint = "If that makes a step more on one rank, it waits for the others for ever. "
        hint += "What fills up the shards?"
    elif missing < ranks and sum(lengths) < count:
        hint = "The remainder is left out. Here it must be read, too: a few samples twice."
    elif missing and sum(lengths) < count and lengths[0] % size == 0:
        hint = "Each rank's last, short batch is left out. Two classes have an option for that: whose is it?"
    elif epoch:
        hint = "Epoch 0 is complete, and a later one is not. Do all ranks know which epoch it is?"
    elif not missing:
        hint = "That is more padding than needed. How many samples are missing to the next multiple?"
    elif all(set(shard) <= set(shards[0]) for shard in shards):
        hint = "All ranks read the same part. Where does the rank come in?"
    return Finding(ALL, not wrong, seen, hint)


def _complete(shards: list[list[int]], values: list[int]) -> bool:
    drawn = list(itertools.chain(*shards))
    even = len(set(map(len, shards))) == 1
    return even and set(drawn) == set(values) and len(drawn) < len(values) + len(shards)


class _Noting(TensorDataset):
    """A dataset that counts the samples read from it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        self.read += sample[0].numel()
        return sample


@reports(lambda calls, *_: ([{"drawn": [[int, [NUMBER, ...]], ...], "read": int}] * len(calls), str))
@in_group
def _batches(answer: Any, calls: list[tuple[list[int], int, int]], batch_size: int, seed: int) -> Any:
    """Return, for each call, what is drawn by epoch and how much is read; or, in words, what is no batch."""
    results = []
    first, second = fresh_copies(answer, 2)  # the second call is that of a resumed run
    for place, copy in enumerate([first, second, *[first] * (len(calls) - 2)]):
        values, start, stop = calls[place]
        data = _Noting(torch.tensor(values))
        with own_randomness(seed + 10 * place + dist.get_rank()):  # the ranks share only what they are given
            given = copy(data, batch_size, range(start, stop))
            try:
                drawn = list(_read(given, batch_size).items())
            except Refused as reason:
                return str(reason)  # the judge adds which rank it is
        results.append({"drawn": drawn, "read": data.read})
    return results


def _read(given: Any, batch_size: int) -> dict[int, list[int]]:
    """Return the values of each epoch; refuse anything but pairs of an epoch and a batch."""
    if given is None or not hasattr(given, "__iter__"):
        raise Refused(f"batches(…) yields pairs (epoch, batch); it returned {told(given)}")
    drawn: dict[int, list[int]] = {}
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], int):
            raise Refused(f"batches(…) yields pairs (epoch, batch); one was {told(pair)}")
        epoch, batch = pair
        while isinstance(batch, tuple | list) and len(batch) == 1:
            batch = batch[0]
        if not isinstance(batch, torch.Tensor):
            raise Refused(f"a batch is what the loader gives; one was {told(batch)}")
        if batch.numel() > batch_size:
            raise Refused(f"batch_size was {batch_size}, and a batch has {batch.numel()} samples")
        if epoch in drawn and epoch != list(drawn)[-1]:
            raise Refused(f"a batch of epoch {epoch} comes after those of another epoch had begun")
        if len(drawn.setdefault(epoch, [])) % batch_size:
            fewer = "a batch before the epoch's last has fewer samples"
            raise Refused(f"batch_size was {batch_size}, and {fewer}")
        drawn[epoch].extend(batch.flatten().tolist())
    return drawn


# --- 07.3 -------------------------------------------------------------------------------------------------

SHARED = "the ranks share the work: every sample is evaluated once"
EXACT = "every rank returns the accuracy of the whole set"
FEW = "also where there are fewer samples than ranks"
EVALUATED: list[int] = []  # samples evaluated by this rank, with any copy of the model
TRAINING: list[bool] = []
ALIKE = "Each rank's accuracy has the same weight here, but the shards differ in size. Divide later."


@question("07.3", "accuracy(model, data)", {SHARED: 1, EXACT: 2, FEW: 1})
def accuracy(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from _of_sets(ask, rng)
    ranks = rng.randint(3, 5)
    few = rng.sample([0, 1, *rng.choices([0, 1], k=ranks - 3)], ranks - 1)
    (results,) = _asked(ask, rng, [few], ranks)
    yield _returned(
        FEW, results, few, "A rank may have nothing to evaluate. What does it add to the sums then?"
    )
    _, missing, seen = _shared_out(len(few), [result["evaluated"] for result in results], "evaluated")
    yield Finding(FEW, not missing, seen, "Every sample belongs to the set, however few there are.")


@with_two_world_sizes()
def _of_sets(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    """Judge the accuracies of two sets, one after the other, from the same ranks."""
    rights = [_rights(rng, ranks, many) for many in rng.sample([6, 110], 2)]  # a few samples, and many
    for right, results in zip(rights, _asked(ask, rng, rights, ranks), strict=True):
        count, truth = len(right), sum(right) / len(right)
        values, evaluated = ([result[name] for result in results] for name in ("value", "evaluated"))
        twice, missing, seen = _shared_out(count, evaluated, "evaluated")
        shares = list(map(len, evaluated))
        hint = "The shards overlap and leave gaps. What must the ranks have in common?"
        if len(missing) == count:
            hint = "The model is never called. What does it predict for the samples?"
        elif len(twice) == count:
            hint = "Each rank does all the work. What is this rank's part of it?"
        elif max(shares) == sum(shares):
            hint = "One rank does all the work. What is each rank's part?"
        elif twice and not missing:
            hint = (
                "That is padding. Here no rank waits for another's step, so no shard needs to be filled up."
            )
        elif missing and not twice:
            hint = "The remainder is left out. It belongs to the set, too."
        once = not twice and not missing and max(shares) < count
        fair = -(-count // ranks)
        if once and fair > 50 and (min(shares) == 0 or max(shares) > 2 * fair):
            once, hint = False, "Some ranks have much to do, and others little. Who takes which samples?"
        yield Finding(SHARED, once, f"{seen}; the ranks evaluate {shares}", hint)
        hits = [[right[i] for i in samples if i in range(count)] for samples in evaluated]
        yield _returned(EXACT, results, right, _of_accuracy(values, truth, hits))


def _asked(ask: Ask, rng: random.Random, rights: list[list[int]], ranks: int) -> list[list[dict[str, Any]]]:
    """Return, for each set and rank, the value returned and the samples evaluated."""
    calls = []
    for right in rights:
        classes = rng.randint(3, 6)
        labels = [rng.randrange(classes) for _ in right]
        # the label if right, else the next class
        said = [(label + 1 - ok) % classes for label, ok in zip(labels, right, strict=True)]
        calls.append({"classes": classes, "labels": labels, "said": said, "seed": rng.randrange(2**31)})
        calls[-1]["below"] = len(rights) == 1  # no score is positive; otherwise some are
    by_rank = ask(_evaluated, calls, nprocs=ranks)
    for rank, results in enumerate(by_rank):
        for value in (call["value"] for call in results):
            if isinstance(value, str):
                raise Refused(f"accuracy(model, data) returns a number; on rank {rank} it returned {value}")
    return by_call(by_rank)


def _returned(what: str, results: list[Result], right: list[int], hint: str) -> Finding:
    values, truth = [result["value"] for result in results], sum(right) / len(right)
    rank, gap = furthest(far(value, truth) for value in values)
    seen = f"{len(values)} ranks; {sum(right)} of {len(right)} are right, which is {truth:.4f}; rank {rank}"
    training = any(result["training"] for result in results)
    if training:
        hint = "The model was in training mode during the evaluation: dropout made its outputs random."
    return Finding(what, gap < CLOSE and not training, f"{seen} returns {values[rank]:.4f}", hint)


def _of_accuracy(values: list[float], truth: float, hits: list[list[int]]) -> str:
    """Choose the hint for what the ranks returned, by what each of them got right."""
    if any(far(value, truth) < CLOSE for value in values):
        return "One rank has it. Do the others get the same sums?"
    own = [sum(hits) / max(1, len(hits)) for hits in hits]
    total, evaluated = sum(map(sum, hits)), sum(map(len, hits))
    share = total / max(1, evaluated)
    of_all = (
        (100 * truth, "That is a percentage. A number from 0 to 1 is asked for."),
        (total, "That is a count. An accuracy is one count divided by another."),
        (evaluated, "That is a count. An accuracy is one count divided by another."),
        (sum(own), "That is a sum of accuracies. Which numbers may be added up over ranks?"),
        (share, "It is right for what was evaluated, but that is not every sample once: see above."),
        (sum(own) / len(values), ALIKE),
    )
    return nearest(
        values,
        (own, "That is each rank's own. What has to be added up over the ranks before anything is divided?"),
        *(([value] * len(values), hint) for value, hint in of_all),
        otherwise="Count the correct ones and all of them, both over all ranks, and only then divide.",
        within=CLOSE,
    )


def _rights(rng: random.Random, ranks: int, a_rank: int) -> list[int]:
    """Draw which samples the model gets right, about ``a_rank`` on each; a wrong count changes the share."""
    while True:
        count = ranks * (a_rank + rng.randint(-1, 3)) + rng.randint(1, ranks - 1)
        right = [0] * ranks + [int(rng.random() < 0.7) for _ in range(count - ranks)]
        truth, size = sum(right) / count, -(-count // ranks)
        dealt = [right[rank::ranks] for rank in range(ranks)]
        blocks = [right[rank * size : (rank + 1) * size] for rank in range(ranks)]
        if not all(blocks):
            continue
        own = [[sum(part) / len(part) for part in cut] for cut in (dealt, blocks)]
        others = [*own[0], *own[1], *(sum(shares) / ranks for shares in own)]
        padded, dropped = size * ranks, count // ranks * ranks
        told_apart = all(sum(right) * size % count for size in (padded, dropped))  # no share of these
        if truth > 0.3 and told_apart and all(abs(other - truth) > 0.02 / a_rank for other in others):
            return right


class _Samples(Dataset):
    """A map-style dataset with nothing but a length and samples."""

    def __init__(self) -> None:
        self.samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[operator.index(index)]


class _Lookup(nn.Module):
    """A model that finds its logits in the sample, and records which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # this gives the model a device, and drop a mode
        self.drop = nn.Dropout(0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        EVALUATED.extend(x[:, 0].long().tolist())
        TRAINING.append(self.training)
        return self.drop(x[:, 1:]) * self.scale


@reports(lambda calls: [{"value": (NUMBER, str), "evaluated": [int, ...], "training": bool}] * len(calls))
@in_group
def _evaluated(answer: Any, calls: list[dict[str, Any]]) -> list[Result]:
    results, model, data = [], _Lookup(), _Samples()
    for call in calls:
        generator, indices = torch.Generator().manual_seed(call["seed"]), torch.arange(len(call["said"]))
        logits = torch.randn(len(indices), call["classes"], generator=generator)
        logits[indices, call["said"]] = logits.amax(1) + 0.1 + torch.rand(len(indices), generator=generator)
        if call["below"]:
            logits -= logits.amax() + 1
        else:
            logits += 4 * torch.randn(len(indices), 1, generator=generator)
        inputs = torch.cat([indices[:, None].float(), logits], dim=1)
        data.samples = list(zip(inputs, torch.tensor(call["labels"]), strict=True))
        model.train()
        EVALUATED.clear()
        TRAINING.clear()
        with own_randomness(call["seed"] + dist.get_rank()):
            value = number(answer(model, data))
        of_model = {"evaluated": list(EVALUATED), "training": any(TRAINING)}
        results.append({"value": value, **of_model})
    return results
