"""The questions of lesson 15: a stream sharded by files, an exact top-k, a loader that prefetches."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ..in_rank.retention import TrackedList
from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, on_each_case, refuse_unless
from ..judging import by_call, far, furthest, nearest, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, reason, told

# --- 15.1 -------------------------------------------------------------------------------------------------

ONCE = "over all ranks and workers each sample comes once in every epoch"
OPENED = "each file is opened by one reader alone, and no reader has two files more than another"
LAZY = "a sample is read when it is asked for, and not before"
Sample = list[int]  # file, place in it, the reader's process, number of files it has opened so far


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
    for ranks, first in zip(rng.sample(range(2, 6), 2), (True, False), strict=True):  # workers are slow
        workers = rng.choice([count for count in (2, 3) if count != ranks])
        readers = ranks * workers  # at least 6; blocks of files, with or without a rest, must be uneven
        many = [rng.randint(4, 7) for _ in range(2 * readers + rng.randint(2, readers - 2))]
        few = [rng.randint(2, 5) for _ in range(rng.randint(1, readers - 1))]
        cases += [(ranks, workers, many if first else few), (ranks, 0, few[: ranks - 1] if first else many)]
    (results,) = ask(_streamed, cases)
    for (ranks, workers, sizes), shards in zip(cases, results, strict=True):
        yield from _of_epochs(ranks, workers, sizes, shards["epochs"])
        yield _of_files(ranks, workers, sizes, shards["epochs"])
        for epoch, (taken, read, kept) in enumerate(shards["out_of_step"]):
            seen = f"when {taken} samples had come, {read} had been read" + ", in the second epoch" * epoch
            hint = "A file may be larger than the memory. What hands a sample on as soon as it is there?"
            if read < taken:
                hint = "A file may be larger than the memory. Where do these come from?"
            yield Finding(LAZY, taken == read, seen, hint)  # 0 of 0: a rank may have no file
            seen = f"when {taken} samples had come, {kept} of them were still there"
            seen += ", in the second epoch" * epoch
            hint = "A file may be larger than the memory. What still holds the samples that were handed on?"
            yield Finding(LAZY, not kept, seen, hint)


def _of_epochs(
    ranks: int, workers: int, sizes: list[int], epochs: list[list[list[Sample]]]
) -> Iterator[Finding]:
    """Check what each rank got in each epoch."""
    every = {(file, place) for file, size in enumerate(sizes) for place in range(size)}
    for epoch, shards in enumerate(epochs):
        times = Counter((file, place) for shard in shards for file, place, *_ in shard)
        missing = len(every - times.keys())
        often = Counter(times[sample] for sample in every)
        seen = f"{ranks} ranks with {workers} workers each, {len(sizes)} files, {len(every)} samples:"
        seen += f" {missing} never came, {len(every) - missing - often[1]} came more than once"
        seen += ", in the second epoch" * epoch
        hint = "Number all readers, of all ranks, from 0 on. Which files are for which number?"
        if often[ranks * max(1, workers)] == len(every):
            hint = "Every reader reads everything. How does a reader know which part is its own?"
        elif workers and often[workers] == len(every):
            hint = "Each sample comes once for every worker. What tells a worker which one it is, and when?"
        elif epoch and missing == len(every):
            hint = "The second epoch is empty. What is used up after the first?"
        elif missing:
            hint = "Some samples are for no reader. How many readers are there in all, and do they agree on "
            hint += "the order of the files, and on who is who?"
        yield Finding(ONCE, not missing and set(often) == {1}, seen, hint)


def _of_files(ranks: int, workers: int, sizes: list[int], epochs: list[list[list[Sample]]]) -> Finding:
    """Check, for the first epoch, who read which file and what else was opened."""
    by: dict[tuple[int, int], set[int]] = {}  # files by reader: a rank and one of its processes
    opened: Counter[tuple[int, int]] = Counter()
    for rank, shard in enumerate(epochs[0]):
        for file, _, process, files_so_far in shard:
            by.setdefault((rank, process), set()).add(file)
            opened[rank, process] = max(opened[rank, process], files_so_far)
    readers = Counter(file for files in by.values() for file in files)
    shared = sum(1 for count in readers.values() if count > 1)
    useless = sum(opened[reader] - len(files) for reader, files in by.items())
    counts = sorted(map(len, by.values())) or [0]
    idle = ranks * max(1, workers) - len(by)
    uneven = counts[-1] - (0 if idle else counts[0]) > 1
    seen = f"{len(sizes)} files, {ranks} ranks with {workers} workers each: {shared} have several readers,"
    seen += f" {useless} were opened in vain, a reader has {0 if idle else counts[0]} to {counts[-1]} files"
    hint = "Deal them out one by one, over all readers of all ranks."
    if shared or useless:
        hint = "Opening a file and skipping its samples takes as long as reading it. Share out the files."
    return Finding(OPENED, not shared and not useless and not uneven, seen, hint)


@reports(
    lambda cases: [
        {"epochs": [[[[int] * 4, ...]] * ranks] * 2, "out_of_step": [[int] * 3] * 2} for ranks, *_ in cases
    ]
)
@on_each_case
def _streamed(answer: Any, ranks: int, workers: int, sizes: list[int]) -> Result:
    """Return what the ranks' loaders give in two epochs; one rank runs after the other."""
    folder = _Folder(sizes)
    how: dict[str, Any] = {"batch_size": None, "num_workers": workers}
    if workers:
        how |= {"multiprocessing_context": "fork", "persistent_workers": True}
    epochs: list[list[Any]] = [[], []]
    for rank in range(ranks):
        _Name.salt = rank
        folder.opened.clear()
        loader = DataLoader(answer(list(folder.names), folder.read, rank, ranks), **how)
        for shards in epochs:
            shards.append([_a_sample(sample) for sample in loader])
    stream = answer(list(folder.names), folder.read, 0, ranks)
    return {"epochs": epochs, "out_of_step": [_out_of_step(stream, folder) for _ in epochs]}


