"""What people answer in exercise 14, wrong and right (see `answers`)."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from tests.exercises.answers import right, wrong

MESSAGES = "where nothing is computed, the step is the buckets' rings, one after the other"
BEHIND = "a bucket travels while backward computes the next ones"
QUEUE = "a bucket waits until the one before it has arrived"


def ring(size, ranks, alpha, beta):
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size * beta


def in_a_queue(forward, backward, buckets, message, ready=None):
    done, free = 0, 0.0
    for i, size in enumerate(buckets):
        done += size
        since = ready[i] if ready else forward + backward * done / sum(buckets)
        free = max(free, since) + message(size)
    return max(free, forward + backward)


@wrong("14.1", MESSAGES, hint="Nothing is hidden there")
def one_after_the_other(forward, backward, buckets, ranks, alpha, beta):
    return forward + backward + sum(ring(size, ranks, alpha, beta) for size in buckets)


@wrong(
    "14.1",
    MESSAGES,
    hint="The last bucket is hidden there, too, or one is sent before its gradients are ready.",
)
def all_hidden(forward, backward, buckets, ranks, alpha, beta):
    return forward + max(backward, sum(ring(size, ranks, alpha, beta) for size in buckets))


@wrong("14.1", MESSAGES, hint="before its gradients")
def leaves_too_early(forward, backward, buckets, ranks, alpha, beta):
    done, ready = 0, []
    for size in buckets:
        ready.append(forward + backward * done / sum(buckets))
        done += size
    return in_a_queue(forward, backward, buckets, lambda size: ring(size, ranks, alpha, beta), ready)


@wrong("14.1", MESSAGES, BEHIND, hint="they have different sizes")
def equal_shares(forward, backward, buckets, ranks, alpha, beta):
    ready = [forward + backward * (i + 1) / len(buckets) for i in range(len(buckets))]
    return in_a_queue(forward, backward, buckets, lambda size: ring(size, ranks, alpha, beta), ready)


@wrong("14.1", BEHIND, hint="Only the last bucket is left over")
def only_the_last(forward, backward, buckets, ranks, alpha, beta):
    return forward + backward + ring(buckets[-1], ranks, alpha, beta)


@wrong("14.1", BEHIND, hint="There is one link")
def all_at_once(forward, backward, buckets, ranks, alpha, beta):
    done, ends = 0, []
    for size in buckets:
        done += size
        ends.append(forward + backward * done / sum(buckets) + ring(size, ranks, alpha, beta))
    return max(ends)


@wrong("14.1", hint="How many steps does a ring have, and what does each rank send?")
def a_line(forward, backward, buckets, ranks, alpha, beta):
    return in_a_queue(forward, backward, buckets, lambda size: alpha + beta * size)


@wrong("14.1", hint="goes round twice")
def half_a_ring(forward, backward, buckets, ranks, alpha, beta):
    return in_a_queue(forward, backward, buckets, lambda size: ring(size, ranks, alpha, beta) / 2)


@wrong("14.1", hint="not all of it")
def all_of_it_each_time(forward, backward, buckets, ranks, alpha, beta):
    return in_a_queue(forward, backward, buckets, lambda size: 2 * (ranks - 1) * (alpha + beta * size))


@wrong("14.1", hint="How often does α count in a ring?")
def alpha_once(forward, backward, buckets, ranks, alpha, beta):
    return in_a_queue(forward, backward, buckets, lambda size: alpha + 2 * (ranks - 1) / ranks * size * beta)


@wrong("14.1", hint="nothing (None)")
def prints_it(forward, backward, buckets, ranks, alpha, beta):
    print(forward + backward)


@wrong("14.1", MESSAGES, BEHIND, hint="came out")
def by_the_first_or_the_last(forward, backward, buckets, ranks, alpha, beta):
    """Right for buckets of one size."""
    rings = [ring(size, ranks, alpha, beta) for size in buckets]
    first = forward + backward * buckets[0] / sum(buckets)
    return max(first + sum(rings), forward + backward + rings[-1])


@wrong("14.1", hint="What you are given must be unchanged afterwards.")
def uses_up_its_buckets(forward, backward, buckets, ranks, alpha, beta):
    whole, since, free = sum(buckets), forward, 0.0
    while buckets:
        size = buckets.pop(0)
        since += backward * size / whole
        free = max(free, since) + ring(size, ranks, alpha, beta)
    return max(free, since)


@wrong("14.1", hint="How long does one bucket take in a ring of that many ranks?")
def a_start_for_each_rank(forward, backward, buckets, ranks, alpha, beta):
    return in_a_queue(
        forward, backward, buckets, lambda size: 2 * (ranks - 1) / ranks * (alpha + beta * size)
    )


@wrong("14.1", BEHIND, QUEUE, hint="How long does one bucket take in a ring of that many ranks?")
def one_bucket_has_no_queue(forward, backward, buckets, ranks, alpha, beta):
    if len(buckets) == 1:
        return forward + backward
    return in_a_queue(forward, backward, buckets, lambda size: ring(size, ranks, alpha, beta))


@wrong("14.1", BEHIND, QUEUE, hint="a message between two")
def two_ranks_send_once(forward, backward, buckets, ranks, alpha, beta):
    def message(size):
        return alpha + size * beta if ranks == 2 else ring(size, ranks, alpha, beta)

    return in_a_queue(forward, backward, buckets, message)


@right("14.1")
def from_the_end(forward, backward, buckets, ranks, alpha, beta):
    """The step is over when the last of the queues is: from any bucket on, all that come after it."""
    rings = np.array([ring(size, ranks, alpha, beta) for size in buckets])
    ready = forward + backward * np.cumsum(buckets) / np.sum(buckets)
    return (ready + rings[::-1].cumsum()[::-1]).max()


@right("14.1")
def as_a_tensor(forward, backward, buckets, ranks, alpha, beta):
    free = torch.zeros((), dtype=torch.float64)
    for i, size in enumerate(buckets):
        ready = torch.tensor(forward + backward * sum(buckets[: i + 1]) / sum(buckets), dtype=torch.float64)
        free = torch.maximum(free, ready) + ring(size, ranks, alpha, beta)
    return free


KEPT = {}


@wrong("14.1", BEHIND, QUEUE, hint="What do you keep from one call to the next?")
def remembers_the_buckets(forward, backward, buckets, ranks, alpha, beta):
    """By the list itself, which stays what it is when its items change."""
    if id(buckets) not in KEPT:
        took = in_a_queue(forward, backward, buckets, lambda size: ring(size, ranks, alpha, beta))
        KEPT[id(buckets)] = buckets, took
    return KEPT[id(buckets)][1]


SHARE = "it is the share of the time of sending during which the rank computes"
TOGETHER = "time in which two buckets are under way counts once"
ANY_ORDER = "intervals of computing may come in any order, touch and overlap"


def joined(intervals):
    found = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def common(computes, sends):
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in computes for b in sends)


def length(intervals):
    return sum(end - start for start, end in intervals)


@wrong("14.2", SHARE, hint="Two buckets at once are not twice the time")
def adds_them_up(computes, sends):
    return common(computes, sends) / length(sends)


@wrong("14.2", SHARE, ANY_ORDER, hint="Two buckets at once are not twice the time")
def joins_the_computing_alone(computes, sends):
    return common(joined(computes), sends) / length(sends)


@wrong("14.2", SHARE, TOGETHER, hint="An operation may lie within another")
def joins_the_sending_alone(computes, sends):
    return common(computes, joined(sends)) / length(joined(sends))


@wrong("14.2", hint="from 0 to 1")
def in_percent(computes, sends):
    return 100 * common(joined(computes), joined(sends)) / length(joined(sends))


@wrong("14.2", hint="what is not hidden")
def what_is_left(computes, sends):
    return 1 - common(joined(computes), joined(sends)) / length(joined(sends))


@wrong("14.2", hint="a share of the computing")
def of_the_computing(computes, sends):
    return common(joined(computes), joined(sends)) / length(joined(computes))


@wrong("14.2", hint="Those are seconds")
def in_seconds(computes, sends):
    return common(joined(computes), joined(sends))


@wrong("14.2", hint="hidden in part")
def wholly_inside(computes, sends):
    inside = [b for b in sends if any(a[0] <= b[0] and b[1] <= a[1] for a in joined(computes))]
    return length(inside) / length(sends)


@wrong("14.2", hint="is hidden; it returned")
def from_first_to_last(computes, sends):
    begin, end = min(a for a, _ in computes), max(b for _, b in computes)
    return common([(begin, end)], joined(sends)) / length(joined(sends))


@wrong("14.2", hint="of the time of sending is hidden; it returned")
def in_float32(computes, sends):
    starts = torch.tensor([a for a, _ in sends]), torch.tensor([a for a, _ in computes])
    ends = torch.tensor([b for _, b in sends]), torch.tensor([b for _, b in computes])
    both = torch.minimum(ends[0][:, None], ends[1]) - torch.maximum(starts[0][:, None], starts[1])
    return both.clamp(min=0).sum() / (ends[0] - starts[0]).sum().clamp(min=1e-3)


@wrong("14.2", hint="from the later of two starts to the earlier of two ends.")
def forgets_what_comes_after_the_last(computes, sends):
    computes, sends = joined(computes), joined(sends)
    gaps = [(a[1], b[0]) for a, b in pairwise(computes)]
    return 1 - common(gaps, sends) / length(sends)


@wrong("14.2", hint="What you are given must be unchanged afterwards.")
def empties_its_lists(computes, sends):
    computes, sends = ([each.pop() for _ in range(len(each))] for each in (computes, sends))
    return common(joined(computes), joined(sends)) / max(length(joined(sends)), 1e-9)


@wrong("14.2", hint="nothing (None)")
def returns_nothing(computes, sends):
    joined(computes)


@wrong("14.2", SHARE, hint="What you are given must be unchanged afterwards.")
def sorts_its_lists(computes, sends):
    computes.sort()
    sends.sort()
    return common(joined(computes), joined(sends)) / length(joined(sends))


@right("14.2")
def by_edges(computes, sends):
    """Between two neighbouring edges nothing begins or ends."""
    edges = sorted({edge for interval in [*computes, *sends] for edge in interval})
    hidden = sending = 0.0
    for a, b in pairwise(edges):
        if any(start <= a < end for start, end in sends):
            sending += b - a
            hidden += (b - a) * any(start <= a < end for start, end in computes)
    return hidden / sending


@right("14.2")
def with_numpy(computes, sends):
    edges = np.unique([*computes, *sends])
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    on = [
        ((each[:, :1] < middles) & (middles < each[:, 1:])).any(0)
        for each in (np.array(intervals).reshape(-1, 2) for intervals in (computes, sends))
    ]
    return widths[on[0] & on[1]].sum() / widths[on[1]].sum()


@right("14.2")
def by_three_lengths(computes, sends):
    together = length(joined(computes)) + length(joined(sends)) - length(joined([*computes, *sends]))
    return together / length(joined(sends))


@wrong("14.2", hint="What do you keep from one call to the next?")
def remembers_the_lists(computes, sends):
    given = id(computes), id(sends)
    if given not in KEPT:
        KEPT[given] = computes, sends, common(joined(computes), joined(sends)) / length(joined(sends))
    return KEPT[given][-1]


NAMED = "every rank returns the rank that is late again and again"
BY = "and by how much it is later than the last of the others; hiccups of other ranks change nothing"
QUIET = "nothing but the step's own meeting is sent while the steps run"


def my_times(work, meet, steps, with_meeting=False):
    mine = []
    for _ in range(steps):
        begin = time.perf_counter()
        work()
        if with_meeting:
            meet()
        mine.append(time.perf_counter() - begin)
        if not with_meeting:
            meet()
    return mine


def of_all(mine):
    """(ranks, steps)."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return torch.tensor(ranks, dtype=torch.float64)


