"""What people answer in exercise 14, wrong and right (see `answers`)."""

from __future__ import annotations

import numpy as np

from tests.exercises.answers import right, wrong

BEHIND = "a bucket travels while backward computes the next ones"


def moved_on(forward, backward, buckets, move):
    """As it is given; `move(free, ready, size)` is the line to write."""
    done, free = 0, 0.0
    for size in buckets:
        done += size
        free = move(free, forward + backward * done / sum(buckets), size)
    return max(free, forward + backward)


@wrong("14.1", hint="nothing hidden")
def one_after_the_other(forward, backward, buckets, speed):
    return moved_on(
        forward, backward, buckets, lambda free, ready, size: max(free, forward + backward) + size / speed
    )


@wrong("14.1", hint="too early")
def never_waits_for_a_bucket(forward, backward, buckets, speed):
    return moved_on(forward, backward, buckets, lambda free, ready, size: free + size / speed)


@wrong("14.1", hint="too early")
def arrives_when_it_is_ready(forward, backward, buckets, speed):
    return moved_on(forward, backward, buckets, lambda free, ready, size: max(free + size / speed, ready))


@wrong("14.1", hint="another time")
def multiplies(forward, backward, buckets, speed):
    return moved_on(forward, backward, buckets, lambda free, ready, size: max(free, ready) + size * speed)


@wrong("14.1", BEHIND, hint="all at once")
def no_queue(forward, backward, buckets, speed):
    return moved_on(forward, backward, buckets, lambda free, ready, size: max(free, ready + size / speed))


@wrong("14.1", BEHIND, hint="busy")
def only_the_last(forward, backward, buckets, speed):
    return moved_on(forward, backward, buckets, lambda free, ready, size: ready + size / speed)


@wrong("14.1", BEHIND, hint="busy")
def by_the_first_or_the_last(forward, backward, buckets, speed):
    first = forward + backward * buckets[0] / sum(buckets)
    return max(first + sum(buckets) / speed, forward + backward + buckets[-1] / speed)


@right("14.1")
def from_the_end(forward, backward, buckets, speed):
    """The step is over when the last of the queues is: from any bucket on, all that come after it."""
    takes = np.array(buckets) / speed
    ready = forward + backward * np.cumsum(buckets) / np.sum(buckets)
    return (ready + takes[::-1].cumsum()[::-1]).max()


@right("14.1")
def in_two_cases(forward, backward, buckets, speed):
    def move(free, ready, size):
        return free + size / speed if free > ready else ready + size / speed

    return moved_on(forward, backward, buckets, move)


SHARE = "it is the share of the time of sending during which the rank computes"


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


@wrong("14.2", SHARE, hint="sends")
def joins_the_computing_alone(computes, sends):
    return common(joined(computes), sends) / length(sends)


@wrong("14.2", SHARE, hint="computes")
def joins_the_sending_alone(computes, sends):
    return common(computes, joined(sends)) / length(joined(sends))


@wrong("14.2", SHARE, hint="computes")
def joins_neighbours_as_they_come(computes, sends):
    """Without putting them in order first."""

    def in_order(intervals):
        found = intervals[:1]
        for start, end in intervals[1:]:
            if found[-1][0] <= start <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end))
            else:
                found.append((start, end))
        return found

    return common(in_order(computes), joined(sends)) / length(joined(sends))


@wrong("14.2", hint="exposed")
def what_is_left(computes, sends):
    return 1 - common(joined(computes), joined(sends)) / length(joined(sends))


@wrong("14.2", hint="of the computing")
def of_the_computing(computes, sends):
    return common(joined(computes), joined(sends)) / length(joined(computes))


@wrong("14.2", hint="seconds")
def in_seconds(computes, sends):
    return common(joined(computes), joined(sends))


@wrong("14.2", hint="in part")
def wholly_inside(computes, sends):
    inside = [b for b in joined(sends) if any(a[0] <= b[0] and b[1] <= a[1] for a in joined(computes))]
    return length(inside) / length(joined(sends))


@wrong("14.2", hint="in part")
def from_first_to_last(computes, sends):
    begin, end = min(a for a, _ in computes), max(b for _, b in computes)
    return common([(begin, end)], joined(sends)) / length(joined(sends))


@wrong("14.2", hint="in part")
def the_first_that_meets_it(computes, sends):
    found = 0.0
    for b in joined(sends):
        found += next((both for a in joined(computes) if (both := common([a], [b]))), 0.0)
    return found / length(joined(sends))


@right("14.2")
def with_numpy(computes, sends):
    edges = np.unique([*computes, *sends])
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    on = [
        ((each[:, :1] < middles) & (middles < each[:, 1:])).any(0)
        for each in (np.array(intervals) for intervals in (computes, sends))
    ]
    return widths[on[0] & on[1]].sum() / widths[on[1]].sum()


@right("14.2")
def by_three_lengths(computes, sends):
    together = length(joined(computes)) + length(joined(sends)) - length(joined([*computes, *sends]))
    return together / length(joined(sends))
