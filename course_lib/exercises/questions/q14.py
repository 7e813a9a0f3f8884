"""The questions of lesson 14: predicting a step, how much communication is hidden, which rank is late."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..in_rank.traffic import STARTS, STORES
from ..in_rank.work import in_group, the_number
from ..judging import by_call, far, first_wrong, furthest, in_digits, nearest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import told

Interval = tuple[float, float]
ONCE_MORE = "with the same lists once more it returned"
REFILLED = "with other numbers in the same lists it returned"
ANEW = "The lists are the same objects, with other contents. What do you keep from one call to the next?"
KEPT = "What you are given must be unchanged afterwards."
CHANGED = "after the call the lists were not what they were before"

# --- 14.1 -------------------------------------------------------------------------------------------------

MESSAGES = "where nothing is computed, the step is the buckets' rings, one after the other"
BEHIND = "a bucket travels while backward computes the next ones"
QUEUE = "a bucket waits until the one before it has arrived"
CLOSE = 1e-9  # relative
ARGUMENTS = ("forward", "backward", "buckets", "ranks", "alpha", "beta")
Case = dict[str, Any]  # the arguments of step_seconds
HOW_OFTEN = "The bytes are right. How often does α count in a ring?"
LAST_ALONE = "Only the last bucket is left over there. What if the ones before it are still under way?"
TOO_EARLY = (
    "The last bucket is hidden there, too, or one is sent before its gradients are ready. When is each?"
)
ONE_LINK = "All travel at once there, each at full speed. There is one link."


@question(
    "14.1",
    "step_seconds(forward, backward, buckets, ranks, alpha, beta)",
    {MESSAGES: 1, BEHIND: 2, QUEUE: 1},
    rests={QUEUE: BEHIND},
)
def step_seconds(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    one, other = rng.sample(range(8, 65), 2)
    whats = (MESSAGES, BEHIND, QUEUE)
    cases = [(what, _case(rng, what, ranks)) for what in whats for ranks in (one, other, one)]
    fewest = _case(rng, MESSAGES, 2)
    cases.append((MESSAGES, fewest | {"buckets": fewest["buckets"][:1]}))
    for what, case in cases:
        if what == MESSAGES:
            case["then"] = [rng.randint(10**5, 10**6) for _ in case["buckets"]]
    (results,) = ask(_steps, [case for _, case in cases])
    for (what, case), ((got, again, *then), kept) in zip(cases, results, strict=True):
        right = _step(case)
        seen = f"{len(case['buckets'])} buckets, {case['ranks']} ranks, forward {case['forward']:.4f} s,"
        seen += f" backward {case['backward']:.4f} s: it takes {right:.6f} s, and {got:.6f} s came out"
        yield Finding(what, _same(got, right), seen, HINTS[what](case, got))
        yield Finding(what, _same(again, right), f"{ONCE_MORE} {again:.6f} s", KEPT)
        yield Finding(what, kept, CHANGED, KEPT)
        for other in then:
            other_right = _step(case | {"buckets": case["then"]})
            seen = f"{REFILLED} {other:.6f} s, and it takes {other_right:.6f} s"
            yield Finding(what, _same(other, other_right), seen, ANEW)


def _case(rng: random.Random, what: str, ranks: int) -> Case:
    buckets = [rng.randint(10**5, 10**6) * rng.choice((1, 3, 8)) for _ in range(rng.randint(4, 7))]
    case: Case = {"forward": 0.0, "backward": 1e-15}  # practically none, but safe to divide by
    case |= {"buckets": buckets, "ranks": ranks}
    case |= {"alpha": rng.uniform(1e-5, 1e-4), "beta": rng.uniform(0.2e-9, 1e-9)}
    rings = [_ring(case, size) for size in buckets]
    if what == BEHIND:  # each bucket is through before the next one is ready
        pace = max(ring / size for ring, size in zip(rings, buckets[1:], strict=False))
        case["backward"] = rng.uniform(1.2, 2) * max(pace * sum(buckets), len(buckets) * max(rings))
    if what == QUEUE:
        case["backward"] = rng.uniform(0.3, 1.2) * sum(rings)
    if what != MESSAGES:
        case["forward"] = rng.uniform(0.3, 0.7) * case["backward"]
    if what == QUEUE:
        middle = 0 < _last_in_time(case, _ready(case)) < len(buckets) - 2
        if not middle or _last_in_time(case, _even(case)) == len(buckets) - 1:
            return _case(rng, what, ranks)
    return case


def _last_in_time(case: Case, ready: list[float]) -> int:
    """Return the last bucket that finds the link free."""
    rings = [_ring(case, size) for size in case["buckets"]]
    ends = [since + sum(rings[i:]) for i, since in enumerate(ready)]
    return ends.index(max(ends))


def _ring(case: Case, size: float) -> float:
    n = case["ranks"]
    return 2 * (n - 1) * case["alpha"] + 2 * (n - 1) / n * case["beta"] * size


def _ready(case: Case) -> list[float]:
    """Return when the gradients of each bucket are ready."""
    whole = sum(case["buckets"])
    return [case["forward"] + case["backward"] * done / whole for done in accumulate(case["buckets"])]


def _even(case: Case) -> list[float]:
    """Return when each bucket would be ready if backward took equally long for each."""
    pieces = len(case["buckets"])
    return [case["forward"] + case["backward"] * (i + 1) / pieces for i in range(pieces)]


def _step(case: Case, ready: list[float] | None = None, ring: Callable[..., float] = _ring) -> float:
    free = 0.0
    for since, size in zip(ready or _ready(case), case["buckets"], strict=True):
        free = max(free, since) + ring(case, size)
    return max(free, case["forward"] + case["backward"])


def _same(got: float, right: float) -> bool:
    return far(got, right) <= CLOSE * right


def _near(case: Case, got: float, *known: tuple[float, str], otherwise: str) -> str:
    return nearest(got, *known, otherwise=otherwise, within=1e-6 * _step(case))


def _of_messages(case: Case, got: float) -> str:
    n, buckets = case["ranks"], case["buckets"]
    line = sum(case["alpha"] + case["beta"] * size for size in buckets)
    once = _ring(case, sum(buckets))
    half = sum(_ring(case, size) for size in buckets) / 2
    no_share = sum(2 * (n - 1) * (case["alpha"] + case["beta"] * size) for size in buckets)
    bytes_alone = 2 * (n - 1) / n * case["beta"] * sum(buckets)
    return _near(
        case,
        got,
        (max(_ring(case, size) for size in buckets), ONE_LINK),
        (
            line,
            "That is a message between two. How many steps does a ring have, and what does each rank send?",
        ),
        (once, "That is one large bucket. Each bucket has a latency of its own."),
        (half, "A ring goes round twice: once to add up, once to distribute."),
        (no_share, "In each step of the ring a rank sends a part of the bucket, not all of it."),
        (bytes_alone + len(buckets) * case["alpha"], HOW_OFTEN),
        (bytes_alone + 2 * len(buckets) * case["alpha"], HOW_OFTEN),
        otherwise="How long does one bucket take in a ring of that many ranks? Then one after the other.",
    )


def _of_hiding(case: Case, got: float) -> str:
    computing, rings = case["forward"] + case["backward"], [_ring(case, size) for size in case["buckets"]]
    early = [case["forward"], *_ready(case)[:-1]]
    return _near(
        case,
        got,
        (computing + sum(rings), "Nothing is hidden there. When may the first bucket leave?"),
        (computing, TOO_EARLY),
        (_step(case, early), TOO_EARLY),
        (case["forward"] + max(case["backward"], sum(rings)), TOO_EARLY),
        (max(computing, sum(rings)), TOO_EARLY),
        otherwise="When is each bucket ready, and when has the one before it arrived? The later time counts.",
    )


def _of_queues(case: Case, got: float) -> str:
    rings = [_ring(case, size) for size in case["buckets"]]
    return _near(
        case,
        got,
        (case["forward"] + case["backward"] + rings[-1], LAST_ALONE),
        (max(since + ring for since, ring in zip(_ready(case), rings, strict=True)), ONE_LINK),
        (
            _step(case, _even(case)),
            "That gives each bucket the same share of backward. But they have different sizes.",
        ),
        otherwise="A bucket that is ready may find the link busy. Until when?",
    )


HINTS = {MESSAGES: _of_messages, BEHIND: _of_hiding, QUEUE: _of_queues}


@reports(lambda cases: [[[NUMBER] * (2 + ("then" in case)), bool] for case in cases])
def _steps(answer: Any, cases: list[Case]) -> list[tuple[list[float], bool]]:
    """Run `_often` for each case; the arguments are positional, since an answer may name them freely."""
    what, at = "step_seconds(…) returns a number of seconds", ARGUMENTS.index("buckets")
    given = [[case[name] for name in ARGUMENTS] for case in cases]
    then = [{at: case["then"]} if "then" in case else {} for case in cases]
    return [_often(answer, *both, what) for both in zip(given, then, strict=True)]


def _often(answer: Any, given: list[Any], then: dict[int, list[Any]], what: str) -> tuple[list[float], bool]:
    """Call twice, then with new items in the lists; return the results, and whether the lists were kept."""
    before = repr(given)
    numbers = [the_number(answer(*given), what) for _ in range(2)]
    kept = repr(given) == before
    for place, items in then.items():
        given[place][:] = items
    return numbers + [the_number(answer(*given), what)] * bool(then), kept


# --- 14.2 -------------------------------------------------------------------------------------------------

SHARE = "it is the share of the time of sending during which the rank computes"
TOGETHER = "time in which two buckets are under way counts once"
ANY_ORDER = "intervals of computing may come in any order, touch and overlap"
NEAR = 1e-6


@question(
    "14.2",
    "hidden(computes, sends)",
    {SHARE: 1, TOGETHER: 1, ANY_ORDER: 1},
    rests={TOGETHER: SHARE, ANY_ORDER: SHARE},
)
def hidden(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [(what, *_intervals(rng, what)) for what in (SHARE, TOGETHER, ANY_ORDER) for _ in range(3)]
    cases[1] = SHARE, [], cases[1][-1]  # nothing is computed
    others: list[Any] = [_intervals(rng, SHARE) if what == SHARE else None for what, *_ in cases]
    (shares,) = ask(_shares, [case[1:] for case in cases], others)
    for (what, *lists), other, ((got, again, *then), kept) in zip(cases, others, shares, strict=True):
        computes, sends = lists
        right = _measure(computes, sends) / _measure(sends)
        truth, came = in_digits(right, got)
        seen = f"{len(computes)} intervals of computing and {len(sends)} of sending: {truth} of the time of "
        seen += f"sending is hidden; it returned {came}"
        yield Finding(what, far(got, right) < NEAR, seen, _of_shares(what, computes, sends, got, right))
        yield Finding(what, far(again, right) < NEAR, f"{ONCE_MORE} {again:.4f}", KEPT)
        yield Finding(what, kept, CHANGED, KEPT)
        for share in then:
            right = _measure(*other) / _measure(other[1])
            seen = f"{REFILLED} {share:.4f}, and {right:.4f} of their time is hidden"
            yield Finding(what, far(share, right) < NEAR, seen, ANEW)


def _intervals(rng: random.Random, what: str) -> tuple[list[Interval], list[Interval]]:
    """Draw when a rank computes and sends, on the clock of a training run that has taken days."""
    begin = rng.uniform(4e5, 8e5)
    computes, at = [], begin
    for _ in range(rng.randint(4, 5)):
        length = rng.uniform(0.02, 0.06)
        computes.append((at, at + length))
        at += length + rng.choice((rng.uniform(0.004, 0.012), 0.0005))
    sends: list[Interval] = []
    at = begin + rng.uniform(-0.01, 0.02)
    while not sends or sends[-1][1] < computes[-1][1] + 0.005:  # the last one outlasts the computing
        length = rng.uniform(0.02, 0.05)
        sends.append((at, at + length))
        at += length + (rng.uniform(-0.6, -0.3) * length if what == TOGETHER else rng.uniform(0.002, 0.02))
    if what == TOGETHER:  # a short one, within the first one
        (a, b), (c, _) = sends[:2]
        sends.append((a + (c - a) / 4, c - (c - a) / 4))
    if what == ANY_ORDER:  # one within another, one across a gap, and the last once more in two halves
        (a, b), (c, d), (e, f), last = *computes[:3], computes[-1]
        middle = (last[0] + last[1]) / 2
        computes += [(a + (b - a) / 4, b - (b - a) / 8), (last[0], middle), (middle, last[1])]
        computes += [((a + b) / 2, (c + d) / 2), (e + (f - e) / 16, e + (f - e) / 8)]
    if what != SHARE:
        rng.shuffle(computes)
        rng.shuffle(sends)
    return computes, sends


def _measure(*lists: list[Interval]) -> float:
    """Return the time during which something in each list is under way."""
    edges = sorted({edge for intervals in lists for interval in intervals for edge in interval})
    return sum(
        b - a
        for a, b in pairwise(edges)
        if all(any(start <= a and b <= end for start, end in intervals) for intervals in lists)
    )


def _of_shares(what: str, computes: list[Interval], sends: list[Interval], got: float, right: float) -> str:
    hidden = _measure(computes, sends)
    if not computes:
        return "Nothing is computed in that profile. Which share is hidden then?"
    if what == SHARE and NEAR <= far(got, right) < 1e-2 * right:
        return "It is close, but not right: an estimate? The ends of the intervals are known exactly."
    return nearest(
        got,
        (100 * right, "A share is a number from 0 to 1."),
        (1 - right, "That is what is not hidden."),
        (hidden / _measure(computes), "That is a share of the computing time. Which time is asked for?"),
        (hidden, "Those are seconds. What is it a share of?"),
        otherwise=OVERLAPS[what],
        within=1e-9,
    )


OVERLAPS = {
    SHARE: "A bucket may be hidden in part: from the later of two starts to the earlier of two ends.",
    TOGETHER: "Two buckets at once are not twice the time. First make one interval of those that overlap.",
    ANY_ORDER: "An operation may lie within another: time in which both compute counts once.",
}


@reports(lambda _, others: [[[NUMBER] * (2 + bool(other)), bool] for other in others])
def _shares(answer: Any, cases: list[Any], others: list[Any]) -> list[tuple[list[float], bool]]:
    """Run `_often` for each case; ``others`` are the new items of its lists."""
    what = "hidden(…) returns a number, a share"

    def pair(case: Any) -> list[list[Interval]]:
        return [[tuple(interval) for interval in intervals] for intervals in case or ()]

    given = [(pair(case), dict(enumerate(pair(other)))) for case, other in zip(cases, others, strict=True)]
    return [_often(answer, *both, what) for both in given]


# --- 14.3 -------------------------------------------------------------------------------------------------

NAMED = "every rank returns the rank that is late again and again"
BY = "and by how much it is later than the last of the others; hiccups of other ranks change nothing"
QUIET = "nothing but the step's own meeting is sent while the steps run"
STEPS = (7, 9)  # steps in the two calls with one world size; with the other, both have 7
HICCUP = 0.78  # seconds: with two of them, a rank works longer in all than the late one, in 7 steps
LOW, HIGH = 0.04, 0.14  # seconds of work of the other ranks
LATER = 0.08  # seconds by which the other ranks begin their first step later
NOISE = 0.025  # seconds that a busy machine may add between the end of the work and reading the clock
Times = list[list[float]]  # by rank, by step


@question(
    "14.3", "late_rank(work, meet, steps)", {NAMED: 1, BY: 1, QUIET: 1}, rests={BY: NAMED, QUIET: NAMED}
)
def late_rank(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    steps = [rng.sample(STEPS, 2), [STEPS[0]] * 2]  # twice 7: a second call with the same arguments
    both = with_two_world_sizes()(lambda ask, rng, ranks: _late_among(ask, rng, ranks, steps.pop()))
    yield from both(ask, rng)


def _late_among(ask: Ask, rng: random.Random, ranks: int, steps: list[int]) -> Iterator[Finding]:
    lates = rng.sample(range(ranks), 2)
    cases = [_times(rng, ranks, *plan) for plan in zip(lates, steps, (0, steps[1] - 1), strict=True)]
    begins = [[LATER * (rank != late) for rank in range(ranks)] for late in lates]
    results = by_call(ask(_watched_steps, cases, begins, nprocs=ranks))
    for late, times, calls in zip(lates, cases, results, strict=True):
        yield from _of_lateness(calls, late, times)
        during = max(result["during"] for result in calls)
        seen = f"while the steps ran a rank sent something of its own {during} times"
        hint = "Each of them makes the ranks wait once more. What can a rank note for itself, until the end?"
        yield Finding(QUIET, during == 0, seen, hint)


def _times(rng: random.Random, ranks: int, late: int, steps: int, edge: int) -> Times:
    """Draw how long each rank works in each step; ``late`` works longest, except in two steps with a hiccup.

    The hiccups are at ``edge`` and in between. Which other rank comes last changes from step to step; none
    does in half of the steps (with two ranks, one must). In one step, all of them are early.
    """
    others = rng.sample([rank for rank in range(ranks) if rank != late], ranks - 1)
    hiccups = [edge, rng.randrange(1, steps - 1)]
    calm = rng.sample([step for step in range(steps) if step not in hiccups], steps - 2)
    times = [[LOW] * steps for _ in range(ranks)]
    for i, step in enumerate(calm[1:]):
        turns = others[1:] * 2 + others[:1]
        times[turns[i % len(turns)]][step] = HIGH
    for step in hiccups:
        times[others[0]][step] = HICCUP
    times[late] = [HIGH + rng.uniform(0.07, 0.09)] * steps
    return [[seconds + rng.uniform(0, 0.004) for seconds in row] for row in times]


def _later(came: Times, late: int) -> list[float]:
    """Return, for each step, how much later than the last of the others ``late`` was done with its work."""
    others = [of_rank for rank, of_rank in enumerate(came) if rank != late]
    return [mine - max(theirs) for mine, *theirs in zip(came[late], *others, strict=True)]


def _of_lateness(calls: list[Result], late: int, times: Times) -> Iterator[Finding]:
    parts = ("rank", "seconds", "came", "worked")
    names, seconds, came, worked = ([result[part] for result in calls] for part in parts)
    for rank, (took, drawn) in enumerate(zip(worked, times, strict=True)):
        if any(seconds < 0.99 * least for seconds, least in zip(took, drawn, strict=True)):
            raise Refused(f"rank {rank} reports less working time than it worked")
    wrong = first_wrong(name == late for name in names)
    steps = len(times[late])
    seen = f"rank {late} worked longer than the others in {steps - 2} of {steps} steps;"
    seen += f" rank {wrong} returned {names[wrong]:g}"
    hint = "All leave a meeting together, so a step takes the same time on all. What differs?"
    if len(set(names)) > 1:
        hint = "The ranks do not agree. Which of them has seen the others' times?"
        if all(name == rank for rank, name in enumerate(names)):
            hint = "Each names itself. Which of them has seen the others' times?"
    elif names[0] in list(range(len(calls))):
        last = sum(later > 0 for later in _later(times, int(names[0])))
        seen += f", which worked longest in {last} of them"
        hint = "Which rank comes last in most steps? And does your clock also run while a rank sleeps?"
    yield Finding(NAMED, all(name == late for name in names), seen, hint)
    # By arrival or by time worked: on a busy machine, the ranks do not leave a meeting at the same time.
    right, too = (statistics.median(_later(by_rank, late)) for by_rank in (came, worked))
    rank, off = furthest(min(far(late_by, right), far(late_by, too)) for late_by in seconds)
    seen = f"rank {late} is {1e3 * right:.0f} ms later; rank {rank} returned {1e3 * seconds[rank]:.0f} ms"
    mean = statistics.mean(_later(came, late))
    hint = nearest(
        seconds[rank],
        (
            statistics.median(times[late]),
            "That is how long it works. By how much is it later than the last of the others?",
        ),
        (mean, "It includes a hiccup of another rank. Which kind of average is not moved by one?"),
        otherwise="In each step: when it came, and when the last of the others did. Then a typical value.",
        within=NOISE,
    )
    if far(seconds[rank] / 1e3, right) < NOISE:
        hint = "In which unit? Seconds are asked for."
    yield Finding(BY, off < NOISE, seen, hint)


@reports(
    lambda cases, begins: [
        {"rank": NUMBER, "seconds": NUMBER, "during": int}
        | dict.fromkeys(("came", "worked"), [float] * len(times[0]))
        for times in cases
    ]
)
@in_group
def _watched_steps(answer: Any, cases: list[Times], begins: Times) -> list[Result]:
    called = _calls()
    results = []

    def work() -> None:
        done.append(len(called))
        begun = time.perf_counter()
        time.sleep(mine[(len(done) - 1) % len(mine)])
        came.append(time.perf_counter())  # on a clock that all processes of a machine share
        worked.append(came[-1] - begun)

    def meet() -> None:
        dist.all_reduce(torch.zeros(1))
        meetings.append(len(called))

    for times, begin in zip(cases, begins, strict=True):
        mine = times[dist.get_rank()]
        done: list[int] = []
        came: list[float] = []
        worked: list[float] = []
        meetings: list[int] = []
        time.sleep(begin[dist.get_rank()])
        value = answer(work, meet, len(mine))
        if len(done) != len(mine) or len(meetings) != len(mine):
            asked = f"in every call each of the {len(mine)} steps calls work() once, then meet() once"
            raise Refused(f"{asked}; there were {len(done)} and {len(meetings)} calls")
        try:
            rank, seconds = value
        except (TypeError, ValueError):
            asked = "late_rank returns two things, a rank and seconds"
            raise Refused(f"{asked}; it returned {told(value)}") from None
        rank = the_number(rank, "late_rank returns a rank first")
        seconds = the_number(seconds, "late_rank returns seconds as the second")
        results.append({"rank": rank, "seconds": seconds, "came": came, "worked": worked})
        results[-1]["during"] = meetings[-1] - done[0] - len(mine)
    return results


def _calls() -> list[str]:
    """Record, from now on, the name of each collective and each store write of this rank."""
    called: list[str] = []

    def noted(real: Any, name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            called.append(name)
            return real(self, *args, **named)

        return call

    for kind, names in ((dist.ProcessGroup, (*STARTS, "monitored_barrier")), (dist.Store, STORES)):
        for name in filter(partial(hasattr, kind), names):
            setattr(kind, name, noted(getattr(kind, name), name))
    return called
