"""The questions of lesson 14: predicting a step, and how much communication is hidden."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from ..in_rank.work import on_each_case, the_number
from ..judging import far, nearest
from ..question import Ask, Finding, question
from ..shape import NUMBER, reports

Interval = tuple[float, float]

# --- 14.1 -------------------------------------------------------------------------------------------------

BEHIND = "a bucket travels while backward computes the next ones"
QUEUE = "a bucket waits until the one before it has arrived"


@question(
    "14.1",
    "step_seconds(forward, backward, buckets, speed)",
    {BEHIND: 2, QUEUE: 2},
    depends_on={QUEUE: BEHIND},
    hints={
        BEHIND: {
            "nothing hidden": "Nothing is hidden there. When may the first bucket leave?",
            "too early": "The last bucket is hidden there, too, or one is sent before it is ready.",
            "another time": "How many seconds does a bucket take, and when does it start?",
        },
        QUEUE: {
            "all at once": "All travel at once there, each at full speed. There is one link.",
            "busy": "A bucket that is ready may find the link busy. Until when?",
        },
    },
)
def step_seconds(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    whats = [what for what in (BEHIND, QUEUE) for _ in range(3)]
    cases = [_case(rng, what) for what in whats]
    (times,) = ask(_steps, cases)
    for what, case, got in zip(whats, cases, times, strict=True):
        forward, backward, buckets, speed = case
        computing, takes = forward + backward, [size / speed for size in buckets]
        right, ready = _step(case), _ready(case)
        if what == BEHIND:
            known = [(computing + sum(takes), "nothing hidden"), (computing, "too early")]
            known.append((_step(case, [forward, *ready[:-1]]), "too early"))
        else:
            known = [(max(map(sum, zip(ready, takes, strict=True))), "all at once")]
        otherwise = "another time" if what == BEHIND else "busy"
        hint = nearest(got, *known, otherwise=otherwise, within=1e-6 * right)
        seen = f"buckets that take {', '.join(f'{each:.4f}' for each in takes)} s, forward {forward:.4f} s, "
        seen += f"backward {backward:.4f} s: the step takes {right:.6f} s, and {got:.6f} s came out"
        yield Finding(what, far(got, right) <= 1e-6 * right, seen, hint)


def _case(rng: random.Random, what: str) -> tuple[float, float, list[int], float]:
    """Draw arguments where all buckets but the last are hidden, or where one in the middle starts a queue."""
    while True:
        buckets = [rng.randint(10**5, 10**6) * rng.choice((1, 3, 8)) for _ in range(rng.randint(4, 7))]
        speed = rng.uniform(1e9, 5e9)
        backward = rng.uniform(0.3, 1.2) * sum(buckets) / speed
        if what == BEHIND:
            backward = 1.2 * sum(buckets) / speed * max(1, *(a / b for a, b in pairwise(buckets)))
        case = rng.uniform(0.3, 0.7) * backward, backward, buckets, speed
        ready = _ready(case)
        ends = [since + sum(buckets[i:]) / speed for i, since in enumerate(ready)]
        last = ends.index(max(ends))  # the last bucket that finds the link free
        alone = [since + size / speed for since, size in zip(ready, buckets, strict=True)]
        if what == BEHIND or (0 < last < len(buckets) - 2 and max(alone) > alone[-1]):
            return case


def _ready(case: Any) -> list[float]:
    """Return when each bucket is complete."""
    forward, backward, buckets, _ = case
    return [forward + backward * done / sum(buckets) for done in accumulate(buckets)]


def _step(case: Any, ready: list[float] | None = None) -> float:
    forward, backward, buckets, speed = case
    free = 0.0
    for since, size in zip(ready or _ready(case), buckets, strict=True):
        free = max(free, since) + size / speed
    return max(free, forward + backward)


@reports(lambda cases: [NUMBER] * len(cases))
@on_each_case
def _steps(answer: Any, *arguments: Any) -> float:
    return the_number(answer(*arguments), "step_seconds(…) returns a number of seconds")


# --- 14.2 -------------------------------------------------------------------------------------------------

SHARE = "it is the share of the time of sending during which the rank computes"
OVERLAPS = "time in which intervals of one list overlap counts once"


@question(
    "14.2",
    "hidden(computes, sends)",
    {SHARE: 3, OVERLAPS: 3},
    depends_on={OVERLAPS: SHARE},
    hints={
        SHARE: {
            "exposed": "That is what is not hidden.",
            "of the computing": "That is a share of the computing time. Which time is asked for?",
            "seconds": "Those are seconds. What is it a share of?",
            "in part": "A bucket may be hidden in part, and by several intervals. Where does each part begin "
            "and end?",
        },
        OVERLAPS: {
            "sends": "Two buckets at once are not twice the time.",
            "computes": "One operation may lie within another. How long does the rank compute then?",
        },
    },
)
def hidden(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    whats = [what for what in ("", "sends", "computes") for _ in range(3)]
    cases = [_intervals(rng, what) for what in whats]
    (shares,) = ask(_shares, cases)
    for what, (computes, sends), got in zip(whats, cases, shares, strict=True):
        both, sending = _measure(computes, sends), _measure(sends)
        right = both / sending
        known = ((1 - right, "exposed"), (both / _measure(computes), "of the computing"), (both, "seconds"))
        hint = what or nearest(got, *known, otherwise="in part", within=1e-6)
        seen = f"{len(computes)} intervals of computing and {len(sends)} of sending: of {sending:.6f} s, "
        seen += f"{both:.6f} s are hidden, which is {right:.6f}; it returned {got:.6f}"
        yield Finding(OVERLAPS if what else SHARE, far(got, right) < 1e-6, seen, hint)


def _intervals(rng: random.Random, overlap: str) -> tuple[list[Interval], list[Interval]]:
    """Draw when a rank computes and when it sends; the intervals of one list may overlap."""
    computes, at = [], rng.uniform(1, 5)
    sends: list[Interval] = []
    sent = at + rng.uniform(-0.01, 0.02)
    for _ in range(rng.randint(4, 5)):
        computes.append((at, at + rng.uniform(0.02, 0.06)))
        at = computes[-1][1] + rng.uniform(0.004, 0.012)
    while not sends or sends[-1][1] < at:  # the last one outlasts the computing
        sends.append((sent, sent + rng.uniform(0.02, 0.05)))
        sent = sends[-1][1] + rng.uniform(0.002, 0.02)
    both = {"computes": computes, "sends": sends}
    if overlap:  # one within another, one across a gap, and the last once more in two halves
        found = both[overlap]
        (a, b), (c, d), last = found[0], found[1], found[-1]
        middle = (last[0] + last[1]) / 2
        found += [(a + (b - a) / 4, b - (b - a) / 8), ((a + b) / 2, (c + d) / 2)]
        found += [(last[0], middle), (middle, last[1])]
        rng.shuffle(computes)
        rng.shuffle(sends)
    return computes, sends


def _measure(*lists: list[Interval]) -> float:
    """Return the time during which every list has an interval."""
    edges = sorted({edge for intervals in lists for interval in intervals for edge in interval})
    return sum(
        b - a
        for a, b in pairwise(edges)
        if all(any(start <= a and b <= end for start, end in intervals) for intervals in lists)
    )


@reports(lambda cases: [NUMBER] * len(cases))
@on_each_case
def _shares(answer: Any, *lists: list[list[float]]) -> float:
    computes, sends = ([tuple(interval) for interval in intervals] for intervals in lists)
    return the_number(answer(computes, sends), "hidden(…) returns a number, a share")
