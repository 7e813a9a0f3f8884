"""What people answer in exercise 11, wrong and right (see `answers`)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.exercises.answers import right, wrong

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


@wrong("11.1", hint="A sum of means")
def sums_the_means(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: 1 / length)


@wrong("11.1", hint="Every piece has the same weight here, but a short one has fewer samples.")
def mean_of_means(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: 1 / length / len(pieces))


@wrong("11.1", hint="It is right on each rank, but the ranks have the same weight, with few samples or many.")
def by_its_own_samples(ddp, pieces):
    own = sum(len(y) for _, y in pieces)
    by_pieces(ddp, pieces, lambda length: 1 / own)


@wrong("11.1", hint="What does DDP divide by?")
def forgets_that_ddp_divides(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: share_of_one(pieces) / dist.get_world_size())


@wrong("11.1", hint="A sum over the samples")
def sums_the_samples(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: 1)


@wrong("11.1", hint="What is each sample's loss divided by?")
def divides_by_two_ranks(ddp, pieces):
    share = share_of_one(pieces)
    by_pieces(ddp, pieces, lambda length: share / dist.get_world_size() * 1.5)


@wrong("11.1", hint="What does it find in .grad?")
def leaves_the_old_ones(ddp, pieces):
    share = share_of_one(pieces)
    for i, (x, y) in enumerate(pieces):
        with context(ddp, pieces, i):
            (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()


@wrong("11.1", hint="Which pass averages them?")
def leaves_out_the_last_one_too(ddp, pieces):
    share = share_of_one(pieces)
    ddp.zero_grad()
    with ddp.no_sync():
        for x, y in pieces:
            (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()


@wrong("11.1", GRADIENT, PIECES, hint="which passes need to send?")
def averages_every_piece(ddp, pieces):
    share = share_of_one(pieces)
    ddp.zero_grad()
    for x, y in pieces:
        (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()


@wrong("11.1", GRADIENT, PIECES, hint="when a forward begins")
def around_the_backward_alone(ddp, pieces):
    share = share_of_one(pieces)
    ddp.zero_grad()
    for i, (x, y) in enumerate(pieces):
        loss = F.cross_entropy(ddp(x), y, reduction="sum") * share
        with context(ddp, pieces, i):
            loss.backward()


@wrong("11.1", GRADIENT, ONCE, hint="Together they may not.")
def puts_them_together(ddp, pieces):
    share = share_of_one(pieces)
    x, y = (torch.cat(each) for each in zip(*pieces, strict=True))
    ddp.zero_grad()
    (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()


@wrong("11.1", GRADIENT, ONCE, hint="When does that come?")
def one_backward_at_the_end(ddp, pieces):
    share = share_of_one(pieces)
    ddp.zero_grad()
    sum(F.cross_entropy(ddp(x), y, reduction="sum") * share for x, y in pieces).backward()


@wrong("11.1", GRADIENT, PIECES, hint="as large as the gradients")
def by_hand_and_by_ddp(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: share_of_one(pieces))
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


KEPT: dict[str, Any] = {}  # what an answer keeps in a global


@wrong(
    "11.1",
    GRADIENT,
    PIECES,
    hint="Switch back at the end whatever you switch, and only read what you are given.",
)
def leaves_the_averaging_off(ddp, pieces):
    share = share_of_one(pieces) / dist.get_world_size()
    ddp.zero_grad()
    ddp.require_backward_grad_sync = False
    for x, y in pieces:
        (F.cross_entropy(ddp(x), y, reduction="sum") * share).backward()
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)


@wrong("11.1", hint="holds no gradients")
def clears_at_the_end(ddp, pieces):
    by_pieces(ddp, pieces, lambda length: share_of_one(pieces))
    ddp.zero_grad()


@wrong("11.1", hint="never called all_reduce")
def rank_0_stays_away(ddp, pieces):
    if dist.get_rank():
        by_pieces(ddp, pieces, lambda length: share_of_one(pieces))


@wrong("11.1", hint="without waiting for the end of it")
def does_not_wait_for_the_count(ddp, pieces):
    samples = torch.tensor(sum(len(y) for _, y in pieces))
    dist.all_reduce(samples, async_op=True)
    dist.barrier()
    by_pieces(ddp, pieces, lambda length: 1)
    for parameter in ddp.parameters():
        parameter.grad *= dist.get_world_size() / samples.item()


@wrong("11.1", hint="These are training passes.")
def in_evaluation_mode(ddp, pieces):
    ddp.eval()
    share_in_float32(ddp, pieces)
    ddp.train()


@right("11.1")
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


@right("11.1")
def share_in_float32(ddp, pieces):
    samples = torch.tensor(sum(len(y) for _, y in pieces))
    dist.all_reduce(samples)
    by_pieces(ddp, pieces, lambda length: dist.get_world_size() / samples)


@right("11.1")
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
NORM = "every rank returns the norm of the mean, as it was before clipping"
ALL = "where the mean is not finite no rank steps, and the next step is right again"


def average(model, divide=True):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            if divide:
                parameter.grad /= dist.get_world_size()


@wrong("11.2", hint="It should be the other way round.")
def clips_first(model, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    average(model)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", hint="without waiting for the end of it")
def does_not_wait(model, optimizer, max_norm):
    trained = [each for each in model.parameters() if each.grad is not None]
    for parameter in trained:
        dist.all_reduce(parameter.grad, async_op=True)
    dist.barrier()
    dist.barrier()  # by then it is there, as a rule
    for parameter in trained:
        parameter.grad /= dist.get_world_size()
    norm = torch.nn.utils.clip_grad_norm_(trained, max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", NORM, hint="The mean is longer than the limit, and is used unclipped.")
def forgets_to_clip(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", hint="the sum of the gradients")
def forgets_to_divide(model, optimizer, max_norm):
    average(model, divide=False)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", hint="The ranks have different weights now")
def does_not_average(model, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", STEP, NORM, hint="before the step?")
def always_steps(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm


@wrong("11.2", STEP, NORM, hint="One rank knew it")
def each_looks_at_its_own(model, optimizer, max_norm):
    fine = all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if fine:
        optimizer.step()
    return norm


@wrong("11.2", STEP, NORM, hint="With momentum, the optimizer moves")
def steps_with_zeros(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not norm.isfinite():
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return norm


@wrong("11.2", NORM, hint="It was shorter than the limit, but was scaled up to it.")
def always_scales(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= max_norm / norm
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", STEP, hint="the norm after clipping")
def returns_what_is_left(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return min(norm.item(), max_norm)


@wrong("11.2", STEP, hint="the norm of its own gradient")
def returns_its_own(model, optimizer, max_norm):
    own = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return own


@wrong("11.2", STEP, hint="nothing (None)")
def returns_nothing(model, optimizer, max_norm):
    average(model)
    if nn.utils.clip_grad_norm_(model.parameters(), max_norm).isfinite():
        optimizer.step()


@wrong("11.2", NORM, hint="Which dtype do the numbers have on the way?")
def loses_digits(model, optimizer, max_norm):
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = parameter.grad.float() / dist.get_world_size()
            dist.all_reduce(mean)
            parameter.grad.copy_(mean)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", STEP, NORM, hint="before the step?")
def looks_for_nan_alone(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not norm.isnan():
        optimizer.step()
    return norm


@wrong("11.2", STEP, hint="It was replaced, or left out")
def what_is_broken_counts_as_0(model, optimizer, max_norm):
    average(model)
    trained = [each for each in model.parameters() if each.grad is not None]
    for each in trained:
        each.grad = each.grad.nan_to_num(0.0, 0.0, 0.0)
    norm = nn.utils.clip_grad_norm_(trained, max_norm)
    optimizer.step()
    return norm


@wrong("11.2", NORM, hint="has a factor of its own")
def each_layer_alone(model, optimizer, max_norm):
    average(model)
    trained = [each for each in model.parameters() if each.grad is not None]
    norm = nn.utils.get_total_norm([each.grad for each in trained])
    for each in trained:
        nn.utils.clip_grad_norm_(each, max_norm / 2)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", hint="It has the mean's direction, but another length.")
def the_norm_of_the_largest_layer(model, optimizer, max_norm):
    average(model)
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    norm = torch.stack([each.norm() for each in grads]).max()
    for each in grads:
        each *= min(1, max_norm / norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", STEP, hint="as a number")
def only_rank_0_returns_it(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm if dist.get_rank() == 0 else None


@wrong("11.2", STEP, ALL, hint="It is asked for then, too")
def comes_back_early(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not norm.isfinite():
        return 0.0
    optimizer.step()
    return norm


@wrong("11.2", STEP, hint="That is its square")
def forgets_the_root(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm**2


@wrong("11.2", hint="divided once more")
def divides_twice(model, optimizer, max_norm):
    average(model)
    for each in model.parameters():
        if each.grad is not None:
            each.grad /= dist.get_world_size()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", hint="What is done to each of them?")
def divides_the_last_alone(model, optimizer, max_norm):
    average(model, divide=False)
    trained = [each for each in model.parameters() if each.grad is not None]
    trained[-1].grad /= dist.get_world_size()
    norm = nn.utils.clip_grad_norm_(trained, max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", NORM, hint="What comes first, what next, and how often is each of them done?")
def steps_twice(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
        optimizer.step()
    return norm


@wrong("11.2", NORM, hint="The weights have not moved")
def a_large_norm_is_broken(model, optimizer, max_norm):
    """As lesson 11's `by_norm`."""
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm < 10:
        optimizer.step()
    return norm


