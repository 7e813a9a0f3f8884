"""What people answer in exercise 13, wrong and right (see `answers`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.exercises.answers import right, wrong

UNEVEN = "every rank returns the mean over all batches of all ranks, also where one has more of them"


def summed(*values: float) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


@wrong("13.1", hint="waited in")
def the_broken_one(losses):
    total, count = 0.0, 0
    for loss in losses:
        total += summed(loss)[0]
        count += dist.get_world_size()
    return total / count


@wrong("13.1", hint="own mean")
def own_mean(losses):
    return sum(losses) / max(1, len(losses))


@wrong("13.1", hint="mean of means")
def mean_of_means(losses):
    return summed(sum(losses) / max(1, len(losses)))[0] / dist.get_world_size()


@wrong("13.1", hint="another mean")
def by_the_number_of_ranks(losses):
    return summed(sum(losses))[0] / dist.get_world_size()


@wrong("13.1", hint="no number")
def on_rank_0_alone(losses):
    total, count = summed(sum(losses), len(losses))
    return total / count if dist.get_rank() == 0 else None


@wrong("13.1", UNEVEN, hint="nothing")
def an_empty_rank_counts_as_one(losses):
    total, count = summed(sum(losses), max(1, len(losses)))
    return total / count


@wrong("13.1", UNEVEN, hint="never called all_reduce")
def leaves_with_nothing(losses):
    if not losses:
        return 0.0
    total, count = summed(sum(losses), len(losses))
    return total / count


@right("13.1")
def gathers_all(losses):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    together = [loss for each in everyone for loss in each]
    return sum(together) / len(together)


@right("13.1")
def in_two_calls(losses):
    total, count = torch.tensor(losses).sum(), torch.tensor(len(losses))
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count


STOP = "all ranks stop after the first epoch that is no better than the best before it, over all ranks"
BEST = "every rank returns the best accuracy over all ranks"
NO_SHARD = "both also where a rank has nothing to evaluate"


def trained_until(train_epoch: Any, epochs: int, measure: Any, stop: Any = lambda new, best: new <= best):
    best = 0.0
    for epoch in range(epochs):
        train_epoch(epoch)
        accuracy = measure(epoch)
        if stop(accuracy, best):
            break
        best = accuracy
    return epoch + 1, best


def over_all(correct: int, evaluated: int) -> float:
    correct, evaluated = summed(correct, evaluated)
    return correct / evaluated


def own(correct: int, evaluated: int) -> float:
    return correct / max(1, evaluated)


@wrong("13.2", hint="waited in")
def alone(train_epoch, validate, epochs):
    return trained_until(train_epoch, epochs, lambda epoch: own(*validate(epoch)))


@wrong("13.2", hint="mean of accuracies")
def by_the_mean_of_accuracies(train_epoch, validate, epochs):
    def measure(epoch):
        return summed(own(*validate(epoch)))[0] / dist.get_world_size()

    return trained_until(train_epoch, epochs, measure)


@wrong("13.2", hint="one rank's")
def one_vote_is_enough(train_epoch, validate, epochs):
    best = own_best = 0.0
    for epoch in range(epochs):
        train_epoch(epoch)
        correct, evaluated = validate(epoch)
        mine = own(correct, evaluated)
        total, count, votes = summed(correct, evaluated, mine <= own_best)
        own_best, best = max(mine, own_best), max(total / count, best)
        if votes:
            break
    return epoch + 1, best


@wrong("13.2", hint="one rank's")
def rank_0_decides(train_epoch, validate, epochs):
    def measure(epoch):
        accuracy = torch.tensor(own(*validate(epoch)))
        dist.broadcast(accuracy, src=0)
        return accuracy.item()

    return trained_until(train_epoch, epochs, measure)


@wrong("13.2", hint="as good")
def stops_when_worse(train_epoch, validate, epochs):
    def is_worse(new, best):
        return new < best

    return trained_until(train_epoch, epochs, lambda epoch: over_all(*validate(epoch)), is_worse)


@wrong("13.2", hint="another epoch")
def counts_from_0(train_epoch, validate, epochs):
    count, best = trained_until(train_epoch, epochs, lambda epoch: over_all(*validate(epoch)))
    return count - 1, best


@wrong("13.2", hint="another epoch")
def trains_all(train_epoch, validate, epochs):
    seen = []
    for epoch in range(epochs):
        train_epoch(epoch)
        seen.append(over_all(*validate(epoch)))
    return epochs, max(seen)


@wrong("13.2", STOP, hint="the last")
def returns_the_last(train_epoch, validate, epochs):
    seen = []

    def measure(epoch):
        seen.append(over_all(*validate(epoch)))
        return seen[-1]

    return trained_until(train_epoch, epochs, measure)[0], seen[-1]


@wrong("13.2", STOP, hint="another accuracy")
def in_percent(train_epoch, validate, epochs):
    count, best = trained_until(train_epoch, epochs, lambda epoch: over_all(*validate(epoch)))
    return count, 100 * best


@wrong("13.2", STOP, BEST, hint="nothing")
def an_empty_shard_counts_as_one(train_epoch, validate, epochs):
    def measure(epoch):
        correct, evaluated = validate(epoch)
        return over_all(correct, max(1, evaluated))

    return trained_until(train_epoch, epochs, measure)


@wrong("13.2", STOP, BEST, hint="your code")  # it hangs, or crashes
def leaves_out_the_empty_shard(train_epoch, validate, epochs):
    def measure(epoch):
        correct, evaluated = validate(epoch)
        return over_all(correct, evaluated) if evaluated else 0.0

    return trained_until(train_epoch, epochs, measure)


@right("13.2")
def divides_tensors(train_epoch, validate, epochs):
    best = 0.0
    for epoch in range(epochs):
        train_epoch(epoch)
        counts = torch.tensor(validate(epoch))
        dist.all_reduce(counts)
        accuracy = counts[0] / counts[1]
        if not accuracy > best:
            return epoch + 1, best
        best = accuracy
    return epochs, best


@right("13.2")
def rank_0_counts_and_tells(train_epoch, validate, epochs):
    best = 0.0
    for epoch in range(epochs):
        train_epoch(epoch)
        counts = torch.tensor(validate(epoch))
        dist.reduce(counts, dst=0)
        told = [None, None]
        if dist.get_rank() == 0:
            correct, evaluated = counts.tolist()
            told = [correct / evaluated <= best, max(best, correct / evaluated)]
        dist.broadcast_object_list(told, src=0)
        stop, best = told
        if stop:
            break
    return [epoch + 1, best]
