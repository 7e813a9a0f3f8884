"""The questions of lesson 06: DDP by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..asking import REST, Ask, Finding, Refused, a_module, far, in_group, nearest, question

RANKS = 3  # an answer that divides by 2 must not pass
CLOSE = 1e-9  # the tensors are float64
Shapes = list[tuple[int, ...]]
PARAMETERS: Shapes = [(5, 4), (5,), (5,), (5,), (2, 5), (2,)]  # of linear, batch norm, linear
BUFFERS: Shapes = [(5,), (5,), ()]  # batch norm's, its counter the last of them
FIRST = 5  # numbers that lie in the first tensor alone, of parameters and of buffers


def _drawn(seed: int, shapes: Shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _everything(seed: int) -> list[torch.Tensor]:
    """For parameters and buffers; the counter holds whole numbers alone."""
    return [*_drawn(seed, PARAMETERS + BUFFERS[:-1]), torch.tensor(seed % 1000, dtype=torch.float64)]


def _filled(model: nn.Module, tensors: list[torch.Tensor]) -> nn.Module:
    with torch.no_grad():
        for into, value in zip((*model.double().parameters(), *model.buffers()), tensors, strict=True):
            into.copy_(value)
    return model


def _normed(tensors: list[torch.Tensor]) -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)), tensors)


def _rows(ranks: list[Any], shapes: Shapes) -> torch.Tensor:
    """For each rank a row with the numbers of all its tensors; refused where the shapes are others."""
    rows = []
    for rank, held in enumerate(ranks):
        tensors = [torch.as_tensor(each, dtype=torch.float64) for each in held]
        if [each.shape for each in tensors] != shapes:
            raise Refused(f"the tensors of rank {rank} have other shapes now, or are more or fewer")
        rows.append(torch.cat([each.flatten() for each in tensors]))
    return torch.stack(rows)


def _by_tensor(rows: torch.Tensor, shapes: Shapes) -> tuple[torch.Tensor, ...]:
    return rows.split(list(map(math.prod, shapes)), dim=1)


def _all_hold(rows: torch.Tensor, right: torch.Tensor) -> bool:
    return far(rows, right.expand_as(rows)) < CLOSE


def _furthest(rows: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
    """The rank that is furthest from what is right, and the place of the number that is."""
    gaps = (rows - right).abs().nan_to_num(float("inf"))
    return divmod(int(gaps.argmax()), gaps.shape[1])


# --- 06.1 -------------------------------------------------------------------------------------------------

AGREE, MEAN = "the ranks hold the same gradients", "they are the mean over all ranks"


@question("06.1", "average_gradients(model)", {AGREE: 1, MEAN: 2})
def average_gradients(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    found = ask(_averaged, seeds, nprocs=RANKS)
    if any(None in each for each in found):
        for what in (AGREE, MEAN):
            hint = "A collective works in place. What does it return?"
            yield Finding(what, False, "a gradient is None now", hint)
        return
    held = _rows(found, PARAMETERS)
    drawn = _rows([_drawn(seed, PARAMETERS) for seed in seeds], PARAMETERS)
    mean = drawn.mean(0)
    agree = _all_hold(held, held[0])
    rank, i = _furthest(held, held[0])
    seen = f"one gradient is {held[0, i]:.4f} on rank 0 and {held[rank, i]:.4f} on rank {rank}"
    if any(_all_hold(each, each[0]) for each in _by_tensor(held, PARAMETERS)):
        hint = "Some gradients agree and others do not. Is it done for every parameter?"
    elif any(far(each, mean) < CLOSE for each in held):
        hint = "One rank holds the mean. Do the others do the same, and get the same?"
    else:
        hint = "Which call gives every rank something that depends on all of them?"
    yield Finding(AGREE, agree, seen, hint)
    rank, i = _furthest(held, mean)
    had = ", ".join(f"{each:.4f}" for each in drawn[:, i])
    seen = f"the ranks had {had}; rank {rank} holds {held[rank, i]:.4f} now, the mean is {mean[i]:.4f}"
    if agree or far(held[rank], mean * RANKS) < CLOSE:
        hint = nearest(
            held[rank],
            (mean * RANKS, "That is the sum. What makes a mean of it, for any number of ranks?"),
            *((each, "That is the gradient of one rank. What of the others' samples?") for each in drawn),
            (mean * RANKS / 2, BY_TWO),
            otherwise="Add up over the ranks first, then divide, once.",
            within=CLOSE,
        )
    else:
        hint = "Once the ranks agree, look at this again."
    yield Finding(MEAN, _all_hold(held, mean), seen, hint)


BY_TWO = "It is divided by 2, and there are 3 ranks here. Where does a rank learn how many there are?"


@in_group
def _averaged(answer: Any, seeds: list[int]) -> list[torch.Tensor | None]:
    model = _normed(_everything(0))
    gradients = _drawn(seeds[dist.get_rank()], PARAMETERS)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    answer(model)
    return [each.grad for each in model.parameters()]


# --- 06.2 -------------------------------------------------------------------------------------------------

START, KEPT = "every rank has rank 0's parameters", "and rank 0's buffers"


@question("06.2", "same_start(model)", {START: 1, KEPT: 1})
def same_start(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    held = _rows(ask(_started, seeds, nprocs=RANKS), PARAMETERS + BUFFERS)
    drawn = _rows([_everything(seed) for seed in seeds], PARAMETERS + BUFFERS)
    parts = [sum(map(math.prod, shapes)) for shapes in (PARAMETERS, BUFFERS)]
    for what, now, had in zip((START, KEPT), held.split(parts, 1), drawn.split(parts, 1), strict=True):
        rank, i = _furthest(now, had[0])
        seen = f"one number of rank {rank} is {now[rank, i]:.4f}, and rank 0 had {had[0, i]:.4f}"
        if any(_all_hold(now, each) for each in had[1:]):
            hint = "All ranks agree, on another rank's. Which rank is the source?"
        elif _all_hold(now, now[0]):
            hint = "All ranks agree, on something that no rank had. Nothing needs to be computed for a copy."
        elif far(now[rank, :FIRST], had[0, :FIRST]) < CLOSE:
            hint = "The first one arrived, not all of them. A model has many."
        elif what == KEPT:
            hint = "A model holds more than parameters: batch norm's running mean, for one. What lists them?"
        else:
            hint = "Nothing arrived in the model. Which collective copies a tensor of one rank into all?"
        yield Finding(what, _all_hold(now, had[0]), seen, hint)


@in_group
def _started(answer: Any, seeds: list[int]) -> list[torch.Tensor]:
    model = _normed(_everything(seeds[dist.get_rank()]))
    answer(model)
    return [*model.parameters(), *model.buffers()]


# --- 06.3 -------------------------------------------------------------------------------------------------

BEGINS = "all replicas begin with rank 0's parameters"
DURING = "after backward() alone, every rank holds the mean of the gradients"
FULL = "three steps give the weights of one device with the whole batch"
STEPS, SHARE = 3, 4  # steps, and samples of each rank in one
NETWORK: Shapes = [(5, 4), (5,), (2, 5), (2,)]


@question("06.3", "HandDDP(model)", {BEGINS: 1, DURING: 2, FULL: 2}, takes=a_module)
def hand_ddp(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds, data = [rng.randrange(2**31) for _ in range(RANKS)], rng.randrange(2**31)
    held = ask(_wrapped, seeds, data, nprocs=RANKS)
    if any(each["by_ddp"] for each in held):
        raise Refused("DistributedDataParallel does the work here; this time it is yours")
    whole = _train(_network(seeds[0]), data, slice(None))
    own = _rows([_train(_network(seeds[0]), data, _share(r))["gradients"] for r in range(RANKS)], NETWORK)
    all_held = True  # that came before
    for what, name in ((BEGINS, "start"), (DURING, "gradients"), (FULL, "end")):
        now, right = _rows([each[name] for each in held], NETWORK), _rows([whole[name]], NETWORK)[0]
        rank, i = _furthest(now, right)
        seen = f"one number of rank {rank} is {now[rank, i]:.5f}, and should be {right[i]:.5f}"
        if what == BEGINS:
            hint = "What has to travel before the first step, and from where?"
        elif not all_held:
            hint = REST
        elif what == DURING:
            hint = _of_gradients(now, right, own)
        else:
            hint = "The first step is right, and a later one is not. What does the first leave behind?"
        holds = _all_hold(now, right)
        yield Finding(what, holds, seen, hint)
        all_held = all_held and holds


def _of_gradients(now: torch.Tensor, mean: torch.Tensor, own: torch.Tensor) -> str:
    pairs = zip(_by_tensor(now, NETWORK), _by_tensor(own, NETWORK), strict=True)
    untouched = [far(a, b) < CLOSE for a, b in pairs]
    if not now[0].any():
        return "There are no gradients at all. Does forward() call the model?"
    if all(untouched):
        return "Nobody calls anything after backward(): a hook on each parameter has to do it, to its .grad."
    if any(untouched):
        return "Some gradients are still each rank's own: a hook on each parameter has to do it, for its own."
    if not _all_hold(now, now[0]):
        return "The ranks differ still. Do all do the same, and has it arrived when the hook ends?"
    if _all_hold(now, mean * RANKS):
        return "That is the sum over the ranks."
    return "All ranks agree, but on another number than the mean. Is it divided once, after the sum?"


@in_group
def _wrapped(answer: Any, seeds: list[int], data: int) -> dict[str, Any]:
    rank = dist.get_rank()
    model = answer(_network(seeds[rank]))
    by_ddp = any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules())
    return {"by_ddp": by_ddp, **_train(model, data, _share(rank))}


def _network(seed: int) -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), _drawn(seed, NETWORK))


def _share(rank: int) -> slice:
    return slice(rank * SHARE, (rank + 1) * SHARE)


def _train(model: nn.Module, data: int, mine: slice) -> dict[str, list[torch.Tensor]]:
    parameters = list(model.parameters())
    held = {"start": [each.detach().clone() for each in parameters]}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    batches = _drawn(data, [(RANKS * SHARE, 4), (RANKS * SHARE, 2)] * STEPS)
    for x, y in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        if "gradients" not in held:
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
            held["gradients"] = [each.clone() for each in gradients]
        optimizer.step()
    return held | {"end": [each.detach() for each in parameters]}
