"""The questions of lesson 06: DDP by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..in_rank.work import in_group
from ..inputs import all_tensors, network, seeds, tensor, trainable
from ..judging import by_call, far, in_digits, nearest, place_of_furthest, with_two_world_sizes
from ..question import REST, Ask, Finding, Refused, Result, a_module, question
from ..shape import TENSOR, reports

CLOSE = 1e-9  # the tensors are float64
ROUNDING = 1e-5
ROUNDED = "That is right to about seven digits, which is what float32 keeps. The gradients have sixteen."
FIRST = (3, 4, 5)  # the world sizes tried first: an answer that divides by 2 must be wrong there
Shapes = Sequence[tuple[int, ...]]


def _drawn(seed: int, shapes: Shapes) -> list[Tensor]:
    return [tensor(seed + i, shape) for i, shape in enumerate(shapes)]


def _rows(ranks: list[Any], shapes: Shapes) -> Tensor:
    """Return a row per rank with the numbers of all its tensors; refuse tensors of other shapes."""
    rows = []
    for rank, of_rank in enumerate(ranks):
        tensors = [torch.as_tensor(numbers, dtype=torch.float64) for numbers in of_rank]
        if [tensor.shape for tensor in tensors] != shapes:
            raise Refused(
                f"the tensors of rank {rank} have other shapes now, or there are more or fewer of them"
            )
        rows.append(torch.cat([tensor.flatten() for tensor in tensors]))
    return torch.stack(rows)


def _by_tensor(rows: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    return rows.split(list(map(math.prod, shapes)), dim=1)


def _all_hold(rows: Tensor, right: Tensor) -> bool:
    return far(rows, right.expand_as(rows)) < CLOSE


def _furthest(rows: Tensor, right: Tensor) -> tuple[int, int]:
    """Return the rank and the index of the number that is furthest from the right one."""
    return divmod(place_of_furthest(rows, right), rows.shape[1])


# --- 06.1 -------------------------------------------------------------------------------------------------

AGREE, MEAN = "the ranks hold the same gradients", "they are the mean over the samples of all ranks"
RETURNS = "A collective works in place. What does it return?"
FROZEN = "A parameter without a gradient must stay without one: an optimizer would use it."
BY_TWO = "It is divided by 2, but there may be more ranks. How many samples do all ranks have together?"
ALIKE = "Each rank has the same weight there; each sample should. What may be added up over the ranks?"


@question("06.1", "average_gradients(model, samples)", {AGREE: 1, MEAN: 2})
@with_two_world_sizes(*FIRST)
def average_gradients(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    cases: list[dict[str, Any]] = [{"kind": kind} for kind in seeds(rng, 2)]
    for case in cases:
        case |= {"seeds": seeds(rng, count), "samples": rng.sample(range(2, 40), count)}
    cases.append(cases[-1] | {"seeds": seeds(rng, count), "again": True})
    results = by_call(ask(_averaged, cases, nprocs=count))
    for call, (case, of_call) in enumerate(zip(cases, results, strict=True)):
        gradients = [result["gradients"] for result in of_call]
        if lacks_one := any(None in of_rank for of_rank in gradients):
            yield from (Finding(what, False, "a gradient is None now", RETURNS) for what in (AGREE, MEAN))
        if any(result["frozen"] for result in of_call):
            yield Finding(MEAN, False, "a parameter has a gradient that had none", FROZEN)
        if lacks_one:
            return
        yield from _of_means(gradients, case, again=call > 0)


def _of_means(gradients: list[Any], case: dict[str, Any], again: bool) -> Iterator[Finding]:
    shapes = [parameter.shape for parameter in trainable(network(case["kind"], 0, norm=False))]
    now = _rows(gradients, shapes)
    drawn = _rows([_drawn(seed, shapes) for seed in case["seeds"]], shapes)
    counts = torch.tensor(case["samples"], dtype=torch.float64)
    weighted = (drawn * counts[:, None]).sum(0)
    mean, count = weighted / counts.sum(), len(counts)
    agree = _all_hold(now, now[0])
    rank, i = _furthest(now, now[0])
    numbers = in_digits(now[0, i].item(), now[rank, i].item())
    seen = f"one gradient is {numbers[0]} on rank 0 and {numbers[1]} on rank {rank}"
    hint = "Which collective gives every rank a result that depends on all of them?"
    if any(_all_hold(part, part[0]) for part in _by_tensor(now, shapes)):
        hint = "Some gradients agree and others do not. Is it done for every parameter?"
    elif all(far(row * (now[0].norm() / row.norm()), now[0]) < ROUNDING for row in now):
        hint = "They are the same up to a factor. What does each rank multiply or divide by?"
    elif any(far(row, mean) < CLOSE for row in now):
        hint = "One rank holds the mean. Do the others make the same calls, and get the same result?"
    yield Finding(AGREE, agree, seen, hint)
    rank, i = _furthest(now, mean)
    is_now, right = in_digits(now[rank, i].item(), mean[i].item())
    had = ", ".join(f"{own:.4g} ({n} samples)" for own, n in zip(drawn[:, i], case["samples"], strict=True))
    seen = f"the ranks had {had}; rank {rank} holds {is_now} now, and the mean is {right}"
    if not agree:
        hint = "Once the ranks agree, look at this again."
    elif far(now[rank], mean) < ROUNDING:
        hint = ROUNDED
    else:
        hint = nearest(
            now[rank],
            (weighted, "That is the sum over all samples. What turns it into a mean?"),
            (drawn.sum(0), "That is the sum over the ranks. What turns it into a mean over all samples?"),
            (drawn.mean(0), ALIKE),
            (weighted / count, "That is divided by the number of ranks. How many samples is it the sum of?"),
            *((own, "That is the gradient of one rank. What about the others' samples?") for own in drawn),
            (drawn.sum(0) / 2, BY_TWO),
            otherwise="The first call was right. What does it leave behind for a later one?"
            if again
            else "A sum over all samples, divided once by their number: which sum does each rank begin with?",
            within=CLOSE,
        )
    yield Finding(MEAN, _all_hold(now, mean), seen, hint)


@reports(lambda cases: [{"gradients": [(TENSOR, None), ...], "frozen": bool}] * len(cases))
@in_group
def _averaged(answer: Any, cases: list[dict[str, Any]]) -> list[Result]:
    rank, results = dist.get_rank(), []
    for case in cases:
        if "again" not in case:  # else the same model, one step later
            model: Any = network(case["kind"], 0, norm=False)
            trained = trainable(model)
        for parameter, gradient in zip(
            trained, _drawn(case["seeds"][rank], [parameter.shape for parameter in trained]), strict=True
        ):
            parameter.grad = gradient
        model.body.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))  # neither first nor last
        answer(model, case["samples"][rank])
        without = [model.body.unused, *(p for p in model.parameters() if not p.requires_grad)]
        frozen = any(parameter.grad is not None for parameter in without)
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in trained]
        results.append({"gradients": gradients, "frozen": frozen})
    return results


# --- 06.2 -------------------------------------------------------------------------------------------------

START, KEPT = "every rank has rank 0's parameters", "and rank 0's buffers"


@question("06.2", "same_start(model)", {START: 1, KEPT: 1})
@with_two_world_sizes(*FIRST)
def same_start(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    cases: list[dict[str, Any]] = [{"kind": kind, "seeds": seeds(rng, count)} for kind in seeds(rng, 2)]
    cases.append(cases[-1] | {"seeds": seeds(rng, count), "again": True})
    results = by_call(ask(_started, cases, nprocs=count))
    for case, of_call in zip(cases, results, strict=True):
        drawn = [network(case["kind"], seed) for seed in case["seeds"]]
        parameters, tensors = len(list(drawn[0].parameters())), [all_tensors(model) for model in drawn]
        for what, part in ((START, slice(parameters)), (KEPT, slice(parameters, None))):
            shapes = [tensor.shape for tensor in tensors[0].values()][part]
            had = _rows([list(of_rank.values())[part] for of_rank in tensors], shapes)
            now = _rows([of_rank[part] for of_rank in of_call], shapes)
            yield _of_start(what, now, had, shapes, list(tensors[0])[part])


def _of_start(what: str, now: Tensor, had: Tensor, shapes: Shapes, names: list[str]) -> Finding:
    pairs = zip(_by_tensor(now, shapes), _by_tensor(had, shapes), strict=True)
    arrived = [_all_hold(after, before[0]) for after, before in pairs]
    rank, i = _furthest(now, had[0])
    is_now, was = in_digits(now[rank, i].item(), had[0, i].item())
    seen = f"one number of rank {rank} is {is_now}, and rank 0 had {was}"
    seen += f"; not as on rank 0: {', '.join(n for n, ok in zip(names, arrived, strict=True) if not ok)}"
    hint = "Nothing arrived in the model. Which collective copies one rank's tensor to all?"
    if any(_all_hold(now, other) for other in had[1:]):
        hint = "All ranks agree, but on another rank's numbers. Which rank is the source?"
    elif far(now, had[0].expand_as(now)) < ROUNDING:
        hint = ROUNDED
    elif any(arrived) and not all(arrived):
        hint = "Some tensors have arrived, but not all. What else does a model hold, saved or not?"
    elif _all_hold(now, now[0]):
        hint = "All ranks agree, but on numbers that no rank had. A copy needs no arithmetic."
    elif what == KEPT:
        hint = "A model holds more than parameters: batch norm's running mean, for example. What lists them?"
    return Finding(what, all(arrived), seen, hint)


@reports(lambda cases: [[TENSOR, ...]] * len(cases))
@in_group
def _started(answer: Any, cases: list[dict[str, Any]]) -> list[list[Tensor]]:
    results, model = [], nn.Module()
    for case in cases:
        other = network(case["kind"], case["seeds"][dist.get_rank()])
        if "again" in case:  # the same model, with other values again
            for into, value in zip(all_tensors(model).values(), all_tensors(other).values(), strict=True):
                into.data.copy_(value)
        else:
            model = other
        answer(model)
        results.append([tensor.detach().clone() for tensor in all_tensors(model).values()])
    return results


# --- 06.3 -------------------------------------------------------------------------------------------------

BEGINS = "all replicas begin with rank 0's parameters and buffers"
DURING = "after backward() alone, every rank holds the mean of the gradients"
FULL = "three steps give the weights of one device with the whole batch"
STEPS, SHARE = 3, 4  # training steps, and samples per rank in each


@question("06.3", "HandDDP(model)", {BEGINS: 1, DURING: 2, FULL: 2}, takes=a_module)
@with_two_world_sizes(*FIRST)
def hand_ddp(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    cases: list[dict[str, Any]] = [
        {"kind": kind, "turned": turned} for kind, turned in zip(seeds(rng, 2), (True, False), strict=True)
    ]
    for case in cases:
        case |= {"seeds": seeds(rng, count), "data": rng.randrange(2**31)}
    results = by_call(ask(_wrapped, cases, nprocs=count))
    if any(result["by_ddp"] for of_call in results for result in of_call):
        raise Refused("DistributedDataParallel does the work here; this time you write it yourself")
    for call, (case, of_call) in enumerate(zip(cases, results, strict=True)):
        yield from _of_training(of_call, case, again=call > 0)


def _of_training(results: list[Any], case: dict[str, Any], again: bool) -> Iterator[Finding]:
    count, model = len(results), _network(case, 0)
    shapes = {
        "start": [tensor.shape for tensor in all_tensors(model).values()],
        "gradients": [parameter.shape for parameter in trainable(model)],
        "end": [parameter.shape for parameter in model.parameters()],
    }
    whole = _train(model, case["data"], slice(None), count)
    alone = [_train(_network(case, 0), case["data"], _share(rank), count) for rank in range(count)]
    own = _rows([of_rank["gradients"] for of_rank in alone], shapes["gradients"])
    all_held = True  # whether all properties so far hold
    for what, name in ((BEGINS, "start"), (DURING, "gradients"), (FULL, "end")):
        now = _rows([result[name] for result in results], shapes[name])
        right = _rows([whole[name]], shapes[name])[0]
        rank, i = _furthest(now, right)
        is_now, wanted = in_digits(now[rank, i].item(), right[i].item())
        seen = f"{count} ranks: one number of rank {rank} is {is_now}, and should be {wanted}"
        hint = "The first step is right. In the next, two backward() calls add up: what does the first leave?"
        if what == BEGINS:
            hint = "What has to be sent before the first step, and by which rank?"
            parameters = sum(map(math.prod, shapes["end"]))
            if _all_hold(now[:, :parameters], right[:parameters]):
                hint = "The parameters have arrived. A model has buffers, too, as in 06.2."
        elif not all_held:
            hint = REST
        elif again:
            hint = "The first model was right. What does it leave behind for a second one?"
        elif what == DURING:
            hint = _of_hooks(now, right, own, shapes[name])
        holds = _all_hold(now, right)
        yield Finding(what, holds, seen, hint)
        all_held = all_held and holds


def _of_hooks(now: Tensor, mean: Tensor, own: Tensor, shapes: Shapes) -> str:
    pairs = zip(_by_tensor(now, shapes), _by_tensor(own, shapes), strict=True)
    untouched = [far(a, b) < CLOSE for a, b in pairs]
    if not now[0].any():
        return "There are no gradients at all. Does forward() call the model?"
    if all(untouched):
        return "Nothing is called after backward(): a hook on each parameter has to average its .grad."
    if any(untouched):
        return "Some gradients are still each rank's own: each parameter needs a hook that averages its own."
    if not _all_hold(now, now[0]):
        return (
            "The ranks still differ. Do all make the same calls, and is each finished when the hook returns?"
        )
    if _all_hold(now, mean * len(now)):
        return "That is the sum over the ranks. What turns it into a mean?"
    return "All ranks agree, but not on the mean. Is the sum divided once?"


TENSORS = [TENSOR, ...]


@reports(
    lambda cases: [{"start": TENSORS, "gradients": TENSORS, "end": TENSORS, "by_ddp": bool}] * len(cases)
)
@in_group
def _wrapped(answer: Any, cases: list[dict[str, Any]]) -> list[Result]:
    rank, count = dist.get_rank(), dist.get_world_size()
    made = []
    results: list[Result] = []
    ddp = nn.parallel.DistributedDataParallel
    begin = ddp.__init__

    def noted(self: Any, *args: Any, **named: Any) -> None:
        made.append(1)
        begin(self, *args, **named)

    with mock.patch.object(ddp, "__init__", noted):  # catches DDP under any name
        for case in cases:
            model = answer(_network(case, rank))
            results.append(_train(model, case["data"], _share(rank), count, parts=2))
            results[-1]["by_ddp"] = bool(made)
    return results


class _Turned(nn.Module):
    """A model that uses its first layer last, so that the gradients of its first parameters come first."""

    def __init__(self, kind: int, values: int) -> None:
        super().__init__()
        self.end = nn.Linear(2, 2).double()
        self.begin = network(kind, values, norm=False)
        with torch.no_grad():
            self.end.weight.copy_(tensor(values, (2, 2)))
            self.end.bias.copy_(tensor(values + 1, (2,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.begin(x).tanh())


def _network(case: dict[str, Any], rank: int) -> nn.Module:
    values = case["seeds"][rank]
    return _Turned(case["kind"], values) if case["turned"] else network(case["kind"], values, norm=False)


def _share(rank: int) -> slice:
    return slice(rank * SHARE, (rank + 1) * SHARE)


def _train(model: nn.Module, data: int, mine: slice, count: int, parts: int = 1) -> dict[str, list[Tensor]]:
    """Train for three steps; from the second on, accumulate each gradient over ``parts`` backward passes."""
    parameters = list(model.parameters())
    trained = trainable(model)
    result = {"start": [tensor.detach().clone() for tensor in all_tensors(model).values()]}
    batches = _drawn(data, [(count * SHARE, 4), (count * SHARE, 2)] * STEPS)
    for x, y in zip(batches[::2], batches[1::2], strict=True):
        for parameter in trained:
            parameter.grad = None
        now = parts if "gradients" in result else 1
        for some, wanted in zip(x[mine].chunk(now), y[mine].chunk(now), strict=True):
            (nn.functional.mse_loss(model(some), wanted) / now).backward()
        if "gradients" not in result:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            result["gradients"] = [gradient.clone() for gradient in gradients]
        with torch.no_grad():  # as SGD does; importing it takes seconds in a notebook
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    return result | {"end": [parameter.detach() for parameter in parameters]}
