"""What people answer in exercise 05, wrong and right (see `answers`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
TO_RIGHT = "each rank sends to its right neighbour only"


@wrong("05.1", hint="waited in send")
def both_send_first(tensor):
    to, source = neighbours()
    theirs = torch.empty_like(tensor)
    dist.send(tensor, to)
    dist.recv(theirs, source)
    return theirs


@wrong("05.1", hint="the other way")
def to_the_left(tensor):
    to, source = neighbours()
    return shift(tensor, source, to)


@wrong("05.1", TO_RIGHT, hint="not what came")
def returns_its_own(tensor):
    shift(tensor, *neighbours())
    return tensor


@wrong("05.1", FROM_LEFT, TO_RIGHT, hint="overwritten")
def into_its_own(tensor):
    tensor.copy_(shift(tensor, *neighbours()))
    return tensor


@wrong("05.1", hint="dist.all_gather does the work here")
def by_all_gather(tensor):
    each = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(each, tensor)
    return each[dist.get_rank() - 1]


@wrong("05.1", hint="not all alike")
def a_line_not_a_ring(tensor):
    rank, world_size = me()
    theirs = torch.zeros_like(tensor)
    if rank > 0:
        dist.recv(theirs, rank - 1)
    if rank < world_size - 1:
        dist.send(tensor, rank + 1)
    return theirs


@wrong("05.1", TO_RIGHT, hint="another form")
def returns_the_work(tensor):
    to, source = neighbours()
    work = dist.isend(tensor, to)
    received = dist.recv(torch.empty_like(tensor), source)
    work.wait()
    return received


@wrong("05.1", TO_RIGHT, hint="another form")
def as_floats(tensor):
    return shift(tensor.double(), *neighbours())


@wrong("05.1", hint="without waiting for the end of it")
def never_waits(tensor):
    to, source = neighbours()
    theirs = torch.zeros_like(tensor)
    dist.isend(tensor, to)
    dist.recv(theirs, source)
    return theirs


@wrong("05.1", FROM_LEFT, KEPT, hint="to others")
def to_everyone(tensor):
    rank, world_size = me()
    others = [other for other in range(world_size) if other != rank]
    started, came = [dist.isend(tensor, other) for other in others], {}
    for other in others:
        dist.recv(came.setdefault(other, torch.empty_like(tensor)), other)
    for work in started:
        work.wait()
    return came[(rank - 1) % world_size]


@right("05.1")
def both_at_once(tensor):
    to, source = neighbours()
    theirs = torch.zeros_like(tensor)
    for work in [dist.irecv(theirs, source), dist.isend(tensor, to)]:
        work.wait()
    return theirs


@right("05.1")
def number_by_number(tensor):
    """Each one a tensor without dimensions."""
    theirs = [shift(number, *neighbours()) for number in tensor.flatten()]
    return torch.stack(theirs).view(tensor.shape)


COMPLETE, HALF = (
    "rank r's piece r is the sum over all ranks",
    "no rank sends more than (n−1)/n of its numbers, and all goes round the ring",
)


def round_the_ring(pieces, first=1, steps=0, add=torch.Tensor.add_, shift=shift):
    rank, world_size = me()
    for step in range(first, first + world_size - 1 + steps):
        theirs = shift(pieces[(rank - step) % world_size], *neighbours())
        add(pieces[(rank - step - 1) % world_size], theirs)


@wrong("05.2", hint="another piece")
def begins_with_its_own(pieces):
    round_the_ring(pieces, first=0)


@wrong("05.2", hint="no sum")
def a_step_too_few(pieces):
    round_the_ring(pieces, first=2, steps=-1)


@wrong("05.2", COMPLETE, hint="too much")
def a_step_too_many(pieces):
    round_the_ring(pieces, steps=1)


@wrong("05.2", COMPLETE, hint="too much")
def a_step_too_many_number_by_number(pieces):
    def shift_each(piece, *ways):
        return torch.stack([shift(number, *ways) for number in piece.flatten()]).view(piece.shape)

    round_the_ring(pieces, steps=1, shift=shift_each)


@wrong("05.2", hint="nothing changed")
def puts_new_tensors_into_the_list(pieces):
    rank, world_size = me()
    for step in range(1, world_size):
        incoming = (rank - step - 1) % world_size
        pieces[incoming] = pieces[incoming] + shift(pieces[(rank - step) % world_size], *neighbours())


@wrong("05.2", hint="no sum")
def replaces_instead_of_adding(pieces):
    round_the_ring(pieces, add=torch.Tensor.copy_)


@wrong("05.2", COMPLETE, hint="through one rank")
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


@wrong("05.2", hint="not all alike")
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


@wrong("05.2", COMPLETE, hint="no ring")
def each_to_its_owner(pieces):
    rank, world_size = me()
    started = [dist.isend(pieces[other], other) for other in range(world_size) if other != rank]
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


@right("05.2")
def adds_up_in_a_tensor_of_its_own(pieces):
    rank, world_size = me()
    running = pieces[(rank - 1) % world_size].clone()
    for step in range(2, world_size + 1):
        running = shift(running, *neighbours()) + pieces[(rank - step) % world_size]
    pieces[rank].copy_(running)
