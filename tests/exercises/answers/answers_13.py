"""What people answer in exercise 13, wrong and right (see `answers`)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from tests.exercises.answers import right, wrong

UNEVEN = "every rank returns the mean over all batches of all ranks, also where one has more of them"
NOTHING = "also where a rank has no batch at all"
ONCE = "more batches need no more collectives"


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


@wrong("13.1", hint="one rank's own mean")
def own_mean(losses):
    return sum(losses) / max(1, len(losses))


@wrong("13.1", hint="Each rank has the same weight there;")
def mean_of_means(losses):
    return summed(sum(losses) / max(1, len(losses)))[0] / dist.get_world_size()


@wrong("13.1", hint="which is what float32 keeps")
def seven_digits(losses):
    sums = torch.tensor([sum(losses), len(losses)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@wrong("13.1", UNEVEN, NOTHING, hint="add up by itself")
def a_call_for_each_batch(losses):
    most = torch.tensor(len(losses))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    total = count = 0.0
    for step in range(int(most)):
        sums = summed(*((losses[step], 1.0) if step < len(losses) else (0.0, 0.0)))
        total, count = total + sums[0], count + sums[1]
    return total / count


@wrong("13.1", UNEVEN, ONCE, hint="never called all_reduce")
def leaves_with_nothing(losses):
    if not losses:
        return 0.0
    total, count = summed(sum(losses), len(losses))
    return total / count


@wrong("13.1", hint="That counts batches that do not exist.")
def pads_with_zeros(losses):
    most = torch.tensor(len(losses))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return summed(sum(losses))[0] / int(most) / dist.get_world_size()


@wrong("13.1", NOTHING, hint="The caller still needs it as it was.")
def uses_the_list_up(losses):
    total = count = 0
    while losses:
        total, count = total + losses.pop(), count + 1
    total, count = summed(total, count)
    return total / count if count else 0.0


@wrong("13.1", hint="one sum divided by one count")
def a_loss_of_0_is_none(losses):
    found = [loss for loss in losses if loss]
    total, count = summed(sum(found), len(found))
    return total / count


@wrong("13.1", hint="returns a number")
def on_rank_0_alone(losses):
    total, count = summed(sum(losses), len(losses))
    return total / count if dist.get_rank() == 0 else None


@right("13.1")
def gathers_all(losses):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    together = [loss for each in everyone for loss in each]
    return sum(together) / len(together)


@right("13.1")
def by_a_tensor_of_losses(losses):
    mine = torch.tensor(losses, dtype=torch.float64)
    total, count = mine.sum(), torch.tensor(len(mine))
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


def over_all(right: int, evaluated: int) -> float:
    right, evaluated = summed(right, evaluated)
    return right / evaluated


def own(right: int, evaluated: int) -> float:
    return right / max(1, evaluated)


@wrong("13.2", hint="waited in")
def alone(train_epoch, validate, epochs):
    return trained_until(train_epoch, epochs, lambda epoch: own(*validate(epoch)))


@wrong("13.2", hint="would end it")
def by_the_mean_of_accuracies(train_epoch, validate, epochs):
    def measure(epoch):
        return summed(own(*validate(epoch)))[0] / dist.get_world_size()

    return trained_until(train_epoch, epochs, measure)


@wrong("13.2", NO_SHARD, hint="exactly as good")
def stops_when_worse(train_epoch, validate, epochs):
    return trained_until(
        train_epoch, epochs, lambda epoch: over_all(*validate(epoch)), lambda new, best: new < best
    )


@wrong("13.2", hint="How many epochs were trained")
def counts_from_0(train_epoch, validate, epochs):
    number, best = trained_until(train_epoch, epochs, lambda epoch: over_all(*validate(epoch)))
    return number - 1, best


@wrong("13.2", STOP, hint="which is what float32 keeps")
def divides_tensors(train_epoch, validate, epochs):
    def measure(epoch):
        counts = torch.tensor(validate(epoch))
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    return trained_until(train_epoch, epochs, measure)


@wrong("13.2", STOP, hint="the accuracy of the last epoch")
def returns_the_last(train_epoch, validate, epochs):
    seen = []

    def measure(epoch):
        seen.append(over_all(*validate(epoch)))
        return seen[-1]

    return trained_until(train_epoch, epochs, measure)[0], seen[-1]


@wrong("13.2", hint="They never stopped")
def trains_all(train_epoch, validate, epochs):
    return trained_until(
        train_epoch, epochs, lambda epoch: over_all(*validate(epoch)), lambda new, best: False
    )


@wrong("13.2", STOP, BEST, hint="your code")  # it hangs, or crashes
def leaves_out_the_empty_shard(train_epoch, validate, epochs):
    def measure(epoch):
        right, evaluated = validate(epoch)
        return over_all(right, evaluated) if evaluated else 0.0

    return trained_until(train_epoch, epochs, measure)


@wrong("13.2", hint="the ranks trained")
def validates_before_it_trains(train_epoch, validate, epochs):
    def measure(epoch):
        counts = validate(epoch)
        train_epoch(epoch)
        return over_all(*counts)

    return trained_until(lambda epoch: None, epochs, measure)


@wrong("13.2", hint="IndexError")
def knows_no_last_epoch(train_epoch, validate, epochs):
    best, epoch = 0.0, 0
    while True:
        train_epoch(epoch)
        accuracy = over_all(*validate(epoch))
        epoch += 1
        if accuracy <= best:
            return epoch, best
        best = accuracy


@right("13.2")
def in_fractions(train_epoch, validate, epochs):
    from fractions import Fraction

    best = Fraction(0)
    for epoch in range(epochs):
        train_epoch(epoch)
        counts = torch.tensor(validate(epoch), dtype=torch.int64)
        dist.all_reduce(counts)
        accuracy = Fraction(*counts.tolist())
        if not accuracy > best:
            return epoch + 1, float(best)
        best = accuracy
    return epochs, float(best)


@right("13.2")
def rank_0_counts_and_tells(train_epoch, validate, epochs):
    best = 0.0
    for epoch in range(epochs):
        train_epoch(epoch)
        counts = torch.tensor(validate(epoch))
        dist.reduce(counts, dst=0)
        told = [None, None]
        if dist.get_rank() == 0:
            right, evaluated = counts.tolist()
            told = [right / evaluated <= best, max(best, right / evaluated)]
        dist.broadcast_object_list(told, src=0)
        stop, best = told
        if stop:
            break
    return [epoch + 1, best]


DONE: dict[Any, Any] = {}


@wrong("13.2", hint="Each call is a training run of its own, also with functions that you have seen before.")
def remembers_its_functions(train_epoch, validate, epochs):
    given = train_epoch, validate, epochs
    if given not in DONE:
        DONE[given] = trained_until(train_epoch, epochs, lambda epoch: over_all(*validate(epoch)))
    return DONE[given]


ORDER = "every rank returns the sums over all ranks, whatever the order of its own names"


@wrong("13.3", hint="Numbers of different names were added up")
def as_they_come(metrics):
    return {name: summed(value)[0] for name, value in metrics.items()}


@wrong("13.3", hint="Who tells it?")
def sorted_by_its_own(metrics):
    return {name: summed(metrics[name])[0] for name in sorted(metrics)}


@wrong("13.3", hint="which is what float32 keeps")
def sums_of_seven_digits(metrics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(metrics))
    names = sorted(set().union(*everyone))
    sums = torch.tensor([metrics.get(name, 0.0) for name in names])
    dist.all_reduce(sums)
    return dict(zip(names, sums.tolist(), strict=True))


@wrong("13.3", hint="the rank's own")
def its_own(metrics):
    return dict(metrics)


@wrong("13.3", hint="goes on counting in it")
def into_the_dict_that_came(metrics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    for name in sorted(set().union(*everyone)):
        metrics[name] = sum(each.get(name, 0.0) for each in everyone)
    return metrics


@wrong("13.3", ORDER, hint="waited in")
def leaves_without_a_name(metrics):
    if not metrics:
        return {}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    return {name: sum(each.get(name, 0.0) for each in everyone) for name in set().union(*everyone)}


@wrong("13.3", hint="All names with a sum below 0 are missing")
def by_a_counter(metrics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    total = Counter()
    for each in everyone:
        total.update(each)
    return dict(+total)  # which leaves out what is not above 0


@wrong("13.3", hint="returns a dict")
def a_list_of_sums(metrics):
    return [summed(metrics[name])[0] for name in sorted(metrics)]


@right("13.3")
def one_tensor_for_all(metrics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(metrics))
    names = sorted(set().union(*everyone))
    return dict(zip(names, summed(*(metrics.get(name, 0.0) for name in names)), strict=True))


@right("13.3")
def others_as_text(metrics):
    """Names that come as text are added up with those in a copy of `metrics`: they have one hash."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, json.dumps(metrics))
    del everyone[dist.get_rank()]
    total = dict(metrics)
    for name, value in [pair for text in everyone for pair in json.loads(text).items()]:
        total[name] = total.get(name, 0.0) + value
    return total


