"""The question of lesson 00: the mean of one number from each rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ..in_rank.work import in_group, the_number
from ..judging import by_call, far, first_wrong, nearest, with_two_world_sizes
from ..question import Ask, Finding, question
from ..shape import NUMBER, reports

CLOSE = 1e-4  # float32 is enough
MEAN = "every rank gets the mean of all ranks' numbers"


@question("00.1", "mean_of_all(number)", {MEAN: 10})
@with_two_world_sizes()
def mean_of_all(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    calls = [[round(rng.uniform(1, 9) * 10**call, 1) for _ in range(ranks)] for call in range(2)]
    for numbers, got in zip(calls, by_call(ask(_called, calls, nprocs=ranks)), strict=True):
        mean = sum(numbers) / ranks
        right = [far(each, mean) < CLOSE * mean for each in got]
        shown = first_wrong(right)
        seen = f"the {ranks} ranks brought {', '.join(map(str, numbers))}: "
        seen += f"rank {shown} returned {got[shown]:.6g}"
        hint = nearest(
            got[shown],
            (numbers[shown], "That is its own number. Which call adds up the numbers of all ranks?"),
            (sum(numbers), "That is the sum. By what is it divided?"),
            (sum(numbers) / 2, "That is half of the sum: right for two ranks. How many are there?"),
            otherwise=f"The mean is {mean:.6g}. Do all ranks make the same calls?",
            within=CLOSE * mean,
        )
        yield Finding(MEAN, all(right), seen, hint)


@reports(lambda calls: [NUMBER] * len(calls))
@in_group
def _called(answer: Any, calls: list[list[float]]) -> list[float]:
    import torch.distributed as dist

    return [the_number(answer(numbers[dist.get_rank()]), "mean_of_all returns a number") for numbers in calls]