class _Name(str):
    """A name with a different hash on each rank, as on real machines; here one process plays all ranks."""

    salt: ClassVar[int] = 0

    def __hash__(self) -> int:
        return hash((self.salt, str(self)))


class _Folder:
    """Files by name, in random order; it records which were opened and which samples were read."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.opened: list[str] = []
        self.given: list[weakref.ref[TrackedList]] = []
        numbers = torch.randperm(10_000)[: len(sizes)].tolist()
        self.names: list[str] = [_Name(f"{number:04}.tar") for number in numbers]

    def read(self, name: str) -> Iterator[Sample]:
        self.opened.append(name)
        return self._samples(self.names.index(name))

    def _samples(self, file: int) -> Iterator[Sample]:
        for place in range(self.sizes[file]):
            yield self._noted([file, place, os.getpid(), len(self.opened)])

    def _noted(self, sample: Sample) -> TrackedList:
        """Return the sample, held by the caller alone, and keep a weak reference to it."""
        given = TrackedList(sample)
        self.given.append(weakref.ref(given))
        return given


def _out_of_step(stream: Any, folder: _Folder) -> tuple[int, int, int]:
    """Return the numbers of samples taken and read when they first differ, or at the end of an epoch.

    The third number is how many of them are still held, if more than one per file opened so far, and one.
    """
    folder.opened.clear()
    folder.given.clear()
    taken = kept = 0
    for taken, _ in enumerate(stream, start=1):
        kept = sum(sample() is not None for sample in folder.given)
        kept *= kept > len(folder.opened) + 1
        if len(folder.given) != taken or kept:
            break
    return taken, len(folder.given), kept


def _a_sample(value: Any) -> Sample:
    if isinstance(value, list | tuple) and len(value) == 4:
        return list(map(int, value))
    raise Refused(f"the stream gives the samples of read(file), one after the other; it gave {told(value)}")


# --- 15.2 -------------------------------------------------------------------------------------------------

EXACT = "every rank returns the share over all pictures, for each k, also where there are fewer classes"
PADDING = "what the sampler repeats is counted once"
FEW = "at most len(ks) + 1 numbers travel"
CLOSE = 1e-12  # more than several divisions round off; a single one of whole numbers has only one result
Case = dict[str, Any]


@question(
    "15.2", "top_k(batches, ks, size)", {EXACT: 1, PADDING: 1, FEW: 1}, rests={PADDING: EXACT, FEW: EXACT}
)
@with_two_world_sizes()
def top_k(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    even, ks = ranks * rng.randint(9, 14), [4, *rng.sample([1, 2, 3], 2)]
    cases = [
        _case(rng, ranks, even, rng.randint(7, 9), ks),
        _case(rng, ranks, even, 3, [5, 1, 2]),
        _case(rng, ranks, even + rng.randint(1, max(1, ranks - 2)), rng.randint(7, 9), ks),
    ]
    for case, results in zip(cases, by_call(ask(_counted, cases, nprocs=ranks)), strict=True):
        what, shares = PADDING if case is cases[2] else EXACT, [result["shares"] for result in results]
        yield from (_of_one_share(what, case, k, shares) for k in case["ks"])
        sent, most = max(result["sent"] for result in results), len(case["ks"]) + 1
        seen = f"for {len(case['ks'])} values of k, {sent} numbers came to a rank; {most} are enough"
        hint = "The ranks need not know each other's pictures, nor which rank counted what. What is enough?"
        yield Finding(FEW, sent <= most, seen, hint)


def _case(rng: random.Random, ranks: int, size: int, classes: int, ks: list[int]) -> Case:
    """Draw a case in which a wrong count is not right by chance: the last batch is shorter, for one."""
    batch = rng.choice([length for length in (3, 4, 5) if -(-size // ranks) % length])
    while True:
        case = {"size": size, "classes": classes, "ks": ks, "batch": batch, "ranks": ranks}
        case["seed"] = rng.randrange(2**31)
        shares = [list(_shares(case, k, ranks).values()) for k in ks if k < classes]
        if size % ranks:
            if all(len(set(values)) == len(values) for values in shares):
                return case
        elif all(
            values[0] != own for k in ks if k < classes for values in shares for own in _own(case, k, ranks)
        ):
            return case


def _shares(case: Case, k: int, ranks: int) -> dict[str, float]:
    """Return the right share, and common wrong ones where the sampler repeats pictures."""
    places, size = _places(case), case["size"]
    repeated = [places[i % size] < k for i in range(-(-size // ranks) * ranks)]
    return {
        "right": sum(place < k for place in places) / size,
        "padding": sum(repeated) / len(repeated),
        "over": sum(repeated) / size,
        "mean": sum(_own(case, k, ranks)) / ranks,
    }


def _own(case: Case, k: int, ranks: int) -> list[float]:
    """Return each rank's share over its own pictures."""
    places = _places(case)
    mine = [places[rank::ranks] for rank in range(ranks)]
    return [sum(place < k for place in pictures) / len(pictures) for pictures in mine]


