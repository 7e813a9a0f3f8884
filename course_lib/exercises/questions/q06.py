"""The questions of lesson 06: DDP by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..check import Refused, a_function, observe, question
from .ranks import join

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
    """Its parameters, then its buffers."""
    return [each.detach() for each in (*model.parameters(), *model.buffers())]


SHAPES: list[tuple[int, ...]] = [(5, 4), (5,), (5,), (5,), (2, 5), (2,), (5,), (5,)]
PARAMETERS = 6  # of these; then the buffers, batch norm's counter the last of them


def _everything(seed: int) -> list[torch.Tensor]:
    counter = torch.tensor(seed % 1000, dtype=torch.float64)
    return [*_tensors(seed, SHAPES), counter]


def _as_before(held: list[list[torch.Tensor]], before: list[torch.Tensor]) -> None:
    """Refuse tensors of other shapes than those that the answer was given."""
    shapes = [each.shape for each in before]
    for rank, tensors in enumerate(held):
        if [each.shape for each in tensors] != shapes:
            raise Refused(f"the tensors of rank {rank} have other shapes now, or are more or fewer")


def _far(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest difference between two lists of tensors; NaN counts as far."""
    return max((x - y).abs().nan_to_num(float("inf")).max().item() for x, y in zip(a, b, strict=True))


Place = tuple[int, int]  # which tensor, and where in it


def _furthest(ranks: list[list[torch.Tensor]], right: list[torch.Tensor]) -> tuple[int, Place]:
    """The rank that is furthest from what is right, and where."""
    rank = max(range(len(ranks)), key=lambda rank: _far(ranks[rank], right))
    gaps = [(x - y).abs().nan_to_num(float("inf")) for x, y in zip(ranks[rank], right, strict=True)]
    which = max(range(len(gaps)), key=lambda i: gaps[i].max().item())
    return rank, (which, int(gaps[which].argmax()))


def _at(tensors: list[torch.Tensor], place: Place) -> float:
    return tensors[place[0]].flatten()[place[1]].item()


# --- 06.1 -------------------------------------------------------------------------------------------------

AGREE, MEAN = "the ranks hold the same gradients", "they are the mean over all ranks"


@question("06.1", {AGREE: 1, MEAN: 2})
def average_gradients(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "average_gradients(model)")
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    held = observe(_averaged, answer, seeds, nprocs=RANKS)
    drawn = [_tensors(seed, SHAPES[:PARAMETERS]) for seed in seeds]
    mean = [torch.stack(each).mean(0) for each in zip(*drawn, strict=True)]
    if any(each is None for gradients in held for each in gradients):
        for what in (AGREE, MEAN):
            yield (
                what,
                False,
                "a gradient is None now",
                "A collective works in place. What does it return?",
            )
        return
    _as_before(held, mean)
    apart = max(_far(held[0], each) for each in held)
    rank, place = _furthest(held, held[0])
    seen = (
        f"one gradient is {_at(held[0], place):.4f} on rank 0 and {_at(held[rank], place):.4f} on rank {rank}"
    )
    if any(all(_far([each[i]], [held[0][i]]) < CLOSE for each in held) for i in range(PARAMETERS)):
        hint = "Some gradients agree and others do not. Is it done for every parameter?"
    elif any(_far(each, mean) < CLOSE for each in held):
        hint = "One rank holds the mean. Do the others do the same, and get the same?"
    else:
        hint = "Which call gives every rank something that depends on all of them?"
    yield AGREE, apart < CLOSE, seen, hint
    rank, place = _furthest(held, mean)
    seen = ", ".join(f"{_at(each, place):.4f}" for each in drawn)
    seen = f"the ranks had {seen}; rank {rank} holds {_at(held[rank], place):.4f} now"
    seen = f"{seen}, the mean is {_at(mean, place):.4f}"
    total = [each * RANKS for each in mean]
    if _far(held[rank], total) < CLOSE:
        hint = "That is the sum. What makes a mean of it, for any number of ranks?"
    elif apart > CLOSE:
        hint = "Once the ranks agree, look at this again."
    elif any(_far(held[0], each) < CLOSE for each in drawn):
        hint = "That is the gradient of one rank. What of the others' samples?"
    elif _far(held[0], [each * RANKS / 2 for each in mean]) < CLOSE:
        hint = "It is divided by 2, and there are 3 ranks here. Where does a rank learn how many there are?"
    else:
        hint = "Add up over the ranks first, then divide, once."
    yield MEAN, max(_far(each, mean) for each in held) < CLOSE, seen, hint


