"""What people answer in exercise 20, wrong and right (see `answers`)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.exercises.answers import right, wrong

ONCE = "whatever the number of ranks is, each sample is one rank's"
EVEN = "the shares are equal, or differ by one"


@wrong("20.1", hint="lost")
def the_share_of_before(drawn, rank, ranks):
    """As large as on one rank more."""
    own = len(drawn) // (ranks + 1)
    return drawn[rank * own : (rank + 1) * own]


@wrong("20.1", hint="lost")
def rounded_down(drawn, rank, ranks):
    own = len(drawn) // ranks
    return drawn[rank * own : (rank + 1) * own]


@wrong("20.1", hint="twice")
def all_of_it(drawn, rank, ranks):
    return drawn


@wrong("20.1", ONCE, hint="uneven")
def rounded_up(drawn, rank, ranks):
    own = math.ceil(len(drawn) / ranks)
    return drawn[rank * own : (rank + 1) * own]


@wrong("20.1", ONCE, hint="uneven")
def the_rest_for_the_last(drawn, rank, ranks):
    own = len(drawn) // ranks
    return drawn[rank * own :] if rank == ranks - 1 else drawn[rank * own : (rank + 1) * own]


@wrong("20.1", hint="returns a list")
def a_range(drawn, rank, ranks):
    return range(rank, len(drawn), ranks)


@right("20.1")
def in_blocks(drawn, rank, ranks):
    return drawn[rank * len(drawn) // ranks : (rank + 1) * len(drawn) // ranks]


@right("20.1")
def one_by_one(drawn, rank, ranks):
    return [each for place, each in enumerate(drawn) if place % ranks == rank]


# --- 20.2 -------------------------------------------------------------------------------------------------

SAME = "where the ranks can take the whole batch, the step is that of one device on it"
LESS = "where they cannot, it is a step on the first samples, at the learning rate for so many"
SHARE = "each of these samples goes forward once, and the ranks' shares are equal, or differ by one"


def number_of(x, most):
    return min(len(x), dist.get_world_size() * most)


def gradients(ddp, x, y, used, of=None, mine=None):
    """The mean gradient of the first samples; ``of`` divides instead of their number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = mine or slice(rank, used, ranks)
    ddp.zero_grad()
    loss = F.cross_entropy(ddp(x[mine]), y[mine], reduction="sum")
    (loss * ranks / (of or used)).backward()


def scaled_step(optimizer, factor, groups=None):
    chosen = optimizer.param_groups[slice(groups)]
    before = [group["lr"] for group in chosen]
    for group in chosen:
        group["lr"] *= factor
    optimizer.step()
    for group, rate in zip(chosen, before, strict=True):
        group["lr"] = rate


@wrong("20.2", hint="mean of means")
def a_mean_of_means(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    mine = slice(dist.get_rank(), used, dist.get_world_size())
    optimizer.zero_grad()
    F.cross_entropy(ddp(x[mine]), y[mine]).backward()
    scaled_step(optimizer, used / len(x))


@wrong("20.2", hint="factor")
def divides_by_the_ranks_twice(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used, of=used * dist.get_world_size())
    scaled_step(optimizer, used / len(x))


@wrong("20.2", hint="left out")
def leaves_the_rest_out(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used - used % dist.get_world_size())
    scaled_step(optimizer, used / len(x))


@wrong("20.2", hint="other")
def round_the_wrapper(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp.module, x, y, used)
    scaled_step(optimizer, used / len(x))


@wrong("20.2", SAME, SHARE, hint="old rate")
def the_old_learning_rate(ddp, optimizer, x, y, most):
    gradients(ddp, x, y, number_of(x, most))
    optimizer.step()


@wrong("20.2", SAME, SHARE, hint="rates")
def smaller_gradients(ddp, optimizer, x, y, most):
    gradients(ddp, x, y, number_of(x, most), of=len(x))
    optimizer.step()


@wrong("20.2", SAME, SHARE, hint="rates")
def the_square_root(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used)
    scaled_step(optimizer, math.sqrt(used / len(x)))


@wrong("20.2", SAME, hint="other samples")
def takes_more_than_it_may(ddp, optimizer, x, y, most):
    gradients(ddp, x, y, len(x))
    optimizer.step()


@wrong("20.2", SAME, hint="other samples")
def the_last_samples(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x[-used:], y[-used:], used)
    scaled_step(optimizer, used / len(x))


@wrong("20.2", SAME, LESS, hint="share")
def all_of_it_on_every_rank(ddp, optimizer, x, y, most):
    used = number_of(x, most)
    gradients(ddp, x, y, used, of=used * dist.get_world_size(), mine=slice(used))
    scaled_step(optimizer, used / len(x))


@right("20.2")
def parts_by_tensor_split(ddp, optimizer, x, y, most):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    used = min(len(x), ranks * most)
    own_x, own_y = x[:used].tensor_split(ranks)[rank], y[:used].tensor_split(ranks)[rank]
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp(own_x), own_y) * len(own_y) * ranks / used
    loss.backward()
    scaled_step(optimizer, used / len(x))


@right("20.2")
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