WELL = "where the work goes well everywhere, every rank returns the sum over the ranks"


@wrong("13.4", WELL, hint="Does this rank know that another one has failed")
def the_broken_try(work):
    try:
        return summed(work())[0]
    except Exception:
        return None


@wrong("13.4", WELL, hint="That is the sum over the ranks that did not fail.")
def a_failure_counts_0(work):
    try:
        mine = work()
    except Exception:
        mine = 0.0
    return summed(mine)[0]


@wrong("13.4", hint="That is a number, too")
def nan_says_it(work):
    try:
        mine = float(work())
    except Exception:
        mine = float("nan")
    total = summed(mine)[0]
    return None if total != total else total


@wrong("13.4", hint="How is a failure told from a number?")
def nothing_is_a_failure(work):
    try:
        mine = work()
    except Exception:
        mine = None
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sum(everyone) if all(everyone) else None


@wrong("13.4", WELL, hint="this rank's work has failed")
def knows_some_errors(work):
    try:
        mine, failed = work(), 0.0
    except (ValueError, ArithmeticError, RuntimeError, LookupError, OSError, TypeError):
        mine, failed = 0.0, 1.0
    total, failures = summed(mine, failed)
    return None if failures else total


@wrong("13.4", hint="call it once")
def tries_first(work):
    try:
        work()
    except Exception:
        well = 0.0
    else:
        well = 1.0
    if summed(well)[0] < dist.get_world_size():
        return None
    return summed(work())[0]


