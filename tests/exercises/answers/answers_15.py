"""What people answer in exercise 15, wrong and right (see `answers`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from tests.exercises.answers import right, wrong

ONCE = "over all ranks and workers each sample comes once in every epoch"
OPENED = "each file is opened by one reader alone, and no reader has two files more than another"
LAZY = "a sample is read when it is asked for, and not before"


class Base(IterableDataset):
    def __init__(self, files, read, rank, world_size):
        self.files, self.read, self.rank, self.world_size = files, read, rank, world_size

    def reader(self):
        """This reader's number, and how many there are."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return self.rank * workers + worker, self.world_size * workers


@wrong("15.1", hint="Every reader reads everything.")
class ReadsAll(Base):
    def __iter__(self):
        for file in self.files:
            yield from self.read(file)


@wrong("15.1", hint="Each sample comes once for every worker")
class ForgetsTheWorkers(Base):
    def __iter__(self):
        for file in self.files[self.rank :: self.world_size]:
            yield from self.read(file)


@wrong("15.1", hint="Number all readers, of all ranks")
class ForgetsTheRanks(Base):
    def __iter__(self):
        info = get_worker_info()
        for file in self.files[info.id :: info.num_workers] if info else self.files:
            yield from self.read(file)


@wrong("15.1", ONCE, hint="Opening a file and skipping its samples takes as long as reading it.")
class SharesSamples(Base):
    def __iter__(self):
        number, readers = self.reader()
        every = itertools.chain.from_iterable(map(self.read, self.files))
        yield from itertools.islice(every, number, None, readers)


@wrong("15.1", ONCE, LAZY, hint="Deal them out one by one")
class InBlocks(Base):
    """The last reader has few, or none."""

    def __iter__(self):
        number, readers = self.reader()
        each = len(self.files) // readers
        end = (number + 1) * each if number < readers - 1 else None
        for file in self.files[number * each : end]:
            yield from self.read(file)


@wrong("15.1", hint="Some samples are for no reader")
class LeavesTheRest(Base):
    def __iter__(self):
        number, readers = self.reader()
        each = len(self.files) // readers
        for file in self.files[number * each : (number + 1) * each]:
            yield from self.read(file)


@wrong("15.1", hint="The second epoch is empty")
class OnceOnly(Base):
    def __init__(self, *given):
        super().__init__(*given)
        self.left = None

    def __iter__(self):
        if self.left is None:
            number, readers = self.reader()
            self.left = self.files[number::readers]
        while self.left:
            yield from self.read(self.left.pop(0))


@wrong("15.1", ONCE, OPENED, hint="A file may be larger than the memory")
class WholeFiles(Base):
    def __iter__(self):
        number, readers = self.reader()
        for file in self.files[number::readers]:
            yield from list(self.read(file))


@wrong("15.1", hint="NoneType")
class NeedsWorkers(Base):
    def __iter__(self):
        info = get_worker_info()
        number = self.rank * info.num_workers + info.id
        for file in self.files[number :: self.world_size * info.num_workers]:
            yield from self.read(file)


@wrong("15.1", ONCE, LAZY, hint="Opening a file and skipping its samples takes as long as reading it.")
class OpensAll(Base):
    def __iter__(self):
        number, readers = self.reader()
        opened = [self.read(file) for file in self.files]
        for samples in opened[number::readers]:
            yield from samples


@wrong("15.1", ONCE, OPENED, hint="What still holds the samples that were handed on?")
class KeepsThem(Base):
    """Reads in the first epoch alone, and has all in memory from then on."""

    kept = None

    def __iter__(self):
        if self.kept is not None:
            yield from self.kept
            return
        number, readers = self.reader()
        kept = []
        for file in self.files[number::readers]:
            for sample in self.read(file):
                kept.append(sample)
                yield sample
        self.kept = kept


