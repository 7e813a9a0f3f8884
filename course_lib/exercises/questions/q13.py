"""The questions of lesson 13: two functions in which the ranks can fall out of step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..in_rank.work import in_group
from ..judging import far, first_wrong, furthest, nearest
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, told

NEAR = 1e-5  # an answer may add up in float32


def _two_numbers(rng: random.Random) -> tuple[int, int]:
    """Draw two different world sizes, so that an answer with one of them hard-coded is wrong."""
    first = rng.randint(2, 5)
    return first, rng.choice([count for count in (3, 4, 5) if count != first])


# --- 13.1 -------------------------------------------------------------------------------------------------

UNEVEN = "every rank returns the mean over all batches of all ranks, also where one has more of them"
NOTHING = "also where a rank has no batch at all"


@question(
    "13.1",
    "mean_loss(losses)",
    {UNEVEN: 3, NOTHING: 1},
    depends_on={NOTHING: UNEVEN},
    hints={
        UNEVEN: {
            "own mean": "That is one rank's own mean. What about the other ranks' batches?",
            "mean of means": "Each rank has the same weight there; each batch should. Divide later.",
            "no number": "Every rank returns a number.",
            "another mean": "The mean over all is one sum divided by one count. Of what?",
        },
        NOTHING: {"nothing": "A rank may have nothing. What does it add to the sums, and to the count?"},
    },
)
def mean_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    for what, ranks in zip((UNEVEN, NOTHING), _two_numbers(rng), strict=True):
        lengths = rng.sample(range(2, 9), ranks)
        if what == NOTHING:
            lengths[rng.randrange(ranks)] = 0
        losses = [[rng.uniform(0.1, 4) for _ in range(length)] for length in lengths]
        values = ask(_mean_losses, losses, nprocs=ranks)
        right = sum(map(sum, losses)) / sum(lengths)
        own = [sum(of_rank) / max(1, len(of_rank)) for of_rank in losses]
        rank, gap = furthest(far(value, right) for value in values)
        hint = "nothing"
        if what == UNEVEN:
            known = [*((mean, "own mean") for mean in own), (sum(own) / ranks, "mean of means")]
            hint = nearest(values[rank], *known, otherwise="another mean", within=NEAR)
            hint = "no number" if isinstance(values[rank], str) else hint
        seen = f"the ranks had {lengths} batches, with the mean {right:.6f}; rank {rank} returned "
        yield Finding(what, gap < NEAR, f"{seen}{values[rank]}", hint)


@reports(lambda _: (NUMBER, str))
@in_group
def _mean_losses(answer: Any, losses: list[list[float]]) -> float | str:
    return number(answer(losses[dist.get_rank()]))


# --- 13.2 -------------------------------------------------------------------------------------------------

STOP = "all ranks stop after the first epoch that is no better than the best before it, over all ranks"
BEST = "every rank returns the best accuracy over all ranks"
NO_SHARD = "both also where a rank has nothing to evaluate"
EPOCHS = 8
Counts = list[list[tuple[int, int]]]  # by epoch and rank: samples that are right, samples evaluated


@question(
    "13.2",
    "train_until(train_epoch, validate, epochs)",
    {STOP: 3, BEST: 2, NO_SHARD: 1},
    depends_on={BEST: STOP, NO_SHARD: STOP},
    hints={
        STOP: {
            "one rank's": "One rank's own accuracy would end it. Is that, or its vote, the accuracy of all?",
            "mean of accuracies": "The mean of the ranks' accuracies would end it. Their shards have "
            "different sizes.",
            "as good": "An epoch that is exactly as good as the best is no better.",
            "another epoch": "By which number do all ranks decide? And how many epochs are trained, if the "
            "first is number 0?",
        },
        BEST: {
            "the last": "That is the accuracy of the last epoch. Was it the best?",
            "another accuracy": "Which accuracy belongs to all ranks together, as a number from 0 to 1?",
        },
        NO_SHARD: {"nothing": "A rank may have nothing to evaluate. What does it add to the sums?"},
    },
)
def train_until(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, others = _two_numbers(rng)
    alone = {0}
    while len(alone) == 1:  # ranks that decide alone must end with different numbers of calls
        cases = [_counts(rng, ranks, tie=tie) for tie in (False, True)]
        alone = {sum(_stop(_own(counts, rank))[0] for counts in cases) for rank in range(ranks)}
    empty = _counts(rng, others, empty=rng.randrange(others))  # two ranks or more have samples
    for world_size, asked in ((ranks, cases), (others, [empty])):
        results = ask(_trained, asked, nprocs=world_size)
        for counts, of_case in zip(asked, zip(*results, strict=True), strict=True):
            yield from _of_stops(list(of_case), counts, asked is cases)


def _of_stops(results: list[Result], counts: Counts, all_have_samples: bool) -> Iterator[Finding]:
    accuracies, ranks = _over_all(counts), range(len(results))
    epochs, best = _stop(accuracies)
    trained, values = ([result[what] for result in results] for what in ("trained", "best"))
    said = [result["epochs"] for result in results]
    stops = trained == said == [epochs] * len(results)
    seen = f"the accuracies over all ranks were {', '.join(f'{each:.4f}' for each in accuracies)}; "
    seen += f"the ranks trained {trained} epochs and returned {said}, and {epochs} is right"
    rank, gap = furthest(far(value, best) for value in values)
    of_best = f"the best accuracy over all ranks was {best:.6f}; rank {rank} returned {values[rank]}"
    if not all_have_samples:
        yield Finding(NO_SHARD, stops and gap < NEAR, of_best if stops else seen, "nothing")
        return
    first = trained[first_wrong(each == epochs for each in trained)]
    hint = "another epoch"
    if first == _stop(accuracies, only_if_worse=True)[0] != epochs:
        hint = "as good"
    elif first in [_stop(_own(counts, rank))[0] for rank in ranks]:
        hint = "one rank's"
    elif first == _stop(_of_means_of(counts))[0]:
        hint = "mean of accuracies"
    yield Finding(STOP, stops, seen, hint)
    known = ((accuracies[epochs - 1], "the last"),)
    hint = nearest(values[rank], *known, otherwise="another accuracy", within=NEAR)
    yield Finding(BEST, gap < NEAR, of_best, hint)


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
    """Draw counts; as a rule, a rank alone, or the mean of the accuracies, would stop in another epoch."""
    while True:
        evaluated = [0 if rank == empty else rng.randint(6, 30) for rank in range(ranks)]
        counts: Counts = [
            [(min(n, max(0, round(n * (share + rng.uniform(-0.15, 0.15))))), n) for n in evaluated]
            for share in (0.2 + 0.08 * epoch for epoch in range(EPOCHS))
        ]
        if tie:  # the last epoch is exactly as good as the best before it
            at = rng.randint(2, EPOCHS - 2)
            counts[at + 1] = list(counts[at])
        epochs, best = _stop(accuracies := _over_all(counts))
        wrong = [*(_stop(_own(counts, rank))[0] for rank in range(ranks)), _stop(_of_means_of(counts))[0]]
        apart = wrong[-1] not in wrong[:-1] and not {epochs, EPOCHS} & set(wrong)
        ties = accuracies[epochs - 1] == best
        if (apart or tie or empty is not None) and 2 < epochs < EPOCHS and ties == tie:
            return counts


@reports(lambda cases: [{"trained": int, "epochs": (NUMBER, str), "best": (NUMBER, str)}] * len(cases))
@in_group
def _trained(answer: Any, cases: list[Counts]) -> list[Result]:
    results: list[Result] = []
    for counts in cases:
        trained: list[int] = []

        def train_epoch(epoch: int, trained: list[int] = trained) -> None:
            trained.append(epoch)
            dist.all_reduce(torch.ones(3))  # as DDP's backward would

        def validate(epoch: int, counts: Counts = counts) -> tuple[int, int]:
            right, evaluated = counts[epoch][dist.get_rank()]
            return right, evaluated

        value = answer(train_epoch, validate, len(counts))
        if not isinstance(value, tuple | list) or len(value) != 2:
            asked = "train_until(…) returns two numbers, epochs and accuracy"
            raise Refused(f"{asked}; it returned {told(value)}")
        results.append({"trained": len(trained), "epochs": number(value[0]), "best": number(value[1])})
    return results