def _averaged(answer: Any, seeds: list[int]) -> list[torch.Tensor | None]:
    join()
    model = _model(_everything(0))
    for parameter, gradient in zip(
        model.parameters(), _tensors(seeds[dist.get_rank()], SHAPES[:PARAMETERS]), strict=True
    ):
        parameter.grad = gradient
    answer(model)
    return [None if each.grad is None else each.grad.detach() for each in model.parameters()]


# --- 06.2 -------------------------------------------------------------------------------------------------

START, BUFFERS = "every rank has rank 0's parameters", "and rank 0's buffers"


@question("06.2", {START: 1, BUFFERS: 1})
def same_start(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "same_start(model)")
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    held = observe(_started, answer, seeds, nprocs=RANKS)
    drawn = [_everything(seed) for seed in seeds]
    _as_before(held, drawn[0])
    for what, part in ((START, slice(PARAMETERS)), (BUFFERS, slice(PARAMETERS, None))):
        shown, place = _furthest([each[part] for each in held], drawn[0][part])
        ok = _far(held[shown][part], drawn[0][part]) < CLOSE
        is_, right = _at(held[shown][part], place), _at(drawn[0][part], place)
        seen = f"one number of rank {shown} is {is_:.4f}, and rank 0 had {right:.4f}"
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
            hint = "Nothing arrived in the model. Which collective copies a tensor of one rank into all?"
        yield what, ok, seen, hint


def _started(answer: Any, seeds: list[int]) -> list[torch.Tensor]:
    join()
    model = _model(_everything(seeds[dist.get_rank()]))
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
    if any(each["by_ddp"] for each in held):
        raise Refused("DistributedDataParallel does the work here; this time it is yours")
    reference = _train(_network(seeds[0]), data, slice(None))
    own = [_train(_network(seeds[0]), data, _share(rank))["gradients"] for rank in range(RANKS)]
    right = True  # all that came before
    for what, name in ((BEGINS, "start"), (DURING, "gradients"), (FULL, "end")):
        ranks = [each[name] for each in held]
        _as_before(ranks, reference[name])
        far, place = _furthest(ranks, reference[name])
        is_, should = _at(ranks[far], place), _at(reference[name], place)
        seen = f"one number of rank {far} is {is_:.5f}, and should be {should:.5f}"
        ok = _far(ranks[far], reference[name]) < CLOSE
        if what == BEGINS:
            hint = "What has to travel before the first step, and from where?"
        elif not right:
            hint = "This rests on what is above; that comes first."
        elif what == DURING:
            hint = _of_gradients(ranks, reference[name], own)
        else:
            hint = "The first step is right, and a later one is not. What does the first leave behind?"
        yield what, ok, seen, hint
        right = right and ok


def _of_gradients(
    ranks: list[list[torch.Tensor]], right: list[torch.Tensor], own: list[list[torch.Tensor]]
) -> str:
    if max(each.abs().max().item() for each in ranks[0]) == 0:
        return "There are no gradients at all. Does forward() call the model?"
    untouched = [
        all(_far([ranks[r][i]], [own[r][i]]) < CLOSE for r in range(len(ranks))) for i in range(len(right))
    ]
    if all(untouched):
        return "Nobody calls anything after backward(): a hook on each parameter has to do it, to its .grad."
    if any(untouched):
        return "Some gradients are still each rank's own: a hook on each parameter has to do it, for its own."
    if max(_far(ranks[0], each) for each in ranks) > CLOSE:
        return "The ranks differ still. Do all do the same, and has it arrived when the hook ends?"
    if _far(ranks[0], [each * RANKS for each in right]) < CLOSE:
        return "That is the sum over the ranks."
    return "All ranks agree, but on another number than the mean. Is it divided once, after the sum?"


def _batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensors = _tensors(seed, [(RANKS * SHARE, 4), (RANKS * SHARE, 2)] * STEPS)
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _wrapped(answer: Any, seeds: list[int], data: int) -> dict[str, Any]:
    join()
    rank = dist.get_rank()
    model = answer(_network(seeds[rank]))
    by_ddp = any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules())
    return {"by_ddp": by_ddp, **_train(model, data, _share(rank))}


def _share(rank: int) -> slice:
    return slice(rank * SHARE, (rank + 1) * SHARE)


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