def _of_one_share(what: str, case: Case, k: int, shares: list[Any]) -> Finding:
    ranks, size = len(shares), case["size"]
    values = [of_rank.get(str(k)) for of_rank in shares]
    known = _shares(case, k, ranks)
    right = known["right"]
    rank, gap = furthest(far(value, right) for value in values)
    hint = nearest(
        values[rank],
        (known["padding"], "The repeated pictures are in it. Which places of which rank hold them?"),
        (
            known["mean"],
            "That is the mean of the ranks' shares. The ranks have evaluated different numbers of pictures.",
        ),
        (_own(case, k, ranks)[rank], "That is this rank's own share. What about the others?"),
        otherwise="Which pictures are counted, by whom? By what are they divided, how often, in which type?",
        within=CLOSE,
    )
    if values[rank] is None:
        hint = "A dict is asked for, with every k of this call as a key."
    seen = f"{ranks} ranks, {size} pictures, {case['classes']} classes, k = {k}:"
    seen += f" rank {rank} returned {values[rank]}, and {round(right * size)} are right"
    return Finding(what, gap == 0, seen, hint)


def _scores(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case["seed"])
    scores = torch.rand(case["size"], case["classes"], generator=generator, dtype=torch.float64)
    labels = torch.randint(case["classes"], (case["size"],), generator=generator)
    if rest := case["size"] % case["ranks"]:
        # Hits are the repeated pictures, and the last one of each rank that repeats none: each one counts.
        # The last rank's last but one is a miss: leaving it out repairs no count.
        ends = [*range(case["ranks"] - rest), *range(case["size"] - rest, case["size"])]
        labels[ends] = scores[ends].argmax(1)
        labels[-rest - 1] = scores[-rest - 1].argmin()
    return 1000 + scores / 2**20, labels  # in float32, many would be equal


