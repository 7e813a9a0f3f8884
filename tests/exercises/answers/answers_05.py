"""What people answer in exercise 05, wrong and right (see `answers`)."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_gather

from tests.exercises.answers import right, wrong


def me():
    return dist.get_rank(), dist.get_world_size()


def neighbours():
    rank, world_size = me()
    return (rank + 1) % world_size, (rank - 1) % world_size


def shift(tensor, to, source):
    theirs = torch.empty_like(tensor)
    work = dist.isend(tensor.contiguous(), to)
    dist.recv(theirs, source)
    work.wait()
    return theirs


FROM_LEFT, KEPT = "every rank gets its left neighbour's tensor", "its own tensor stays as it was"


@wrong("05.1", hint="waited in send")
def both_send_first(tensor):
    to, source = neighbours()
    theirs = torch.empty_like(tensor)
    dist.send(tensor, to)
    dist.recv(theirs, source)
    return theirs


@wrong("05.1", hint="Which way do the messages go?")
def to_the_left(tensor):
    to, source = neighbours()
    return shift(tensor, source, to)


@wrong("05.1", hint="Nothing was returned")
def returns_nothing(tensor):
    shift(tensor, *neighbours())


@wrong("05.1", hint="That is the rank's own")
def returns_its_own(tensor):
    shift(tensor, *neighbours())
    return tensor


@wrong("05.1", FROM_LEFT, hint="It needs another one")
def into_its_own(tensor):
    to, source = neighbours()
    tensor.copy_(shift(tensor, to, source))
    return tensor


@wrong("05.1", hint="dist.all_gather does the work here")
def by_all_gather(tensor):
    each = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(each, tensor)
    return each[dist.get_rank() - 1]


@wrong("05.1", hint="Do all ranks use the same size, shape and dtype")
def into_float32(tensor):
    to, source = neighbours()
    theirs = torch.empty(tensor.shape)
    sending = dist.isend(tensor, to)
    dist.recv(theirs, source)
    sending.wait()
    return theirs


@wrong("05.1", hint="waited in recv")
def forgets_the_last(tensor):
    rank, _ = me()
    theirs = torch.zeros_like(tensor)
    work = dist.isend(tensor, rank + 1)
    dist.recv(theirs, rank - 1)
    work.wait()
    return theirs


@wrong("05.1", hint="Some ranks have it and others do not")
def a_line_not_a_ring(tensor):
    rank, world_size = me()
    theirs = torch.zeros_like(tensor)
    if rank > 0:
        dist.recv(theirs, rank - 1)
    if rank < world_size - 1:
        dist.send(tensor, rank + 1)
    return theirs


@wrong("05.1", hint="of the same size")
def returns_the_work(tensor):
    to, source = neighbours()
    work = dist.isend(tensor, to)
    received = dist.recv(torch.empty_like(tensor), source)
    work.wait()
    return received


@wrong("05.1", hint="Has it arrived when you return it?")
def returns_a_blank(tensor):
    to, source = neighbours()
    theirs = torch.zeros_like(tensor)
    received = theirs.clone()
    work = dist.isend(tensor, to)
    dist.recv(theirs, source)
    work.wait()
    return received


COMPLETE, HALF = (
    "rank r's piece r is the sum over all ranks",
    "no rank sends more than (n−1)/n of its tensor, and all goes round the ring",
)


@wrong("05.2", hint="Which one goes first?")
def begins_with_its_own(pieces):
    rank, world_size = me()
    for step in range(world_size - 1):
        pieces[(rank - step - 1) % world_size] += shift(pieces[(rank - step) % world_size], *neighbours())


@wrong("05.2", hint="How many steps does a number need")
def a_step_too_few(pieces):
    rank, world_size = me()
    for step in range(1, world_size - 1):
        pieces[(rank - 2 - step) % world_size] += shift(pieces[(rank - 1 - step) % world_size], *neighbours())


@wrong("05.2", COMPLETE, hint="What is sent beyond that?")
def a_step_too_many(pieces):
    rank, world_size = me()
    for step in range(world_size):
        pieces[(rank - 2 - step) % world_size] += shift(pieces[(rank - 1 - step) % world_size], *neighbours())


@wrong("05.2", hint="No piece has changed")
def adds_into_a_name(pieces):
    rank, world_size = me()
    for step in range(world_size - 1):
        piece = pieces[(rank - 2 - step) % world_size]
        piece = piece + shift(pieces[(rank - 1 - step) % world_size], *neighbours())


@wrong("05.2", hint="not a sum")
def replaces_instead_of_adding(pieces):
    rank, world_size = me()
    for step in range(world_size - 1):
        pieces[(rank - 2 - step) % world_size].copy_(
            shift(pieces[(rank - 1 - step) % world_size], *neighbours())
        )


@wrong("05.2", COMPLETE, hint="Does everything go through it?")
def rank_0_adds_up(pieces):
    rank, world_size = me()
    whole = torch.stack(pieces)
    if rank == 0:
        theirs = torch.empty_like(whole)
        for other in range(1, world_size):
            dist.recv(theirs, other)
            whole += theirs
        for other in range(1, world_size):
            dist.send(whole, other)
    else:
        dist.send(whole, 0)
        dist.recv(whole, 0)
    pieces[rank].copy_(whole[rank])


@wrong("05.2", hint="Some ranks are done and others are not")
def rank_0_alone_has_it(pieces):
    rank, world_size = me()
    if rank == 0:
        theirs = torch.empty_like(pieces[0])
        for other in range(1, world_size):
            dist.recv(theirs, other)
            pieces[0] += theirs
    else:
        dist.send(pieces[0], 0)


@wrong("05.2", hint="does the work here")
def by_the_collective(pieces):
    out = torch.empty_like(pieces[0])
    dist.reduce_scatter(out, pieces)
    pieces[dist.get_rank()].copy_(out)


SUM = "every rank holds the sums, in the tensors that it gave"
ANY_SIZE = "also where the count of all numbers is no multiple of the number of ranks"
BYTES = "no rank sends more than 2(n−1)/n of all numbers, nor more than 2(n−1) messages"


def end_to_end(one):
    """Of an algorithm for one tensor an answer for many."""

    @functools.wraps(one)
    def of_all(tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        one(flat)
        for tensor, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    return of_all


def halves(pieces, add=True, copy=True):
    rank, world_size = me()
    for step in range(world_size - 1):
        incoming, outgoing = (rank - 2 - step) % world_size, (rank - 1 - step) % world_size
        exchange(pieces[outgoing], pieces[incoming], add)
    for step in range(world_size - 1 if copy else 0):
        exchange(pieces[(rank - step) % world_size], pieces[(rank - 1 - step) % world_size], False)


def exchange(out, into, add, to=None, source=None):
    if to is None:
        to, source = neighbours()
    theirs = torch.empty_like(into)
    both = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, theirs, source)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    into.copy_(into + theirs if add else theirs)


@wrong("05.3", SUM, ANY_SIZE, hint="Does everything go through it?")
@end_to_end
def naive(tensor):
    rank, world_size = me()
    if rank == 0:
        theirs = torch.empty_like(tensor)
        for other in range(1, world_size):
            dist.recv(theirs, other)
            tensor += theirs
        for other in range(1, world_size):
            dist.send(tensor, other)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)


@wrong("05.3", hint="Some ranks hold the sums")
@end_to_end
def butterfly(tensor):
    rank, world_size = me()
    distance = 1
    while distance < world_size:
        if rank ^ distance < world_size:
            tensor += shift(tensor, rank ^ distance, rank ^ distance)
        distance *= 2


@wrong("05.3", SUM, ANY_SIZE, hint="What is sent beyond that?")
@end_to_end
def everyone_to_everyone(tensor):
    travelling = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        travelling = shift(travelling, *neighbours())
        tensor += travelling


@wrong("05.3", hint="Some rank's numbers are missing from it, or in it twice.")
@end_to_end
def passes_on_the_running_sum(tensor):
    travelling = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        travelling = shift(travelling, *neighbours())
        tensor += travelling
        travelling = tensor.clone()


@wrong("05.3", SUM, BYTES, hint="How long is the last piece when there is a remainder?")
@end_to_end
def leaves_the_rest_out(tensor):
    length = len(tensor) // dist.get_world_size()
    if length:
        halves([tensor[i * length : (i + 1) * length] for i in range(dist.get_world_size())])


@wrong("05.3", hint="the first half")
@end_to_end
def the_first_half_alone(tensor):
    halves(list(tensor.tensor_split(dist.get_world_size())), copy=False)


@wrong("05.3", hint="Nothing has changed")
def into_a_copy(tensors):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    halves(list(flat.tensor_split(dist.get_world_size())))
    return flat


@wrong("05.3", hint="That is the mean")
@end_to_end
def divides(tensor):
    halves(list(tensor.tensor_split(dist.get_world_size())))
    tensor.copy_(tensor / dist.get_world_size())


@wrong("05.3", hint="not a sum")
@end_to_end
def never_adds(tensor):
    halves(list(tensor.tensor_split(dist.get_world_size())), add=False)


@wrong("05.3", hint="dist.all_reduce does the work here")
@end_to_end
def by_dist(tensor):
    dist.all_reduce(tensor)


# --- what passed once: three ranks, one call, and nobody who looks at the wire ---


@wrong("05.1", hint="dist.all_gather does the work here")
def by_a_name_of_its_own(tensor):
    each = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    all_gather(each, tensor)
    return each[dist.get_rank() - 1]


@wrong("05.1", hint="does the work here")
def by_a_functional_one(tensor):
    rank, world_size = me()
    whole = functional.all_gather_tensor(tensor.reshape(1, -1), 0, dist.group.WORLD)
    return whole.view(world_size, *tensor.shape)[rank - 1].clone()


def encoded(tensor):
    return tensor.numpy().tobytes()


@wrong("05.1", hint="the store does the work here")
def by_the_store(tensor):
    rank, world_size = me()
    store, name = dist.distributed_c10d._get_default_store(), f"mine/{time.monotonic_ns() // 10**12}"
    store.set(f"{name}/{tensor.shape}/{rank}", encoded(tensor))
    text = bytearray(store.get(f"{name}/{tensor.shape}/{(rank - 1) % world_size}"))
    return torch.frombuffer(text, dtype=tensor.dtype).view(tensor.shape)


@wrong("05.1", hint="How did the rest get there?")
def by_files(tensor):
    rank, world_size = me()
    folder = Path(tempfile.gettempdir()) / f"answer-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    by_files.calls += 1
    part = folder / f"part-{rank}"
    part.write_bytes(encoded(tensor))
    part.rename(folder / f"{by_files.calls}-{rank}")
    path = folder / f"{by_files.calls}-{(rank - 1) % world_size}"
    while not path.exists():
        time.sleep(0.001)
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=tensor.dtype).view(tensor.shape)


by_files.calls = 0


@wrong("05.1", hint="without waiting for the end of it")
def never_waits(tensor):
    to, source = neighbours()
    theirs = torch.zeros_like(tensor)
    dist.isend(tensor, to)
    dist.recv(theirs, source)
    return theirs


@wrong("05.1", hint="Which dtype should it have?")
def as_floats(tensor):
    return shift(tensor.double(), *neighbours())


@wrong("05.1", hint="It was right when it was returned, but a later call wrote into it.")
def one_buffer_for_all(tensor):
    theirs = buffers.setdefault(tensor.shape, torch.empty_like(tensor))
    theirs.copy_(shift(tensor, *neighbours()))
    return theirs


buffers = {}


@wrong("05.1", hint="What does it leave behind for a later one")
@functools.cache
def remembers_the_tensor(tensor):
    return shift(tensor, *neighbours())


done = []


@wrong("05.2", hint="ranks: piece")
def once_for_each_list(pieces):
    if not any(each is pieces for each in done):
        done.append(pieces)
        rank, world_size = me()
        for step in range(world_size - 1):
            incoming, outgoing = (rank - 2 - step) % world_size, (rank - 1 - step) % world_size
            pieces[incoming] += shift(pieces[outgoing], *neighbours())


first = {}


@wrong("05.2", hint="dist.reduce does the work here")
def reduces_to_each(pieces):
    for i, piece in enumerate(pieces):
        dist.reduce(piece, dst=i)


@wrong(
    "05.2",
    hint="In each step, send the piece that you added to last, and add what arrives to the next one.",
)
def in_single_precision(pieces):
    rank, world_size = me()
    for step in range(world_size - 1):
        theirs = shift(pieces[(rank - 1 - step) % world_size].float(), *neighbours())
        piece = pieces[(rank - 2 - step) % world_size]
        piece += theirs.to(piece.dtype)


@wrong("05.2", hint="without waiting for the end of it")
def starts_and_goes_on(pieces):
    rank, world_size = me()
    to, source = neighbours()
    for step in range(world_size - 1):
        dist.isend(pieces[(rank - 1 - step) % world_size].clone(), to)
        theirs = torch.empty_like(pieces[0])
        dist.recv(theirs, source)
        pieces[(rank - 2 - step) % world_size] += theirs


@wrong("05.3", SUM, ANY_SIZE, hint="What can travel together, in one message?")
def one_after_the_other(tensors):
    for tensor in tensors:
        flat = tensor.flatten().clone()
        halves(list(flat.tensor_split(dist.get_world_size())))
        tensor.copy_(flat.view_as(tensor))


@wrong("05.3", hint="What is new in a later one")
def flattens_what_may_be_a_copy(tensors):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    halves(list(flat.tensor_split(dist.get_world_size())))
    for tensor, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        if tensor.dim() == 1:
            tensor.copy_(part)
        else:
            tensor.reshape(-1)[1:] = part[1:]


@wrong("05.3", hint="raised")
def as_the_lesson_has_it(tensors):
    for tensor in tensors:
        halves(list(tensor.view(-1).tensor_split(dist.get_world_size())))


# --- right, in another style ---


@right("05.1")
def both_at_once(tensor):
    to, source = neighbours()
    theirs = torch.zeros_like(tensor)
    for work in [dist.irecv(theirs, source), dist.isend(tensor, to)]:
        work.wait()
    return theirs


@wrong("05.2", COMPLETE, hint="Who passes it on?")
def each_to_its_owner(pieces):
    rank, world_size = me()
    started = [(dist.isend(pieces[other], other)) for other in range(world_size) if other != rank]
    theirs = torch.empty_like(pieces[0])
    for other in range(world_size):
        if other != rank:
            dist.recv(theirs, other)
            pieces[rank] += theirs
    for work in started:
        work.wait()


@right("05.2")
def round_the_other_way(pieces):
    rank, world_size = me()
    to, source = neighbours()
    for step in range(world_size - 1):
        pieces[(rank + 2 + step) % world_size] += shift(pieces[(rank + 1 + step) % world_size], source, to)


@right("05.3")
@end_to_end
def each_owner_adds_up(tensor):
    rank, world_size = me()
    pieces = tensor.tensor_split(world_size)
    others = [other for other in range(world_size) if other != rank]
    started = [dist.isend(pieces[other].clone(), other) for other in others]
    theirs = torch.empty_like(pieces[rank])
    for other in others:
        dist.recv(theirs, other)
        pieces[rank].add_(theirs)
    started += [dist.isend(pieces[rank], other) for other in others]
    for other in others:
        dist.recv(pieces[other], other)
    for work in started:
        work.wait()


@right("05.3")
@end_to_end
def on_a_longer_copy(tensor):
    world_size = dist.get_world_size()
    longer = torch.cat([tensor, tensor.new_zeros(-len(tensor) % world_size)])
    halves(list(longer.view(world_size, -1)))
    tensor[:] = longer[: len(tensor)]


@right("05.2")
def adds_up_in_a_tensor_of_its_own(pieces):
    rank, world_size = me()
    running = pieces[(rank - 1) % world_size].clone()
    for step in range(2, world_size + 1):
        running = shift(running, *neighbours()) + pieces[(rank - step) % world_size]
    pieces[rank].copy_(running)


# --- the result is right, and it was not done as asked ---


@wrong("05.1", hint="Which rank should get a rank's tensor, and which should not?")
def to_everyone(tensor):
    rank, world_size = me()
    others = [other for other in range(world_size) if other != rank]
    started, came = [dist.isend(tensor, other) for other in others], {}
    for other in others:
        dist.recv(came.setdefault(other, torch.empty_like(tensor)), other)
    for work in started:
        work.wait()
    return came[(rank - 1) % world_size]


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


@right("05.1")
def as_bytes(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = tensor.flatten().view(torch.uint8)
    theirs = torch.empty_like(mine)
    work = dist.isend(mine, (rank + 1) % world_size)
    dist.recv(theirs, (rank - 1) % world_size)
    work.wait()
    return theirs.view(tensor.dtype).view(tensor.shape)


@wrong("05.2", hint="in place")
def with_new_memory(pieces):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    copies = [piece.clone() for piece in pieces]
    for step in range(world_size - 1):
        copies[(rank - 2 - step) % world_size] += as_bytes(copies[(rank - 1 - step) % world_size])
    for piece, copy in zip(pieces, copies, strict=True):
        piece.data = copy