@wrong("15.1", ONCE, OPENED, hint="Where do these come from?")
class KeepsCopies(KeepsThem):
    """The same, of which nobody sees what is kept."""

    def __init__(self, files, read, rank, world_size):
        super().__init__(files, lambda file: map(list, read(file)), rank, world_size)


@wrong("15.1", ONCE, OPENED, hint="What hands a sample on as soon as it is there?")
class InPairs(Base):
    def __iter__(self):
        number, readers = self.reader()
        for file in self.files[number::readers]:
            samples = iter(self.read(file))
            while pair := list(itertools.islice(samples, 2)):
                yield from pair


@wrong("15.1", hint="on who is who?")
class FromASet(Base):
    """Its order is another on each machine."""

    def __iter__(self):
        number, readers = self.reader()
        for file in list(set(self.files))[number::readers]:
            yield from self.read(file)


@right("15.1")
@dataclasses.dataclass
class AsADataclass(IterableDataset):
    files: list
    read: object
    rank: int
    world_size: int

    @functools.cached_property
    def of_the_rank(self):
        return sorted(self.files)[self.rank :: self.world_size]

    def __iter__(self):
        info = get_worker_info()
        part = slice(info.id, None, info.num_workers) if info else slice(None)
        return (sample for file in self.of_the_rank[part] for sample in self.read(file))


