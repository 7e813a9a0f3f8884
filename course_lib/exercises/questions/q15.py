"""The questions of lesson 15: a stream shared out over ranks and workers, and an exact top-k."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..in_rank.work import in_group, on_each_case, refuse_unless
from ..judging import by_call, far, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, question
from ..shape import NUMBER, reports
from ..wording import number

# --- 15.1 -------------------------------------------------------------------------------------------------

ONCE = "over all ranks and workers each file is opened once"
EVEN = "no reader has two files more than another"


@question(
    "15.1",
    "mine(files, rank, world_size, worker, workers)",
    {ONCE: 3, EVEN: 1},
    depends_on={EVEN: ONCE},
    hints={
        ONCE: {
            "for every worker": "Each file is opened by every worker of a rank. What tells them apart?",
            "for every rank": "Each file is opened on every rank. What tells the ranks apart?",
            "some for nobody": "Some files are for no reader. How many readers are there in all?",
            "another": "Number all readers, of all ranks, from 0 on. Which files go to which number?",
        },
        EVEN: {"in blocks": "Deal the files out one by one, over all readers of all ranks."},
    },
)
def mine(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = []
    for few in (False, True):
        ranks, workers = rng.sample(range(2, 6), 2)
        readers = ranks * workers
        count = rng.randint(2, readers - 1) if few else 2 * readers + rng.randint(2, readers - 2)
        cases.append((rng.sample(range(10_000), count), ranks, workers))
    cases.append((rng.sample(range(10_000), 5), 3, 1))
    (found,) = ask(_shared_out, cases)
    for (files, ranks, workers), shares in zip(cases, found, strict=True):
        times = Counter(itertools.chain.from_iterable(shares))
        often = {times[_name(file)] for file in files}
        words = f"{ranks} ranks with {workers} workers each, {len(files)} files: "
        seen = f"{words}each is opened {' or '.join(map(str, sorted(often)))} times"
        hint = "another"
        if often == {workers} or often == {ranks}:
            hint = "for every worker" if often == {workers} else "for every rank"
        elif 0 in often and max(often) == 1:
            hint = "some for nobody"
        yield Finding(ONCE, often == {1} and len(times) == len(files), seen, hint)
        counts = sorted(map(len, shares))
        seen = f"{words}a reader has {counts[0]} to {counts[-1]} of them"
        yield Finding(EVEN, counts[-1] - counts[0] < 2, seen, "in blocks")


def _name(file: int) -> str:
    return f"{file:04}.tar"


@reports(lambda cases: [[[str, ...]] * (ranks * workers) for _, ranks, workers in cases])
@on_each_case
def _shared_out(answer: Any, files: list[int], ranks: int, workers: int) -> list[list[str]]:
    shares = []
    for rank, worker in itertools.product(range(ranks), range(workers)):
        share = answer([_name(file) for file in files], rank, ranks, worker, workers)
        refuse_unless(isinstance(share, list | tuple), "mine(…) returns a list of files", share)
        shares.append([str(file) for file in share])
    return shares


# --- 15.2 -------------------------------------------------------------------------------------------------

EXACT = "every rank returns the share over all pictures, for each k, also where there are fewer classes"
PADDING = "what the sampler repeats is counted once"
Case = dict[str, Any]


@question(
    "15.2",
    "top_k(batches, ks, size)",
    {EXACT: 3, PADDING: 3},
    depends_on={PADDING: EXACT},
    hints={
        EXACT: {
            "own share": "That is this rank's own share. What about the others?",
            "another share": "Which pictures are counted, and by which rank? Is the label among the k "
            "highest scores, for each k?",
        },
        PADDING: {
            "repeats": "The repeated pictures are in it. Which places of which rank hold them?",
            "mean of shares": "That is the mean of the ranks' shares. The ranks have evaluated different "
            "numbers of pictures.",
            "another count": "Which ranks have a repeated picture, and which have none?",
        },
    },
)
@with_two_world_sizes()
def top_k(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    even, ks = ranks * rng.randint(9, 14), [4, *rng.sample([1, 2, 3], 2)]
    cases = [
        _case(rng, ranks, even, rng.randint(7, 9), ks),
        _case(rng, ranks, even, 3, [5, 1, 2]),
        _case(rng, ranks, even + rng.randint(1, max(1, ranks - 2)), rng.randint(7, 9), ks),
    ]
    results = by_call(ask(_counted, cases, nprocs=ranks))
    for what, case, shares in zip((EXACT, EXACT, PADDING), cases, results, strict=True):
        for i, k in enumerate(case["ks"]):
            known = _shares(case, k)
            values = [of_rank[i] for of_rank in shares]
            rank, gap = furthest(far(value, known["right"]) for value in values)
            seen = f"{ranks} ranks, {case['size']} pictures, {case['classes']} classes, k = {k}: rank {rank} "
            seen += f"returned {values[rank]}, and {known['right'] * case['size']:.0f} are right"
            wrong = (
                (known["padding"], "repeats"),
                (known["over"], "repeats"),
                (known["mean"], "mean of shares"),
            )
            hint = nearest(values[rank], *wrong, otherwise="another count", within=1e-6)
            if what == EXACT:
                own = len({str(value) for value in values}) > 1
                hint = "own share" if own else "another share"
            yield Finding(what, gap < 1e-6, seen, hint)


def _case(rng: random.Random, ranks: int, size: int, classes: int, ks: list[int]) -> Case:
    """Draw a case in which no wrong count is right by chance; the last batch, for example, is shorter."""
    batch = rng.choice([length for length in (3, 4, 5) if -(-size // ranks) % length])
    while True:
        case = {"size": size, "classes": classes, "ks": ks, "batch": batch, "ranks": ranks}
        case["seed"] = rng.randrange(2**31)
        shares = [_shares(case, k) for k in ks if k < classes]
        if size % ranks:
            wrong = [{each[what] for what in ("right", "padding", "over", "mean")} for each in shares]
            if all(len(values) == 4 for values in wrong):
                return case
        elif all(each["right"] not in each["own"] for each in shares):
            return case


def _shares(case: Case, k: int) -> Any:
    """Return the right share, and common wrong ones."""
    scores, labels = _scores(case)
    size, ranks = case["size"], case["ranks"]
    right = ((scores > scores.gather(1, labels[:, None])).sum(1) < k).tolist()
    repeated = [right[i % size] for i in range(-(-size // ranks) * ranks)]
    own = [sum(right[rank::ranks]) / len(right[rank::ranks]) for rank in range(ranks)]
    return {
        "right": sum(right) / size,
        "padding": sum(repeated) / len(repeated),
        "over": sum(repeated) / size,
        "mean": sum(own) / ranks,
        "own": own,
    }


def _scores(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case["seed"])
    scores = torch.rand(case["size"], case["classes"], generator=generator, dtype=torch.float64)
    labels = torch.randint(case["classes"], (case["size"],), generator=generator)
    if rest := case["size"] % case["ranks"]:
        # The repeated pictures are hits, and so is the last one of each rank that repeats none: each matters.
        # The last rank's last but one is a miss, so that leaving it out does not correct a count.
        ends = [*range(case["ranks"] - rest), *range(case["size"] - rest, case["size"])]
        labels[ends] = scores[ends].argmax(1)
        labels[-rest - 1] = scores[-rest - 1].argmin()
    return scores, labels


@reports(lambda cases: [[(NUMBER, str, None)] * len(case["ks"]) for case in cases])
@in_group
def _counted(answer: Any, cases: list[Case]) -> list[list[float | str | None]]:
    rank, ranks, results = dist.get_rank(), dist.get_world_size(), []
    for case in cases:
        scores, labels = _scores(case)
        shard = torch.arange(rank, -(-case["size"] // ranks) * ranks, ranks) % case["size"]
        batches = [(scores[part], labels[part]) for part in shard.split(case["batch"])]
        value = answer(batches, list(case["ks"]), case["size"])
        refuse_unless(isinstance(value, dict), "top_k(…) returns a dict, a share for each k", value)
        results.append([number(value[k]) if k in value else None for k in case["ks"]])
    return results
