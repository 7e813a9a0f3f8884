"""What people answer in exercise 11, wrong and right (see `answers`)."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.exercises.answers import right, wrong

SCALED = "after the warm-up: k times the batch, k times the learning rate"


def rate(batch, seen):
    return 0.004 * batch / 48 * min(1, seen / 3840)


@wrong("11.1", hint="not all samples")
def forgets_the_pieces(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks, (step + 1) * batch_size * ranks)


@wrong("11.1", hint="not all samples")
def counts_one_piece(step, batch_size, ranks, pieces):
    return rate(batch_size, (step + 1) * batch_size)


@wrong("11.1", hint="no end")
def warms_up_for_ever(step, batch_size, ranks, pieces):
    return 0.004 * batch_size * ranks * pieces / 48 * (step + 1) * batch_size * ranks * pieces / 3840


@wrong("11.1", hint="another batch")
def divides_by_the_pieces(step, batch_size, ranks, pieces):
    batch = batch_size * ranks / pieces
    return rate(batch, (step + 1) * batch)


@wrong("11.1", SCALED, hint="from the start")
def does_not_warm_up(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks * pieces, 3840)


@wrong("11.1", SCALED, hint="one step late")
def begins_with_nothing(step, batch_size, ranks, pieces):
    batch = batch_size * ranks * pieces
    return rate(batch, step * batch)


@wrong("11.1", SCALED, hint="another share")
def warms_up_on_its_own(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks * pieces, (step + 1) * batch_size * pieces)


@wrong("11.1", SCALED, hint="another share")
def counts_steps(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks * pieces, step + 1)


@right("11.1")
def in_two_cases(step, batch_size, ranks, pieces):
    batch = batch_size * ranks * pieces
    seen = (step + 1) * batch
    return 0.004 * batch / 48 if seen > 3840 else 0.004 * batch / 48 * seen / 3840


@right("11.1")
def in_float32(step, batch_size, ranks, pieces):
    batch = torch.tensor(float(batch_size * ranks * pieces))
    return 0.004 * batch / 48 * torch.clamp((step + 1) * batch / 3840, max=1.0)


GRADIENT = "every rank holds the gradient of the mean loss over all samples of all ranks"
ONCE = "the gradients travel once"
PIECES = "one piece after the other: forward, backward, then the next"


def share_of_one(pieces):
    """What a sample's loss is multiplied with, so that DDP's mean is the mean over all samples."""
    samples = torch.tensor(sum(len(y) for _, y in pieces))
    dist.all_reduce(samples)
    return dist.get_world_size() / samples.item()


def context(ddp, pieces, i):
    return nullcontext() if i == len(pieces) - 1 else ddp.no_sync()


def by_pieces(ddp, pieces, weigh):
    """Right but for the weights."""
    ddp.zero_grad()
    for i, (x, y) in enumerate(pieces):
        with context(ddp, pieces, i):
            (F.cross_entropy(ddp(x), y, reduction="sum") * weigh(len(y))).backward()


@wrong("11.2", hint="another weight")
def mean_of_means(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: 1 / length / len(pieces))


@wrong("11.2", hint="another weight")
def by_its_own_samples(ddp, pieces):
    own = sum(len(y) for _, y in pieces)
    by_pieces(ddp, pieces, lambda length: 1 / own)


@wrong("11.2", hint="another length")
def forgets_that_ddp_divides(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: share_of_one(pieces) / dist.get_world_size())


@wrong("11.2", hint="another length")
def sums_the_samples(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: 1)


@wrong("11.2", hint="old gradients")
def leaves_the_old_ones(ddp, pieces):
    share = share_of_one(pieces)
    for i, (x, y) in enumerate(pieces):
        with context(ddp, pieces, i):
            (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()


@wrong("11.2", hint="not averaged")
def leaves_out_the_last_one_too(ddp, pieces):
    share = share_of_one(pieces)
    ddp.zero_grad()
    with ddp.no_sync():
        for x, y in pieces:
            (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()


@wrong("11.2", GRADIENT, PIECES, hint="every pass sends")
def around_the_backward_alone(ddp, pieces):
    share = share_of_one(pieces)
    ddp.zero_grad()
    for i, (x, y) in enumerate(pieces):
        loss = F.cross_entropy(ddp(x), y, reduction="sum") * share
        with context(ddp, pieces, i):
            loss.backward()


@wrong("11.2", GRADIENT, PIECES, hint="more than the sum")
def by_hand_and_by_ddp(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: share_of_one(pieces))
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("11.2", GRADIENT, ONCE, hint="more than a piece")
def puts_them_together(ddp, pieces):
    share = share_of_one(pieces)
    x, y = (torch.cat(each) for each in zip(*pieces, strict=True))
    ddp.zero_grad()
    (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()


@wrong("11.2", GRADIENT, ONCE, hint="more than a piece")
def one_backward_at_the_end(ddp, pieces):
    share = share_of_one(pieces)
    ddp.zero_grad()
    sum(F.cross_entropy(ddp(x), y, reduction="sum") * share for x, y in pieces).backward()


@right("11.2")
def weighs_each_mean(ddp, pieces):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, [len(y) for _, y in pieces])
    samples = sum(map(sum, counts))
    for parameter in ddp.parameters():
        parameter.grad = None
    for i, (x, y) in enumerate(pieces):
        ddp.require_backward_grad_sync = i == len(pieces) - 1
        loss = F.cross_entropy(ddp(x), y) * len(y) * len(counts) / samples
        loss.backward()


@right("11.2")
def averages_by_hand(ddp, pieces):
    ddp.zero_grad()
    with ddp.no_sync():
        for x, y in pieces:
            F.cross_entropy(ddp(x), y, reduction="sum").backward()
    share = share_of_one(pieces) / dist.get_world_size()
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad *= share


STEP = "the step is that of one device: its gradient is the mean, clipped"


def average(model, divide=True):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            if divide:
                parameter.grad /= dist.get_world_size()


def clip_and_step(model, optimizer, max_norm):
    if nn.utils.clip_grad_norm_(model.parameters(), max_norm).isfinite():
        optimizer.step()


@wrong("11.3", hint="ranks differ")
def does_not_average(model, optimizer, max_norm):
    clip_and_step(model, optimizer, max_norm)


@wrong("11.3", hint="clipped first")
def clips_first(model, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    average(model)
    if norm.isfinite():
        optimizer.step()


@wrong("11.3", hint="frozen moved")
def zeros_for_the_frozen(model, optimizer, max_norm):
    for each in model.parameters():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    average(model)
    clip_and_step(model, optimizer, max_norm)


@wrong("11.3", hint="another step")
def forgets_to_divide(model, optimizer, max_norm):
    average(model, divide=False)
    clip_and_step(model, optimizer, max_norm)


@wrong("11.3", hint="another step")
def each_parameter_alone(model, optimizer, max_norm):
    average(model)
    norms = [nn.utils.clip_grad_norm_(each, max_norm) for each in model.parameters() if each.grad is not None]
    if all(norm.isfinite() for norm in norms):
        optimizer.step()


@wrong("11.3", hint="they have not moved")
def a_large_norm_is_broken(model, optimizer, max_norm):
    """As lesson 11's `by_norm`."""
    average(model)
    if nn.utils.clip_grad_norm_(model.parameters(), max_norm) < 10:
        optimizer.step()


