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
    """An interval in which a rank did one thing.

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
    clocks = [event for event in events if event.name.startswith(CLOCK)]
    zero = max(int(event.name.removeprefix(CLOCK)) / 1e9 - event.time_range.start / 1e6 for event in clocks)

    def stretch(event: Any) -> Stretch:
        return zero + event.time_range.start / 1e6, zero + event.time_range.end / 1e6

    own = [event for event in events if _on_host(event) and not event.name.startswith(CLOCK)]
    device = [event for event in events if not _on_host(event)]
    kernels = [event for event in device if not event.is_user_annotation and _computes(event)]
    carried = [event for event in device if KERNEL.match(event.name)]
    carried = carried or [event for event in own if CARRIED.match(event.name)]
    if kernels:
        busy = _joined(map(stretch, kernels), PAUSE)
        computing = [Span("computes", "kernels", start, end) for start, end in busy]
    else:
        labels = [event for event in own if event.is_user_annotation and event.thread == clocks[0].thread]
        operations = [stretch(event) for event in own if not event.is_user_annotation and _computes(event)]
        computing = _inside([(event.name, *stretch(event)) for event in labels], operations)
    return sorted([*computing, *_numbered([(event.name, *stretch(event)) for event in carried])], key=_start)


def _on_host(event: Any) -> bool:
    return "CPU" in str(event.device_type)


def _computes(event: Any) -> bool:
    return not event.name.startswith(BESIDES) and not KERNEL.match(event.name)


def _start(span: Span) -> float:
    return span.start


def _of_kind(spans: Iterable[Span], kind: str) -> list[Stretch]:
    return [(span.start, span.end) for span in spans if span.kind == kind]


def _joined(stretches: Iterable[Stretch], pause: float = 0.0) -> list[Stretch]:
    """Merge intervals that overlap, or with at most ``pause`` seconds between them."""
    joined: list[Stretch] = []
    for start, end in sorted(stretches):
        if joined and start - joined[-1][1] <= pause:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _inside(labels: list[tuple[str, float, float]], operations: list[Stretch]) -> list[Span]:
    """Split each outermost label into intervals with operations and the pauses around and between them."""
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
    for number, (name, start, end) in enumerate(sorted(carried, key=lambda call: call[1]), start=1):
        lane = next((i for i, since in enumerate(free) if since <= start), len(free))
        free[lane : lane + 1] = [end]
        spans.append(Span("sends", f"{_collective(name)} {number}", start, end, lane))
    return spans


def _collective(name: str) -> str:
    words = CARRIED.match(name) or KERNEL.match(name)
    kind = words[1] if words else name
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()  # AllReduce: all_reduce
