"""The questions of lesson 20: the same batch for fewer ranks, and one step with those that are left."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.work import in_group, refuse_unless
from ..inputs import flat, tensor
from ..judging import by_call, far, furthest, nearest
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports

# --- 20.1 -------------------------------------------------------------------------------------------------

ONCE = "whatever the number of ranks is, each sample is one rank's"
EVEN = "the shares are equal, or differ by one"
HINTS_1 = {
    ONCE: {
        "lost": "Some samples are nobody's. What if ranks are gone, or the division has a remainder?",
        "twice": "Some samples are in two shares. Where does a rank's share begin?",
    },
    EVEN: {"uneven": "A step takes as long as the rank with the most samples needs. Who gets the rest?"},
}


@question("20.1", "whole(drawn, rank, ranks)", {ONCE: 3, EVEN: 1}, depends_on={EVEN: ONCE}, hints=HINTS_1)
def whole(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    sizes = [(48, 3), (48, 5), (48, 7), *((rng.randint(9, 60), rng.randint(2, 8)) for _ in range(6))]
    cases = [(rng.sample(range(1000), samples), ranks) for samples, ranks in sizes]
    (results,) = ask(_shares, cases)
    for (drawn, ranks), shares in zip(cases, results, strict=True):
        taken, counts = sorted(each for share in shares for each in share), [len(share) for share in shares]
        seen = f"{len(drawn)} samples, {ranks} ranks: the shares have {', '.join(map(str, counts))}"
        lost = {*drawn} - {*taken}
        yield Finding(
            ONCE, taken == sorted(drawn), f"{seen}; {len(lost)} are lost", "lost" if lost else "twice"
        )
        yield Finding(EVEN, max(counts) - min(counts) < 2, seen, "uneven")


@reports(lambda cases: [[[int, ...]] * ranks for _, ranks in cases])
def _shares(answer: Any, cases: list[tuple[list[int], int]]) -> list[list[list[int]]]:
    results: list[list[list[int]]] = []
    for drawn, ranks in cases:
        results.append([])
        for rank in range(ranks):
            share = answer([*drawn], rank, ranks)
            refuse_unless(isinstance(share, list), "whole(…) returns a list, a part of drawn", share)
            results[-1].append(share)
    return results


# --- 20.2 -------------------------------------------------------------------------------------------------

SAME = "where the ranks can take the whole batch, the step is that of one device on it"
LESS = "where they cannot, it is a step on the first samples, at the learning rate for so many"
SHARE = "each of these samples goes forward once, and the ranks' shares are equal, or differ by one"
HINTS_2 = {
    SAME: {
        "mean of means": "A sample must count for as much on a rank with many as on one with few.",
        "factor": "The gradient is too large or too small by some factor. Who divides, and by what?",
        "left out": "The last samples are left out. They count, too.",
        "other": "Which gradients does the step take, and from which samples?",
    },
    LESS: {
        "old rate": "The step is on fewer samples, at the learning rate of the whole batch.",
        "rates": "Every learning rate falls by the share of the batch that is used: not the gradient, which "
        "momentum remembers.",
        "other samples": "Which samples are in this step, and how many may a rank take?",
    },
    SHARE: {"share": "Every rank is given the whole batch. Which part is its own, and how large?"},
}
CLOSE = 1e-9  # the tensors are float64
INPUTS, CLASSES = 5, 4


def _network(seed: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    for place, value in enumerate(model.state_dict().values()):
        value.copy_(tensor(seed + place, tuple(value.shape)) / 2)
    return model


WEIGHTS = sum(parameter.numel() for parameter in _network(0).parameters())


def _optimizer(model: nn.Sequential, rates: list[float]) -> torch.optim.Optimizer:
    groups = [{"params": model[at].parameters(), "lr": rate} for at, rate in zip((0, 2), rates, strict=True)]
    return torch.optim.SGD(groups, momentum=0.9)


def _batch(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    drawn = tensor(call["seed"], (call["samples"], INPUTS))
    return drawn, drawn.abs().argmax(1) % CLASSES


@question(
    "20.2",
    "step_of_those_left(ddp, optimizer, x, y, most)",
    {SAME: 3, LESS: 2, SHARE: 1},
    depends_on={LESS: SAME, SHARE: SAME},
    hints=HINTS_2,
)
def step_of_those_left(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks, most = rng.choice((3, 4, 5)), rng.randint(4, 6)
    rates = [rng.uniform(0.1, 0.2), rng.uniform(0.3, 0.4)]
    sizes = [
        ranks * most - 1,
        ranks * most,
        math.ceil(ranks * most * rng.uniform(1.3, 1.9)),
        ranks * most + 1,
    ]
    calls = [{"seed": rng.randrange(2**31), "samples": samples, "most": most} for samples in sizes]
    seed = rng.randrange(2**31)
    results = by_call(ask(_stepped, seed, rates, calls, nprocs=ranks))
    for number, (call, of_call) in enumerate(zip(calls, results, strict=True)):
        used, samples = min(call["samples"], ranks * most), call["samples"]
        weights = [each["weights"] for each in of_call]
        rank, gap = furthest(far(own, _right(seed, rates, calls[: number + 1], ranks)) for own in weights)
        seen = f"{ranks} ranks, a batch of {samples}, at most {most} for each rank: "
        words = f"after step {number + 1} rank {rank}'s weights are off by up to {gap:.2g}"

        known: list[tuple[str, dict[str, Any]]]
        if used == samples:
            known = [("factor", {"times": times}) for times in (samples, samples / ranks, 1 / ranks, ranks)]
            known += [("left out", {"used": samples - samples % ranks, "rate": 1.0})]
            known += [("mean of means", {"of_ranks": True})]
        else:
            share = used / samples
            known = [("old rate", {"rate": 1.0}), ("rates", {"rate": 1 / share})]
            known += [("rates", {"rate": share**0.5}), ("rates", {"rate": 1.0, "times": share})]
        pairs = [(_right(seed, rates, calls[: number + 1], ranks, **wrong), hint) for hint, wrong in known]
        otherwise = "other" if used == samples else "other samples"
        hint = nearest(weights[rank], *pairs, otherwise=otherwise, within=CLOSE)
        yield Finding(SAME if used == samples else LESS, gap < CLOSE, seen + words, hint)

        taken = sorted(each for result in of_call for each in result["forward"])
        counts = [len(result["forward"]) for result in of_call]
        words = f"the ranks took {', '.join(map(str, counts))}"
        fair = taken == list(range(used)) and max(counts) - min(counts) < 2
        yield Finding(SHARE, fair, seen + words, "share")


def _right(
    seed: int,
    rates: list[float],
    calls: list[dict[str, Any]],
    ranks: int,
    of_ranks: bool = False,
    **wrong: Any,
) -> Tensor:
    """Return one device's weights after some calls; the last one may be wrong, by the number of samples, the
    factor of the gradient or of the rate, or by a mean of the ranks' means."""
    model = _network(seed)
    optimizer = _optimizer(model, rates)
    for call in calls:
        changed = wrong if call is calls[-1] else {}
        x, y = _batch(call)
        used = changed.get("used", min(len(x), ranks * call["most"]))
        loss = nn.functional.cross_entropy(model(x[:used]), y[:used], reduction="none")
        if of_ranks and call is calls[-1]:
            loss = torch.stack([loss[rank::ranks].mean() for rank in range(ranks)])
        optimizer.zero_grad()
        (loss.mean() * changed.get("times", 1.0)).backward()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * changed.get("rate", used / len(x))
        optimizer.step()
    return flat(model.parameters())


@reports(lambda seed, rates, calls: [{"weights": [NUMBER] * WEIGHTS, "forward": [int, ...]}] * len(calls))
@in_group
def _stepped(answer: Any, seed: int, rates: list[float], calls: list[dict[str, Any]]) -> list[Result]:
    model, results, forward = _network(seed), list[Result](), list[int]()
    places: dict[float, int] = {}  # of a batch's samples, by their first number

    def begins(_: nn.Module, inputs: Any) -> None:
        forward.extend(places.get(value, -1) for value in inputs[0][:, 0].tolist())

    model.register_forward_pre_hook(begins)
    ddp, optimizer = DistributedDataParallel(model), _optimizer(model, rates)
    for call in calls:
        x, y = _batch(call)
        places = {value: place for place, value in enumerate(x[:, 0].tolist())}
        forward.clear()
        answer(ddp, optimizer, x, y, call["most"])
        results.append({"weights": flat(model.parameters()).tolist(), "forward": [*forward]})
    return results