@wrong("11.3", STEP, hint="into the weights")
def always_steps(model, optimizer, max_norm):
    average(model)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


@wrong("11.3", STEP, hint="into the weights")
def looks_for_nan_alone(model, optimizer, max_norm):
    average(model)
    if not nn.utils.clip_grad_norm_(model.parameters(), max_norm).isnan():
        optimizer.step()


@wrong("11.3", STEP, hint="one rank knew")
def each_looks_at_its_own(model, optimizer, max_norm):
    fine = all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)
    average(model)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if fine:
        optimizer.step()


@wrong("11.3", STEP, hint="a step all the same")
def steps_with_zeros(model, optimizer, max_norm):
    average(model)
    if not nn.utils.clip_grad_norm_(model.parameters(), max_norm).isfinite():
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@wrong("11.3", hint="never called all_reduce")
def stays_away(model, optimizer, max_norm):
    if all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None):
        average(model)
        clip_and_step(model, optimizer, max_norm)


@right("11.3")
def in_one_tensor(model, optimizer, max_norm):
    trained = [each for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.grad.flatten() for each in trained]).float() / dist.get_world_size()
    dist.all_reduce(flat)
    norm = flat.norm().item()
    if math.isfinite(norm):
        flat *= min(1, max_norm / norm)
        for parameter, part in zip(trained, flat.split([each.numel() for each in trained]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()


@right("11.3")
def asks_all(model, optimizer, max_norm):
    fine = all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)
    broken = torch.tensor(0 if fine else 1)
    dist.all_reduce(broken)
    average(model)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not broken:
        optimizer.step()
