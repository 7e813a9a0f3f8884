"""With whom a rank's main thread meets, and which of its calls has not ended."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
import torch.distributed as dist

from course_lib import Run
from course_lib.rank.blocking_call import blocking_call
from tests.support.cells import quiet_launch
from tests.support.processes import wait_for


def call_of(stand: Any) -> str:
    """Return what is told of a thread that stands in a function of this file until it is told."""
    end = threading.Event()
    thread = threading.Thread(target=stand, args=(end,))
    thread.start()
    try:
        return wait_for(
            lambda: (call := blocking_call(thread.ident).get("call", "")) and "wait" in call and call
        )
    finally:
        end.set()
        thread.join()


def test_the_call_that_has_not_ended_is_told_as_it_is_written() -> None:
    def one_of_a_line(end: threading.Event) -> None:
        é = len("é") + bool(end.wait(600)) + 1
        assert é

    def of_two_lines(end: threading.Event) -> None:
        end.wait(
            timeout=600,
        )

    assert call_of(one_of_a_line) == "end.wait(600)"
    assert call_of(of_two_lines) == "end.wait("


def test_functions_of_torch_distributed_tell_with_whom_they_meet() -> None:
    def work() -> list[Any]:
        dist.init_process_group("gloo")
        group = dist.new_group([1, 2])
        calls = [
            lambda: dist.recv(torch.ones(1), 0, tag=7),
            lambda: dist.recv(torch.ones(1), group_src=0, tag=8),
            lambda: dist.broadcast(torch.ones(1), 1, group=group),
            lambda: dist.new_group([0, 2]),
            lambda: dist.monitored_barrier(),
        ]
        if dist.get_rank() == 2:
            for call in calls:
                call()
            return []
        path, told = Run.open().folder / "rank-2.where", []

        def meets(name: str, tag: int | None = None) -> Any:
            met = (json.loads(path.read_text()) if path.exists() else {}).get("meets", {})
            return met.get("name") == name and tag in (None, met.get("number")) and met

        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)  # until the first messages are through
            told.append(wait_for(lambda: meets("broadcast")))
            dist.broadcast(torch.ones(1), 1, group=group)
            dist.new_group([0, 2])
            dist.monitored_barrier()
            return told
        for tag in (7, 8):
            told.append(wait_for(lambda tag=tag: meets("recv", tag)))
            dist.send(torch.ones(1), 2, tag=tag)
        dist.send(torch.ones(1), 1)
        told.append(wait_for(lambda: meets("new_group")))
        dist.new_group([0, 2])
        told.append(wait_for(lambda: meets("monitored_barrier")))
        dist.monitored_barrier()
        return told

    run = quiet_launch(work, nprocs=3)
    assert run.results[0] == [
        {"name": "recv", "ranks": [0], "number": 7},
        {"name": "recv", "ranks": [0], "number": 8},
        {"name": "new_group", "ranks": [0, 2], "number": 2},
        {"name": "monitored_barrier", "ranks": [0, 1, 2]},
    ]
    assert run.results[1] == [{"name": "broadcast", "ranks": [1, 2], "root": 1}]
