"""`profiled`: record what a rank did in a block of code, and when, with PyTorch's profiler (lesson 14)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

CLOCK = "course_lib clock "  # begins the name of an event, which goes on with time.time_ns() of its start
CLOCKS = 5  # such events: on a busy machine some milliseconds may pass between this reading and the start
PAUSE = 1e-4  # seconds: a shorter pause between two operations is Python overhead, not waiting
BESIDES = ("c10d::", "torch.distributed.ddp", "gloo:", "nccl:", "Memcpy", "Memset")  # these do not compute
CARRIED = re.compile(r"(?:gloo|nccl):_?(\w+)")  # c10d's name for a collective that a backend runs
KERNEL = re.compile(r"nccl\w*?Kernel_(\w+?)_")  # NCCL's own name, on a GPU
Stretch = tuple[float, float]


class Span(NamedTuple):
    """A stretch of time in which a rank did one thing.

    Attributes
    ----------
    kind : str
        ``"computes"``; ``"sends"``: a collective, from when the backend (a thread of gloo, a kernel of NCCL)
        starts it until it is done; ``"waits"``: inside a label while no operation runs.
    what : str
        The label of ``record_function``, ``"kernels"`` on a GPU, or the collective and its number.
    start, end : float
        Seconds by time.time(), which is one clock for all ranks of a machine.
    lane : int
        For a collective: 0, or a higher number if it began while others were under way.
    """

    kind: str
    what: str
    start: float
    end: float
    lane: int = 0


@contextmanager
def profiled() -> Iterator[list[Span]]:
    """Profile the code inside the block; the list that it yields is filled when the block ends (lesson 14).

    Inside, name the parts with ``torch.profiler.record_function("forward")``. On a GPU, what "computes" is
    its kernels, not the labels of the host, which runs ahead; this has not been tried on a GPU.

    Examples
    --------
    >>> with profiled() as spans:
    ...     with record_function("forward"):
    ...         loss = ddp(x).sum()
    ...     with record_function("backward"):
    ...         loss.backward()
    >>> hidden = overlap(spans)
    """
    import torch
    from torch.profiler import profile, record_function, supported_activities

    spans: list[Span] = []
    with profile(activities=supported_activities()) as profiler:
        for _ in range(CLOCKS):
            with record_function(f"{CLOCK}{time.time_ns()}"):
                pass
        yield spans
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    spans += spans_of(profiler.events())


def overlap(spans: Iterable[Span]) -> float:
    """Return the share of a rank's communication time, 0 to 1, during which it computed (lesson 14).

    Raises
    ------
    ValueError
        There is no collective among the spans.
    """
    spans = list(spans)
    sends, computes = (_joined(_of_kind(spans, kind)) for kind in ("sends", "computes"))
    if not (whole := sum(end - start for start, end in sends)):
        raise ValueError("there is no collective in what was profiled")
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sends for b in computes)
    return both / whole


def spans_of(events: Sequence[Any]) -> list[Span]:
    """Convert a profiler's events to spans, in order of their start."""
    clocks = [each for each in events if each.name.startswith(CLOCK)]
    zero = max(int(each.name.removeprefix(CLOCK)) / 1e9 - each.time_range.start / 1e6 for each in clocks)

    def stretch(event: Any) -> Stretch:
        return zero + event.time_range.start / 1e6, zero + event.time_range.end / 1e6

    own = [each for each in events if _on_host(each) and not each.name.startswith(CLOCK)]
    device = [each for each in events if not _on_host(each)]
    kernels = [each for each in device if not each.is_user_annotation and _computes(each)]
    carried = [each for each in device if KERNEL.match(each.name)]
    carried = carried or [each for each in own if CARRIED.match(each.name)]
    if kernels:
        busy = [("kernels", *each) for each in _joined(map(stretch, kernels), PAUSE)]
        computing = [Span("computes", *each) for each in busy]
    else:
        labels = [each for each in own if each.is_user_annotation and each.thread == clocks[0].thread]
        operations = [stretch(each) for each in own if not each.is_user_annotation and _computes(each)]
        computing = _inside([(each.name, *stretch(each)) for each in labels], operations)
    return sorted([*computing, *_numbered([(each.name, *stretch(each)) for each in carried])], key=_start)


def _on_host(event: Any) -> bool:
    return "CPU" in str(event.device_type)


def _computes(event: Any) -> bool:
    return not event.name.startswith(BESIDES) and not KERNEL.match(event.name)


def _start(span: Span) -> float:
    return span.start


def _of_kind(spans: Iterable[Span], kind: str) -> list[Stretch]:
    return [(each.start, each.end) for each in spans if each.kind == kind]


def _joined(stretches: Iterable[Stretch], pause: float = 0.0) -> list[Stretch]:
    """Merge stretches that overlap, or with at most ``pause`` seconds between them."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start - found[-1][1] <= pause:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _inside(labels: list[tuple[str, float, float]], operations: list[Stretch]) -> list[Span]:
    """Split each outermost label into stretches with operations and the pauses around and between them."""
    spans, until = [], 0.0
    for name, start, end in sorted(labels, key=lambda label: (label[1], -label[2])):
        if start < until:  # within another label
            continue
        until = end
        inside = [(max(start, a), min(end, b)) for a, b in operations if a < end and b > start]
        busy = _joined([(start, start), *inside, (end, end)], PAUSE)
        spans += [Span("computes", name, a, b) for a, b in busy if b > a]
        spans += [Span("waits", name, a[1], b[0]) for a, b in pairwise(busy)]
    return spans


def _numbered(carried: list[tuple[str, float, float]]) -> list[Span]:
    """Number the collectives from 1 in the order in which they began, and put overlapping ones into lanes."""
    spans: list[Span] = []
    free: list[float] = []  # by lane: since when it is free
    for number, (name, start, end) in enumerate(sorted(carried, key=lambda each: each[1]), start=1):
        lane = next((i for i, since in enumerate(free) if since <= start), len(free))
        free[lane : lane + 1] = [end]
        spans.append(Span("sends", f"{_collective(name)} {number}", start, end, lane))
    return spans


def _collective(name: str) -> str:
    found = (CARRIED.match(name) or KERNEL.match(name))[1]
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found).lower()  # AllReduce: all_reduce