def _places(case: Case) -> list[int]:
    """Return the position of each label among its picture's scores, 0 for the highest."""
    scores, labels = _scores(case)
    return (scores > scores.gather(1, labels[:, None])).sum(1).tolist()


class _Batches:
    """Batches that come once, as from an iterator; the same object is then refilled with others."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.waiting:
            raise StopIteration
        return self.waiting.pop(0)


@reports(lambda cases: [{"shares": {str: (NUMBER, str)}, "sent": int}] * len(cases))
@in_group
def _counted(answer: Any, cases: list[Case]) -> list[Result]:
    rank, ranks, results = dist.get_rank(), dist.get_world_size(), []
    batches = _Batches()
    ks: list[int] = []
    for case in cases:
        scores, labels = _scores(case)
        shard = torch.arange(rank, -(-case["size"] // ranks) * ranks, ranks) % case["size"]
        batches.waiting = [(scores[part], labels[part]) for part in shard.split(case["batch"])]
        ks[:] = case["ks"]
        with record_traffic() as travelled:
            value = answer(batches, ks, case["size"])
        refuse_unless(isinstance(value, dict), "top_k(…) returns a dict, a share for each k", value)
        shares = {str(k): number(value[k]) for k in case["ks"] if k in value}
        results.append({"shares": shares, "sent": travelled.received()})
    return results


# --- 15.3 -------------------------------------------------------------------------------------------------

ORDER = "all batches come, in their order, and an error of the source comes in its place"
AHEAD = "while a batch is used the next ones are made, `ahead` of them and not many more"
STOPS = "when no more batches are taken, no more are made"
PATIENCE = 2.0  # seconds to wait for what is bound to happen
SETTLED = 0.2  # seconds to wait for what must not happen: a producer that may go on has done so by then
TAKES = 7  # batches that a consumer takes beside the first `ahead`, if all goes well
SLOW, LINES = 0.02, 40  # seconds added to each line that closes a generator, and to how many lines
FAILURES = (ValueError, OSError, KeyError, ArithmeticError, UnicodeError, AssertionError)
ODD = (None, (), 0, ValueError("no error, but a batch"))  # batches, too, reported as -1.0, -2.0, …


@question("15.3", "prefetch(batches, ahead)", {ORDER: 1, AHEAD: 1, STOPS: 1}, rests={STOPS: AHEAD})
def prefetch(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    aheads = rng.sample([1, rng.choice((3, 4, 5))], 2)
    cases = [_source(rng, ahead, rng.randint(24, 30)) for ahead in aheads]
    cases[1] |= {"fails": rng.randint(14, 20), "failure": rng.randrange(len(FAILURES))}
    cases.append(_source(rng, aheads[0] + 1, rng.randint(1, aheads[0])))  # fewer batches than `ahead`
    cases.append(_source(rng, aheads[1], 0))
    cases.append(_source(rng, aheads[1], 9) | {"fails": 0, "failure": rng.randrange(len(FAILURES))})
    (results,) = ask(_taken, cases)
    for case, result in zip(cases, results, strict=True):
        yield _of_batches(case, result)
        if "taken" in result:
            yield from _of_the_producer(case["ahead"], result)


def _source(rng: random.Random, ahead: int, count: int) -> Case:
    odd = rng.sample(range(1, 13), len(ODD))  # their places
    return {"ahead": ahead, "count": count, "first": rng.randrange(1000), "odd": odd}


def _of_batches(case: Case, result: Result) -> Finding:
    right = [case["first"] + i for i in range(case["fails"] if "fails" in case else case["count"])]
    right = [-1.0 - case["odd"].index(i) if i in case["odd"] else batch for i, batch in enumerate(right)]
    got = result["whole"]
    seen = f"of {len(right)} batches {len(got)} came"
    hint = "In which order are they put in, and from which end are they taken?"
    if len(got) < len(right) and got == right[: len(got)]:
        hint = "Some are missing at the end. When does the consumer know that there are no more?"
        if right[len(got)] < 0:
            seen += f"; the next one was {ODD[int(-right[len(got)]) - 1]!r}"
            hint = "A batch may be any object. "
            hint += "How does the consumer tell one from the end, or from an error?"
    failure = FAILURES[case["failure"]].__name__ if "fails" in case else ""
    if got == right or (failure and result["error"] and got == right[: len(got)]):
        seen += f"; the source then raised {failure}" if failure else "; the source raised nothing"
        seen += f", and {result['error'] or 'nothing'} came out of the generator"
        hint = "In which thread is it raised? It has to be passed on to the consumer, like a batch."
        if not failure:
            hint = "The end of the batches is no error."
        elif result["error"]:
            seen += ", which is another object"
            hint = "What the consumer catches has to be the very error that the iterator raised."
    return Finding(ORDER, got == right and result["same"], seen, hint)


def _of_the_producer(ahead: int, result: Result) -> Iterator[Finding]:
    taken, made, begun = (result[name] for name in ("taken", "made", "begun"))
    seen = f"ahead = {ahead}: when {taken} batches had been taken, {made} were made and {begun} begun"
    hint = "It is ahead, but not by as many as it may be."
    if begun > taken + ahead + 1:
        hint = "It runs far ahead. A batch is large: what makes the producer wait?"
    elif result["by_the_consumer"] or made == taken:
        hint = "It makes the next one only when it is asked for. What could do that in the meantime?"
    elif result["held_up"]:
        seen += "; the consumer asked for one that was made, and waited until the next was made, too"
        hint = "It is ahead, but the consumer waits for the producer. When may it have what is ready?"
    fine = taken == ahead + TAKES and not (result["by_the_consumer"] or result["held_up"])
    yield Finding(AHEAD, fine and taken + ahead <= made and begun <= taken + ahead + 1, seen, hint)
    seen = (
        f"{PATIENCE:g} s after the consumer had gone, {result['threads']} of your threads were still there,"
    )
    seen += f" and {result['after']} batches had been begun in the meantime"
    hint = "A loop that is left early closes its generator. What happens there, and what tells the producer?"
    if result["closing"] > PATIENCE:
        seen = f"when the consumer went, the generator took {result['closing']:.1f} s to close"
    elif result["more"] and not (result["after"] or result["threads"]):
        seen = "the consumer went while the second batch was in the making; "
        seen += f"{result['more']} more were begun then"
        hint = "Batches that were requested before the consumer left are no longer wanted. What cancels them?"
    elif result["after"] == 1:
        hint = "The producer waits for room. What does it do first when it may go on?"
        hint += " And what must it know by then?"
    ok = not any(result[name] for name in ("threads", "after", "more")) and result["closing"] <= PATIENCE
    yield Finding(STOPS, ok, seen, hint)


class _Source:
    """A source of numbered batches that counts those begun and made; number ``waits_at`` waits for ``go``."""

    def __init__(self, case: Case, waits_at: int | None = None) -> None:
        self.case, self.waits_at, self.begun, self.made = case, waits_at, 0, 0
        self.producers: set[int] = set()  # thread IDs
        self.changed, self.go = threading.Condition(), threading.Event()
        self.held_up = False
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[object]:
        for i in range(self.case["count"]):
            with self.changed:
                self.begun += 1
                self.producers.add(threading.get_ident())
                self.changed.notify_all()
            if i == self.case.get("fails"):
                self.failure = FAILURES[self.case["failure"]]("no such file")
                raise self.failure
            if i == self.waits_at:
                self.held_up = not self.go.wait(PATIENCE)
            with self.changed:
                self.made += 1
                self.changed.notify_all()
            odd = self.case["odd"]
            yield ODD[odd.index(i)] if i in odd else torch.full((2,), self.case["first"] + i)

    def reaches(self, count: int, which: str = "made") -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: getattr(self, which) >= count, PATIENCE)


OF_ALL: Result = {"whole": [(NUMBER, str), ...], "error": str, "same": bool}
OF_A_CONSUMER: Result = dict.fromkeys(("taken", "made", "begun", "threads", "after", "more"), int)
OF_A_CONSUMER |= {"by_the_consumer": bool, "held_up": bool, "closing": float}


@reports(lambda cases: [OF_ALL | (OF_A_CONSUMER if case["count"] > 20 else {}) for case in cases])
@on_each_case
def _taken(answer: Any, case: Case) -> Result:
    result = _of_all_batches(answer, case)
    return result | (_of_a_consumer(answer, {**case, "fails": None, "odd": []}) if case["count"] > 20 else {})


def _of_all_batches(answer: Any, case: Case) -> Result:
    whole, error, source = [], None, _Source(case)
    try:
        for batch in answer(iter(source), case["ahead"]):
            odd = [-1.0 - i for i, odd_one in enumerate(ODD) if odd_one is batch]
            whole.append(odd[0] if odd else number(batch[0]) if _is_ours(batch) else told(batch))
            time.sleep(0.002)  # so that the producer is ahead
    except Exception as wrong:
        error = wrong
    if isinstance(error, TypeError) and not whole:
        raise Refused(f"prefetch(…) gives batches, one after the other; but {reason(error)}")
    return {"whole": whole, "error": reason(error) if error else "", "same": error is source.failure}


def _is_ours(batch: Any) -> bool:
    return isinstance(batch, torch.Tensor) and batch.shape == (2,)


@contextlib.contextmanager
def _slowly() -> Iterator[None]:
    """Slow down each line of an answer in this thread, so that another thread can do much in between."""
    before, left, library = sys.gettrace(), LINES, os.path.dirname(threading.__file__)

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename.startswith(library):
            return None
        if event == "line" and left:
            left -= 1
            time.sleep(SLOW)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _of_a_consumer(answer: Any, case: Case) -> Result:
    """Take some batches, a few of them while one is held in the making, then leave; return what is seen."""
    ahead = case["ahead"]
    before = set(threading.enumerate())
    source = _Source(case, waits_at=ahead + 1)
    batches = iter(answer(iter(source), ahead))
    result: Result = {}
    for taken in range(1, ahead + TAKES + 1):  # fewer than there are
        next(batches, None)
        if 1 < taken <= ahead:  # made before the held one
            source.reaches(ahead + 2, "begun")
            continue
        if taken == ahead + 1:
            source.go.set()
        enough = source.reaches(taken + ahead)
        if taken in (1, ahead + TAKES):
            time.sleep(SETTLED)
        result = {"taken": taken, "made": source.made, "begun": source.begun}
        if not enough or source.begun > taken + ahead + 1:
            break
    source.go.set()
    result |= {"by_the_consumer": threading.get_ident() in source.producers, "held_up": source.held_up}
    begun, left = source.begun, time.monotonic()
    close: Callable[[], None] = getattr(batches, "close", lambda: None)
    with _slowly():
        close()
        del batches, close
    closing = time.monotonic() - left
    ours = [thread for thread in threading.enumerate() if thread not in before]
    for thread in ours:
        thread.join(max(0.0, left + PATIENCE - time.monotonic()))
    threads = sum(thread.is_alive() for thread in ours)
    result |= {"threads": threads, "after": source.begun - begun, "closing": closing}
    return result | {"more": _begun_for_nobody(answer, case) if result["made"] > result["taken"] else 0}


def _begun_for_nobody(answer: Any, case: Case) -> int:
    """Return how many batches are begun after the consumer left while the second was in the making."""
    before = set(threading.enumerate())
    source = _Source(case, waits_at=1)
    batches = iter(answer(iter(source), case["ahead"]))
    next(batches, None)
    source.reaches(2, "begun")
    timer = threading.Timer(SETTLED, source.go.set)  # close() may wait for it
    timer.start()
    getattr(batches, "close", lambda: None)()
    timer.join()
    until = time.monotonic() + PATIENCE
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, until - time.monotonic()))
    return max(0, source.begun - 2)
