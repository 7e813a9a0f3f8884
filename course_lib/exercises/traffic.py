"""What an answer let travel between the ranks, whichever way it asked for it.

PyTorch's profiler stands where each call ends: a collective of `torch.distributed`, one that was imported by
name, a functional one, and a call of the backend itself look alike there. Works run under it in a rank.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

# How a process group starts work, for the functions of torch.distributed. Not every torch has all of them.
STARTS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "gather_single", "scatter"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall", "alltoall_base", "all_to_all_single", "barrier", "send", "recv", "recv_anysource"),
)
STORES = ("set", "multi_set", "add", "append", "compare_set", "queue_push")  # how a store is written to
READS = ("get", "multi_get", "queue_pop")  # and read
MESSAGES = ("send", "recv")
END_SECONDS = 2.0  # for what nobody waits for
is_completed = dist.Work.is_completed  # the real one: asking `waits` whether work has ended is waiting for it


@dataclass
class Traffic:
    """Of one rank. A number counts as one, whatever its type.

    Attributes
    ----------
    calls : list of (str, int)
        Each call by gloo's name ("all_reduce", "send", "barrier"), and how many numbers it was given here.
    unwaited : list of str
        Calls with ``async_op`` that nobody waited for.
    stored : int
        How often this rank wrote into a store: another way to exchange something.
    put, got : int
        What it wrote there, and read, in numbers of 8 bytes.
    to : set of int
        Ranks that messages went to.
    """

    calls: list[tuple[str, int]] = field(default_factory=list)
    unwaited: list[str] = field(default_factory=list)
    stored: int = 0
    put: int = 0
    got: int = 0
    to: set[int] = field(default_factory=set)

    def collectives(self) -> list[str]:
        """Names of all calls that are no messages."""
        return [name for name, _ in self.calls if name not in MESSAGES]

    def sent(self) -> int:
        """Numbers that went out in messages."""
        return sum(count for name, count in self.calls if name == "send")

    def came(self) -> int:
        """Numbers that came to this rank: a gather brings those of all ranks, and a store what is read."""
        world_size = dist.get_world_size()
        here = [(name, count) for name, count in self.calls if name != "send"]
        return sum(count * (world_size if "gather" in name else 1) for name, count in here) + self.got


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Watch what is called inside; it is all known when the block has ended."""
    found = Traffic()
    with (
        _noting_stores(found),
        _noting_neighbours(found),
        waits() as pending,
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        yield found
        found.unwaited = [name for name, _ in pending.values()]
        # A thread of gloo's that ends a collective after the profiler may crash the process.
        let_end([work for name, work in pending.values() if not name.startswith(MESSAGES)])
    for event in profiler.events():
        if event.name.startswith("gloo:"):
            size = sum(math.prod(shape) for shape in event.input_shapes if shape)
            found.calls.append((event.name.removeprefix("gloo:"), size))


def let_end(works: list[dist.Work]) -> None:
    """Give work that nobody waited for `END_SECONDS` to end; for `waits`, nobody has waited for it then."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until and not all(map(is_completed, works)):
        time.sleep(0.001)


@contextlib.contextmanager
def waits() -> Iterator[dict[int, tuple[str, Any]]]:
    """By id, name and work of all that is started inside and that nobody has waited for yet."""
    pending: dict[int, tuple[str, Any]] = {}

    def started(real: Callable[..., Any], name: str, self: Any, *args: Any, **named: Any) -> Any:
        work = real(self, *args, **named)
        if work is not None:
            pending[id(work)] = name, work  # it lives on, so that its id stays its own
        return work

    def ended(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        result: Any = None
        try:
            result = real(self, *args, **named)
        finally:  # who waits in vain has waited
            if result is not False:  # is_completed() says whether it is
                pending.pop(id(self), None)
        return result

    with contextlib.ExitStack() as stack:
        for name in filter(partial(hasattr, dist.ProcessGroup), STARTS):
            method = _method(partial(started, getattr(dist.ProcessGroup, name), name))
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        for name in ("wait", "is_completed", "synchronize", "get_future"):
            method = _method(partial(ended, getattr(dist.Work, name)))
            stack.enter_context(mock.patch.object(dist.Work, name, method))
        yield pending


@contextlib.contextmanager
def _noting_stores(found: Traffic) -> Iterator[None]:
    """Count in ``found`` what is written into stores, and read."""

    def written(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        found.stored += 1
        found.put += _numbers([*args[1:], *named.values()])  # what comes first is a key
        return real(self, *args, **named)

    def read(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        value = real(self, *args, **named)
        found.got += _numbers(value)
        return value

    with contextlib.ExitStack() as stack:
        for names, call in ((STORES, written), (READS, read)):
            for name in filter(partial(hasattr, dist.Store), names):
                method = _method(partial(call, getattr(dist.Store, name)))
                stack.enter_context(mock.patch.object(dist.Store, name, method))
        yield


def _numbers(value: Any) -> int:
    """Of a text, or of several, in numbers of 8 bytes."""
    if isinstance(value, list | tuple):
        return sum(map(_numbers, value))
    return -(-len(value) // 8) if isinstance(value, str | bytes) else 0


@contextlib.contextmanager
def _noting_neighbours(found: Traffic) -> Iterator[None]:
    """Note in ``found`` to which ranks of their group messages go."""
    real = dist.ProcessGroup.send

    def send(self: Any, tensors: Any, to: int, *args: Any, **named: Any) -> Any:
        found.to.add(to)
        return real(self, tensors, to, *args, **named)

    with mock.patch.object(dist.ProcessGroup, "send", send):
        yield


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function, which a class binds to its instances, as it does not a `partial`."""
    return lambda self, *args, **named: call(self, *args, **named)
