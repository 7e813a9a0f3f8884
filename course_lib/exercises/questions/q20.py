"""The question of lesson 20: one step with the remaining ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.work import in_group
from ..inputs import flat, tensor
from ..judging import by_call, far, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports

CLOSE = 1e-9  # the tensors are float64
INPUTS, CLASSES = 7, 4
MOMENTUM = 0.9

SAME = "where the ranks can take the whole batch, the step is that of one device on it"
LESS = "where they cannot, it is a step on what they can take, at the learning rate for so many"
LATER = "the steps after that are right again"
SHARE = "each of these samples goes forward once, and the ranks' shares are equal, or differ by one"


def _network(seed: int) -> nn.Sequential:
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(6, 5), nn.Tanh()))
    model = nn.Sequential(nn.Linear(INPUTS, 6), inner, nn.Linear(5, CLASSES)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


WEIGHTS = sum(parameter.numel() for parameter in _network(0).parameters())


def _optimizer(model: nn.Sequential, rates: list[float]) -> torch.optim.Optimizer:
    """Build SGD with momentum and two learning rates: one for the first layer, one for the rest."""
    first, rest = model[0].parameters(), [*model[1].parameters(), *model[2].parameters()]
    groups = [{"params": first, "lr": rates[0]}, {"params": rest, "lr": rates[1]}]
    return torch.optim.SGD(groups, momentum=MOMENTUM)


def _batch(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tensor(seed, (samples, INPUTS)), torch.randint(CLASSES, (samples,), generator=generator)


@question(
    "20.1",
    "step_of_those_left(ddp, optimizer, x, y, most)",
    {SAME: 4, LESS: 3, LATER: 1, SHARE: 2},
    rests={LATER: LESS, SHARE: SAME},
)
@with_two_world_sizes()
def step_of_those_left(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    runs: list[dict[str, Any]] = []
    for kinds in (("uneven", "even"), ("even", "one more", "even", "less", "even")):
        calls = [_call(rng, kind, ranks) for kind in kinds]
        rates = [rng.uniform(0.1, 0.2), rng.uniform(0.3, 0.4)]
        for number, call in enumerate(calls):  # a schedule lowers the rates from the third call on
            rates = [rate * (rng.uniform(0.7, 0.9) if number > 1 else 1.0) for rate in rates]
            call["rates"] = rates
        runs.append({"seed": rng.randrange(2**31), "calls": calls})
    results = ask(_stepped, runs, nprocs=ranks)
    for run, of_run in zip(runs, by_call(results), strict=True):
        right = _right(run, ranks)
        for number, (call, of_call) in enumerate(zip(run["calls"], by_call(of_run), strict=True)):
            weights = [result["weights"] for result in of_call]
            rank, gap = furthest(far(own, right[number]) for own in weights)
            used = min(call["samples"], ranks * call["most"])
            seen = f"{ranks} ranks, a batch of {call['samples']}, at most {call['most']} for each rank: "
            seen += f"after call {number + 1} rank {rank}'s weights are off by up to {gap:.2g}"
            if call["kind"] in ("one more", "less"):
                what, hint = LESS, _of_less(run, number, weights, rank, ranks)
            elif run is runs[0] or number == 0:
                what, hint = SAME, _of_same(run, number, weights, rank, ranks)
            else:
                what = LATER
                hint = (
                    "What did the step before leave in the optimizer? And the learning rates are lower now."
                )
            if number < 2 or what == LATER:  # what a later call is off by, an earlier one may have brought
                yield Finding(what, gap < CLOSE, seen, hint)
                if run is runs[0] and gap >= CLOSE:
                    break
            rates = [result["rates"] for result in of_call]
            rank, gap = furthest(far(own, call["rates"]) for own in rates)
            seen = f"after call {number + 1} the learning rates on rank {rank} are"
            seen += f" {rates[rank]}, and were {call['rates']} before it"
            hint = "They are for the whole batch, which may fit again in the next call."
            yield Finding(LATER, gap < CLOSE, seen, hint)
            yield _of_shares(call, [result["forward"] for result in of_call], used, number)


def _call(rng: random.Random, kind: str, ranks: int) -> dict[str, Any]:
    """Draw a batch that cannot be shared equally, one that just fits, or one that is too large."""
    most = rng.randint(5, 8)
    samples = ranks * most  # even: it just fits
    if kind == "uneven":  # blocks of the largest share would leave the last rank two too few, or more
        samples -= rng.randint(min(2, ranks - 1), ranks - 1) + rng.choice([0, ranks])
    elif kind == "one more":
        samples += 1
    elif kind == "less":
        samples = math.ceil(samples * rng.uniform(1.3, 1.9))
    return {"kind": kind, "seed": rng.randrange(2**31), "samples": samples, "most": most}


def _right(run: dict[str, Any], ranks: int, until: int | None = None, **wrong: Any) -> list[Tensor]:
    """Return the weights of one device after each call; in call ``until`` something may be wrong.

    ``rate`` is then a multiple of the learning rate, and ``times`` one of the gradient; ``first`` is where
    the batch begins, ``cut`` how many samples of it count, and ``kept`` whether the call before left its
    gradient.
    """
    model = _network(run["seed"])
    optimizer, weights = _optimizer(model, [0.0, 0.0]), []
    for number, call in enumerate(run["calls"]):
        changed = wrong if number == until else {}
        x, y = _batch(call["seed"], call["samples"])
        used = changed.get("cut", min(len(x), ranks * call["most"]))
        first = changed.get("first", 0)
        part = slice(first, first + used)
        if not changed.get("kept"):
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        (loss * changed.get("times", 1.0)).backward()
        for group, rate in zip(optimizer.param_groups, call["rates"], strict=True):
            group["lr"] = rate * changed.get("rate", used / len(x))
        optimizer.step()
        weights.append(flat(model.parameters()))
    return weights


def _of_same(run: dict[str, Any], number: int, weights: list[Any], rank: int, ranks: int) -> str:
    call = run["calls"][number]
    samples = call["samples"]
    if far(weights[rank], flat(_network(run["seed"]).parameters())) < CLOSE:
        return "The weights have not moved. What makes the step?"
    if any(far(own, weights[0]) > CLOSE for own in weights):
        return "The ranks have different weights now. What averages the gradients, and when does it run?"
    known = [
        ({"times": samples}, "A sum over the samples, where the mean is meant."),
        ({"times": samples / ranks}, "A sum over the samples of a rank, where the mean of all is meant."),
        (
            {"times": 1 / ranks},
            "It is too small by a factor of the number of ranks. What does DDP divide by?",
        ),
        ({"times": ranks}, "It is too large by a factor of the number of ranks."),
        ({"cut": samples - samples % ranks, "rate": 1.0}, "The last samples are left out. They count, too."),
        ({"kept": True}, "What did the call before leave in the gradients?"),
    ]
    pairs = [(_right(run, ranks, number, **wrong)[number], hint) for wrong, hint in known]
    last = max(0, number - 1)
    share = run["calls"][last]["samples"] / (ranks * run["calls"][last]["most"])
    momentum = _right(run, ranks, last, times=share, rate=1 / share)[number]
    pairs.append(
        (momentum, "In the call before, the ranks could take more samples than there were. What divides?")
    )
    otherwise = "A sample counts for as much on a rank with a small share as on one with a large share."
    return nearest(weights[rank], *pairs, otherwise=otherwise, within=CLOSE)


def _of_less(run: dict[str, Any], number: int, weights: list[Any], rank: int, ranks: int) -> str:
    if any(far(own, weights[0]) > CLOSE for own in weights):
        return "The ranks have different weights now. Is the learning rate the same on all of them?"
    call = run["calls"][number]
    used, samples = ranks * call["most"], call["samples"]
    share = used / samples
    known = [
        ({"rate": 1.0}, "The step is on fewer samples, at the learning rate of the whole batch."),
        ({"rate": 1 / share}, "The learning rate is changed in the wrong direction."),
        (
            {"rate": math.sqrt(share)},
            "The learning rate falls by the square root. The linear rule is asked for.",
        ),
        ({"times": share, "rate": 1.0}, "Smaller gradients are not a smaller rate: there is momentum."),
        ({"cut": samples}, "All samples are in the step, more than the ranks may take."),
        ({"first": samples - used}, "Which samples of the batch count, the first or the last?"),
    ]
    pairs = [(_right(run, ranks, number, **wrong)[number], hint) for wrong, hint in known]
    otherwise = "How many samples are in this step, of how many? Each learning rate changes by that."
    return nearest(weights[rank], *pairs, otherwise=otherwise, within=CLOSE)


def _of_shares(call: dict[str, Any], forward: list[list[int]], used: int, number: int) -> Finding:
    """Judge which samples went forward on which rank; a -1 is a sample that is not of the batch."""
    counts = [len(own) for own in forward]
    every = sorted(sample for own in forward for sample in own)
    seen = f"in call {number + 1}, of {call['samples']} samples with at most {call['most']} for each rank, "
    seen += f"the ranks took {', '.join(map(str, counts))}"
    hint = "Every rank is given the whole batch. Which part of it is its own?"
    if every == list(range(used)):
        hint = "The step takes as long as the rank with the most samples needs."
    elif sum(counts) == used:
        seen += ", and not each of them once"
    elif min(counts) < max(counts) > call["most"]:
        hint = "A rank's memory has room for so many, and no more."
    return Finding(SHARE, every == list(range(used)) and max(counts) - min(counts) < 2, seen, hint)


@reports(
    lambda runs: [
        [
            {"weights": [NUMBER] * WEIGHTS, "rates": [NUMBER, NUMBER], "forward": [int, ...]}
            for _ in run["calls"]
        ]
        for run in runs
    ]
)
@in_group
def _stepped(answer: Any, runs: list[dict[str, Any]]) -> list[list[Result]]:
    results: list[list[Result]] = []
    for run in runs:
        model = _network(run["seed"])
        optimizer = _optimizer(model, [0.0, 0.0])
        forward: list[int] = []
        of_batch: dict[float, int] = {}
        _watch(model, forward, of_batch)
        ddp = DistributedDataParallel(model)
        results.append([])
        for call in run["calls"]:
            x, y = _batch(call["seed"], call["samples"])
            forward.clear()
            of_batch.clear()
            of_batch.update({value: place for place, value in enumerate(x[:, 0].tolist())})
            for group, rate in zip(optimizer.param_groups, call["rates"], strict=True):
                group["lr"] = rate
            answer(ddp, optimizer, x, y, call["most"])
            noted = {"weights": flat(model.parameters()).tolist(), "forward": list(forward)}
            noted["rates"] = [float(group["lr"]) for group in optimizer.param_groups]
            results[-1].append(noted)
    return results


def _watch(model: nn.Module, forward: list[int], of_batch: dict[float, int]) -> None:
    """Note which samples of the batch go forward, known by their first number."""

    def begins(_: nn.Module, inputs: Any) -> None:
        forward.extend(of_batch.get(value, -1) for value in inputs[0][:, 0].tolist())

    model.register_forward_pre_hook(begins)
