"""The questions of lesson 13: four functions in which ranks fall out of step."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ..in_rank.work import in_group, refuse_unless
from ..inputs import own_order_of_sets
from ..judging import Faults, by_call, far, first_fault, furthest, in_digits, nearest
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, told

CLOSE = 1e-11  # relative; the numbers are float64
SEVEN_DIGITS = "That is right to seven digits, which is what float32 keeps. Which dtype keeps sixteen?"
EMPTY_HANDED = "A rank may have nothing. What does it add to the sums, and which calls does it make?"
Counts = list[list[tuple[int, int]]]  # by epoch and rank: samples that are right, samples evaluated


def _two_numbers(rng: random.Random) -> tuple[int, int]:
    """Draw two different world sizes, so that an answer with one of them hard-coded is wrong."""
    first = rng.randint(2, 5)
    return first, rng.choice([count for count in (3, 4, 5) if count != first])


def _is(value: Any, right: float, within: float = CLOSE) -> bool:
    return far(value, right) <= within * max(1.0, abs(right))


def _numbers(values: Sequence[Any], what: str) -> None:
    for rank, value in enumerate(values):
        if not isinstance(value, int | float):
            raise Refused(f"{what}; on rank {rank} it returned {value}")


# --- 13.1 -------------------------------------------------------------------------------------------------

UNEVEN = "every rank returns the mean over all batches of all ranks, also where one has more of them"
NOTHING = "also where a rank has no batch at all"
ONCE = "more batches need no more collectives"


@question("13.1", "mean_loss(losses)", {UNEVEN: 1, NOTHING: 1, ONCE: 1}, rests={ONCE: UNEVEN})
def mean_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, others = _two_numbers(rng)
    order = rng.sample(range(ranks), ranks)  # a rank with more of them has more in each case
    few, many = (_losses(rng, order, least) for least in (2, 90))
    results = ask(_mean_losses, [few, many], nprocs=ranks)  # by rank and turn: the value, the number of calls
    for turn, (losses, of_turn) in enumerate(zip([few, many, few, many], by_call(results), strict=True)):
        yield _of_means(UNEVEN, [value for value, *_ in of_turn], losses, again=turn > 1)
        changed = [rank for rank, (*_, stays) in enumerate(of_turn) if not stays]
        seen = f"on rank {(changed or [0])[0]} `losses` has other numbers, or another order, after your call"
        yield Finding(UNEVEN, not changed, seen, "The caller still needs it as it was.")
    grows = max(turns[1][1] - turns[0][1] for turns in results)
    calls = max(turns[1][1] for turns in results)
    seen = f"{sum(map(len, few))} batches in all took {max(turns[0][1] for turns in results)} collectives, "
    seen += f"{sum(map(len, many))} took {calls}"
    hint = "Which numbers can a rank add up by itself, before it communicates?"
    yield Finding(ONCE, grows <= 0 and calls > 0, seen, hint)
    empty, few = (_losses(rng, range(others), 2) for _ in range(2))
    empty[rng.randrange(others)] = []
    results = ask(_mean_losses, [empty, few], nprocs=others)
    for turn, (losses, of_turn) in enumerate(zip([empty, few] * 2, by_call(results), strict=True)):
        what = UNEVEN if turn > 1 else NOTHING  # the same lists again
        yield _of_means(what, [value for value, *_ in of_turn], losses, again=turn > 1)


def _losses(rng: random.Random, order: Sequence[int], least: int) -> list[list[float]]:
    """Draw the losses of each rank, in different numbers. A loss of 0 counts, too."""
    lengths = sorted(rng.sample(range(least, least + 2 * len(order)), len(order)))
    return [[0.0, *(rng.uniform(0.1, 4) for _ in range(lengths[place] - 1))] for place in order]


def _of_means(what: str, values: list[Any], losses: list[list[float]], again: bool = False) -> Finding:
    _numbers(values, "mean_loss(losses) returns a number")
    total, count = sum(map(sum, losses)), sum(map(len, losses))
    right, lengths = total / count, list(map(len, losses))
    rank, _ = furthest(far(value, right) for value in values)
    own = [sum(numbers) / max(1, len(numbers)) for numbers in losses]
    seen = f"the ranks had {lengths} batches, with the mean {right:.9f}; "
    seen += f"rank {rank} returned {values[rank]:.9f}"
    hint = "The mean over all is one sum divided by one count. Of what?"
    if far(values[rank], right) < 1e-5:
        hint = SEVEN_DIGITS
    elif again:
        hint = "The same lists came a second time. What did the first call do to them, or keep of them?"
    elif 0 in lengths:
        hint = EMPTY_HANDED
    else:
        hint = nearest(
            values[rank],
            *((mean, "That is one rank's own mean. What about the others' batches?") for mean in own),
            (sum(own) / len(own), "Each rank has the same weight there; each batch should. Divide later."),
            (total, "That is the sum. Divided by how many?"),
            (total / len(losses), "That is divided by the number of ranks. What is the mean over?"),
            (total / (max(lengths) * len(losses)), "That counts batches that do not exist."),
            otherwise=hint,
            within=1e-9,
        )
    return Finding(what, _is(values[rank], right), seen, hint)


@reports(lambda cases: [[(NUMBER, str), int, bool]] * (len(cases) + 2))
@in_group
def _mean_losses(answer: Any, cases: list[list[list[float]]]) -> list[tuple[float | str, int, bool]]:
    results, mine = [], [losses[dist.get_rank()] for losses in cases]
    for turn, losses in enumerate([*mine, mine[0], mine[0]]):
        if turn == len(mine) + 1:  # the same list, with new numbers
            losses[:] = mine[1]
        before = list(losses)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            value = answer(losses)
        calls = sum(event.name.startswith("c10d::") for event in profiler.events())
        results.append((number(value), calls, losses == before))
    return results


# --- 13.2 -------------------------------------------------------------------------------------------------

STOP = "all ranks stop after the first epoch that is no better than the best before it, over all ranks"
BEST = "every rank returns the best accuracy over all ranks"
NO_SHARD = "both also where a rank has nothing to evaluate"
EPOCHS = 8


@question("13.2", "train_until(train_epoch, validate, epochs)", {STOP: 1, BEST: 1, NO_SHARD: 1})
def train_until(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, others = _two_numbers(rng)  # with `others` ranks, at least two have samples
    alone = {0}
    while len(alone) == 1:  # ranks that decide alone must end with different numbers of calls
        cases = [_counts(rng, ranks, tie=tie) for tie in (False, True)]
        alone = {sum(_stop(_own(counts, rank))[0] for counts in cases) for rank in range(ranks)}
    evaluated = [rng.randint(200_000, 400_000) for _ in range(ranks)]  # so that it is better by very little
    for start in (1, 0):  # better in every epoch, to the last; then with nothing right in the first
        cases.append([[(epoch + start, n) for n in evaluated] for epoch in range(EPOCHS)])
    for counts, results in zip(cases, by_call(ask(_trained, cases, nprocs=ranks)), strict=True):
        yield from _of_stops(results, counts, STOP, BEST)
    cases = [_counts(rng, others, empty=rng.randrange(others)) for _ in range(2)]
    for counts, results in zip(cases, by_call(ask(_trained, cases, nprocs=others)), strict=True):
        yield from _of_stops(results, counts, NO_SHARD, NO_SHARD)


def _stop(accuracies: list[float], only_if_worse: bool = False) -> tuple[int, float]:
    """Return how many epochs are trained, and the best accuracy in them."""
    best = 0.0
    for epoch, accuracy in enumerate(accuracies):
        if accuracy < best or (accuracy == best and not only_if_worse):
            return epoch + 1, best
        best = accuracy
    return len(accuracies), best


def _over_all(counts: Counts) -> list[float]:
    return [sum(right for right, _ in epoch) / sum(evaluated for _, evaluated in epoch) for epoch in counts]


def _own(counts: Counts, rank: int) -> list[float]:
    return [epoch[rank][0] / max(1, epoch[rank][1]) for epoch in counts]


def _of_means_of(counts: Counts) -> list[float]:
    return [sum(right / max(1, evaluated) for right, evaluated in epoch) / len(epoch) for epoch in counts]


def _counts(rng: random.Random, ranks: int, tie: bool = False, empty: int | None = None) -> Counts:
    """Draw counts where single ranks, and the mean of their accuracies, stop elsewhere than all samples."""
    while True:
        evaluated = [0 if rank == empty else rng.randint(6, 30) for rank in range(ranks)]
        trend = [0.2 + 0.08 * epoch for epoch in range(EPOCHS)]
        counts: Counts = [
            [(min(n, max(0, round(n * (share + rng.uniform(-0.15, 0.15))))), n) for n in evaluated]
            for share in trend
        ]
        if tie:  # the last epoch is exactly as good as the best before it
            at = rng.randint(2, EPOCHS - 2)
            counts[at + 1] = list(counts[at])
        epochs, best = _stop(accuracies := _over_all(counts))
        own = [_stop(_own(counts, rank))[0] for rank in range(ranks) if rank != empty]
        of_means = _stop(_of_means_of(counts))[0]
        told_apart = len({epochs, own[0], of_means, EPOCHS}) == 4
        told_apart &= len(set(own)) > 1 and epochs not in own
        told_apart &= torch.tensor(best).item() != best  # float32 cannot hold it
        if told_apart and 2 < epochs < EPOCHS and tie == (accuracies[epochs - 1] == best):
            return counts


def _of_stops(results: list[Result], counts: Counts, stop: str, best_: str) -> Iterator[Finding]:
    accuracies = _over_all(counts)
    epochs, best = _stop(accuracies)
    trained = [result["trained"] for result in results]
    said = [result["epochs"] for result in results]
    shown = ", ".join(in_digits(*accuracies[: epochs + 1]))
    seen = f"the accuracies over all ranks were {shown}; "
    seen += f"the ranks trained {trained} epochs, and {epochs} is right"
    own = [_stop(_own(counts, rank))[0] for rank in range(len(results))]
    hint = "By which number do all ranks decide, and is it the accuracy of all samples together?"
    if trained == [epochs] * len(trained) and said != trained:
        seen = f"the ranks trained {epochs} epochs, and returned {said} as their number"
        hint = "How many epochs were trained, if the first one has the number 0?"
    elif not any(trained):
        hint = "Each call is a training run of its own, also with functions that you have seen before."
    elif trained[0] == _stop(accuracies, only_if_worse=True)[0]:
        hint = "An epoch that is exactly as good as the best is no better."
    elif trained[0] == own[0]:
        seen += f"; rank 0's own were {', '.join(in_digits(*_own(counts, 0)[: own[0]]))}"
        hint = "Rank 0's own accuracy would end it there. What do the others know that it does not?"
    elif trained[0] in own:
        rank = own.index(trained[0])
        seen += f"; rank {rank}'s own were {', '.join(in_digits(*_own(counts, rank)[: own[rank]]))}"
        hint = "One rank's own accuracy would end it. Is that, or its vote, the accuracy of all samples?"
    elif trained[0] == _stop(means := _of_means_of(counts))[0]:
        seen += f"; the means of the ranks' accuracies were {', '.join(in_digits(*means[: trained[0]]))}"
        hint = "The mean of the ranks' accuracies would end it there. Their shards have different sizes."
    elif trained[0] == EPOCHS:
        hint = "They never stopped. What is compared with what?"
    right = trained == [epochs] * len(trained) and said == trained
    yield Finding(stop, right, seen, hint)
    for rank, result in enumerate(results):
        seen = f"{epochs} epochs were trained, and rank {rank} called validate for {result['validated']}"
        hint = "Each call goes through all the rank's samples. How often is that needed after an epoch?"
        yield Finding(stop, not right or result["validated"] == list(range(epochs)), seen, hint)
    values = [result["best"] for result in results]
    _numbers(values, "train_until(…) returns the number of epochs and the best accuracy, two numbers")
    rank, _ = furthest(far(value, best) for value in values)
    seen = f"the best accuracy over all ranks was {best:.9f}; rank {rank} returned {values[rank]:.9f}"
    hint = "Once the ranks stop where they should, look at this again."
    if right:
        hint = nearest(
            values[rank],
            (best, SEVEN_DIGITS),
            (accuracies[epochs - 1], "That is the accuracy of the last epoch. Was it the best?"),
            (100 * best, "That is a percentage. A number from 0 to 1 is asked for."),
            otherwise="Which accuracy belongs to all ranks together?",
            within=1e-5,
        )
    yield Finding(best_, right and _is(values[rank], best), seen, hint)


@reports(
    lambda cases: (
        [{"trained": int, "epochs": (NUMBER, str), "best": (NUMBER, str), "validated": [NUMBER, ...]}]
        * len(cases)
    )
)
@in_group
def _trained(answer: Any, cases: list[Counts]) -> list[Result]:
    rank = dist.get_rank()
    results: list[Result] = []
    trained: list[int] = []
    validated: list[int] = []
    accuracies: Counts = []

    def train_epoch(epoch: int) -> None:
        trained.append(epoch)
        dist.all_reduce(torch.ones(3))  # as DDP's backward would

    def validate(epoch: int) -> tuple[int, int]:
        validated.append(epoch)
        right, evaluated = accuracies[epoch][rank]
        return (right if trained[-1:] == [epoch] else 0), evaluated  # untrained, nothing is right

    for counts in cases:  # one training run after the other, with the same function objects
        trained.clear()
        validated.clear()
        accuracies[:] = counts
        value = answer(train_epoch, validate, len(counts))
        if not isinstance(value, tuple | list) or len(value) != 2:
            asked = "train_until(…) returns two numbers, epochs and accuracy"
            raise Refused(f"{asked}; it returned {told(value)}")
        results.append({"trained": len(trained), "epochs": number(value[0]), "best": number(value[1])})
        results[-1]["validated"] = list(validated)
    return results


# --- 13.3 -------------------------------------------------------------------------------------------------

ORDER = "every rank returns the sums over all ranks, whatever the order of its own names"
MISSING = "also of names that some ranks do not have"
NAMES = ["accuracy", "error", "loss", "norm", "right", "samples", "seconds", "tokens"]


@question("13.3", "sum_metrics(metrics)", {ORDER: 1, MISSING: 1})
def sum_metrics(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, others = _two_numbers(rng)
    cases = [_metrics(rng, ranks, rng.sample(NAMES, count), lacking=0) for count in (4, 6)]
    results = by_call(ask(_summed, cases, nprocs=ranks))
    for turn, (metrics, of_turn) in enumerate(zip(cases * 2, results, strict=True)):
        yield first_fault(ORDER, _of_sums(of_turn, metrics, again=turn > 1))
    cases = [_metrics(rng, others, rng.sample(NAMES, count), lacking=2) for count in (6, 4)]
    results = by_call(ask(_summed, cases, nprocs=others))
    missing = [
        first_fault(ORDER if turn > 1 else MISSING, _of_sums(of_turn, metrics, again=turn > 1))
        for turn, (metrics, of_turn) in enumerate(zip(cases * 2, results, strict=True))
    ]
    if all(finding.ok for finding in missing):  # otherwise it may hang here, and tell less
        cases[0][rng.randrange(others)] = []  # a rank without any name
        results = by_call(ask(_summed, cases[:1], nprocs=others))
        missing.append(first_fault(MISSING, _of_sums(results[0], cases[0])))
        missing += [first_fault(ORDER, _of_sums(of_turn, cases[0], again=True)) for of_turn in results[1:]]
    yield from missing


def _metrics(rng: random.Random, ranks: int, names: list[str], lacking: int) -> list[list[tuple[str, float]]]:
    """Draw each rank's pairs, in an order of its own; ranks lack names, and some name is on one rank only."""
    while True:
        own = [rng.sample(names, len(names) - lacking) for _ in range(ranks)]
        everywhere = set(own[0]).intersection(*map(set, own))
        if set().union(*map(set, own)) != set(names) or (lacking and len(everywhere) == len(own[0])):
            continue
        if lacking and not any(sum(name in of_rank for of_rank in own) == 1 for name in names):
            continue
        if len({tuple(of_rank) for of_rank in own}) > 1:
            return [[(name, rng.uniform(-1000, 1000)) for name in of_rank] for of_rank in own]


