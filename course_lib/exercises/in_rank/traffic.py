"""Record what an answer sends between the ranks, whichever way it does so.

PyTorch's profiler sees what all calls end in: a collective of `torch.distributed` looks like one imported by
name, a functional one, or a call of the backend itself. Works run under it in a rank.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
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
READS = ("get", "multi_get", "queue_pop")  # methods that read from a store
MESSAGES = ("send", "recv")
END_SECONDS = 2.0  # for work that nobody waits for
is_completed = dist.Work.is_completed  # unpatched: in `unwaited_work`, the patched one counts as a wait


@dataclass
class Traffic:
    """The traffic of one rank, in numbers. A number counts as one, whatever its dtype.

    Attributes
    ----------
    calls : list of (str, int)
        Each call by gloo's name ("all_reduce", "send", "barrier"), and how many numbers this rank gave it.
    stored : int
        How often this rank wrote to a store, another way to exchange something.
    got : int
        How much it read from stores, in numbers of 8 bytes.
    to : set of int
        Ranks that messages went to.
    """

    calls: list[tuple[str, int]] = field(default_factory=list)
    stored: int = 0
    got: int = 0
    to: set[int] = field(default_factory=set)

    def collectives(self) -> list[str]:
        """Return the names of all calls that are not messages."""
        return [name for name, _ in self.calls if name not in MESSAGES]

    def received(self) -> int:
        """Return how many numbers came to this rank; a gather brings those of all ranks."""
        world_size = dist.get_world_size()
        here = [(name, count) for name, count in self.calls if name != "send"]
        return sum(count * (world_size if "gather" in name else 1) for name, count in here) + self.got


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record what is called inside the block; the record is complete when the block has ended."""
    record = Traffic()

    def writes(real: Callable[..., Any], _: str, self: Any, *args: Any, **named: Any) -> Any:
        record.stored += 1
        return real(self, *args, **named)

    def reads(real: Callable[..., Any], _: str, self: Any, *args: Any, **named: Any) -> Any:
        value = real(self, *args, **named)
        record.got += _numbers(value)
        return value

    def sends(real: Any, _: str, self: Any, tensors: Any, to: int, *args: Any, **named: Any) -> Any:
        record.to.add(to)
        return real(self, tensors, to, *args, **named)

    with (
        _through(writes, dist.Store, STORES),
        _through(reads, dist.Store, READS),
        _through(sends, dist.ProcessGroup, ["send"]),
        unwaited_work() as pending,
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        yield record
        # A gloo thread that ends a collective after the profiler has stopped may crash the process.
        let_end([work for name, work in pending.values() if not name.startswith(MESSAGES)])
    # Not profiler.events(): making an object of each operation took longer than all other judging.
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    for event in events:
        if (name := event.name()).startswith("gloo:"):
            sizes = zip(event.shapes(), event.dtypes(), strict=True)
            size = sum(math.prod(shape) for shape, dtype in sizes if dtype)  # a number has no dimensions
            record.calls.append((name.removeprefix("gloo:"), size))


def let_end(works: list[dist.Work]) -> None:
    """Give work that nobody waited for `END_SECONDS` to end; for `unwaited_work`, this is no wait."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until and not all(map(is_completed, works)):
        time.sleep(0.001)


@contextlib.contextmanager
def unwaited_work() -> Iterator[dict[int, tuple[str, Any]]]:
    """Yield, by id, the name and the work of each operation started inside and not yet waited for."""
    pending: dict[int, tuple[str, Any]] = {}

    def started(real: Callable[..., Any], name: str, self: Any, *args: Any, **named: Any) -> Any:
        work = real(self, *args, **named)
        if work is not None:
            pending[id(work)] = name, work  # kept alive, so that its id is not reused
        return work

    def ended(real: Callable[..., Any], _: str, self: Any, *args: Any, **named: Any) -> Any:
        result: Any = None
        try:
            result = real(self, *args, **named)
        finally:  # a wait that fails is a wait, too
            if result is not False:  # as of is_completed()
                pending.pop(id(self), None)
        return result

    ends = ("wait", "is_completed", "synchronize", "get_future")
    with _through(started, dist.ProcessGroup, STARTS), _through(ended, dist.Work, ends):
        yield pending


OUTPUTS_FIRST = ("gather", "scatter", "alltoall", "all_to_all")  # in names of calls: they take outputs first
TO_EACH = ("alltoall", "all_to_all", "scatter")  # in names of calls: each rank gets a part of its own


@contextlib.contextmanager
def noting_bytes(note: Callable[[float], None]) -> Iterator[None]:
    """Call ``note`` with the bytes that each call, in any thread, gives to another rank.

    Unlike `record_traffic`, this counts bytes, and does not see functional collectives.
    """

    def started(real: Callable[..., Any], name: str, self: Any, *args: Any, **named: Any) -> Any:
        given = args[1:2] if any(part in name for part in OUTPUTS_FIRST) else args[:1]
        size = float(_bytes(given))
        if name == "send":
            size /= max(self.size() - 1, 1)  # as a rule, each of the others is sent to
        elif any(part in name for part in TO_EACH):
            size /= self.size()
        if not name.startswith("recv") and (name != "broadcast" or args[1].rootRank == self.rank()):
            note(size)
        return real(self, *args, **named)

    with _through(started, dist.ProcessGroup, STARTS):
        yield


def _bytes(given: Any) -> int:
    """Return the size of a tensor, or of those in nested lists."""
    if isinstance(given, list | tuple):
        return sum(map(_bytes, given))
    return given.nbytes if isinstance(given, Tensor) else 0


@contextlib.contextmanager
def noting_waits(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` each time this thread waits for work or a future that is not done yet, or asks for it.

    Each wait for the result of a functional collective counts.
    """
    import torch.distributed._functional_collectives as functional  # not loaded before it is needed

    here, future_is_done = get_ident(), torch._C.Future.done  # unpatched

    def waits(real: Callable[..., Any], name: str, self: Any, *args: Any, **named: Any) -> Any:
        is_done = is_completed if isinstance(self, dist.Work) else future_is_done
        if get_ident() == here and (name == "wait_tensor" or not is_done(self)):
            note()
        return real(self, *args, **named)

    with (
        _through(waits, dist.Work, ["wait", "synchronize", "is_completed"]),
        _through(waits, torch._C.Future, ["wait", "done"]),
        _through(waits, functional, ["wait_tensor"]),
    ):
        yield


def _numbers(value: Any) -> int:
    """Return the size of a text, or of several, in numbers of 8 bytes."""
    if isinstance(value, list | tuple):
        return sum(map(_numbers, value))
    return -(-len(value) // 8) if isinstance(value, str | bytes) else 0


@contextlib.contextmanager
def _through(call: Callable[..., Any], kind: Any, names: Iterable[str]) -> Iterator[None]:
    """Replace methods of a class, if it has them: they run ``call(real, name, self, *args, **named)``."""
    with contextlib.ExitStack() as stack:
        for name in filter(partial(hasattr, kind), names):
            stack.enter_context(mock.patch.object(kind, name, _method(call, getattr(kind, name), name)))
        yield


def _method(call: Callable[..., Any], real: Any, name: str) -> Callable[..., Any]:
    return lambda self, *args, **named: call(real, name, self, *args, **named)