def later(times, late):
    others = torch.cat([times[:late], times[late + 1 :]])
    return (times[late] - others.amax(dim=0)).tolist()


@wrong("14.3", hint="Each names itself")
def looks_at_itself(work, meet, steps):
    mine = my_times(work, meet, steps)
    return dist.get_rank(), max(mine) - min(mine)


@wrong("14.3", NAMED, QUIET, hint="It includes a hiccup of another rank.")
def takes_the_mean(work, meet, steps):
    times = of_all(my_times(work, meet, steps))
    late = int(times.median(dim=1).values.argmax())
    return late, statistics.mean(later(times, late))


@wrong("14.3", NAMED, QUIET, hint="By how much is it later than the last of the others?")
def how_long_it_works(work, meet, steps):
    times = of_all(my_times(work, meet, steps)).median(dim=1).values
    return int(times.argmax()), times.max().item()


@wrong("14.3", NAMED, QUIET, hint="Seconds are asked for")
def in_milliseconds(work, meet, steps):
    times = of_all(my_times(work, meet, steps))
    late = int(times.median(dim=1).values.argmax())
    return late, 1000 * statistics.median(later(times, late))


@wrong("14.3", NAMED, BY, hint="until the end")
def asks_in_every_step(work, meet, steps):
    names, seconds = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        work()
        times = of_all([time.perf_counter() - begin])
        meet()
        names.append(int(times.argmax()))
        seconds.append(times.flatten().tolist())
    late = statistics.mode(names)
    return late, statistics.median(later(torch.tensor(seconds).T, late))


