"""What people answer in exercise 20, wrong and right (see `answers`)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.exercises.answers import right, wrong

SAME = "where the ranks can take the whole batch, the step is that of one device on it"
LESS = "where they cannot, it is a step on what they can take, at the learning rate for so many"
LATER = "the steps after that are right again"
SHARE = "each of these samples goes forward once, and the ranks' shares are equal, or differ by one"


def gradients(ddp, x, y, used, of=None):
    """The mean gradient of the first samples; ``of`` divides instead of their number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(rank, used, ranks)
    ddp.zero_grad()
    loss = F.cross_entropy(ddp(x[mine]), y[mine], reduction="sum")
    (loss * ranks / (of or used)).backward()


def scaled_step(optimizer, factor, groups=None):
    chosen = optimizer.param_groups if groups is None else optimizer.param_groups[groups]
    before = [group["lr"] for group in chosen]
    for group in chosen:
        group["lr"] *= factor
    optimizer.step()
    for group, rate in zip(chosen, before, strict=True):
        group["lr"] = rate


def number_of(x, most):
    return min(len(x), dist.get_world_size() * most)


@wrong("20.1", LESS, LATER, hint="counts for as much")
def a_mean_of_means(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    mine = slice(dist.get_rank(), used, dist.get_world_size())
    optimizer.zero_grad()
    F.cross_entropy(ddp(x[mine]), y[mine]).backward()
    scaled_step(optimizer, used / len(x))


@wrong("20.1", LESS, LATER, hint="The last samples are left out")
def leaves_the_rest_out(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used - used % dist.get_world_size())
    scaled_step(optimizer, used / len(x))


@wrong("20.1", SAME, LESS, LATER, hint="Which part of it is its own?")
def all_of_it_on_every_rank(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    optimizer.zero_grad()
    F.cross_entropy(ddp(x[:used]), y[:used]).backward()
    scaled_step(optimizer, used / len(x))


@wrong("20.1", SAME, hint="more than the ranks may take")
def takes_more_than_it_may(ddp, optimizer, x, y, most):
    gradients(ddp, x, y, len(x))
    optimizer.step()


@wrong("20.1", SAME, SHARE, hint="at the learning rate of the whole batch")
def the_old_learning_rate(ddp, optimizer, x, y, most):
    gradients(ddp, x, y, number_of(x, most))
    optimizer.step()


@wrong("20.1", SAME, SHARE, hint="in the wrong direction")
def a_larger_learning_rate(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used)
    scaled_step(optimizer, len(x) / used)


@wrong("20.1", SAME, SHARE, hint="square root")
def the_square_root(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used)
    scaled_step(optimizer, math.sqrt(used / len(x)))


@wrong("20.1", SAME, SHARE, hint="there is momentum")
def smaller_gradients(ddp, optimizer, x, y, most):
    gradients(ddp, x, y, number_of(x, most), of=len(x))
    optimizer.step()


@wrong("20.1", SAME, SHARE, hint="Each learning rate changes by that")
def one_group_alone(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used)
    scaled_step(optimizer, used / len(x), slice(1))


@wrong("20.1", SAME, LESS, SHARE, hint="learning rates on rank")
def never_back(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used)
    for group in optimizer.param_groups:
        group["lr"] *= used / len(x)
    optimizer.step()


@wrong("20.1", hint="A sum over the samples")
def a_sum(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used, of=1)
    scaled_step(optimizer, used / len(x))


@wrong("20.1", hint="too small by a factor of the number of ranks")
def divides_by_the_ranks_twice(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used, of=used * dist.get_world_size())
    scaled_step(optimizer, used / len(x))


@wrong("20.1", hint="What did the call before leave in the gradients?")
def never_cleared(ddp, optimizer, x, y, most):
    rank, ranks, used = dist.get_rank(), dist.get_world_size(), number_of(x, most)
    mine = slice(rank, used, ranks)
    (F.cross_entropy(ddp(x[mine]), y[mine], reduction="sum") * ranks / used).backward()
    scaled_step(optimizer, used / len(x))


@wrong("20.1", hint="The ranks have different weights now")
def round_the_wrapper(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp.module, x, y, used)
    scaled_step(optimizer, used / len(x))


@wrong("20.1", SAME, hint="the first or the last?")
def the_last_samples(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x[-used:], y[-used:], used)
    scaled_step(optimizer, used / len(x))


@wrong("20.1", SAME, LESS, LATER, hint="the rank with the most samples")
def the_rest_on_one_rank(ddp, optimizer, x, y, most):
    rank, ranks, used = dist.get_rank(), dist.get_world_size(), number_of(x, most)
    own = max(1, used // ranks - 1)
    mine = slice(rank * own, used if rank == ranks - 1 else (rank + 1) * own)
    optimizer.zero_grad()
    (F.cross_entropy(ddp(x[mine]), y[mine], reduction="sum") * ranks / used).backward()
    scaled_step(optimizer, used / len(x))


@wrong("20.1", SAME, LESS, SHARE, hint="the learning rates are lower now")
def the_first_rates_for_ever(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("full", group["lr"]) * used / len(x)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = group["full"]


@wrong("20.1", SAME, SHARE, hint="Is the learning rate the same on all of them?")
def rates_of_rank_0(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used)
    scaled_step(optimizer, used / len(x) if dist.get_rank() == 0 else 1.0)


@wrong("20.1", LESS, LATER, hint="the ranks could take more samples")
def divides_by_what_the_ranks_can_take(ddp, optimizer, x, y, most):
    used = dist.get_world_size() * most
    gradients(ddp, x, y, used)
    scaled_step(optimizer, used / len(x))


@wrong("20.1", hint="have not moved")
def no_step(ddp, optimizer, x, y, most):
    gradients(ddp, x, y, number_of(x, most))


@right("20.1")
def parts_by_tensor_split(ddp, optimizer, x, y, most):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    used = min(len(x), ranks * most)
    own_x, own_y = x[:used].tensor_split(ranks)[rank], y[:used].tensor_split(ranks)[rank]
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp(own_x), own_y) * len(own_y) * ranks / used
    loss.backward()
    scaled_step(optimizer, used / len(x))


@right("20.1")
def sums_the_gradients_itself(ddp, optimizer, x, y, most):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    used = min(len(x), ranks * most)
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp.module(x[rank:used:ranks]), y[rank:used:ranks], reduction="sum") / used
    loss.backward()
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    for group, rate in zip(optimizer.param_groups, (rates * used / len(x)).tolist(), strict=True):
        group["lr"] = rate
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates.tolist(), strict=True):
        group["lr"] = rate
