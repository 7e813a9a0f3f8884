"""The questions of lesson 11: a schedule by samples, accumulation over ranks, a step by all ranks or none."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.retention import watch_retention
from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, on_each_case, the_number
from ..inputs import flat, gradients_of, seeds, tensor, trainable
from ..judging import far, furthest, nearest, place_of_furthest, with_two_world_sizes
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports

INPUTS, CLASSES = 9, 5


def _network(seed: int, frozen: int | None = None) -> nn.Sequential:
    """Build a nested model in float64; its first layer (0) or its last (2) may be frozen."""
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(14, 8), nn.Tanh()))
    model = nn.Sequential(nn.Linear(INPUTS, 14), inner, nn.Linear(8, CLASSES)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    if frozen is not None:
        model[frozen].requires_grad_(False)
    return model


NUMBERS = sum(parameter.numel() for parameter in _network(0).parameters())


def _give(model: nn.Module, gradient: Tensor) -> None:
    """Give the trained parameters their parts of a flat gradient."""
    trained = trainable(model)
    for parameter, part in zip(trained, gradient.split([each.numel() for each in trained]), strict=True):
        parameter.grad = part.clone().view_as(parameter)


# --- 11.1 -------------------------------------------------------------------------------------------------

SCALED = "after the warm-up: k times the batch, k times the learning rate"
WARM = "during the warm-up: in proportion to the samples that all ranks have seen"
RATE, BATCH, WARM_UP = 0.004, 48, 3840  # as the exercise says


@question(
    "11.1",
    "learning_rate(step, batch_size, ranks, pieces)",
    {SCALED: 2, WARM: 1},
    depends_on={WARM: SCALED},
    hints={
        SCALED: {
            "not all samples": "Some samples are not counted. What goes into one step of the optimizer?",
            "no end": "The batch is right, but the learning rate keeps growing. What ends the warm-up?",
            "another batch": "How many samples do all ranks send forward before one step?",
        },
        WARM: {
            "from the start": "That is the full learning rate, from the start.",
            "one step late": "The samples of the step itself count, too: step 0 must move something.",
            "another share": "Which share of the 3,840 samples have all ranks seen at the end of this step?",
        },
    },
)
def learning_rate(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    size, ranks, pieces = rng.choice((14, 22, 26)), rng.choice((2, 4)), rng.choice((3, 5))
    splits = [(size, ranks, pieces), (size + 8, ranks + 3, pieces + 2), (8, 3, 2), (4, 3, 2)]  # k = 1, k < 1
    late = [(WARM_UP + rng.randint(1, 99), *split) for split in splits]
    early = [
        (step, *split)
        for split in splits
        for last in [WARM_UP // math.prod(split) - 1]
        for step in (0, last // 2, last, last + 1)
    ]
    (rates,) = ask(_rates, [*late, *early])
    for case, got in zip([*late, *early], rates, strict=True):
        step, size, ranks, pieces = case
        batch = size * ranks * pieces
        full, warm = RATE * batch / BATCH, batch / WARM_UP
        right = full * min(1.0, (step + 1) * warm)
        parts = (size, size * ranks, size * pieces)
        if case in late:
            known = [(RATE * part / BATCH, "not all samples") for part in parts]
            known.append((full * (step + 1) * warm, "no end"))
        else:
            known = [(full, "from the start"), (full * step * warm, "one step late")]
        hint = nearest(
            got, *known, otherwise="another batch" if case in late else "another share", within=1e-9
        )
        seen = f"step {step}, batch_size {size}, {ranks} ranks, {pieces} pieces: "
        seen += f"the learning rate should be {right:.6g}, and is {got:.6g}"
        yield Finding(SCALED if case in late else WARM, far(got, right) < 1e-6 * right, seen, hint)


@reports(lambda cases: [NUMBER] * len(cases))
@on_each_case
def _rates(answer: Any, *arguments: int) -> float:
    return the_number(answer(*arguments), "learning_rate(…) returns a number")


# --- 11.2 -------------------------------------------------------------------------------------------------

GRADIENT = "every rank holds the gradient of the mean loss over all samples of all ranks"
ONCE = "the gradients travel once"
PIECES = "one piece after the other: forward, backward, then the next"
NEAR = 3e-7  # tolerance: an answer may compute a rank's share in float32


@question(
    "11.2",
    "accumulate(ddp, pieces)",
    {GRADIENT: 3, ONCE: 1, PIECES: 1},
    depends_on={ONCE: GRADIENT, PIECES: GRADIENT},
    hints={
        GRADIENT: {
            "not averaged": "The ranks hold different gradients, or none. Which backward pass averages them?",
            "another length": "The direction is right, the length is not. Who divides the sum of all losses, "
            "and by what?",
            "old gradients": "It is the right one, added to what .grad held before your call.",
            "another weight": "Pieces and ranks differ in length. Does a sample count the same in each?",
        },
        ONCE: {
            "every pass sends": "Each pass sends them. DDP decides when a forward begins: which passes must "
            "send?",
            "more than the sum": "More travels than the gradients. What must a rank know of the others?",
        },
        PIECES: {
            "more than a piece": "Only one piece fits into memory. What does a forward pass keep, "
            "and until when?",
        },
    },
)
@with_two_world_sizes()
def accumulate(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    weights, seed, old_seed = seeds(rng, 3)
    pieces = rng.randint(3, 5)
    totals = rng.sample(range(4 * pieces, 8 * pieces), ranks)  # no two ranks have equally many samples
    lengths = [_in_pieces(rng, total, pieces) for total in totals]
    results = ask(_accumulated, weights, seed, old_seed, lengths, nprocs=ranks)
    model = _network(weights)
    drawn = [pair for rank in range(ranks) for pair in _pieces(seed + rank, lengths[rank])]
    x, y = (torch.cat(each) for each in zip(*drawn, strict=True))
    nn.functional.cross_entropy(model(x), y).backward()
    truth: Any = gradients_of(model)
    gradients = [result["gradient"] for result in results]
    rank, gap = furthest(far(gradient, truth) for gradient in gradients)
    first, hint = gradients[0], "another weight"
    if any(far(gradient, first) > NEAR for gradient in gradients):  # None is far from all
        hint = "not averaged"
    elif far(first, truth + tensor(old_seed, (NUMBERS,))) < NEAR:
        hint = "old gradients"
    elif torch.cosine_similarity(torch.tensor(first, dtype=torch.float64), truth, dim=0) > 1 - 1e-9:
        hint = "another length"
    place = 0 if gradients[rank] is None else place_of_furthest(gradients[rank], truth)
    is_now = "missing" if gradients[rank] is None else f"{gradients[rank][place]:.6f}"
    seen = f"with {ranks} ranks and {len(y)} samples one gradient of rank {rank} is {is_now}, "
    seen += f"and should be {truth[place]:.6f}"
    yield Finding(GRADIENT, gap < NEAR, seen, hint)
    sent = max(result["sent"] for result in results)
    hint = "every pass sends" if sent > 0.9 * NUMBERS * pieces else "more than the sum"
    seen = f"the model has {NUMBERS} gradients, and {sent} numbers travelled"
    yield Finding(ONCE, sent < 1.9 * NUMBERS, seen, hint)
    for rank, result in enumerate(results):
        longest, kept = max(lengths[rank]), result["kept"]
        seen = f"rank {rank}'s longest piece has {longest} samples, and what the model computed for {kept} "
        seen += "was kept at the same time"
        yield Finding(PIECES, kept == longest, seen, "more than a piece")


def _in_pieces(rng: random.Random, total: int, pieces: int) -> list[int]:
    """Cut a number of samples into pieces of different lengths."""
    while True:
        cuts = [0, *sorted(rng.sample(range(1, total), pieces - 1)), total]
        lengths = [end - start for start, end in pairwise(cuts)]
        if len(set(lengths)) > 1:
            return lengths


def _pieces(seed: int, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Draw the pieces of a rank, as pairs of inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(length, INPUTS, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (length,), generator=generator),
        )
        for length in lengths
    ]


@reports(lambda *_: {"gradient": ([NUMBER] * NUMBERS, None), "sent": int, "kept": int})
@in_group
def _accumulated(answer: Any, weights: int, seed: int, old_seed: int, lengths: list[list[int]]) -> Result:
    rank, model = dist.get_rank(), _network(weights)
    kept = watch_retention(model, len)
    ddp = DistributedDataParallel(model)
    _give(model, tensor(old_seed, (NUMBERS,)))
    with record_traffic() as travelled:
        answer(ddp, _pieces(seed + rank, lengths[rank]))
    return {"gradient": gradients_of(model), "sent": travelled.received(), "kept": max(kept, default=0)}


# --- 11.3 -------------------------------------------------------------------------------------------------

STEP = "the step is that of one device: its gradient is the mean, clipped"
ALL = "where the mean is not finite no rank steps"
CLOSE = 1e-4  # a gradient may travel in float32; each weight moves by about 1
SCALE = 40.0  # of the gradients: a large norm alone is no error


@question(
    "11.3",
    "step_together(model, optimizer, max_norm)",
    {STEP: 1, ALL: 1},
    depends_on={ALL: STEP},
    hints={
        STEP: {
            "ranks differ": "The ranks have different weights now. Which gradient must all of them use?",
            "clipped first": "Each rank's gradient is clipped first and then averaged. What did lesson 11 "
            "find for that order?",
            "frozen moved": "The frozen layer has moved. No gradient is not the same as a gradient of 0.",
            "another step": "One mean of all ranks, one norm of all layers, one limit, one step: which of "
            "them is different here?",
        },
        ALL: {
            "one rank knew": "One rank knew it and the others did not. What do all of them hold "
            "after the average?",
            "into the weights": "It went into the weights. Which number shows it to every rank, before the "
            "step?",
            "a step all the same": "A step was made without it. With momentum, even a gradient of 0 moves "
            "the weights.",
        },
    },
)
@with_two_world_sizes()
def step_together(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    broken = rng.randrange(1, ranks)  # not rank 0, which cannot know of it by itself
    calls: list[dict[str, Any]] = []
    for ratio, spoilt in ((0.15, ""), (2.5, ""), (1.0, "nan"), (1.0, "inf")):
        seed, weights = seeds(rng, 2)
        call: dict[str, Any] = {
            "seed": seed,
            "spoilt": spoilt,
            "place": rng.choice((0, -1)),
            "weights": weights,
        }
        call["frozen"] = rng.choice((0, 2))
        if spoilt:  # a later step of the same training
            call |= {"weights": None, "frozen": calls[-1]["frozen"]}
        calls.append(call | {"limit": _mean(call, ranks).norm().item() / ratio})
    results, right = ask(_stepped, calls, broken, nprocs=ranks), torch.empty(0)
    for i, call in enumerate(calls):
        now = [torch.as_tensor(result[i], dtype=torch.float64) for result in results]
        if call["spoilt"]:
            gaps = [far(own, right) for own in now]
            hint = "one rank knew" if min(gaps) < CLOSE else "a step all the same"
            hint = "into the weights" if all(own.isnan().any() for own in now) else hint
            seen = f"rank {broken}'s gradient held {call['spoilt']}, and rank {furthest(gaps)[0]} has other "
            yield Finding(ALL, max(gaps) < CLOSE, f"{seen}weights now", hint)
            continue
        model, _ = _training(call)
        start, mean = flat(model.parameters()), _mean(call, ranks)
        frozen = flat(torch.full_like(each, not each.requires_grad) for each in model.parameters()).bool()
        right = _after_a_step(call, _clipped(mean, call["limit"]))
        clipped = [_clipped(_own(call, one), call["limit"]) for one in range(ranks)]
        rank, gap = furthest(far(own, right) for own in now)
        hint = "another step"
        if any(far(own, now[0]) > CLOSE for own in now):
            hint = "ranks differ"
        elif far(now[0][frozen], start[frozen]) > CLOSE:
            hint = "frozen moved"
        elif far(now[0], _after_a_step(call, torch.stack(clipped).mean(0))) < CLOSE:
            hint = "clipped first"
        seen = f"{ranks} ranks, the norm of their mean is {mean.norm() / call['limit']:.2f} × the limit: "
        seen += f"rank {rank}'s weights are off by up to {gap:.2g}"
        seen += ", they have not moved" if torch.equal(now[rank], start) else ""
        yield Finding(STEP, gap < CLOSE, seen, hint)


def _own(call: dict[str, Any], rank: int) -> Tensor:
    """Draw a rank's gradient for the trained layers, as one flat tensor."""
    trained = sum(parameter.numel() for parameter in trainable(_network(0, call["frozen"])))
    return tensor(call["seed"] + rank, (trained,)) * SCALE


def _mean(call: dict[str, Any], ranks: int) -> Tensor:
    return torch.stack([_own(call, rank) for rank in range(ranks)]).mean(0)


def _training(call: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model, and SGD with weight decay, which moves even a frozen weight if its gradient is 0."""
    model = _network(call["weights"], call["frozen"])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _clipped(gradient: Tensor, limit: float) -> Tensor:
    return gradient * min(1.0, limit / gradient.norm().item())


def _after_a_step(call: dict[str, Any], gradient: Tensor) -> Tensor:
    """Return all weights after the first step of a training run."""
    model, optimizer = _training(call)
    _give(model, gradient)
    optimizer.step()
    return flat(model.parameters())


@reports(lambda calls, _: [[NUMBER] * NUMBERS] * len(calls))
@in_group
def _stepped(answer: Any, calls: list[dict[str, Any]], broken: int) -> list[Tensor]:
    results = []
    for call in calls:
        if call["weights"] is not None:
            model, optimizer = _training(call)
        gradient = _own(call, dist.get_rank())
        if call["spoilt"] and dist.get_rank() == broken:
            gradient[call["place"]] = float(call["spoilt"])
        _give(model, gradient)
        answer(model, optimizer, call["limit"])
        results.append(flat(model.parameters()))
    return results
