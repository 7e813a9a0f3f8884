"""Record what an answer sends between the ranks, whichever way it does so.

PyTorch's profiler sits where each call ends up: a collective of `torch.distributed`, one that was imported by
name, a functional one, and a call of the backend itself look alike there. Works run under it in a rank.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

# Methods by which torch.distributed starts work on a process group. Not every torch has all of them.
STARTS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "gather_single", "scatter"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall", "alltoall_base", "all_to_all_single", "barrier", "send", "recv", "recv_anysource"),
)
STORES = ("set", "multi_set", "add", "append", "compare_set", "queue_push")  # methods that write to a store
READS = ("get", "multi_get", "queue_pop")  # and that read from it
MESSAGES = ("send", "recv")
# Where reduce_scatter of one tensor ends up, and which input it is; over gloo it starts an all_reduce of it.
SCATTERS = {"c10d::_reduce_scatter_base_": 1, "_c10d_functional::reduce_scatter_tensor": 0}
END_SECONDS = 2.0  # for work that nobody waits for
is_completed = dist.Work.is_completed  # unpatched: in `unwaited_work`, a call that returns True is a wait


@dataclass
class Traffic:
    """The traffic of one rank, in numbers. A number counts as one, whatever its dtype.

    Attributes
    ----------
    calls : list of (str, int)
        Each call by gloo's name ("all_reduce", "send", "barrier"), and how many numbers this rank gave it.
    unwaited : list of str
        Calls with ``async_op`` that nobody waited for.
    stored : int
        How often this rank wrote to a store, another way to exchange something.
    put, got : int
        How much it wrote to stores, and read from them, in numbers of 8 bytes.
    to : set of int
        Ranks that messages went to.
    scattered : int
        How many numbers it gave to reduce_scatter; over gloo these are among those of "all_reduce".
    """

    calls: list[tuple[str, int]] = field(default_factory=list)
    unwaited: list[str] = field(default_factory=list)
    stored: int = 0
    put: int = 0
    got: int = 0
    to: set[int] = field(default_factory=set)
    scattered: int = 0

    def collectives(self) -> list[str]:
        """Return the names of all calls that are not messages."""
        return [name for name, _ in self.calls if name not in MESSAGES]

    def sent(self) -> int:
        """Return how many numbers this rank sent in messages."""
        return sum(count for name, count in self.calls if name == "send")

    def received(self) -> int:
        """Return how many numbers came to this rank: by gathers those of all ranks, by stores those read."""
        world_size = dist.get_world_size()
        here = [(name, count) for name, count in self.calls if name != "send"]
        return sum(count * (world_size if "gather" in name else 1) for name, count in here) + self.got

    def travels(self) -> dict[str, int]:
        """Return by name what `received` counts, an all_reduce twice: it scatters sums and gathers them."""
        world_size, found = dist.get_world_size(), Counter(store=self.got, reduce_scatter=self.scattered)
        for name, count in self.calls:
            found[name] += count * (world_size if "gather" in name else 2 if name == "all_reduce" else 1)
        found["all_reduce"] -= 2 * self.scattered
        return {name: count for name, count in found.items() if count and name != "send"}


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record what is called inside the block; the record is complete when the block has ended."""
    record = Traffic()
    with (
        _noting_stores(record),
        _noting_neighbours(record),
        _noting_lists_to_scatter(record),
        unwaited_work() as pending,
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        yield record
        record.unwaited = [name for name, _ in pending.values()]
        # A gloo thread that ends a collective after the profiler has stopped may crash the process.
        let_end([work for name, work in pending.values() if not name.startswith(MESSAGES)])
    # Not profiler.events(), which makes an object of each operation: that took longer than all other judging.
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    for event in events:
        if (name := event.name()).startswith("gloo:"):
            sizes = zip(event.shapes(), event.dtypes(), strict=True)
            size = sum(math.prod(shape) for shape, dtype in sizes if dtype)  # a number has no dimensions
            record.calls.append((name.removeprefix("gloo:"), size))
        elif name in SCATTERS:
            record.scattered += math.prod(event.shapes()[SCATTERS[name]])


def let_end(works: list[dist.Work]) -> None:
    """Give work that nobody waited for `END_SECONDS` to end; in `unwaited_work` this is not a wait."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until and not all(map(is_completed, works)):
        time.sleep(0.001)


@contextlib.contextmanager
def unwaited_work() -> Iterator[dict[int, tuple[str, Any]]]:
    """Yield, by id, the name and work of all that was started inside and not yet waited for."""
    pending: dict[int, tuple[str, Any]] = {}

    def started(real: Callable[..., Any], name: str, self: Any, *args: Any, **named: Any) -> Any:
        work = real(self, *args, **named)
        if work is not None:
            pending[id(work)] = name, work  # kept alive, so that its id is not reused
        return work

    def ended(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        result: Any = None
        try:
            result = real(self, *args, **named)
        finally:  # a wait that fails is a wait, too
            if result is not False:  # is_completed() says that it is not
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


OUTPUTS_FIRST = ("gather", "scatter", "alltoall", "all_to_all")  # parts of names of calls that get them first
TO_ALL = ("alltoall", "all_to_all", "scatter")  # and of those that give each rank a part of its own


@contextlib.contextmanager
def noting_bytes(note: Callable[[float], None]) -> Iterator[None]:
    """Call ``note`` with the bytes that each call gives to another rank, on whichever thread it is called.

    It tells dtypes apart, which `record_traffic` does not. A functional collective is not seen.
    """

    def started(real: Callable[..., Any], name: str, self: Any, *args: Any, **named: Any) -> Any:
        given = args[1:2] if any(part in name for part in OUTPUTS_FIRST) else args[:1]
        size = float(_bytes(given))
        if name == "send":
            size /= max(self.size() - 1, 1)  # as a rule, each of the others is sent to
        elif any(part in name for part in TO_ALL):
            size /= self.size()
        if not name.startswith("recv") and (name != "broadcast" or args[1].rootRank == self.rank()):
            note(size)
        return real(self, *args, **named)

    with contextlib.ExitStack() as stack:
        for name in filter(partial(hasattr, dist.ProcessGroup), STARTS):
            method = _method(partial(started, getattr(dist.ProcessGroup, name), name))
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        yield


def _bytes(given: Any) -> int:
    """Return the size of a tensor, or of those in nested lists."""
    if isinstance(given, list | tuple):
        return sum(map(_bytes, given))
    return given.nbytes if isinstance(given, Tensor) else 0


@contextlib.contextmanager
def noting_waits(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` each time this thread waits for, or asks for, work or a future that is not done yet.

    For what a functional collective returns, each wait is told.
    """
    import torch.distributed._functional_collectives as functional  # not loaded before it is needed

    here = get_ident()

    def waits(
        real: Callable[..., Any], is_done: Callable[..., bool], self: Any, *args: Any, **named: Any
    ) -> Any:
        if get_ident() == here and not is_done(self):
            note()
        return real(self, *args, **named)

    with contextlib.ExitStack() as stack:
        for kind, names, is_done in (
            (dist.Work, ("wait", "synchronize", "is_completed"), is_completed),
            (torch._C.Future, ("wait", "done"), torch._C.Future.done),
        ):
            for name in names:
                method = _method(partial(waits, getattr(kind, name), is_done))
                stack.enter_context(mock.patch.object(kind, name, method))
        method = partial(waits, functional.wait_tensor, lambda _: False)
        stack.enter_context(mock.patch.object(functional, "wait_tensor", method))
        yield


@contextlib.contextmanager
def _noting_stores(record: Traffic) -> Iterator[None]:
    """Count in ``record`` what is written to stores, and read from them."""

    def written(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        record.stored += 1
        record.put += _numbers([*args[1:], *named.values()])  # the first one is a key
        return real(self, *args, **named)

    def read(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        value = real(self, *args, **named)
        record.got += _numbers(value)
        return value

    with contextlib.ExitStack() as stack:
        for names, call in ((STORES, written), (READS, read)):
            for name in filter(partial(hasattr, dist.Store), names):
                method = _method(partial(call, getattr(dist.Store, name)))
                stack.enter_context(mock.patch.object(dist.Store, name, method))
        yield


def _numbers(value: Any) -> int:
    """Return the size of a text, or of several, in numbers of 8 bytes."""
    if isinstance(value, list | tuple):
        return sum(map(_numbers, value))
    return -(-len(value) // 8) if isinstance(value, str | bytes) else 0


@contextlib.contextmanager
def _noting_neighbours(record: Traffic) -> Iterator[None]:
    """Record in ``record`` to which ranks of their group messages go."""
    real = dist.ProcessGroup.send

    def send(self: Any, tensors: Any, to: int, *args: Any, **named: Any) -> Any:
        record.to.add(to)
        return real(self, tensors, to, *args, **named)

    with mock.patch.object(dist.ProcessGroup, "send", send):
        yield


@contextlib.contextmanager
def _noting_lists_to_scatter(record: Traffic) -> Iterator[None]:
    """Count in ``record`` the numbers in lists given to reduce_scatter, whose sizes no profiler says."""
    real = dist.ProcessGroup.reduce_scatter

    def reduce_scatter(self: Any, outputs: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        lists = inputs if isinstance(inputs[0], list) else [inputs]
        record.scattered += sum(each.numel() for tensors in lists for each in tensors)
        return real(self, outputs, inputs, *args, **named)

    with mock.patch.object(dist.ProcessGroup, "reduce_scatter", reduce_scatter):
        yield


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a `partial` into a function, which, unlike it, a class binds to its instances."""
    return lambda self, *args, **named: call(self, *args, **named)