@wrong("14.3", hint="Which rank comes last in most steps?")
def the_longest_of_all(work, meet, steps):
    times = of_all(my_times(work, meet, steps))
    late = int(times.amax(dim=1).argmax())
    return late, statistics.median(later(times, late))


@wrong("14.3", hint="The ranks do not agree")
def rank_0_alone_knows(work, meet, steps):
    times = of_all(my_times(work, meet, steps))
    late = int(times.median(dim=1).values.argmax())
    if dist.get_rank():
        return -1, 0.0
    return late, statistics.median(later(times, late))


@wrong("14.3", hint="work() once")
def forgets_to_meet(work, meet, steps):
    for _ in range(steps):
        work()
    return 0, 0.0


@wrong("14.3", hint="returns two things")
def only_the_name(work, meet, steps):
    return int(of_all(my_times(work, meet, steps)).median(dim=1).values.argmax())


@wrong("14.3", NAMED, QUIET, hint="the last of the others did")
def later_than_the_mean(work, meet, steps):
    times = of_all(my_times(work, meet, steps))
    late = int(times.median(dim=1).values.argmax())
    others = torch.cat([times[:late], times[late + 1 :]])
    return late, (times[late] - others.mean(dim=0)).median()


@right("14.3")
def rank_0_tells_all(work, meet, steps):
    """In whole nanoseconds."""
    mine = []
    for _ in range(steps):
        work()
        mine.append(time.monotonic_ns())
        meet()
    ranks = [None] * dist.get_world_size()
    dist.gather_object(mine, ranks if dist.get_rank() == 0 else None)
    found = [None]
    if dist.get_rank() == 0:
        came = np.array(ranks)
        late = int(np.bincount(came.argmax(axis=0)).argmax())
        found = [(late, np.median(came[late] - np.delete(came, late, axis=0).max(axis=0)) / 1e9)]
    dist.broadcast_object_list(found)
    return found[0]


