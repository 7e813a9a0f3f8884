"""What people answer in exercise 12, wrong and right (see `answers`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.exercises.answers import right, wrong

SUMMED = "each rank has the gradient of the sum of all ranks' losses"


class Sum(torch.autograd.Function):
    """The part that is given."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total


@wrong("12.1", hint="own loss")
class PassesItOn(Sum):
    @staticmethod
    def backward(ctx, gradient):
        return gradient


@wrong("12.1", hint="own loss")
class ThrowsTheTotalAway(Sum):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return gradient


@wrong("12.1", hint="another")
class Averages(Sum):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


@wrong("12.1", hint="another")
class OnRank0Alone(Sum):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.reduce(total, dst=0)
        return total * (dist.get_rank() == 0)


@wrong("12.1", hint="none")
class ReturnsWhatTheCollectiveDoes(Sum):
    @staticmethod
    def backward(ctx, gradient):
        return dist.all_reduce(gradient.clone())


@wrong("12.1", SUMMED, hint="in place")
class AddsUpInPlace(Sum):
    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient


@right("12.1")
class Gathers(Sum):
    @staticmethod
    def backward(ctx, gradient):
        of_ranks = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, gradient.contiguous())
        return torch.stack(of_ranks).sum(0)


@right("12.1")
class CallsItsForward(Sum):
    @staticmethod
    def backward(ctx, gradient):
        return Sum.forward(ctx, gradient)


MEAN = "every norm has the mean of all that the ranks have seen"
VARIANCE = "and its variance"
ONCE = "the number of collectives does not grow with the norms"


def norms_of(model):
    return [each for each in model.modules() if isinstance(each, nn.BatchNorm1d)]


def pool(norms, variance=lambda variances, squares, mean: variances + squares - mean**2, ranks=None):
    """In one all_reduce; `variance` is given the means over the ranks of variances, squares and means."""
    means = torch.cat([each.running_mean for each in norms])
    variances = torch.cat([each.running_var for each in norms])
    sums = torch.stack([means, variances, means**2])
    dist.all_reduce(sums)
    mean, of_variances, of_squares = sums / (ranks or dist.get_world_size())
    sizes = [each.num_features for each in norms]
    pairs = zip(mean.split(sizes), variance(of_variances, of_squares, mean).split(sizes), strict=True)
    for norm, (its_mean, its_variance) in zip(norms, pairs, strict=True):
        norm.running_mean.copy_(its_mean)
        norm.running_var.copy_(its_variance)


@wrong("12.2", hint="unchanged")
def into_copies(model):
    means = torch.cat([each.running_mean for each in norms_of(model)])
    dist.all_reduce(means)
    means /= dist.get_world_size()


@wrong("12.2", hint="some ranks")
def on_rank_0_alone(model):
    norms = norms_of(model)
    means = torch.cat([each.running_mean for each in norms])
    dist.reduce(means, dst=0)
    if dist.get_rank() == 0:
        for norm, mean in zip(
            norms, (means / dist.get_world_size()).split([n.num_features for n in norms]), strict=True
        ):
            norm.running_mean.copy_(mean)


@wrong("12.2", hint="some norms")
def the_first_norm_alone(model):
    pool(norms_of(model)[:1])


@wrong("12.2", hint="another mean")
def broadcasts(model):
    for each in norms_of(model):
        dist.broadcast(each.running_mean, src=0)
        dist.broadcast(each.running_var, src=0)


@wrong("12.2", hint="another mean")
def only_adds_up(model):
    pool(norms_of(model), ranks=1)


@wrong("12.2", MEAN, ONCE, hint="mean of variances")
def mean_of_the_variances(model):
    pool(norms_of(model), lambda variances, squares, mean: variances)


@wrong("12.2", MEAN, ONCE, hint="another variance")
def means_apart_by_n_minus_1(model):
    n = dist.get_world_size()
    pool(norms_of(model), lambda variances, squares, mean: variances + (squares - mean**2) * n / (n - 1))


@wrong("12.2", MEAN, ONCE, hint="another variance")
def forgets_to_take_the_mean_away(model):
    pool(norms_of(model), lambda variances, squares, mean: variances + squares)


@wrong("12.2", MEAN, VARIANCE, hint="norm by norm")
def norm_by_norm(model):
    for each in norms_of(model):
        pool([each])


@wrong("12.2", MEAN, VARIANCE, hint="norm by norm")
def number_by_number(model):
    """Each in a tensor without dimensions."""
    for each in norms_of(model):
        each.running_var += each.running_mean**2
        for number in (*each.running_mean, *each.running_var):
            dist.all_reduce(number)
            number /= dist.get_world_size()
        each.running_var -= each.running_mean**2


@right("12.2")
def gathers_them(model):
    norms = norms_of(model)
    mine = torch.stack([torch.cat([getattr(n, of) for n in norms]) for of in ("running_mean", "running_var")])
    everyones = mine.new_empty(2 * dist.get_world_size(), mine.shape[1])
    dist.all_gather_into_tensor(everyones, mine)
    means, variances = everyones[::2], everyones[1::2]
    var = variances.mean(0) + means.var(0, correction=0)
    at = 0
    for each in norms:
        end = at + each.num_features
        each.running_mean, each.running_var = means.mean(0)[at:end], var[at:end]
        at = end


@right("12.2")
def in_two_rounds(model):
    """The mean first, then the squares of the distances from it."""
    norms, n = norms_of(model), dist.get_world_size()
    sizes = [each.num_features for each in norms]
    own = torch.cat([each.running_mean for each in norms])
    mean = own / n
    dist.all_reduce(mean)
    var = (torch.cat([each.running_var for each in norms]) + (own - mean) ** 2) / n
    dist.all_reduce(var)
    for each, its_mean, its_var in zip(norms, mean.split(sizes), var.split(sizes), strict=True):
        each.running_mean[:], each.running_var[:] = its_mean, its_var
