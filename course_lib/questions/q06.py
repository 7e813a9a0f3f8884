"""The questions of lesson 06: DDP by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
RANKS = 3  # an answer that divides by 2 shall not pass
CLOSE = 1e-9  # the tensors are float64


def _tensors(seed: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _model(tensors: list[torch.Tensor]) -> nn.Module:
    """Linear, batch norm, linear, with these tensors as its parameters and buffers."""
    return _filled(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)), tensors)


def _network(seed: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return _filled(model, _tensors(seed, [(5, 4), (5,), (2, 5), (2,)]))


def _filled(model: nn.Module, tensors: list[torch.Tensor]) -> nn.Module:
    with torch.no_grad():
        for into, value in zip(_held(model.double()), tensors, strict=True):
            into.copy_(value)
    return model


def _held(model: nn.Module) -> list[torch.Tensor]:
    """Its parameters, then its buffers, of floats."""
    floats = [*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())]
    return [each.detach() for each in floats]


SHAPES: list[tuple[int, ...]] = [(5, 4), (5,), (5,), (5,), (2, 5), (2,), (5,), (5,)]
PARAMETERS = 6  # of these; then the two buffers


def _far(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest difference between two lists of tensors; NaN counts as far."""
    return max((x - y).abs().nan_to_num(float("inf")).max().item() for x, y in zip(a, b, strict=True))


def _first(tensors: list[torch.Tensor]) -> float:
    return tensors[0].flatten()[0].item()


# --- 06.1 -------------------------------------------------------------------------------------------------

AGREE, MEAN = "the ranks hold the same gradients", "they are the mean over all ranks"


@question("06.1", {AGREE: 1, MEAN: 2})
def average_gradients(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "average_gradients(model)")
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    held = observe(_averaged, answer, seeds, nprocs=RANKS)
    drawn = [_tensors(seed, SHAPES[:PARAMETERS]) for seed in seeds]
    mean = [torch.stack(each).mean(0) for each in zip(*drawn, strict=True)]
    apart = max(_far(held[0], each) for each in held)
    seen = f"one gradient is {_first(held[0]):.4f} on rank 0 and {_first(held[1]):.4f} on rank 1"
    yield AGREE, apart < CLOSE, seen, "Which call gives every rank something that depends on all of them?"
    seen = ", ".join(f"{_first(each):.4f}" for each in drawn)
    seen = f"the ranks had {seen}; rank 0 holds {_first(held[0]):.4f} now, the mean is {_first(mean):.4f}"
    total = [each * RANKS for each in mean]
    if _far(held[0], total) < CLOSE:
        hint = "That is the sum. What makes a mean of it, for any number of ranks?"
    elif apart < CLOSE and any(_far(held[0], each) < CLOSE for each in drawn):
        hint = "That is the gradient of one rank. What of the others' samples?"
    elif _far(held[0], [each * RANKS / 2 for each in mean]) < CLOSE:
        hint = "It is divided by 2, and there are 3 ranks here. Where does a rank learn how many there are?"
    else:
        hint = "Add up over the ranks first, then divide, once."
    yield MEAN, max(_far(each, mean) for each in held) < CLOSE, seen, hint


def _averaged(answer: Any, seeds: list[int]) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    model = _model(_tensors(0, SHAPES))
    for parameter, gradient in zip(
        model.parameters(), _tensors(seeds[dist.get_rank()], SHAPES[:PARAMETERS]), strict=True
    ):
        parameter.grad = gradient
    answer(model)
    return [torch.zeros(()) if each.grad is None else each.grad for each in model.parameters()]


# --- 06.2 -------------------------------------------------------------------------------------------------

START, BUFFERS = "every rank has rank 0's parameters", "and rank 0's buffers"