def _of_sums(results: list[Result], metrics: list[list[tuple[str, float]]], again: bool = False) -> Faults:
    right: dict[str, float] = {}
    for name, value in (pair for own in metrics for pair in own):
        right[name] = right.get(name, 0.0) + value
    positive = {name for name, value in right.items() if value > 0}
    drops_negative = all(result["sums"].keys() == positive for result in results)
    for rank, (result, own) in enumerate(zip(results, map(dict, metrics), strict=True)):
        sums = result["sums"]
        if not result["stays"]:
            seen = f"on rank {rank} `metrics` has other names or numbers after your call"
            yield seen, "Whoever gave it to you goes on counting in it."
        for name in (name for name in right if name not in sums):
            hint = "A rank cannot know the names of the others by itself. Who tells it?"
            if drops_negative:
                hint = "All names with a sum below 0 are missing. Does your way of adding leave them out?"
            yield f"rank {rank} returned nothing for {name!r}; its sum is {right[name]:.6f}", hint
        for name in (name for name in sums if name not in right):
            seen = f"rank {rank} returned {name!r}, which no rank has"
            yield seen, "Which names are there, over all ranks?"
        for name, value in right.items():
            if _is(sums[name], value, 1e-12 * 1000):
                continue
            shown = sums[name] if isinstance(sums[name], str) else f"{sums[name]:.6f}"
            hint = "Numbers of different names were added up. By what does a collective know its partner?"
            if far(sums[name], value) < 1e-3:
                hint = SEVEN_DIGITS
            elif again:
                hint = "The same dict came a second time. What do you keep of the first?"
            elif far(sums[name], own.get(name, 0.0)) < 1e-9:
                hint = "That is the rank's own. What of the others?"
            yield f"the sum of {name!r} is {value:.6f}; rank {rank} returned {shown}", hint


