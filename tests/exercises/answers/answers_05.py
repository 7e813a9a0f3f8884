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


@wrong("05.1", hint="Has it arrived when you hand it back?")
def returns_a_blank(tensor):
    to, source = neighbours()
    theirs = torch.zeros_like(tensor)
    received = theirs.clone()
    work = dist.isend(tensor, to)
    dist.recv(theirs, source)
    work.wait()
    return received


COMPLETE, HALF = "rank r's piece r is the sum over all ranks", "no rank sends more than (n−1)/n of its tensor"


@wrong("05.2", hint="Which one must go first?")
def begins_with_its_own(pieces):
    rank, world_size = me()
    for step in range(world_size - 1):
        pieces[(rank - step - 1) % world_size] += shift(pieces[(rank - step) % world_size], *neighbours())


@wrong("05.2", hint="How many steps does a number need")
def a_step_too_few(pieces):
    rank, world_size = me()
    for step in range(1, world_size - 1):
        pieces[(rank - 2 - step) % world_size] += shift(pieces[(rank - 1 - step) % world_size], *neighbours())


@wrong("05.2", COMPLETE, hint="What goes out beyond that?")
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


@wrong("05.2", hint="No piece has changed")
def puts_new_ones_into_the_list(pieces):
    rank, world_size = me()
    for step in range(world_size - 1):
        i = (rank - 2 - step) % world_size
        pieces[i] = pieces[i] + shift(pieces[(rank - 1 - step) % world_size], *neighbours())


@wrong("05.2", COMPLETE, hint="What goes out beyond that?")
def sends_all_pieces(pieces):
    rank, world_size = me()
    travelling = torch.stack(pieces)
    for _ in range(world_size - 1):
        travelling = shift(travelling, *neighbours())
        pieces[rank] += travelling[rank]


@wrong("05.2", COMPLETE, hint="Who is in the middle?")
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


@wrong("05.2", hint="dist.reduce_scatter does the work here")
def by_the_collective(pieces):
    out = torch.empty_like(pieces[0])
    dist.reduce_scatter(out, pieces)
    pieces[dist.get_rank()].copy_(out)


SUM = "every rank holds the sum, in the tensor that it gave"
ANY_SIZE = "also for sizes that the ranks do not divide"
BYTES = "no rank sends more than 2(n−1)/n of the tensor"


def halves(pieces, add=True, copy=True):
    rank, world_size = me()
    for step in range(world_size - 1):
        incoming, outgoing = (rank - 2 - step) % world_size, (rank - 1 - step) % world_size
        exchange(pieces[outgoing], pieces[incoming], add)
    for step in range(world_size - 1 if copy else 0):
        exchange(pieces[(rank - step) % world_size], pieces[(rank - 1 - step) % world_size], False)


def exchange(out, into, add):
    to, source = neighbours()
    theirs = torch.empty_like(into)
    both = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, theirs, source)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    into.copy_(into + theirs if add else theirs)


@wrong("05.3", SUM, ANY_SIZE, hint="Who is in the middle?")
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


@wrong("05.3", hint="One rank holds the sum")
def butterfly(tensor):
    rank, world_size = me()
    distance = 1
    while distance < world_size:
        if rank ^ distance < world_size:
            tensor += shift(tensor, rank ^ distance, rank ^ distance)
        distance *= 2


@wrong("05.3", SUM, ANY_SIZE, hint="What goes out beyond that?")
def everyone_to_everyone(tensor):
    travelling = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        travelling = shift(travelling, *neighbours())
        tensor += travelling


@wrong("05.3", hint="Some rank's numbers are missing in it, or are in it twice")
def passes_on_the_running_sum(tensor):
    travelling = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        travelling = shift(travelling, *neighbours())
        tensor += travelling
        travelling = tensor.clone()


@wrong("05.3", SUM, BYTES, hint="when it does not come out even")
def leaves_the_rest_out(tensor):
    length = len(tensor) // dist.get_world_size()
    if length:
        halves([tensor[i * length : (i + 1) * length] for i in range(dist.get_world_size())])


@wrong("05.3", SUM, BYTES, hint="raised")
def chunks_may_be_fewer(tensor):
    halves(list(tensor.chunk(dist.get_world_size())))


@wrong("05.3", hint="the first half")
def the_first_half_alone(tensor):
    halves(list(tensor.tensor_split(dist.get_world_size())), copy=False)


@wrong("05.3", hint="Nothing has changed")
def into_a_copy(tensor):
    tensor = tensor.clone()
    halves(list(tensor.tensor_split(dist.get_world_size())))
    return tensor


@wrong("05.3", hint="That is the mean")
def divides(tensor):
    halves(list(tensor.tensor_split(dist.get_world_size())))
    tensor /= dist.get_world_size()


@wrong("05.3", hint="not a sum")
def never_adds(tensor):
    halves(list(tensor.tensor_split(dist.get_world_size())), add=False)


@wrong("05.3", hint="dist.all_reduce does the work here")
def by_dist(tensor):
    dist.all_reduce(tensor)


# --- right, in another style ---


@right("05.1")
def rank_0_receives_first(tensor):
    to, source = neighbours()
    theirs = torch.empty_like(tensor)
    if dist.get_rank() == 0:
        dist.recv(theirs, source)
        dist.send(tensor, to)
    else:
        dist.send(tensor, to)
        dist.recv(theirs, source)
    return theirs


@right("05.1")
def both_at_once(tensor):
    to, source = neighbours()
    theirs = torch.zeros_like(tensor)
    for work in [dist.irecv(theirs, source), dist.isend(tensor, to)]:
        work.wait()
    return theirs


@right("05.1")
def in_a_batch(tensor):
    theirs = tensor.clone()
    exchange(tensor, theirs, False)
    return theirs


@right("05.2")
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
def views_of_it(tensor):
    halves(list(tensor.tensor_split(dist.get_world_size())))


@right("05.3")
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
def on_a_longer_copy(tensor):
    world_size = dist.get_world_size()
    longer = torch.cat([tensor, tensor.new_zeros(-len(tensor) % world_size)])
    halves(list(longer.view(world_size, -1)))
    tensor[:] = longer[: len(tensor)]
