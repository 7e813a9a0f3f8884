"""What people answer in exercise 15, wrong and right (see `answers`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.exercises.answers import right, wrong

ONCE = "over all ranks and workers each file is opened once"


@wrong("15.1", hint="for every worker")
def forgets_the_workers(files, rank, world_size, worker, workers):
    return files[rank::world_size]


@wrong("15.1", hint="for every rank")
def forgets_the_ranks(files, rank, world_size, worker, workers):
    return files[worker::workers]


@wrong("15.1", hint="another")
def all_of_them(files, rank, world_size, worker, workers):
    return files


@wrong("15.1", hint="another")
def numbers_some_alike(files, rank, world_size, worker, workers):
    return files[rank + worker :: world_size * workers]


@wrong("15.1", hint="another")
def swaps_the_factors(files, rank, world_size, worker, workers):
    return files[rank * world_size + worker :: world_size * workers]


@wrong("15.1", hint="some for nobody")
def leaves_the_rest(files, rank, world_size, worker, workers):
    each = len(files) // (world_size * workers)
    reader = rank * workers + worker
    return files[reader * each : (reader + 1) * each]


@wrong("15.1", ONCE, hint="in blocks")
def the_last_takes_the_rest(files, rank, world_size, worker, workers):
    reader, readers = rank * workers + worker, world_size * workers
    each = len(files) // readers
    return files[reader * each : (reader + 1) * each if reader < readers - 1 else None]


@wrong("15.1", ONCE, hint="in blocks")
def rounds_up(files, rank, world_size, worker, workers):
    reader, readers = rank * workers + worker, world_size * workers
    each = -(-len(files) // readers)
    return files[reader * each : (reader + 1) * each]


@right("15.1")
def first_the_ranks(files, rank, world_size, worker, workers):
    return files[rank::world_size][worker::workers]


@right("15.1")
def in_even_blocks(files, rank, world_size, worker, workers):
    reader, readers = worker * world_size + rank, world_size * workers
    return tuple(files[len(files) * reader // readers : len(files) * (reader + 1) // readers])


EXACT = "every rank returns the share over all pictures, for each k, also where there are fewer classes"


def hits_of(batches, ks, size=None):
    """This rank's hits for each k, and its pictures; without what lies beyond `size`."""
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


@wrong("15.2", EXACT, hint="repeats")
def keeps_the_padding(batches, ks, size):
    counts = hits_of(batches, ks)
    dist.all_reduce(counts)
    return shares(counts, ks)


@wrong("15.2", EXACT, hint="repeats")
def divides_by_size_alone(batches, ks, size):
    counts = hits_of(batches, ks)
    dist.all_reduce(counts)
    return {k: count / size for k, count in zip(ks, counts.tolist(), strict=False)}


@wrong("15.2", EXACT, hint="mean of shares")
def mean_of_shares(batches, ks, size):
    counts = hits_of(batches, ks, size)
    mine = counts[:-1] / counts[-1]
    dist.all_reduce(mine)
    return dict(zip(ks, (mine / dist.get_world_size()).tolist(), strict=True))


@wrong("15.2", EXACT, hint="another count")
def drops_on_every_rank(batches, ks, size):
    """The last picture of each rank, where there is a rest."""
    pairs = [(s[i : i + 1], y[i : i + 1]) for s, y in batches for i in range(len(y))]
    counts = hits_of(pairs[:-1] if size % dist.get_world_size() else pairs, ks)
    dist.all_reduce(counts)
    return {k: count / size for k, count in zip(ks, counts.tolist(), strict=False)}


@wrong("15.2", hint="own share")
def its_own(batches, ks, size):
    return shares(hits_of(batches, ks, size), ks)


@wrong("15.2", hint="another share")
def the_first_k_for_all(batches, ks, size):
    counts = hits_of(batches, ks[:1], size)
    dist.all_reduce(counts)
    return dict.fromkeys(ks, counts[0].item() / size)


@wrong("15.2", hint="another share")
def exactly_the_kth(batches, ks, size):
    """Whether the label has the k-th highest score."""
    counts = torch.zeros(len(ks), dtype=torch.int64)
    for scores, labels in batches:
        for i, k in enumerate(ks):
            counts[i] += (scores.topk(min(k, scores.shape[1])).indices[:, -1] == labels).sum()
    dist.all_reduce(counts)
    return {k: count / size for k, count in zip(ks, counts.tolist(), strict=True)}


@wrong("15.2", hint="out of range")
def five_of_three(batches, ks, size):
    right = dict.fromkeys(ks, 0)
    for scores, labels in batches:
        for k in ks:
            right[k] += (scores.topk(k).indices == labels[:, None]).sum()
    for k in ks:
        dist.all_reduce(right[k])
    return {k: right[k].item() / size for k in ks}


@wrong("15.2", hint="a dict")
def a_list(batches, ks, size):
    counts = hits_of(batches, ks, size)
    dist.all_reduce(counts)
    return list(shares(counts, ks).values())


@right("15.2")
def after_all_batches(batches, ks, size):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    scores, labels = (torch.cat(each)[: len(range(rank, size, ranks))] for each in zip(*batches, strict=True))
    place = (scores.argsort(dim=1, descending=True) == labels[:, None]).int().argmax(1)
    counts = torch.tensor([(place < k).sum() for k in ks])
    dist.all_reduce(counts)
    return {k: int(count) / size for k, count in zip(ks, counts, strict=True)}


@right("15.2")
def gathers_the_hits(batches, ks, size):
    hits = [
        [bool(label in row.topk(min(k, len(row))).indices) for k in ks]
        for scores, labels in batches
        for row, label in zip(scores, labels, strict=True)
    ]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, hits)
    in_order = [each for pictures in zip(*every, strict=True) for each in pictures][:size]
    return {k: sum(each[i] for each in in_order) / size for i, k in enumerate(ks)}
