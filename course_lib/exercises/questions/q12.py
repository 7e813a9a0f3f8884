"""The questions of lesson 12: the backward pass of a sum over ranks, and pooled running statistics."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group
from ..inputs import seeds, tensor
from ..judging import far, furthest, nearest, place_of_furthest, with_two_world_sizes
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports

CLOSE = 1e-9  # the tensors are float64

# --- 12.1 -------------------------------------------------------------------------------------------------

SUMMED = "each rank has the gradient of the sum of all ranks' losses"
UNCHANGED = "the gradient that backward is given keeps its numbers"


@question(
    "12.1",
    "SumOverRanks",
    {SUMMED: 3, UNCHANGED: 1},
    depends_on={UNCHANGED: SUMMED},
    hints={
        SUMMED: {
            "none": "What your backward pass returns becomes the gradient. What does it return?",
            "own loss": "The other ranks' losses depend on this tensor, too. Does your backward say so?",
            "another": "Which ranks' gradients are in it, and how often is each?",
        },
        UNCHANGED: {"in place": "Others may still need it as it is. Add up in a tensor of your own."},
    },
)
@with_two_world_sizes()
def sum_over_ranks(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    size, drawn = rng.randint(2, 6), seeds(rng, ranks)
    own = [tensor(seed, (size,)) for seed in drawn]
    right = torch.stack(own).sum(0)
    results = ask(_gone_back, drawn, size, nprocs=ranks)
    gradients = [result["gradient"] for result in results]
    rank, gap = furthest(far(gradient, right) for gradient in gradients)
    seen, hint = f"on rank {rank} there is no gradient", "none"
    if gradients[rank] is not None:
        hint = nearest(gradients[rank], (own[rank], "own loss"), otherwise="another", within=CLOSE)
        seen = f"the ranks were given {', '.join(f'{each[0]:.4f}' for each in own)}; "
        seen += f"rank {rank} returned {gradients[rank][0]:.4f}, and the sum is {right[0]:.4f}"
    yield Finding(SUMMED, gap < CLOSE, seen, hint)
    rank, gap = furthest(far(result["given"], was) for result, was in zip(results, own, strict=True))
    seen = f"rank {rank}'s gradient was {own[rank][0]:.4f}, and is {results[rank]['given'][0]:.4f} now"
    yield Finding(UNCHANGED, gap == 0, seen, "in place")


@reports(lambda _, size: {"gradient": ([NUMBER] * size, None), "given": [NUMBER] * size})
@in_group
def _gone_back(answer: Any, drawn: list[int], size: int) -> Result:
    x = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    given = tensor(drawn[dist.get_rank()], (size,))
    answer.apply(x).backward(given)
    return {"gradient": x.grad, "given": given}


# --- 12.2 -------------------------------------------------------------------------------------------------

MEAN = "every norm has the mean of all that the ranks have seen"
VARIANCE = "and its variance"
ONCE = "the number of collectives does not grow with the norms"


@question(
    "12.2",
    "pool_statistics(model)",
    {MEAN: 2, VARIANCE: 3, ONCE: 1},
    depends_on={VARIANCE: MEAN, ONCE: MEAN},
    hints={
        MEAN: {
            "unchanged": "Nothing has changed. The new values must get into the model's own buffers.",
            "some ranks": "Some ranks have it, and others do not. Does every rank get the result?",
            "some norms": "Some channels are right, and others are not. Which part belongs to which norm?",
            "another mean": "Think of all ranks' samples together, the same number from each rank.",
        },
        VARIANCE: {
            "mean of variances": "That is the mean of the variances. The ranks' means differ, too.",
            "another variance": "Think of all samples, and of their distances from the mean over all ranks.",
        },
        ONCE: {"norm by norm": "What can be concatenated can travel together."},
    },
)
@with_two_world_sizes()
def pool_statistics(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    channels, drawn = rng.sample(range(2, 9), rng.randint(4, 6)), seeds(rng, ranks)
    results = ask(_pooled, channels, drawn, nprocs=ranks)
    means, variances = map(torch.stack, zip(*map(_seen_by, drawn, [channels] * ranks), strict=True))
    mean, of_variances = means.mean(0), variances.mean(0)
    for what, key, right in (
        (MEAN, "means", mean),
        (VARIANCE, "variances", of_variances + means.var(0, correction=0)),
    ):
        gaps = [far(result[key], right) for result in results]
        rank, gap = furthest(gaps)
        now = torch.as_tensor(results[rank][key], dtype=torch.float64)
        place = place_of_furthest(now, right)
        if what == VARIANCE:
            known: tuple[Any, ...] = ((of_variances, "mean of variances"),)
            hint = nearest(now, *known, otherwise="another variance", within=CLOSE)
        elif min(gaps) < CLOSE < gap:
            hint = "some ranks"
        elif bool(((now - right).abs() < CLOSE).any()):
            hint = "some norms"
        else:
            same = all(far(result[key], was) < CLOSE for result, was in zip(results, means, strict=True))
            hint = "unchanged" if same else "another mean"
        seen = f"one of rank {rank}'s {key} is {now[place]:.5f}, and should be {right[place]:.5f}"
        yield Finding(what, gap < CLOSE, seen, hint)
    calls = max(result["calls"] for result in results)
    seen = f"a rank called {calls} collectives for {len(channels)} norms"
    yield Finding(ONCE, calls <= 2, seen, "norm by norm")


def _seen_by(seed: int, channels: list[int]) -> tuple[Tensor, Tensor]:
    """Draw the running means and variances of all norms of a rank, each in one flat tensor."""
    mean, spread = tensor(seed, (2, sum(channels)))
    return mean * 3, spread.abs() + 0.1


@reports(lambda channels, _: dict.fromkeys(("means", "variances"), [NUMBER] * sum(channels)) | {"calls": int})
@in_group
def _pooled(answer: Any, channels: list[int], drawn: list[int]) -> Result:
    norms = [nn.BatchNorm1d(count).double() for count in channels]
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(3), nn.ModuleDict({"norm": norm})) for norm in norms))
    mean, variance = (both.split(channels) for both in _seen_by(drawn[dist.get_rank()], channels))
    for i, norm in enumerate(norms):
        norm.load_state_dict({"running_mean": mean[i], "running_var": variance[i]}, strict=False)
    with record_traffic() as seen:
        answer(model)
    means = torch.cat([norm.running_mean for norm in norms if norm.running_mean is not None])
    variances = torch.cat([norm.running_var for norm in norms if norm.running_var is not None])
    return {"means": means, "variances": variances, "calls": len(seen.calls) + seen.stored}
