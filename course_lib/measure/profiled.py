"""`profiled`: record what a rank did in a block of code, and when, with PyTorch's profiler (lesson 14)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import profile, supported_activities

PAUSE = 1e-4  # seconds: a shorter pause between two operations is Python overhead, not waiting
BESIDES = ("c10d::", "torch.distributed.ddp", "Memcpy", "Memset")  # beginnings of events that do not compute
BY_BACKEND = re.compile(r"(?:gloo|nccl):_?(\w+)")  # c10d's name for a collective that a backend runs
BY_KERNEL = re.compile(r"nccl\w*?Kernel_(\w+?)_")  # NCCL's own name, on a GPU
Stretch = tuple[float, float]  # seconds by time.time()


class Span(NamedTuple):
    """An interval in which a rank did one thing, in seconds by time.time(), one clock for a machine's ranks.

    It ``"computes"``, or it ``"sends"``: a collective, from the moment when the backend (a thread of gloo, a
    kernel of NCCL) starts it until it is done. Between intervals, the rank waits.
    """

    kind: str
    what: str  # "operations", "kernels" on a GPU, or the collective and its number
    start: float
    end: float
    lane: int = 0  # of a collective: higher if it began while others were under way


@contextmanager
def profiled() -> Iterator[list[Span]]:
    """Profile the code inside the block; the list that it yields is filled when the block ends (lesson 14).

    On a GPU (not tried yet), its kernels are what "computes", not the host, which runs ahead.

    Examples
    --------
    >>> with profiled() as spans:
    ...     ddp(x).sum().backward()
    >>> hidden = overlap(spans)
    """
    spans: list[Span] = []
    with profile(activities=supported_activities()) as profiler:
        yield spans
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    began = profiler.profiler.kineto_results.trace_start_ns() / 1e9  # by time.time()
    spans += spans_of(profiler.events(), began)


def overlap(spans: Sequence[Span]) -> float:
    """Return the share of a rank's communication time, 0 to 1, during which it computed (lesson 14).

    ValueError is raised if there is no collective among the spans.
    """
    sends = _joined((span.start, span.end) for span in spans if span.kind == "sends")
    computes = _joined((span.start, span.end) for span in spans if span.kind == "computes")
    if not (whole := sum(end - start for start, end in sends)):
        raise ValueError("there is no collective in what was profiled")
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sends for b in computes) / whole


def spans_of(events: Sequence[Any], began: float) -> list[Span]:
    """Convert a profiler's events, in microseconds since it ``began``, to spans in order of their start.

    Collectives are numbered from 1 in the order in which they began.
    """

    def stretch(event: Any) -> Stretch:
        return began + event.time_range.start / 1e6, began + event.time_range.end / 1e6

    on_gpu = [event for event in events if "CPU" not in str(event.device_type)]
    kernels = list(filter(_computes, on_gpu))
    busy = _joined(map(stretch, kernels or filter(_computes, events)), PAUSE)
    spans = [Span("computes", "kernels" if kernels else "operations", *each) for each in busy]
    name = BY_KERNEL if any(BY_KERNEL.match(event.name) for event in on_gpu) else BY_BACKEND
    sends = [(*stretch(event), found[1]) for event in events if (found := name.match(event.name))]
    free: list[float] = []  # by lane: since when it is free
    for number, (start, end, kind) in enumerate(sorted(sends), start=1):
        lane = next((i for i, since in enumerate(free) if since <= start), len(free))
        free[lane : lane + 1] = [end]
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()  # AllReduce: all_reduce
        spans.append(Span("sends", f"{words} {number}", start, end, lane))
    return sorted(spans, key=lambda span: span.start)


def _computes(event: Any) -> bool:
    sends = BY_BACKEND.match(event.name) or BY_KERNEL.match(event.name)
    return not (event.is_user_annotation or sends or event.name.startswith(BESIDES))


def _joined(stretches: Iterable[Stretch], pause: float = 0.0) -> list[Stretch]:
    """Merge intervals that overlap, or that have at most ``pause`` seconds between them."""
    joined: list[Stretch] = []
    for start, end in sorted(stretches):
        if joined and start - joined[-1][1] <= pause:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined
