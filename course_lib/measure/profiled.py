"""`profiled`: record what a rank did in a block of code, and when, with PyTorch's profiler (lesson 14)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

PAUSE = 1e-4  # seconds: a shorter pause between two operations is Python overhead, not waiting
BESIDES = ("c10d::", "torch.distributed.ddp", "gloo:", "nccl:", "Memcpy", "Memset")  # these do not compute
CARRIED = re.compile(r"(?:gloo|nccl):_?(\w+)")  # c10d's name for a collective that a backend runs
KERNEL = re.compile(r"nccl\w*?Kernel_(\w+?)_")  # NCCL's own name, on a GPU
Stretch = tuple[float, float]
Named = tuple[str, float, float]


class Span(NamedTuple):
    """An interval in which a rank did one thing.

    Attributes
    ----------
    kind : str
        ``"computes"``; ``"sends"``: a collective, from when the backend (a thread of gloo, a kernel of NCCL)
        starts it until it is done. Between these, it waits.
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
    from torch.profiler import profile, supported_activities

    spans: list[Span] = []
    with profile(activities=supported_activities()) as profiler:
        yield spans
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    began = profiler.profiler.kineto_results.trace_start_ns() / 1e9  # by time.time()
    spans += spans_of(profiler.events(), began)


def overlap(spans: Iterable[Span]) -> float:
    """Return the share of a rank's communication time, 0 to 1, during which it computed (lesson 14).

    Raises
    ------
    ValueError
        There is no collective among the spans.
    """
    spans = list(spans)
    sends, computes = (
        _joined((span.start, span.end) for span in spans if span.kind == kind)
        for kind in ("sends", "computes")
    )
    if not (whole := sum(end - start for start, end in sends)):
        raise ValueError("there is no collective in what was profiled")
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sends for b in computes)
    return both / whole


def spans_of(events: Sequence[Any], began: float) -> list[Span]:
    """Convert a profiler's events, in microseconds since it ``began``, to spans in order of their start."""

    def stretches(chosen: Iterable[Any]) -> list[Named]:
        ranges = [(event.name, event.time_range) for event in chosen]
        return [(name, began + each.start / 1e6, began + each.end / 1e6) for name, each in ranges]

    host = [event for event in events if _on_host(event)]
    device = [event for event in events if not _on_host(event)]
    kernels = stretches(event for event in device if not event.is_user_annotation and _computes(event))
    carried = [event for event in device if KERNEL.match(event.name)]
    carried = carried or [event for event in host if CARRIED.match(event.name)]
    if kernels:
        busy = _joined(((start, end) for _, start, end in kernels), PAUSE)
        computing = [Span("computes", "kernels", *each) for each in busy]
    else:
        labels = stretches(event for event in host if event.is_user_annotation and _computes(event))
        operations = stretches(event for event in host if not event.is_user_annotation and _computes(event))
        computing = _inside(labels, [(start, end) for _, start, end in operations])
    return sorted([*computing, *_numbered(stretches(carried))], key=lambda span: span.start)


def _on_host(event: Any) -> bool:
    return "CPU" in str(event.device_type)


def _computes(event: Any) -> bool:
    return not event.name.startswith(BESIDES) and not KERNEL.match(event.name)


def _joined(stretches: Iterable[Stretch], pause: float = 0.0) -> list[Stretch]:
    """Merge intervals that overlap, or with at most ``pause`` seconds between them."""
    joined: list[Stretch] = []
    for start, end in sorted(stretches):
        if joined and start - joined[-1][1] <= pause:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _inside(labels: list[Named], operations: list[Stretch]) -> list[Span]:
    """Return the intervals with operations in each outermost label."""
    spans, until = [], 0.0
    for name, start, end in sorted(labels, key=lambda label: (label[1], -label[2])):
        if start >= until:  # not within another label
            until = end
            inside = [(max(start, a), min(end, b)) for a, b in operations if a < end and b > start]
            spans += [Span("computes", name, *each) for each in _joined(inside, PAUSE)]
    return spans


def _numbered(carried: list[Named]) -> list[Span]:
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