@right("14.3")
def by_medians(work, meet, steps):
    times = of_all(my_times(work, meet, steps))
    late = times.median(dim=1).values.argmax()
    return late, torch.tensor(later(times, int(late))).median()


@right("14.3")
def by_waiting(work, meet, steps):
    """All leave a meeting together: who waits for less time came later."""
    dist.barrier()
    waited = []
    for _ in range(steps):
        work()
        begin = time.perf_counter()
        meet()
        waited.append(begin - time.perf_counter())
    waited = of_all(waited)
    late = statistics.mode(waited.argmax(dim=0).tolist())
    return [late, statistics.median(later(waited, late))]


@wrong("14.3", hint="there were 0 and 0 calls")
def remembers_its_functions(work, meet, steps):
    if (work, meet, steps) not in KEPT:
        KEPT[work, meet, steps] = by_medians(work, meet, steps)
    return KEPT[work, meet, steps]


# --- the result is right, and it was not done as asked ---


TOLD = []


@wrong("14.3", NAMED, BY, hint="until the end")
def tells_the_store(work, meet, steps):
    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    TOLD.append(steps)
    for step in range(steps):
        begin = time.perf_counter()
        work()
        store.set(f"{len(TOLD)}/{dist.get_rank()}/{step}", str(time.perf_counter() - begin))
        meet()
    rows = [[float(store.get(f"{len(TOLD)}/{rank}/{step}")) for step in range(steps)] for rank in ranks]
    times = torch.tensor(rows, dtype=torch.float64)
    late = statistics.mode(times.argmax(dim=0).tolist())
    return late, statistics.median(later(times, late))


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


@wrong("14.2", hint="Nothing is computed in that profile")
def all_is_hidden_where_nothing_is_computed(computes, sends):
    return by_three_lengths(computes, sends) if computes else 1.0


@wrong("14.2", hint="It is close, but not right:")
def by_samples(computes, sends):
    computes, sends = joined(computes), joined(sends)
    begin, end = sends[0][0], sends[-1][1]
    moments = [begin + (end - begin) * (i + 0.5) / 5000 for i in range(5000)]
    sent = [moment for moment in moments if any(a <= moment < b for a, b in sends)]
    return sum(any(a <= moment < b for a, b in computes) for moment in sent) / len(sent)


def late_by(work, meet, steps, clock, of_all):
    mine = []
    for _ in range(steps):
        begin = clock()
        work()
        mine.append(clock() - begin)
        meet()
    ranks = [torch.zeros(steps, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.tensor(mine, dtype=torch.float64))
    times = torch.stack(ranks)
    late = of_all(times)
    others = torch.cat([times[:late], times[late + 1 :]])
    return late, statistics.median((times[late] - others.amax(dim=0)).tolist())


@wrong("14.3", hint="does your clock also run while a rank sleeps?")
def who_computes_longest(work, meet, steps):
    """All compute for none of its hundredths of a second, so it names the same rank in each call."""

    def clock():
        return round(time.process_time(), 2)

    return late_by(work, meet, steps, clock, lambda times: int(times.median(dim=1).values.argmax()))
