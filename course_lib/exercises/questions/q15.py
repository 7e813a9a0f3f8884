"""The questions of lesson 15: a stream shared out by files, an exact top-k, a loader that keeps up."""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ..asking import (
    Ask,
    Finding,
    Refused,
    far,
    in_group,
    nearest,
    number,
    question,
    reason,
    told,
    with_two_numbers,
)

# --- 15.1 -------------------------------------------------------------------------------------------------

ONCE = "over all ranks and workers each sample comes once in every epoch"
OPENED = "each file is opened by one reader alone, and no reader has two files more than another"
LAZY = "a sample is read when it is asked for, and not before"
Sample = list[int]  # file, place in it, the reader's process, how many files that has opened so far


def a_stream(answer: Any, form: str) -> None:
    if not (isinstance(answer, type) and issubclass(answer, IterableDataset)):
        raise Refused(f"{form} is a class, an IterableDataset; this is {told(answer)}")


@question(
    "15.1",
    "Files(files, read, rank, world_size)",
    {ONCE: 2, OPENED: 1, LAZY: 1},
    takes=a_stream,
    rests={OPENED: ONCE, LAZY: ONCE},
)
def files(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = []
    for ranks in rng.sample(range(2, 6), 2):
        workers = rng.choice([each for each in (2, 3) if each != ranks])
        many = [rng.randint(4, 7) for _ in range(2 * ranks * workers + rng.randint(1, ranks * workers - 1))]
        few = [rng.randint(2, 5) for _ in range(rng.randint(1, ranks * workers - 1))]
        cases += [(ranks, workers, many), (ranks, workers, few), (ranks, 0, many)]
    (found,) = ask(_streamed, cases)
    for (ranks, workers, sizes), shards in zip(cases, found, strict=True):
        yield from _of_epochs(ranks, workers, sizes, shards["epochs"])
        yield _of_files(ranks, workers, sizes, shards["epochs"])
        seen = f"when the first {shards['taken']} samples had come, {shards['read']} had been read"
        hint = "A file may be larger than the memory. What hands a sample on as soon as it is there?"
        yield Finding(LAZY, shards["read"] <= shards["taken"] + 1, seen, hint)


def _of_epochs(
    ranks: int, workers: int, sizes: list[int], epochs: list[list[list[Sample]]]
) -> Iterator[Finding]:
    """Of what each rank got in each epoch."""
    every = {(file, place) for file, size in enumerate(sizes) for place in range(size)}
    for epoch, shards in enumerate(epochs):
        times = Counter((file, place) for shard in shards for file, place, *_ in shard)
        missing = len(every - times.keys())
        often = Counter(times[each] for each in every)
        seen = f"{ranks} ranks with {workers} workers each, {len(sizes)} files, {len(every)} samples:"
        seen += f" {missing} came not at all, {len(every) - missing - often[1]} more than once"
        seen += ", in the second epoch" * epoch
        hint = "Number all readers, of all ranks, from 0 on. Which files are for which number?"
        if often[ranks * max(1, workers)] == len(every):
            hint = "Every reader reads all of it. Who is reading?"
        elif workers and often[workers] == len(every):
            hint = "Each sample comes once for every worker. Who tells a worker which one it is, and when?"
        elif often[ranks] == len(every):
            hint = "Each sample comes once for every rank. Where do the ranks come in?"
        elif epoch and missing == len(every):
            hint = "The second epoch is empty. What is used up after the first?"
        elif not workers and missing:
            hint = "Without workers the rank itself reads. What is there to ask then?"
        elif missing:
            hint = "Some are for nobody. How many readers are there in all?"
        yield Finding(ONCE, not missing and set(often) == {1}, seen, hint)


def _of_files(ranks: int, workers: int, sizes: list[int], epochs: list[list[list[Sample]]]) -> Finding:
    """Of the first epoch: who read which file, and what else was opened."""
    by: dict[tuple[int, int], set[int]] = {}  # files by reader: a rank, and a process of it
    opened: Counter[tuple[int, int]] = Counter()
    for rank, shard in enumerate(epochs[0]):
        for file, _, process, files_so_far in shard:
            by.setdefault((rank, process), set()).add(file)
            opened[rank, process] = max(opened[rank, process], files_so_far)
    readers = Counter(file for each in by.values() for file in each)
    shared = sum(1 for count in readers.values() if count > 1)
    useless = sum(opened[reader] - len(each) for reader, each in by.items())
    counts = sorted(map(len, by.values())) or [0]
    idle = ranks * max(1, workers) - len(by)
    uneven = counts[-1] - (0 if idle else counts[0]) > 1
    seen = f"{len(sizes)} files, {ranks} ranks with {workers} workers each: {shared} have several readers,"
    seen += f" {useless} were opened in vain, a reader has {0 if idle else counts[0]} to {counts[-1]} files"
    hint = "Deal them out one by one, over all readers of all ranks."
    if shared or useless:
        hint = "To open a file and pass over what is in it costs as much as to read it. Share out the files."
    return Finding(OPENED, not shared and not useless and not uneven, seen, hint)


def _streamed(answer: Any, cases: list[tuple[int, int, list[int]]]) -> list[dict[str, Any]]:
    """Of each case what the ranks' loaders give in two epochs; the ranks come one after the other."""
    found = []
    for ranks, workers, sizes in cases:
        opened: list[int] = []
        given: list[Sample] = []

        def read(
            file: int, sizes: list[int] = sizes, opened: list[int] = opened, given: list[Sample] = given
        ) -> Iterator[Sample]:
            opened.append(file)
            for place in range(sizes[file]):
                given.append([file, place, os.getpid(), len(opened)])
                yield given[-1]

        how: dict[str, Any] = {"batch_size": None, "num_workers": workers}
        if workers:
            how |= {"multiprocessing_context": "fork", "persistent_workers": True}
        names = list(range(len(sizes)))
        epochs: list[list[Any]] = [[], []]
        for rank in range(ranks):
            opened.clear()
            loader = DataLoader(answer(list(names), read, rank, ranks), **how)
            for shards in epochs:
                shards.append([_a_sample(each) for each in loader])
        given.clear()
        taken = 0
        if not workers:
            stream = iter(answer(list(names), read, 0, ranks))
            taken = sum(1 for _ in itertools.islice(stream, 2))
        found.append({"epochs": epochs, "taken": taken, "read": len(given)})
    return found


def _a_sample(value: Any) -> Sample:
    if isinstance(value, list | tuple) and len(value) == 4:
        return list(map(int, value))
    raise Refused(f"the stream gives the samples of read(file), one after the other; it gave {told(value)}")


# --- 15.2 -------------------------------------------------------------------------------------------------

EXACT = "every rank returns the share over all pictures, for each k, also where there are fewer classes"
PADDING = "what the sampler repeats is counted once"
FEW = "no more numbers travel than there are k, and one"
CLOSE = 1e-12  # a share is a quotient of two whole numbers
Case = dict[str, Any]


@question(
    "15.2",
    "top_k(batches, ks, size)",
    {EXACT: 1, PADDING: 1, FEW: 1},
    rests={PADDING: EXACT, FEW: EXACT},
)
def top_k(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    yield from with_two_numbers(rng, partial(_of_shares, ask, rng))


def _of_shares(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    even = ranks * rng.randint(9, 14)
    cases = [
        _case(rng, ranks, even, rng.randint(7, 9), [1, 5]),
        _case(rng, ranks, even + ranks, 3, [1, 2, 5]),
        _case(rng, ranks, even + rng.randint(1, ranks - 1), rng.randint(7, 9), [1, 3, 5]),
    ]
    found = ask(_judged, cases, nprocs=ranks)
    for i, case in enumerate(cases):
        yield from (_of_one_share(i == 2, case, k, [each[i]["shares"] for each in found]) for k in case["ks"])
        sent, most = max(each[i]["sent"] for each in found), len(case["ks"]) + 1
        seen = f"for {len(case['ks'])} k, {sent} numbers came to a rank"
        hint = "The ranks need not know each other's pictures, nor who counted what. What is enough?"
        yield Finding(FEW, sent <= most, seen, hint)


def _case(rng: random.Random, ranks: int, size: int, classes: int, ks: list[int]) -> Case:
    """In which what people count instead is not right by chance."""
    while True:
        case = {"size": size, "classes": classes, "ks": ks, "batch": rng.randint(3, 5)}
        case["seed"] = rng.randrange(2**31)
        shares = [list(_shares(case, k, ranks).values()) for k in ks if k < classes]
        if size % ranks:
            if all(len(set(each)) == len(each) for each in shares):
                return case
        elif all(
            each[0] != own for k in ks if k < classes for each in shares for own in _own(case, k, ranks)
        ):
            return case


def _shares(case: Case, k: int, ranks: int) -> dict[str, float]:
    """What is right, and what people take for it where the sampler repeats some."""
    places, size = _places(case), case["size"]
    repeated = [places[i % size] < k for i in range(-(-size // ranks) * ranks)]
    return {
        "right": sum(place < k for place in places) / size,
        "padding": sum(repeated) / len(repeated),
        "over": sum(repeated) / size,
        "mean": sum(_own(case, k, ranks)) / ranks,
    }


def _own(case: Case, k: int, ranks: int) -> list[float]:
    """By rank, the share of its own pictures."""
    places = _places(case)
    mine = [places[rank::ranks] for rank in range(ranks)]
    return [sum(place < k for place in each) / len(each) for each in mine]


def _of_one_share(padded: bool, case: Case, k: int, shares: list[Any]) -> Finding:
    ranks, size = len(shares), case["size"]
    values = [each.get(str(k)) for each in shares]
    known = _shares(case, k, ranks)
    right = known["right"]
    rank = max(range(ranks), key=lambda rank: far(values[rank], right))
    gap = far(values[rank], right)
    hint = nearest(
        values[rank],
        (100 * right, "A share is a number from 0 to 1."),
        (known["padding"], "The repeated pictures are in it. Which places of which rank hold them?"),
        (known["over"], "The repeated pictures are counted as hits. Which places of which rank hold them?"),
        (known["mean"], "The mean of the ranks' shares. The ranks have judged different numbers."),
        (right * ranks, "It is too large, by the number of ranks."),
        (_own(case, k, ranks)[rank], "That is this rank's own share. What of the others?"),
        otherwise="Which pictures are counted, by whom, and what are they divided by?",
        within=CLOSE,
    )
    if values[rank] is None:
        hint = "What is asked for is a dict, with every k as a key."
    elif CLOSE < gap < 1e-6:
        hint = "That is right to seven digits. Who divides whole numbers, and in which type?"
    seen = f"{ranks} ranks, {size} pictures, {case['classes']} classes, k = {k}:"
    seen += f" rank {rank} returned {values[rank]}, and {round(right * size)} are right"
    return Finding(PADDING if padded else EXACT, gap <= CLOSE, seen, hint)


def _scores(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(case["seed"])
    scores = torch.rand(case["size"], case["classes"], generator=dice, dtype=torch.float64)
    return scores, torch.randint(case["classes"], (case["size"],), generator=dice)


def _places(case: Case) -> list[int]:
    """The label's place in the order of a picture's scores, 0 for the highest."""
    scores, labels = _scores(case)
    return (scores > scores.gather(1, labels[:, None])).sum(1).tolist()


@in_group
def _judged(answer: Any, cases: list[Case]) -> list[dict[str, Any]]:
    from torch.profiler import ProfilerActivity, profile

    rank, ranks, found = dist.get_rank(), dist.get_world_size(), []
    for case in cases:
        scores, labels = _scores(case)
        shard = torch.arange(rank, -(-case["size"] // ranks) * ranks, ranks) % case["size"]
        batches = [(scores[part], labels[part]) for part in shard.split(case["batch"])]
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            value = answer(iter(batches), list(case["ks"]), case["size"])
        if not isinstance(value, dict):
            raise Refused(f"top_k(…) returns a dict, a share for each k; it returned {told(value)}")
        found.append({"shares": {str(k): number(each) for k, each in value.items()}, "sent": _came(profiler)})
    return found


def _came(profiler: Any) -> int:
    """Numbers that came to this rank in its collectives; the profiler names them, with their sizes."""
    count = 0
    for event in profiler.events():
        if event.name.startswith("gloo:"):
            size = sum(math.prod(shape) for shape in event.input_shapes if shape)
            count += size * (dist.get_world_size() if "gather" in event.name else 1)
    return count


# --- 15.3 -------------------------------------------------------------------------------------------------

ORDER = "all batches come, in their order, and an error of the source comes in its place"
AHEAD = "while a batch is used the next ones are made, `ahead` of them and not many more"
STOPS = "when nobody takes batches any more, no more are made"
PATIENCE = 2.0  # seconds, for what is bound to happen


@question("15.3", "prefetch(batches, ahead)", {ORDER: 1, AHEAD: 1, STOPS: 1}, rests={STOPS: AHEAD})
def prefetch(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    aheads = rng.sample([rng.choice((1, 2)), rng.choice((3, 4, 5))], 2)
    cases = [{"ahead": ahead, "count": rng.randint(24, 30), "first": rng.randrange(1000)} for ahead in aheads]
    cases[1]["fails"] = rng.randint(14, 20)
    (found,) = ask(_taken, cases)
    for case, each in zip(cases, found, strict=True):
        yield from _of_batches(case, each)


def _of_batches(case: Case, found: dict[str, Any]) -> Iterator[Finding]:
    right = [case["first"] + i for i in range(case.get("fails", case["count"]))]
    got = found["whole"]
    seen = f"of {len(right)} batches {len(got)} came"
    hint = "Who puts them in, and who takes them out, from which end?"
    if len(got) < len(right) and got == right[: len(got)]:
        hint = "Some are missing at the end. When does the taker know that there are no more?"
    elif sorted(got) == right:
        seen += ", in another order"
    ok = got == right
    if ok:
        expected = "ValueError: no such file" if "fails" in case else ""
        ok = found["error"] == expected
        seen += f"; then the source failed with {expected!r}, and out came {found['error'] or 'nothing'!r}"
        if not expected:
            seen = f"all batches came; then there was {found['error']!r}"
        hint = "Where is it raised, and who hears of it there? It has to travel like a batch."
    yield Finding(ORDER, ok, seen, hint)
    ahead, taken, made, begun = (found[each] for each in ("ahead", "taken", "made", "begun"))
    seen = f"ahead = {ahead}: when {taken} batches had been taken, {made} were made and {begun} begun"
    hint = "It makes the next one only when it is asked for. Who could do that in the meantime?"
    if begun > taken + ahead + 1:
        hint = "It runs far ahead. A batch is large: what makes the maker wait?"
    elif not found["by_the_taker"]:
        hint = "It is ahead, but not by as many as it may be."
    yield Finding(AHEAD, taken + ahead <= made and begun <= taken + ahead + 1, seen, hint)
    left, more = found["threads"], found["after"]
    seen = f"{PATIENCE:g} s after the taker had gone, {left} of your threads were still there,"
    seen += f" and {more} batches had been made in the meantime"
    hint = "A loop that is left early closes its generator. What happens there, and who tells the maker?"
    yield Finding(STOPS, not left and more <= 1, seen, hint)


class _Source:
    """Batches by number; it notes which were begun and made."""

    def __init__(self, case: Case) -> None:
        self.case, self.begun, self.made = case, 0, 0
        self.makers: set[int] = set()  # threads
        self.changed = threading.Condition()

    def __iter__(self) -> Iterator[int]:
        for i in range(self.case["count"]):
            with self.changed:
                self.begun += 1
                self.makers.add(threading.get_ident())
            if i == self.case.get("fails"):
                raise ValueError("no such file")
            with self.changed:
                self.made += 1
                self.changed.notify_all()
            yield self.case["first"] + i

    def reaches(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.made >= count, PATIENCE)


def _taken(answer: Any, cases: list[Case]) -> list[dict[str, Any]]:
    return [_of_a_taker(answer, case) for case in cases]


def _of_a_taker(answer: Any, case: Case) -> dict[str, Any]:
    whole, error = [], ""
    try:
        for batch in answer(iter(_Source(case)), case["ahead"]):
            whole.append(number(batch))
    except TypeError as wrong:
        if not whole:
            raise Refused(f"prefetch(…) gives batches, one after the other; but {reason(wrong)}") from None
        error = reason(wrong)
    except Exception as wrong:
        error = reason(wrong)
    found = {"whole": whole, "error": error, "ahead": case["ahead"]}
    before = set(threading.enumerate())
    source = _Source(case)
    batches = iter(answer(iter(source), case["ahead"]))
    for taken in range(1, 9):  # fewer than there are
        next(batches, None)
        enough = source.reaches(taken + case["ahead"])
        found |= {"taken": taken, "made": source.made, "begun": source.begun}
        found["by_the_taker"] = threading.get_ident() in source.makers
        if not enough or source.begun > taken + case["ahead"] + 1:
            break
    made = source.made
    close: Callable[[], None] = getattr(batches, "close", lambda: None)
    close()
    del batches
    ours = [each for each in threading.enumerate() if each not in before]
    deadline = time.monotonic() + PATIENCE
    for each in ours:
        each.join(max(0.0, deadline - time.monotonic()))
    found |= {"threads": sum(each.is_alive() for each in ours), "after": source.made - made}
    return found