@reports(lambda cases: [{"sums": {str: (NUMBER, str)}, "stays": bool}] * (len(cases) + 2))
@in_group
def _summed(answer: Any, cases: list[list[list[tuple[str, float]]]]) -> list[Result]:
    results, mine = [], [dict(metrics[dist.get_rank()]) for metrics in cases]
    for turn, metrics in enumerate([*mine, mine[0], mine[0]]):
        if turn == len(mine) + 1:  # the same dict, with other numbers in it
            metrics.clear()
            metrics.update(cases[-1][dist.get_rank()])
        before = list(metrics.items())
        with own_order_of_sets(dist.get_rank()):
            value = answer(metrics)
        refuse_unless(isinstance(value, dict), "sum_metrics(metrics) returns a dict", value)
        sums = {str(name): number(metric) for name, metric in value.items()}
        results.append({"sums": sums, "stays": list(metrics.items()) == before})
    return results


# --- 13.4 -------------------------------------------------------------------------------------------------

WELL = "where the work goes well everywhere, every rank returns the sum over the ranks"
FAILS = "where it fails on some ranks, every rank returns None, and the next call is right again"
OUT_OF_STEP = "The previous call left the ranks out of step. Does every rank make the same calls in it?"


class _Failure(Exception):
    """An exception of a type that no answer can know."""