@right("15.1")
class EvenBlocksInTurns(Base):
    """A sample of each of its files in turn."""

    def __iter__(self):
        number, readers = self.reader()
        size = len(self.files)
        mine = self.files[size * number // readers : size * (number + 1) // readers]
        left = [iter(self.read(file)) for file in mine]
        while left:
            for samples in list(left):
                try:
                    yield next(samples)
                except StopIteration:
                    left.remove(samples)


EXACT = "every rank returns the share over all pictures, for each k, also where there are fewer classes"
PADDING = "what the sampler repeats is counted once"
FEW = "at most len(ks) + 1 numbers travel"


def hits_of(batches, ks, size=None):
    """This rank's hits for each k, and its pictures, in int64; without what lies beyond `size`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts, position = torch.zeros(len(ks) + 1, dtype=torch.int64), rank
    for scores, labels in batches:
        places = torch.arange(position, position + ranks * len(labels), ranks)
        position += ranks * len(labels)
        keep = places < size if size else torch.ones(len(labels), dtype=torch.bool)
        best = scores.topk(min(max(ks), scores.shape[1])).indices == labels[:, None]
        for i, k in enumerate(ks):
            counts[i] += (best[:, :k].any(1) & keep).sum()
        counts[-1] += keep.sum()
    return counts


def shares(counts, ks):
    return {k: count / counts[-1].item() for k, count in zip(ks, counts.tolist(), strict=False)}


@wrong("15.2", EXACT, FEW, hint="The repeated pictures are in it")
def keeps_the_padding(batches, ks, size):
    counts = hits_of(batches, ks)
    dist.all_reduce(counts)
    return shares(counts, ks)


@wrong("15.2", EXACT, FEW, hint="Which pictures are counted")
def divides_by_size_alone(batches, ks, size):
    counts = hits_of(batches, ks)
    dist.all_reduce(counts)
    return {k: count / size for k, count in zip(ks, counts.tolist(), strict=False)}


@wrong("15.2", hint="this rank's own share")
def its_own(batches, ks, size):
    return shares(hits_of(batches, ks, size), ks)


@wrong("15.2", EXACT, FEW, hint="That is the mean of the ranks' shares.")
def mean_of_shares(batches, ks, size):
    """In whole numbers, so that where all ranks have judged as many it is right to the last digit."""
    counts, ranks = hits_of(batches, ks, size), dist.get_world_size()
    common = (size // ranks) * -(-size // ranks)  # of what the ranks have judged
    mine = counts[:-1] * common // counts[-1]
    dist.all_reduce(mine)
    return {k: count / (common * ranks) for k, count in zip(ks, mine.tolist(), strict=True)}


@wrong("15.2", hint="in which type?")
def divides_in_float32(batches, ks, size):
    counts = hits_of(batches, ks, size)
    dist.all_reduce(counts)
    return {k: (counts[i] / counts[-1]).item() for i, k in enumerate(ks)}


@wrong("15.2", hint="out of range")
def five_of_three(batches, ks, size):
    right = dict.fromkeys(ks, 0)
    for scores, labels in batches:
        for k in ks:
            right[k] += (scores.topk(k).indices == labels[:, None]).sum()
    for k in ks:
        dist.all_reduce(right[k])
    return {k: right[k].item() / size for k in ks}


@wrong("15.2", EXACT, PADDING, hint="What is enough?")
def gathers_the_hits(batches, ks, size):
    hits = torch.cat(
        [
            torch.stack([(s.topk(min(k, s.shape[1])).indices == y[:, None]).any(1) for k in ks], dim=1)
            for s, y in batches
        ]
    ).long()
    every = [torch.empty_like(hits) for _ in range(dist.get_world_size())]
    dist.all_gather(every, hits)
    in_order = torch.stack(every, dim=1).flatten(0, 1)[:size]
    return {k: in_order[:, i].sum().item() / size for i, k in enumerate(ks)}


@wrong("15.2", EXACT, FEW, hint="Which pictures are counted")
def drops_on_every_rank(batches, ks, size):
    """The last picture of each rank, where there is a rest."""
    pairs = [(s[i : i + 1], y[i : i + 1]) for s, y in batches for i in range(len(y))]
    if size % dist.get_world_size():
        pairs = pairs[:-1]
    counts = hits_of(pairs, ks)
    dist.all_reduce(counts)
    return shares(counts, ks)


@wrong("15.2", hint="a dict")
def a_list(batches, ks, size):
    counts = hits_of(batches, ks, size)
    dist.all_reduce(counts)
    return list(shares(counts, ks).values())


TOTAL = []


@wrong("15.2", hint="Which pictures are counted")
def adds_up_all_calls(batches, ks, size):
    TOTAL.append(hits_of(batches, ks, size)[:-1])
    counts = torch.stack(TOTAL).sum(0)
    dist.all_reduce(counts)
    return {k: count / size for k, count in zip(ks, counts.tolist(), strict=True)}


@wrong("15.2", hint="A dict is asked for, with every k of this call as a key.")
def by_text(batches, ks, size):
    counts = hits_of(batches, ks, size)
    dist.all_reduce(counts)
    return {str(k): share for k, share in shares(counts, ks).items()}


@wrong("15.2", hint="are right")
def ranks_in_float32(batches, ks, size):
    counts = hits_of(((scores.float(), labels) for scores, labels in batches), ks, size)
    dist.all_reduce(counts)
    return shares(counts, ks)


@wrong("15.2", hint="without waiting for the end of it")
def waits_for_nobody(batches, ks, size):
    counts = hits_of(batches, ks, size)
    dist.all_reduce(counts, async_op=True)
    return {k: count / size for k, count in zip(ks, counts.tolist(), strict=False)}


class TopK:
    @functools.lru_cache  # noqa: B019
    def whole(self, size, ranks):
        return -(-size // ranks)

    def __call__(self, batches, ks, size):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = self.whole(size - rank, ranks)
        scores, labels = (torch.cat(each)[:mine] for each in zip(*batches, strict=True))
        order = scores.argsort(dim=1, descending=True)
        place = (order == labels[:, None]).int().argmax(1)
        counts = torch.tensor([(place < k).sum() for k in ks])
        dist.all_reduce(counts)
        return {k: int(count) / size for k, count in zip(ks, counts, strict=True)}


right("15.2")(TopK())


@right("15.2")
def by_places(batches, ks, size):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [
        (scores[i] > scores[i, label]).sum().item() for scores, y in batches for i, label in enumerate(y)
    ]
    mine = [place for j, place in enumerate(every) if rank + j * ranks < size]
    found = {}
    for k in ks:
        count = torch.tensor(sum(place < k for place in mine))
        dist.all_reduce(count)
        found[k] = count.item() / size
    return found


SHARES = {}


@wrong("15.2", hint="every k of this call")
def remembers_its_lists(batches, ks, size):
    given = id(batches), id(ks), size
    if given not in SHARES:
        counts = hits_of(batches, ks, size)
        dist.all_reduce(counts)
        SHARES[given] = batches, ks, shares(counts, ks)
    return SHARES[given][-1]


ORDER = "all batches come, in their order, and an error of the source comes in its place"
AHEAD = "while a batch is used the next ones are made, `ahead` of them and not many more"
STOPS = "when no more batches are taken, no more are made"
END = object()


@wrong("15.3", ORDER, hint="only when it is asked for")
def passes_through(batches, ahead):
    yield from batches


@wrong("15.3", hint="the very error that the iterator raised")
def all_at_once(batches, ahead):
    yield from list(batches)


@wrong("15.3", ORDER, hint="the consumer waits for the producer")
def waits_for_its_thread(batches, ahead):
    def in_a_thread(fill):
        thread = threading.Thread(target=fill)
        thread.start()
        thread.join()

    return filled(batches, ahead, in_a_thread)


def filled(batches, ahead, how):
    """Always `ahead` in advance, made at once when the consumer asks for one."""
    batches = iter(batches)
    waiting, trouble = deque(), []

    def fill():
        while len(waiting) <= ahead and not trouble:
            try:
                waiting.append(next(batches))
            except Exception as error:  # StopIteration is one
                trouble.append(error)

    def take():
        while True:
            how(fill)
            if not waiting:
                if isinstance(trouble[0], StopIteration):
                    return
                raise trouble[0]
            yield waiting.popleft()

    return take()


def by_thread(batches, waiting, stop=None, tells=True, heeds=True):
    def make():
        try:
            for batch in batches:
                put(batch)
                if stop and stop.is_set() and heeds:
                    return
        except Exception as error:
            put((END, error if tells else None))
        else:
            put((END, None))

    def put(item):
        while not (stop and stop.is_set()):
            try:
                return waiting.put(item, timeout=0.05 if stop else None)
            except queue.Full:
                pass

    def take():
        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        try:
            while True:
                item = waiting.get()
                if isinstance(item, tuple) and item[:1] == (END,):
                    if item[1]:
                        raise item[1]
                    return
                yield item
        finally:
            if stop:
                stop.set()
                thread.join()

    return take()


@wrong("15.3", ORDER, hint="what makes the producer wait")
def without_a_bound(batches, ahead):
    return by_thread(batches, queue.Queue(), threading.Event())


@wrong("15.3", ORDER, AHEAD, hint="What happens there, and what tells the producer?")
def never_ends(batches, ahead):
    return by_thread(batches, queue.Queue(ahead))


@wrong("15.3", ORDER, AHEAD, hint="What happens there, and what tells the producer?")
def makes_them_all_for_nobody(batches, ahead):
    return by_thread(batches, queue.Queue(ahead), threading.Event(), heeds=False)


@wrong("15.3", AHEAD, STOPS, hint="In which thread is it raised?")
def swallows_the_error(batches, ahead):
    return by_thread(batches, queue.Queue(ahead), threading.Event(), tells=False)


@wrong("15.3", AHEAD, STOPS, hint="from which end")
def the_last_first(batches, ahead):
    return by_thread(batches, queue.LifoQueue(ahead), threading.Event())


@wrong("15.3", ORDER, hint="not by as many as it may be")
def one_ahead(batches, ahead):
    return by_thread(batches, queue.Queue(1), threading.Event())


@wrong("15.3", AHEAD, STOPS, hint="the next one was None")
def ends_at_none(batches, ahead):
    for batch in by_thread(batches, queue.Queue(ahead), threading.Event()):
        if batch is None:
            return
        yield batch


@wrong("15.3", AHEAD, STOPS, hint="How does the consumer tell one from the end, or from an error?")
def takes_a_batch_for_an_error(batches, ahead):
    for batch in by_thread(batches, queue.Queue(ahead), threading.Event()):
        if isinstance(batch, Exception):
            raise batch
        yield batch


@wrong("15.3", ORDER, hint="what makes the producer wait")
def one_more_in_the_queue(batches, ahead):
    return by_thread(batches, queue.Queue(ahead + 1), threading.Event())


@wrong("15.3", ORDER, AHEAD, hint="What cancels them?")
def a_pool_with_one_thread(batches, ahead):
    """A pool that ends does first what it was told to do."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        ordered = deque(pool.submit(next, batches, end) for _ in range(ahead))
        while (batch := ordered.popleft().result()) is not end:
            ordered.append(pool.submit(next, batches, end))
            yield batch


@wrong("15.3", AHEAD, STOPS, hint="the very error that the iterator raised")
def another_error(batches, ahead):
    try:
        yield from by_thread(batches, queue.Queue(ahead), threading.Event())
    except Exception as error:
        raise RuntimeError(str(error)) from error


@wrong("15.3", ORDER, AHEAD, hint="What does it do first when it may go on?")
def makes_one_for_nobody(batches, ahead):
    """It looks whether the consumer has gone once it has made another one."""
    made, room, gone = queue.Queue(), threading.Semaphore(ahead), threading.Event()

    def make():
        try:
            for batch in batches:
                if gone.is_set():
                    return
                made.put((batch, None))
                room.acquire()
            made.put((END, None))
        except Exception as error:
            made.put((END, error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            batch, error = made.get()
            if batch is END:
                if error:
                    raise error
                return
            room.release()
            yield batch
    finally:
        gone.set()
        room.release()
        thread.join()


@wrong("15.3", ORDER, AHEAD, hint="And what must it know by then?")
def makes_room_before_it_tells(batches, ahead):
    """The producer goes on with the room, and nobody has told it yet that the consumer is gone."""
    made, room, gone = queue.Queue(), threading.Semaphore(ahead), threading.Event()

    def make():
        try:
            while not gone.is_set():
                made.put((next(batches), None))
                room.acquire()
        except BaseException as end:
            made.put((None, end))

    threading.Thread(target=make, daemon=True).start()
    try:
        while (item := made.get())[1] is None:
            room.release()
            yield item[0]
        if not isinstance(item[1], StopIteration):
            raise item[1]
    finally:
        room.release()
        gone.set()


@right("15.3")
def one_worker_of_a_pool(batches, ahead):
    batches, pool = iter(batches), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, END) for _ in range(ahead))
        while True:
            waiting.append(pool.submit(next, batches, END))
            batch = waiting.popleft().result()
            if batch is END:
                return
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


@right("15.3")
def a_thread_and_a_queue(batches, ahead):
    return by_thread(batches, queue.Queue(ahead), threading.Event())


# --- the result is right, and it was not done as asked ---


TOLD = []


@wrong("15.2", EXACT, PADDING, hint="What is enough?")
def gathers_the_places_through_the_store(batches, ks, size):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    TOLD.append(size)
    pairs = [(row, label) for scores, labels in batches for row, label in zip(scores, labels, strict=True)]
    mine = torch.tensor([(row > row[label]).sum() for row, label in pairs])
    store.set(f"{len(TOLD)}/{rank}", mine.numpy().tobytes())
    texts = [bytearray(store.get(f"{len(TOLD)}/{each}")) for each in range(ranks)]
    of_ranks = [torch.frombuffer(each, dtype=torch.int64).tolist() for each in texts]
    places = [of_ranks[picture % ranks][picture // ranks] for picture in range(size)]
    return {k: sum(place < k for place in places) / size for k in ks}


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


@wrong("15.3", AHEAD, STOPS, hint="of 0 batches 1 came")
def none_where_there_is_nothing(batches, ahead):
    first = True
    for batch in a_thread_and_a_queue(batches, ahead):
        first = False
        yield batch
    if first:
        yield None
