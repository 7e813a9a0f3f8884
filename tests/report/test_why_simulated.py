"""Trainings made to mislead `why`, in simulated time: it names the cause, or says that it does not know."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from course_lib import why
from tests.support.simulated import Doing, simulated

Training = Callable[[int, int, Callable[[], float]], list[Doing]]  # of rank, step, and its own dice
MEET = ("meet", 0.0005)
UNEVEN = "not one rank that is late again and again"


def every(steps: int, i: int, *doing: Doing) -> list[Doing]:
    return list(doing) if i % steps == steps - 1 else []


TRAININGS: dict[str, tuple[int, int, Training, str, str]] = {  # ranks, steps, what a rank does, cause, words
    "even": (2, 60, lambda r, i, dice: [("work", 0.05), MEET], "computing", ""),
    "nearly even": (2, 60, lambda r, i, dice: [("work", 0.045 + 0.01 * dice()), MEET], "computing", ""),
    "batches of any length": (2, 50, lambda r, i, dice: [("work", 0.1 * dice()), MEET], "unknown", UNEVEN),
    "the same on four": (4, 50, lambda r, i, dice: [("work", 0.1 * dice()), MEET], "unknown", UNEVEN),
    "and short": (3, 200, lambda r, i, dice: [("work", 0.03 * dice()), MEET], "unknown", UNEVEN),
    "with many collectives": (
        3,
        50,
        lambda r, i, dice: [("work", 0.2 * dice()), *[("meet", 3e-4)] * 30],
        "unknown",
        "too few were seen",
    ),
    "one and the other": (
        2,
        60,
        lambda r, i, dice: [("work", 0.02 + 0.06 * (i % 2 == r)), MEET],
        "unknown",
        UNEVEN,
    ),
    "by turns": (
        2,
        80,
        lambda r, i, dice: [("work", 0.02 + 0.06 * (i // 10 % 2 == r)), MEET],
        "unknown",
        UNEVEN,
    ),
    "late at first": (
        2,
        90,
        lambda r, i, dice: [("work", 0.03 + 0.06 * (r > 0 and i < 30)), MEET],
        "unknown",
        UNEVEN,
    ),
    "late at the end": (
        2,
        90,
        lambda r, i, dice: [("work", 0.03 + 0.06 * (r > 0 and i > 59)), MEET],
        "unknown",
        UNEVEN,
    ),
    "one evaluates": (
        2,
        60,
        lambda r, i, dice: [("work", 0.03), MEET, *every(10, i, ("work", 0.4 * (r == 0)))],
        "unknown",
        UNEVEN,
    ),
    "one saves": (
        2,
        60,
        lambda r, i, dice: [("work", 0.03), MEET, *every(5, i, ("sleep", 0.25 * (r == 0)))],
        "unknown",
        "",
    ),
    "all save": (
        2,
        60,
        lambda r, i, dice: [("work", 0.03), MEET, *every(10, i, ("sleep", 0.4))],
        "unknown",
        "in no collective of all ranks",
    ),
    "all sleep": (
        2,
        60,
        lambda r, i, dice: [("sleep", 0.05), MEET],
        "unknown",
        "in no collective of all ranks",
    ),
    "evaluation between epochs": (
        2,
        60,
        lambda r, i, dice: [("work", 0.04), MEET, *every(5, i, ("outside", 0.3))],
        "computing",
        "",
    ),
    "compiled at first": (
        2,
        60,
        lambda r, i, dice: [("sleep", 2.0 * (i == 0)), ("work", 0.04), MEET],
        "computing",
        "",
    ),
    "a fifth longer": (
        3,
        40,
        lambda r, i, dice: [("work", (0.1 + 0.02 * (r == 1)) * (0.95 + 0.1 * dice())), MEET],
        "straggler",
        "rank 1 is late",
    ),
    "late to the first of three": (
        2,
        50,
        lambda r, i, dice: [("work", 0.03 + 0.03 * r), MEET, MEET, MEET],
        "straggler",
        "rank 1 is late again and again: the others wait 30 ms for it",
    ),
    "the loader of one": (
        2,
        60,
        lambda r, i, dice: [("loader", 0.05 * r), ("work", 0.04), MEET],
        "straggler",
        "Loader takes",
    ),
    "the loader of all": (
        2,
        60,
        lambda r, i, dice: [("loader", 0.1 * dice()), ("work", 0.04), MEET],
        "loader",
        "it does not keep up",
    ),
    "batches made between two steps": (
        2,
        60,
        lambda r, i, dice: [("loader_work", 0.05), ("work", 0.04), MEET],
        "loader",
        "let workers do it",
    ),
    "more ranks than cores": (
        4,
        60,
        lambda r, i, dice: [("work", 0.02), ("no_core", 0.04 * dice()), MEET],
        "shared cores",
        "",
    ),
    "two ranks for each core": (  # these three as lesson 14's runs of that name were measured
        4,
        60,
        lambda r, i, dice: [("work", 0.011), ("no_core", 0.012 * dice()), ("starved", 0.012)],
        "shared cores",
        "a thread that carries its collectives",
    ),
    "a large model": (
        2,
        60,
        lambda r, i, dice: [("work", 0.028), ("no_core", 0.01 * dice()), ("starved", 0.02)],
        "communication",
        "MiB in all",
    ),
    "tiny steps": (
        2,
        1500,
        lambda r, i, dice: [("work", 6e-4), ("no_core", 4e-4 * dice()), ("starved", 1e-3)],
        "little work",
        "",
    ),
    "long collectives": (
        4,
        60,
        lambda r, i, dice: [("work", 0.03 * (0.9 + 0.2 * dice())), ("meet", 0.03)],
        "little work",
        "",
    ),
    "many collectives": (
        2,
        400,
        lambda r, i, dice: [("work", 0.001), *[("meet", 5e-4)] * 10],
        "little work",
        "",
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_made_to_mislead(name: str, seed: int) -> None:
    ranks, steps, training, cause, words = TRAININGS[name]

    def step(rank: int, i: int) -> list[Doing]:
        return training(rank, i, random.Random(f"{seed} {rank} {i}").random)

    verdict = why(simulated(ranks, steps, step, seed, size=20 * 2**20 if cause == "communication" else 4.0))

    assert (verdict.cause, words in verdict.sentence) == (cause, True), verdict


def test_a_straggler_beside_another_cause_is_told() -> None:
    run = simulated(2, 50, lambda rank, i: [("sleep", 0.08 + 0.02 * rank), MEET])
    assert why(run).cause == "unknown"
    assert "And rank 1 is late again and again: the others wait 20 ms" in why(run).sentence