@question("06.2", {START: 1, BUFFERS: 1})
def same_start(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "same_start(model)")
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    held = observe(_started, answer, seeds, nprocs=RANKS)
    drawn = [_tensors(seed, SHAPES) for seed in seeds]
    for what, part in ((START, slice(PARAMETERS)), (BUFFERS, slice(PARAMETERS, None))):
        wrong = [rank for rank in range(RANKS) if _far(held[rank][part], drawn[0][part]) > CLOSE]
        shown = wrong[-1] if wrong else 0
        begins, right = _first(held[shown][part]), _first(drawn[0][part])
        seen = f"one of rank {shown} begins with {begins:.4f}, and rank 0 had {right:.4f}"
        if any(
            all(_far(held[r][part], drawn[i][part]) < CLOSE for r in range(RANKS)) for i in range(1, RANKS)
        ):
            hint = "All ranks agree, on another rank's. Which rank is the source?"
        elif all(_far(held[0][part], each[part]) < CLOSE for each in held):
            hint = "All ranks agree, on something that no rank had. Nothing needs to be computed for a copy."
        elif _far(held[shown][part][:1], drawn[0][part][:1]) < CLOSE:
            hint = "The first one arrived, not all of them. A model has many."
        elif part.stop is None:
            hint = "A model holds more than parameters: batch norm's running mean, for one. What lists them?"
        else:
            hint = "Nothing arrived there. Which collective copies a tensor of one rank to all?"
        yield what, not wrong, seen, hint


def _started(answer: Any, seeds: list[int]) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    model = _model(_tensors(seeds[dist.get_rank()], SHAPES))
    answer(model)
    return _held(model)


# --- 06.3 -------------------------------------------------------------------------------------------------

BEGINS, DURING, FULL = (
    "all replicas begin with rank 0's parameters",
    "after backward() alone, every rank holds the mean of the gradients",
    "three steps give the weights of one device with the whole batch",
)
STEPS, SHARE = 3, 4  # steps, and samples of each rank in one


@question("06.3", {BEGINS: 1, DURING: 2, FULL: 2})
def hand_ddp(answer: Any, rng: random.Random) -> Found:
    if not (isinstance(answer, type) and issubclass(answer, nn.Module)):
        raise Refused(f"HandDDP is a class, a nn.Module that wraps another one; this is {answer!r:.60}")
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    data = rng.randrange(2**31)
    held = observe(_wrapped, answer, seeds, data, nprocs=RANKS)
    reference = _one_device(seeds[0], data)
    for what, name in ((BEGINS, "start"), (DURING, "gradients"), (FULL, "end")):
        ranks = [each[name] for each in held]
        off = max(_far(each, reference[name]) for each in ranks)
        apart = max(_far(ranks[0], each) for each in ranks)
        far = max(range(RANKS), key=lambda rank: _far(ranks[rank], reference[name]))
        is_, right = _first(ranks[far]), _first(reference[name])
        seen = f"one number of rank {far} is {is_:.5f}, and should be {right:.5f}"
        yield what, off < CLOSE, seen, _hint(what, ranks, reference[name], apart)


def _hint(what: str, ranks: list[list[torch.Tensor]], right: list[torch.Tensor], apart: float) -> str:
    if what == BEGINS:
        return "What has to travel before the first step, and from where?"
    if what == FULL:
        return "Look at what still differs above; then, whether a hook is there for every parameter."
    if max(each.abs().max().item() for each in ranks[0]) == 0:
        return "There are no gradients at all. Does forward() call the model?"
    if apart > CLOSE:
        return "Nobody calls anything after backward(): a hook on each parameter has to do it."
    if _far(ranks[0], [each * RANKS for each in right]) < CLOSE:
        return "That is the sum over the ranks."
    return "All ranks agree, but on another number than the mean. Is it divided once, after the sum?"


def _batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensors = _tensors(seed, [(RANKS * SHARE, 4), (RANKS * SHARE, 2)] * STEPS)
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _wrapped(answer: Any, seeds: list[int], data: int) -> dict[str, list[torch.Tensor]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    return _train(answer(_network(seeds[rank])), data, slice(rank * SHARE, (rank + 1) * SHARE))


def _one_device(seed: int, data: int) -> dict[str, list[torch.Tensor]]:
    return _train(_network(seed), data, slice(None))


def _train(model: nn.Module, data: int, mine: slice) -> dict[str, list[torch.Tensor]]:
    parameters = list(model.parameters())
    held = {"start": [each.detach().clone() for each in parameters]}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for x, y in _batches(data):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        if "gradients" not in held:
            held["gradients"] = [
                torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters
            ]
        optimizer.step()
    return held | {"end": [each.detach().clone() for each in parameters]}
