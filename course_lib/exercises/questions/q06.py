"""The questions of lesson 06: DDP by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ..asking import REST, Ask, Finding, Refused, a_module, far, in_digits, in_group, nearest, question
from ..drawn import everything, network, seeds, tensor, with_two_numbers

CLOSE = 1e-9  # the tensors are float64
ROUNDING = 1e-5
ROUNDED = "That is right to some seven digits, which is what float32 keeps. The gradients have sixteen."
FIRST = (3, 4, 5)  # the world sizes tried first: an answer that divides by 2 must be wrong there
Shapes = list[tuple[int, ...]]


def _drawn(seed: int, shapes: Shapes) -> list[torch.Tensor]:
    return [tensor(seed + i, shape) for i, shape in enumerate(shapes)]


def _rows(ranks: list[Any], shapes: Shapes) -> torch.Tensor:
    """Return a row per rank with the numbers of all its tensors; refuse tensors of other shapes."""
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
    """Return the rank and the index of the number that is furthest from the right one."""
    gaps = (rows - right).abs().nan_to_num(float("inf"))
    return divmod(int(gaps.argmax()), gaps.shape[1])


# --- 06.1 -------------------------------------------------------------------------------------------------

AGREE, MEAN = "the ranks hold the same gradients", "they are the mean over the samples of all ranks"


@question("06.1", "average_gradients(model, samples)", {AGREE: 1, MEAN: 2})
def average_gradients(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from with_two_numbers(rng, partial(_of_gradients, ask, rng), FIRST)


def _of_gradients(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    cases = [
        {"kind": kind, "seeds": seeds(rng, count), "samples": rng.sample(range(2, 40), count)}
        for kind in seeds(rng, 2)
    ]
    cases.append(cases[-1] | {"seeds": seeds(rng, count), "again": True})
    by_rank = ask(_averaged, cases, nprocs=count)
    for call, case in enumerate(cases):
        found = [each[call] for each in by_rank]
        for what, found_, seen, hint in (
            (AGREE, any(None in each["gradients"] for each in found), "a gradient is None now", RETURNS),
            (MEAN, any(each["frozen"] for each in found), "a parameter has a gradient that had none", FROZEN),
        ):
            if found_:
                yield from (Finding(each, False, seen, hint) for each in dict.fromkeys((what, MEAN)))
        if any(None in each["gradients"] for each in found):
            return
        yield from _of_means([each["gradients"] for each in found], case, again=call > 0)


RETURNS = "A collective works in place. What does it return?"
FROZEN = "Where there was no gradient there must be none: an optimizer would go by it."
BY_TWO = "It is divided by 2, and there are other numbers of ranks. What is the sum of all counts?"
ALIKE = "Each rank counts alike there, and each sample should. What may be added up over the ranks?"


def _of_means(gradients: list[Any], case: dict[str, Any], again: bool) -> Iterator[Finding]:
    shapes = [each.shape for each in network(case["kind"], 0, norm=False).parameters() if each.requires_grad]
    held = _rows(gradients, shapes)
    drawn = _rows([_drawn(seed, shapes) for seed in case["seeds"]], shapes)
    counts = torch.tensor(case["samples"], dtype=torch.float64)
    weighted = (drawn * counts[:, None]).sum(0)
    mean, count = weighted / counts.sum(), len(counts)
    agree = _all_hold(held, held[0])
    rank, i = _furthest(held, held[0])
    numbers = in_digits(held[0, i].item(), held[rank, i].item())
    seen = f"one gradient is {numbers[0]} on rank 0 and {numbers[1]} on rank {rank}"
    if any(_all_hold(each, each[0]) for each in _by_tensor(held, shapes)):
        hint = "Some gradients agree and others do not. Is it done for every parameter?"
    elif all(far(each * (held[0].norm() / each.norm()), held[0]) < ROUNDING for each in held):
        hint = "They are the same but for a factor. By what does each rank multiply, or divide?"
    elif any(far(each, mean) < CLOSE for each in held):
        hint = "One rank holds the mean. Do the others do the same, and get the same?"
    else:
        hint = "Which call gives every rank something that depends on all of them?"
    yield Finding(AGREE, agree, seen, hint)
    rank, i = _furthest(held, mean)
    is_, right = in_digits(held[rank, i].item(), mean[i].item())
    had = ", ".join(f"{each:.4g} of {n}" for each, n in zip(drawn[:, i], case["samples"], strict=True))
    seen = f"the ranks had {had} samples; rank {rank} holds {is_} now, the mean is {right}"
    if not agree:
        hint = "Once the ranks agree, look at this again."
    elif far(held[rank], mean) < ROUNDING:
        hint = ROUNDED
    else:
        hint = nearest(
            held[rank],
            (weighted, "That is the sum over all samples. What makes a mean of it?"),
            (drawn.sum(0), "That is the sum over the ranks. What makes a mean of it, over all samples?"),
            (drawn.mean(0), ALIKE),
            (weighted / count, "That is divided by the number of ranks. Of how many samples is it the sum?"),
            *((each, "That is the gradient of one rank. What of the others' samples?") for each in drawn),
            (drawn.sum(0) / 2, BY_TWO),
            otherwise="The first call was right. What does a later one find of it?"
            if again
            else "A sum over all samples, divided once by their number: which sum has a rank to begin with?",
            within=CLOSE,
        )
    yield Finding(MEAN, _all_hold(held, mean), seen, hint)


@in_group
def _averaged(answer: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rank, found = dist.get_rank(), []
    for case in cases:
        if "again" not in case:  # else the same model, one step later
            model = network(case["kind"], 0, norm=False)
            trained = [each for each in model.parameters() if each.requires_grad]
        for parameter, gradient in zip(
            trained, _drawn(case["seeds"][rank], [each.shape for each in trained]), strict=True
        ):
            parameter.grad = gradient
        model.body.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))  # neither first nor last
        answer(model, case["samples"][rank])
        without = [model.body.unused, *(each for each in model.parameters() if not each.requires_grad)]
        frozen = any(each.grad is not None for each in without)
        gradients = [None if each.grad is None else each.grad.clone() for each in trained]
        found.append({"gradients": gradients, "frozen": frozen})
    return found


# --- 06.2 -------------------------------------------------------------------------------------------------

START, KEPT = "every rank has rank 0's parameters", "and rank 0's buffers"


@question("06.2", "same_start(model)", {START: 1, KEPT: 1})
def same_start(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from with_two_numbers(rng, partial(_of_starts, ask, rng), FIRST)


def _of_starts(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    cases = [{"kind": kind, "seeds": seeds(rng, count)} for kind in seeds(rng, 2)]
    cases.append(cases[-1] | {"seeds": seeds(rng, count), "again": True})
    by_rank = ask(_started, cases, nprocs=count)
    for call, case in enumerate(cases):
        drawn = [network(case["kind"], seed) for seed in case["seeds"]]
        parameters = len(list(drawn[0].parameters()))
        names = list(everything(drawn[0]))
        for what, part in ((START, slice(parameters)), (KEPT, slice(parameters, None))):
            shapes = [each.shape for each in everything(drawn[0]).values()][part]
            had = _rows([list(everything(each).values())[part] for each in drawn], shapes)
            now = _rows([each[call][part] for each in by_rank], shapes)
            yield _of_start(what, now, had, shapes, names[part])


def _of_start(what: str, now: torch.Tensor, had: torch.Tensor, shapes: Shapes, names: list[str]) -> Finding:
    pairs = zip(_by_tensor(now, shapes), _by_tensor(had, shapes), strict=True)
    arrived = [_all_hold(is_, was[0]) for is_, was in pairs]
    rank, i = _furthest(now, had[0])
    is_, was = in_digits(now[rank, i].item(), had[0, i].item())
    seen = f"one number of rank {rank} is {is_}, and rank 0 had {was}"
    seen += f"; not as on rank 0: {', '.join(n for n, ok in zip(names, arrived, strict=True) if not ok)}"
    if any(_all_hold(now, each) for each in had[1:]):
        hint = "All ranks agree, on another rank's. Which rank is the source?"
    elif far(now, had[0].expand_as(now)) < ROUNDING:
        hint = ROUNDED
    elif any(arrived) and not all(arrived):
        hint = "Some have arrived, and not all of them. What else does a model hold, saved or not?"
    elif _all_hold(now, now[0]):
        hint = "All ranks agree, on something that no rank had. Nothing needs to be computed for a copy."
    elif what == KEPT:
        hint = "A model holds more than parameters: batch norm's running mean, for one. What lists them?"
    else:
        hint = "Nothing arrived in the model. Which collective copies a tensor of one rank into all?"
    return Finding(what, all(arrived), seen, hint)


@in_group
def _started(answer: Any, cases: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    found, model = [], nn.Module()
    for case in cases:
        other = network(case["kind"], case["seeds"][dist.get_rank()])
        if "again" in case:  # the same model, with other values again
            for into, value in zip(everything(model).values(), everything(other).values(), strict=True):
                into.data.copy_(value)
        else:
            model = other
        answer(model)
        found.append([each.detach().clone() for each in everything(model).values()])
    return found


# --- 06.3 -------------------------------------------------------------------------------------------------

BEGINS = "all replicas begin with rank 0's parameters and buffers"
DURING = "after backward() alone, every rank holds the mean of the gradients"
FULL = "three steps give the weights of one device with the whole batch"
STEPS, SHARE = 3, 4  # training steps, and samples per rank in each


@question("06.3", "HandDDP(model)", {BEGINS: 1, DURING: 2, FULL: 2}, takes=a_module)
def hand_ddp(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from with_two_numbers(rng, partial(_of_hand_ddp, ask, rng), FIRST)


def _of_hand_ddp(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    cases = [
        {"kind": kind, "turned": turned, "seeds": seeds(rng, count), "data": rng.randrange(2**31)}
        for kind, turned in zip(seeds(rng, 2), (True, False), strict=True)
    ]
    by_rank = ask(_wrapped, cases, nprocs=count)
    if any(each["by_ddp"] for calls in by_rank for each in calls):
        raise Refused("DistributedDataParallel does the work here; this time it is yours")
    for call, case in enumerate(cases):
        yield from _of_training([each[call] for each in by_rank], case, again=call > 0)


def _of_training(held: list[Any], case: dict[str, Any], again: bool) -> Iterator[Finding]:
    count, model = len(held), _network(case, 0)
    shapes = {
        "start": [each.shape for each in everything(model).values()],
        "gradients": [each.shape for each in model.parameters() if each.requires_grad],
        "end": [each.shape for each in model.parameters()],
    }
    whole = _train(model, case["data"], slice(None), count)
    own = [_train(_network(case, 0), case["data"], _share(rank), count)["gradients"] for rank in range(count)]
    own = _rows(own, shapes["gradients"])
    all_held = True  # whether all properties so far hold
    for what, name in ((BEGINS, "start"), (DURING, "gradients"), (FULL, "end")):
        now = _rows([each[name] for each in held], shapes[name])
        right = _rows([whole[name]], shapes[name])[0]
        rank, i = _furthest(now, right)
        is_, wanted = in_digits(now[rank, i].item(), right[i].item())
        seen = f"{count} ranks: one number of rank {rank} is {is_}, and should be {wanted}"
        if what == BEGINS:
            hint = "What has to travel before the first step, and from where?"
            parameters = sum(map(math.prod, shapes["end"]))
            if _all_hold(now[:, :parameters], right[:parameters]):
                hint = "The parameters have come. A model has buffers, too, as in 06.2."
        elif not all_held:
            hint = REST
        elif again:
            hint = "The first model was right. What does a second one find of it?"
        elif what == DURING:
            hint = _of_hooks(now, right, own, shapes[name])
        else:
            hint = "The first step is right. In the next, two backward() add up: what does the first leave?"
        holds = _all_hold(now, right)
        yield Finding(what, holds, seen, hint)
        all_held = all_held and holds


def _of_hooks(now: torch.Tensor, mean: torch.Tensor, own: torch.Tensor, shapes: Shapes) -> str:
    pairs = zip(_by_tensor(now, shapes), _by_tensor(own, shapes), strict=True)
    untouched = [far(a, b) < CLOSE for a, b in pairs]
    if not now[0].any():
        return "There are no gradients at all. Does forward() call the model?"
    if all(untouched):
        return "Nobody calls anything after backward(): a hook on each parameter has to do it, to its .grad."
    if any(untouched):
        return "Some gradients are still each rank's own: a hook on each parameter has to do it, for its own."
    if not _all_hold(now, now[0]):
        return "The ranks differ still. Do all do the same, and has it arrived when the hook ends?"
    if _all_hold(now, mean * len(now)):
        return "That is the sum over the ranks."
    return "All ranks agree, but on another number than the mean. Is it divided once, after the sum?"


@in_group
def _wrapped(answer: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rank, count = dist.get_rank(), dist.get_world_size()
    made, found = [], []
    ddp = nn.parallel.DistributedDataParallel
    begin = ddp.__init__

    def noted(self: Any, *args: Any, **named: Any) -> None:
        made.append(1)
        begin(self, *args, **named)

    with mock.patch.object(ddp, "__init__", noted):  # catches DDP under any name
        for case in cases:
            model = answer(_network(case, rank))
            found.append(_train(model, case["data"], _share(rank), count, parts=2))
            found[-1]["by_ddp"] = bool(made)
    return found


class _Turned(nn.Module):
    """A model that uses its first layer last, so that the gradients of its first parameters come first."""

    def __init__(self, kind: int, values: int) -> None:
        super().__init__()
        self.end = nn.Linear(2, 2).double()
        self.begin = network(kind, values, norm=False)
        with torch.no_grad():
            self.end.weight.copy_(tensor(values, (2, 2)))
            self.end.bias.copy_(tensor(values + 1, (2,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.begin(x).tanh())


def _network(case: dict[str, Any], rank: int) -> nn.Module:
    values = case["seeds"][rank]
    return _Turned(case["kind"], values) if case["turned"] else network(case["kind"], values, norm=False)


def _share(rank: int) -> slice:
    return slice(rank * SHARE, (rank + 1) * SHARE)


def _train(
    model: nn.Module, data: int, mine: slice, count: int, parts: int = 1
) -> dict[str, list[torch.Tensor]]:
    """Train for three steps; from the second on, accumulate each gradient over ``parts`` backward passes."""
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.requires_grad]
    held = {"start": [each.detach().clone() for each in everything(model).values()]}
    batches = _drawn(data, [(count * SHARE, 4), (count * SHARE, 2)] * STEPS)
    for x, y in zip(batches[::2], batches[1::2], strict=True):
        for each in trained:
            each.grad = None
        now = parts if "gradients" in held else 1
        for some, wanted in zip(x[mine].chunk(now), y[mine].chunk(now), strict=True):
            (nn.functional.mse_loss(model(some), wanted) / now).backward()
        if "gradients" not in held:
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
            held["gradients"] = [each.clone() for each in gradients]
        with torch.no_grad():  # as SGD does; importing it takes seconds in a notebook
            for each in filter(lambda each: each.grad is not None, trained):
                each -= 0.1 * each.grad
    return held | {"end": [each.detach() for each in parameters]}