@wrong("11.2", NORM, hint="is not the same as a gradient of 0")
def zeros_for_the_frozen(model, optimizer, max_norm):
    for each in model.parameters():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", NORM, hint="What makes the step, and with which gradients?")
def never_steps(model, optimizer, max_norm):
    average(model)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


@wrong("11.2", hint="The ranks have different weights now")
def without_the_first_layer(model, optimizer, max_norm):
    for parameter in list(model.parameters())[1:]:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", hint="NoneType")
def forgets_the_frozen(model, optimizer, max_norm):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@wrong("11.2", hint="never called all_reduce")
def stays_away(model, optimizer, max_norm):
    if all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None):
        average(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return norm
    return math.nan


@right("11.2")
def in_one_tensor(model, optimizer, max_norm):
    trained = [each for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.grad.flatten() for each in trained]) / dist.get_world_size()
    dist.all_reduce(flat)
    norm = flat.norm().item()
    if math.isfinite(norm):
        flat *= min(1, max_norm / norm)
        for parameter, part in zip(trained, flat.split([each.numel() for each in trained]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    return norm


@right("11.2")
def asks_all(model, optimizer, max_norm):
    fine = all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)
    broken = torch.tensor(0 if fine else 1)
    dist.all_reduce(broken)
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not broken:
        optimizer.step()
    return norm


@wrong("11.2", STEP, NORM, hint="this model and this limit before")
def remembers_the_model(model, optimizer, max_norm):
    done = KEPT.setdefault("norms", {})
    if (model, optimizer, max_norm) not in done:
        done[model, optimizer, max_norm] = without_words(model, optimizer, max_norm)
    return done[model, optimizer, max_norm]


def without_words(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


SCALED = "after the warm-up: k times the batch, k times the learning rate"


def rate(together, seen):
    return 0.004 * together / 48 * min(1, seen / 3840)


@wrong("11.3", hint="that of the small batch")
def does_not_scale(step, batch_size, ranks, pieces):
    return 0.004 * min(1, (step + 1) * batch_size * ranks * pieces / 3840)


@wrong("11.3", hint="The pieces are not counted.")
def forgets_the_pieces(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks, (step + 1) * batch_size * ranks)


@wrong("11.3", hint="The ranks are not counted.")
def forgets_the_ranks(step, batch_size, ranks, pieces):
    return rate(batch_size * pieces, (step + 1) * batch_size * pieces)


@wrong("11.3", hint="what one rank sends forward at once")
def counts_one_piece(step, batch_size, ranks, pieces):
    return rate(batch_size, (step + 1) * batch_size)


@wrong("11.3", hint="the square root")
def takes_the_root(step, batch_size, ranks, pieces):
    together = batch_size * ranks * pieces
    return 0.004 * math.sqrt(together / 48) * min(1, (step + 1) * together / 3840)


@wrong("11.3", hint="Which way round?")
def the_wrong_way_round(step, batch_size, ranks, pieces):
    together = batch_size * ranks * pieces
    return 0.004 * 48 / together * min(1, (step + 1) * together / 3840)


@wrong("11.3", SCALED, hint="from the start")
def does_not_warm_up(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks * pieces, 3840)


@wrong("11.3", SCALED, hint="step 0 must move something")
def begins_with_nothing(step, batch_size, ranks, pieces):
    together = batch_size * ranks * pieces
    return rate(together, step * together)


@wrong("11.3", SCALED, hint="the samples of one rank alone")
def warms_up_on_its_own(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks * pieces, (step + 1) * batch_size * pieces)


@wrong("11.3", SCALED, hint="Which share of the 3,840 samples")
def counts_steps(step, batch_size, ranks, pieces):
    return rate(batch_size * ranks * pieces, 3840 * (step + 1) / 100)


@wrong("11.3", hint="k is right, but the learning rate keeps growing.")
def warms_up_for_ever(step, batch_size, ranks, pieces):
    return 0.004 * batch_size * ranks * pieces / 48 * (step + 1) * batch_size * ranks * pieces / 3840


@wrong("11.3", hint="What ends the warm-up, and when?")
def up_to_twice_as_much(step, batch_size, ranks, pieces):
    together = batch_size * ranks * pieces
    return 0.004 * together / 48 * min(2, (step + 1) * together / 3840)


@wrong("11.3", hint="nothing (None)")
def prints_it(step, batch_size, ranks, pieces):
    print(rate(batch_size * ranks * pieces, (step + 1) * batch_size * ranks * pieces))


@right("11.3")
def as_a_tensor(step, batch_size, ranks, pieces):
    together = torch.tensor(batch_size * ranks * pieces, dtype=torch.float64)
    return torch.minimum((step + 1) * together / 3840, torch.tensor(1.0)) * 0.004 * together / 48


@right("11.3")
def in_float32(step, batch_size, ranks, pieces):
    together = torch.tensor(float(batch_size * ranks * pieces))
    return 0.004 * together / 48 * torch.clamp((step + 1) * together / 3840, max=1.0)


# --- the result is right, and it was not done as asked ---


def own_sums(ddp, pieces):
    """The gradients of this rank's samples, added up, in .grad; and the number of samples of all ranks."""
    ddp.zero_grad()
    with ddp.no_sync():
        for x, y in pieces:
            F.cross_entropy(ddp(x), y, reduction="sum").backward()
    return dist.get_world_size() / share_of_one(pieces)


@wrong("11.1", GRADIENT, PIECES, hint="A gather brings every rank's tensor separately.")
def gathers_the_gradients(ddp, pieces):
    samples = own_sums(ddp, pieces)
    for parameter in ddp.parameters():
        of_ranks = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, parameter.grad)
        parameter.grad.copy_(sum(of_ranks) / samples)


TOLD: list[int] = []


@wrong("11.1", GRADIENT, PIECES, hint="numbers travelled")
def through_the_store(ddp, pieces):
    samples, store = own_sums(ddp, pieces), dist.distributed_c10d._get_default_store()
    TOLD.append(len(pieces))
    parameters = list(ddp.parameters())
    mine = torch.cat([each.grad.flatten() for each in parameters])
    store.set(f"{len(TOLD)}/{dist.get_rank()}", mine.numpy().tobytes())
    texts = [bytearray(store.get(f"{len(TOLD)}/{rank}")) for rank in range(dist.get_world_size())]
    mean = sum(torch.frombuffer(each, dtype=mine.dtype) for each in texts) / samples
    for parameter, part in zip(parameters, mean.split([each.numel() for each in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


@wrong("11.1", GRADIENT, ONCE, hint="is freed by its backward")
def keeps_every_graph(ddp, pieces):
    share, losses = share_of_one(pieces), []
    ddp.zero_grad()
    for i, (x, y) in enumerate(pieces):
        with context(ddp, pieces, i):
            losses.append(F.cross_entropy(ddp(x), y, reduction="sum") * share)
            losses[-1].backward(retain_graph=True)
    return sum(losses).item()


# --- a state that is given back changed, and the answer where nothing is done -----------------------------


def accumulated(ddp, pieces):
    share = share_of_one(pieces)
    by_pieces(ddp, pieces, lambda length: share)


@wrong(
    "11.1",
    GRADIENT,
    PIECES,
    hint="after your call a module of ddp is in another mode, a parameter is frozen or no longer frozen, the",
)
def freezes_a_layer(ddp, pieces):
    ddp.requires_grad_(True)
    accumulated(ddp, pieces)
    ddp.module[0].requires_grad_(False)


@wrong(
    "11.1",
    GRADIENT,
    PIECES,
    hint="Switch back at the end whatever you switch, and only read what you are given.",
)
def inputs_with_gradients(ddp, pieces):
    for x, _ in pieces:
        x.requires_grad_()
    accumulated(ddp, pieces)


def stepped(model, optimizer, max_norm):
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


@wrong("11.2", STEP, ALL, hint="the mean holds")
def minus_inf_where_there_is_no_step(model, optimizer, max_norm):
    norm = stepped(model, optimizer, max_norm)
    return norm if norm.isfinite() else -math.inf