@question("13.4", "all_or_none(work)", {WELL: 1, FAILS: 1}, rests={FAILS: WELL})
def all_or_none(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, others = _two_numbers(rng)
    cases = [_works(rng, ranks, []) for _ in range(4)]
    cases[1][:2] = rng.sample([0.0, -1.0], 2)
    for case, value in zip(cases[2:], (math.inf, math.nan), strict=True):
        case[rng.randrange(ranks)] = value
    for values, results in zip(cases, by_call(ask(_worked, cases, nprocs=ranks)), strict=True):
        yield first_fault(WELL, _of_works(WELL, results, values))
    one = rng.randrange(others)
    some = [rank for rank in range(others) if rank != one]
    cases = [_works(rng, others, failing) for failing in ([one], [], some, range(others), [])]
    for values, results in zip(cases, by_call(ask(_worked, cases, nprocs=others)), strict=True):
        yield first_fault(FAILS, _of_works(FAILS, results, values))


def _works(rng: random.Random, ranks: int, failing: Sequence[int]) -> list[float | None]:
    """Draw what the work of each rank returns, or None where it fails."""
    return [None if rank in failing else rng.uniform(-100, 100) for rank in range(ranks)]


def _of_works(what: str, results: list[Result], values: list[float | None]) -> Faults:
    failing = [rank for rank, value in enumerate(values) if value is None]
    right = sum(value for value in values if value is not None)
    for rank, result in enumerate(results):
        value, calls = result["value"], result["calls"]
        if calls != 1:
            hint = "It may take an hour: call it once."
            if calls == 0:
                hint = "It may be the same function as before. What it returns may be something else now."
            yield f"rank {rank} called work() {calls} times", hint
        if failing and value is not None:
            hint = "Does this rank know that another one has failed, when it decides what to return?"
            if not isinstance(value, str) and far(value, right) < 1e-6:
                hint = "That is the sum over the ranks that did not fail. None is asked for, on all ranks."
            yield f"the work failed on the ranks {failing}; rank {rank} returned {value}", hint
        if failing or value == right or str(value) == str(right):  # inf, or nan
            continue
        if value is not None and _is(value, right, 1e-12 * 1000):
            continue
        hint = (
            "No rank has failed, whatever its number is: 0 is one, too. How is a failure told from a number?"
        )
        if value is not None and far(value, right) < 1e-3:
            hint = SEVEN_DIGITS
        elif value is not None and far(value, values[rank]) < 1e-9:
            hint = "That is the rank's own. What of the others?"
        elif not math.isfinite(right):
            hint = "That is a number, too, which work() may return. What else tells you that it has failed?"
        elif what == FAILS:
            hint = OUT_OF_STEP
        shown = str(value) if value is None or isinstance(value, str) else f"{value:.9f}"
        yield f"the work went well everywhere, with the sum {right:.9f}; rank {rank} returned {shown}", hint


@reports(lambda cases: [{"value": (NUMBER, str, None), "calls": int}] * len(cases))
@in_group
def _worked(answer: Any, cases: list[list[float | None]]) -> list[Result]:
    results: list[Result] = []
    calls: list[int] = []

    def work() -> float:  # the same function object in each call, as in a training run
        calls.append(1)
        if mine is None:
            raise _Failure("this rank's work has failed")
        return mine

    for values in cases:
        mine = values[dist.get_rank()]
        calls.clear()
        value = answer(work)
        results.append({"value": None if value is None else number(value), "calls": len(calls)})
    return results