@wrong("13.4", hint="which is what float32 keeps")
def total_of_seven_digits(work):
    try:
        mine = torch.tensor([work(), 0.0])
    except Exception:
        mine = torch.tensor([0.0, 1.0])
    dist.all_reduce(mine)
    return None if mine[1] else mine[0].item()


@wrong("13.4", hint="the rank's own")
def sums_nothing(work):
    try:
        return work()
    except Exception:
        return None


@right("13.4")
def agrees_first(work):
    try:
        mine, well = work(), 1
    except Exception:
        mine, well = 0.0, 0
    flag = torch.tensor(well)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return summed(mine)[0] if flag else None


@right("13.4")
def over_rank_0(work):
    try:
        mine = torch.tensor([float(work()), 1.0], dtype=torch.float64)
    except Exception:
        mine = torch.zeros(2, dtype=torch.float64)
    world_size = dist.get_world_size()
    gathered = [torch.zeros_like(mine) for _ in range(world_size)] if dist.get_rank() == 0 else None
    dist.gather(mine, gathered, dst=0)
    verdict = sum(gathered) if gathered else mine
    dist.broadcast(verdict, src=0)
    total, well = verdict.tolist()
    return total if well == world_size else None


@wrong("13.4", hint="What it returns may be something else now")
def remembers_the_work(work):
    if work not in DONE:
        DONE[work] = agrees_first(work)
    return DONE[work]


# --- the result is right, and it was not done as asked ---


@wrong("13.2", BEST, hint="How often is that needed")
def validates_twice(train_epoch, validate, epochs):
    return trained_until(train_epoch, epochs, lambda epoch: over_all(validate(epoch)[0], validate(epoch)[1]))


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


def summed_over_ranks(*numbers):
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


@wrong("13.1", NOTHING, hint="or another order")
def sorts_them(losses):
    losses.sort()
    total, count = summed_over_ranks(sum(losses), len(losses))
    return total / count


def stopped_by(train_epoch, validate, epochs, is_no_better):
    best = 0.0
    for epoch in range(epochs):
        train_epoch(epoch)
        right, evaluated = summed_over_ranks(*validate(epoch))
        if is_no_better(right / evaluated, best):
            break
        best = right / evaluated
    return epoch + 1, best


@wrong(
    "13.2",
    NO_SHARD,
    hint="By which number do all ranks decide, and is it the accuracy of all samples together?",
)
def better_by_a_thousandth(train_epoch, validate, epochs):
    return stopped_by(train_epoch, validate, epochs, lambda now, best: round(now, 3) <= round(best, 3))


@wrong("13.2", hint="own were")
def one_vote_is_enough(train_epoch, validate, epochs):
    best = own_best = 0.0
    for epoch in range(epochs):
        train_epoch(epoch)
        right, evaluated = validate(epoch)
        own = right / max(1, evaluated)
        total, count, votes = summed_over_ranks(right, evaluated, own <= own_best)
        own_best, best = max(own, own_best), max(total / count, best)
        if votes:
            break
    return epoch + 1, best
