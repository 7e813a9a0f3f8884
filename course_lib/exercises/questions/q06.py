"""The questions of lesson 06: DDP by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..in_rank.work import in_group
from ..inputs import flat, network, seeds, tensor, trainable
from ..judging import far, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, a_module, question
from ..shape import NUMBER, reports

CLOSE = 1e-6  # the tensors are float64, but an answer may compute a rank's share in float32
FIRST_SIZES = (3, 4, 5)  # tried first: an answer that divides by 2 must be wrong there


def _model(kind: int, values: int) -> Any:
    """Build a model in which ``values`` draws the parameters alone."""
    model = network(kind, values, norm=False)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def _parameters(kind: int, values: int) -> Tensor:
    return flat(network(kind, values, norm=False).parameters())


def _all_hold(ranks: Iterable[Any], right: Any) -> bool:
    return all(far(of_rank, right) < CLOSE for of_rank in ranks)


def _seen(ranks: list[Any], right: Any) -> str:
    """Show the number that is furthest from the right one."""
    rank, gap = furthest(far(of_rank, right) for of_rank in ranks)
    return f"{len(ranks)} ranks: a number of rank {rank} is off by {gap:.3g}"


# --- 06.1 -------------------------------------------------------------------------------------------------

START = "every rank has rank 0's parameters"


@question(
    "06.1",
    "same_start(model)",
    {START: 3},
    hints={
        START: {
            "nothing": "Nothing arrived in the model. What copies one rank's tensor into those of all?",
            "source": "All ranks agree, but on another rank's numbers. Which rank is the source?",
            "arithmetic": "All ranks agree, but on numbers that no rank had. A copy needs no arithmetic.",
            "not all": "The ranks still differ. Do all of them make the same call, for each parameter?",
        }
    },
)
@with_two_world_sizes(*FIRST_SIZES)
def same_start(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    kind, *values = seeds(rng, 1 + count)
    now = ask(_started, kind, values, nprocs=count)
    before = [_parameters(kind, seed) for seed in values]
    hint = "not all"
    if _all_hold(map(far, now, before), 0.0):
        hint = "nothing"
    elif any(_all_hold(now, other) for other in before[1:]):
        hint = "source"
    elif _all_hold(now, now[0]):
        hint = "arithmetic"
    yield Finding(START, _all_hold(now, before[0]), _seen(now, before[0]), hint)


@reports(lambda *_: [NUMBER, ...])
@in_group
def _started(answer: Any, kind: int, values: list[int]) -> list[float]:
    model = network(kind, values[dist.get_rank()], norm=False)
    answer(model)
    return flat(model.parameters()).tolist()


# --- 06.2 -------------------------------------------------------------------------------------------------

BEGINS = "all replicas begin with rank 0's parameters"
DURING = "after backward() alone, every rank holds the mean of the gradients"
LATER = "and so it is in later steps, also where two backward() calls add up"
BACKWARDS = (1, 2, 1)  # in each step
SHARE = 4  # samples of a rank in each step


@question(
    "06.2",
    "HandDDP(model)",
    {BEGINS: 1, DURING: 3, LATER: 1},
    accepts=a_module,
    depends_on={DURING: BEGINS, LATER: DURING},
    hints={
        BEGINS: {"apart": "What has to be sent before the first step, and by whom? Frozen parameters, too."},
        DURING: {
            "own": "Some gradients are still each rank's own. Has each a hook that writes into .grad?",
            "differ": "The ranks still differ. Do all make the same calls, on the gradient itself?",
            "other": "All ranks agree, but not on the mean. Is the sum divided once, by the number of ranks?",
        },
        LATER: {"later": "The first step is right. What does a hook leave behind for the next call?"},
    },
)
@with_two_world_sizes(*FIRST_SIZES)
def hand_ddp(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    kind, data, *values = seeds(rng, 2 + count)
    starts, gradients = zip(*ask(_wrapped, kind, data, values, nprocs=count), strict=True)
    right = _train(_model(kind, values[0]), data, range(count), count)
    begin = _parameters(kind, values[0])
    yield Finding(BEGINS, _all_hold(starts, begin), _seen(list(starts), begin), "apart")
    own = [_train(_model(kind, values[0]), data, [rank], count)[0] for rank in range(count)]
    first = [of_rank[0] for of_rank in gradients]
    kept = [of_rank for of_rank, mine in zip(first, own, strict=True) if _any_equal(of_rank, mine)]
    hint = "other"
    if kept:
        hint = "own"
    elif not _all_hold(first, first[0]):
        hint = "differ"
    yield Finding(DURING, _all_hold(first, right[0]), _seen(first, right[0]), hint)
    yield Finding(LATER, _all_hold(gradients, right), _seen(list(gradients), right), "later")


def _any_equal(numbers: list[float], others: list[float]) -> bool:
    return any(abs(a - b) < CLOSE for a, b in zip(numbers, others, strict=False))


def _train(model: Any, data: int, ranks: Iterable[int], count: int) -> list[list[float]]:
    """Train for three steps on these ranks' samples; return the gradients after each backward()."""
    trained, gradients = trainable(model), []
    for step, parts in enumerate(BACKWARDS):
        x = tensor(data + step, (count, parts, SHARE // parts, 4))
        for parameter in trained:
            parameter.grad = None
        for part in range(parts):
            mine = torch.cat([x[rank, part] for rank in ranks])
            (model(mine) - mine[:, :2]).square().mean().backward()
            gradients.append(
                flat(torch.zeros_like(p) if p.grad is None else p.grad for p in trained).tolist()
            )
        with torch.no_grad():  # as SGD does; importing it takes seconds in a notebook
            for parameter in trained:
                parameter.sub_(0.1 * (0.0 if parameter.grad is None else parameter.grad))
    return gradients


@reports(lambda *_: [[NUMBER, ...], [[NUMBER, ...]] * sum(BACKWARDS)])
@in_group
def _wrapped(answer: Any, kind: int, data: int, values: list[int]) -> list[Any]:
    rank, count = dist.get_rank(), dist.get_world_size()
    model = _model(kind, values[rank])
    ddp = answer(model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in ddp.modules()):
        raise Refused("DistributedDataParallel does the work here; this time you write it yourself")
    return [flat(model.parameters()).tolist(), _train(ddp, data, [rank], count)]


# --- 06.3 -------------------------------------------------------------------------------------------------

MEAN = "the gradients are the mean over the samples of all ranks, on every rank"
KEPT = "a gradient that was None is still None"


@question(
    "06.3",
    "average_gradients(model, samples)",
    {MEAN: 1, KEPT: 1},
    depends_on={KEPT: MEAN},
    hints={
        MEAN: {
            "alike": "Each rank has the same weight there; but they have different numbers of samples.",
            "sum": "That is a sum. How many samples, on all ranks together, is it the sum of?",
            "differ": "The ranks differ. Do all make the same calls, and divide by the same number?",
            "other": "It is a sum over all samples, divided once: which sum does each rank begin with?",
        },
        KEPT: {"given": "A parameter without a gradient must stay without one: an optimizer would use it."},
    },
)
@with_two_world_sizes(*FIRST_SIZES)
def average_gradients(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    kind, *drawn = seeds(rng, 1 + count)
    samples = rng.sample(range(2, 40), count)
    results = ask(_averaged, kind, drawn, samples, nprocs=count)
    now = [result["gradients"] for result in results]
    own = torch.stack([flat(_drawn(kind, seed)) for seed in drawn])
    weighted = (own * torch.tensor(samples)[:, None]).sum(0)
    mean = weighted / sum(samples)
    known = ((own.mean(0), "alike"), (own.sum(0), "sum"), (weighted, "sum"), (weighted / count, "sum"))
    hint = nearest(now[0], *known, otherwise="other", within=CLOSE)
    hint = hint if _all_hold(now, now[0]) else "differ"
    yield Finding(MEAN, _all_hold(now, mean), f"{_seen(now, mean)}; the samples of each: {samples}", hint)
    given = any(result["given"] for result in results)
    yield Finding(KEPT, not given, "a parameter has a gradient that had none", "given")


def _drawn(kind: int, seed: int) -> list[Tensor]:
    trained = trainable(_model(kind, 0))
    return [tensor(seed + i, tuple(parameter.shape)) for i, parameter in enumerate(trained)]


@reports(lambda *_: {"gradients": [NUMBER, ...], "given": bool})
@in_group
def _averaged(answer: Any, kind: int, drawn: list[int], samples: list[int]) -> Result:
    rank = dist.get_rank()
    model: Any = _model(kind, 0)
    trained = trainable(model)
    for parameter, gradient in zip(trained, _drawn(kind, drawn[rank]), strict=True):
        parameter.grad = gradient
    model.body.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))  # neither first nor last
    answer(model, samples[rank])
    without = [model.body.unused, *(p for p in model.parameters() if not p.requires_grad)]
    given = any(parameter.grad is not None for parameter in without)
    return {"gradients": flat(p.grad for p in trained if p.grad is not None).tolist(), "given": given}
