"""What travelled between the ranks is known, whichever way it was asked for."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce

from course_lib.exercises.in_rank.traffic import (
    noting_bytes,
    noting_waits,
    record_traffic,
    unwaited_work,
)
from tests.support.cells import quiet_launch


def ways_to_communicate() -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, tensor = dist.get_rank(), torch.ones(7, dtype=torch.float64)
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    store = dist.distributed_c10d._get_default_store()

    def by_messages() -> None:
        both = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, others[0], 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    ways = {
        "by its name": lambda: all_reduce(tensor),
        "functional": lambda: functional.all_reduce(tensor, "sum", dist.group.WORLD).sum(),
        "by the backend": lambda: dist.group.WORLD._get_backend(tensor.device).allreduce([tensor]).wait(),
        "waited for": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "by its future": lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
        "gathered": lambda: dist.all_gather(others, tensor),
        "messages": by_messages,
        "the store": lambda: (store.set(f"own/{rank}", "1"), dist.barrier()),
        "nothing": lambda: None,
    }
    seen = {}
    for name, way in ways.items():
        with record_traffic() as record:
            way()
        seen[name] = [record.calls, record.received()]
        seen[name] += [bool(record.stored)] * (name == "the store")  # the other rank may be early or late
    with record_traffic() as record:
        store.set(f"own/{rank}", tensor.numpy().tobytes())
        dist.barrier()
        store.get(f"own/{1 - rank}")
    seen["by the store"] = record.received()
    with unwaited_work() as works:
        dist.all_reduce(tensor, async_op=True).wait()
        pending = dist.broadcast(tensor, 0, async_op=True)
    seen["never waited for"] = [name for name, _ in works.values()]
    pending.wait()
    with unwaited_work() as works:
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(tensor, async_op=True).wait(timedelta(milliseconds=1))
            store.set("in vain", "1")
        else:  # it comes when the first has lost its patience, and may be gone
            store.wait(["in vain"])
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(tensor)
    seen["waited for in vain"] = list(works)
    return seen


def test_each_way_is_seen_alike() -> None:
    for seen in quiet_launch(ways_to_communicate, nprocs=2).results:
        for name in ("by its name", "functional", "by the backend", "waited for", "by its future"):
            assert seen[name] == [[("all_reduce", 7)], 7], name
        assert seen["gathered"] == [[("all_gather", 7)], 14]
        calls, received = seen["messages"]
        assert (sorted(calls), received) == ([("recv", 7), ("send", 7)], 7)
        assert seen["the store"] == [[("barrier", 0)], 0, True]
        assert seen["by the store"] == 7
        assert seen["nothing"] == [[], 0]
        assert seen["never waited for"] == ["broadcast"]
        assert seen["waited for in vain"] == []


def not_waited_for() -> list[Any]:
    sys.modules["course_lib.exercises.in_rank.traffic"].END_SECONDS = 200.0  # the other rank may lack a core
    dist.init_process_group("gloo")
    tensor = torch.ones(7)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    with record_traffic() as record:
        work = dist.all_reduce(tensor, async_op=True)
    ended = work.is_completed()
    work.wait()
    return [ended, record.calls]


def test_what_nobody_waits_for_ends_before_the_profiler_does() -> None:
    """A rank crashed once (SIGSEGV), by reading since gloo's thread told a profiler of it that was gone."""
    seen = quiet_launch(not_waited_for, nprocs=2).results
    assert seen == [[True, [("all_reduce", 7)]]] * 2


WAITS = {"work": 1, "future": 1, "thread": 0, "asks": 1, "done": 0, "functional": 1}


def bytes_and_waits() -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, tensor = dist.get_rank(), torch.ones(12, dtype=torch.float16)
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    rows = torch.empty(24, dtype=torch.float16)

    def in_turns() -> None:
        for source in (0, 1):
            dist.broadcast(others[source], source)

    def by_messages() -> None:
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)

    ways = {
        "added up": lambda: dist.all_reduce(tensor),
        "gathered": lambda: dist.all_gather(others, tensor),
        "gathered as rows": lambda: dist.all_gather_into_tensor(rows, tensor),
        "each its own broadcast": in_turns,
        "messages": by_messages,
        "a barrier": dist.barrier,
    }
    seen: dict[str, Any] = {}
    for name, way in ways.items():
        sent: list[float] = []
        with noting_bytes(sent.append):
            way()
        seen[name] = sum(sent)
    for name in WAITS:
        waits: list[bool] = []
        dist.barrier()
        time.sleep(0.1 * (rank == 0))  # the other one waits
        with noting_waits(lambda waits=waits: waits.append(True)):
            work = dist.all_reduce(tensor, async_op=True)
            future = work.get_future()
            if name == "work":
                work.wait()
            elif name == "future":
                future.wait()
            elif name == "thread":
                thread = threading.Thread(target=work.wait)
                thread.start()
                thread.join()
            elif name == "asks":
                while not work.is_completed():
                    time.sleep(0.2)
            else:
                time.sleep(0.3)
                future.wait()
            if name == "functional":
                functional.all_reduce(tensor, "sum", dist.group.WORLD).sum()
        seen[f"waits: {name}"] = len(waits)
    dist.barrier()
    return seen


def test_bytes_are_told_by_dtype_and_a_wait_is_one_for_what_is_not_done() -> None:
    for rank, seen in enumerate(quiet_launch(bytes_and_waits, nprocs=2).results):
        alike = ("added up", "gathered", "gathered as rows", "each its own broadcast")
        assert [seen[name] for name in alike] == [24] * len(alike)
        assert seen["messages"] == (24 if rank == 0 else 0)
        assert seen["a barrier"] == 0
        if rank == 1:
            assert {name: seen[f"waits: {name}"] for name in WAITS} == WAITS
