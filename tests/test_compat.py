"""Private names and habits of libraries that the course uses, to which no other test would lead."""

from __future__ import annotations

import importlib.metadata
import json
import linecache
import multiprocessing.forkserver
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from course_lib import RankError, compat, launch

LIBRARIES = "cloudpickle", "ipykernel", "ipython", "numpy", "torch"


@pytest.fixture(autouse=True)
def _versions() -> None:
    """Pytest shows them with what fails."""
    print("Python", platform.python_version(), {each: importlib.metadata.version(each) for each in LIBRARIES})


def test_the_fork_server_has_our_names() -> None:
    server = multiprocessing.forkserver._forkserver
    names = ("_forkserver_pid", "_forkserver_alive_fd", "_forkserver_address")
    assert [name for name in names if not hasattr(server, name)] == []


def test_the_fork_server_leads_its_ranks() -> None:
    """A rank's parent is the server, whose process the kernel knows by a private name."""
    parent = launch(os.getppid, nprocs=1, device="cpu", dashboard=False).results[0]
    assert parent == compat.fork_server_pid()


def test_a_rank_has_left_its_fork_server() -> None:
    def has() -> list[Any]:
        server = multiprocessing.forkserver._forkserver
        return [server._forkserver_alive_fd, server._forkserver_address, compat.leave_fork_server()]

    assert launch(has, nprocs=1, device="cpu", dashboard=False).results[0] == [None, None, False]


def test_a_cell_is_in_linecache_and_has_a_number() -> None:
    """In linecache as (size, None, lines, name), which `launch` sends on."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("def f(): pass\n", store_history=True)
    name = shell.user_ns["f"].__code__.co_filename
    added = linecache.cache[name]
    assert (len(added), added[1], added[2]) == (4, None, ["def f(): pass\n"])
    assert shell.compile.format_code_name(name) == ("Cell", "In[1]")


def test_a_click_can_be_let_in() -> None:
    if Version(importlib.metadata.version("ipykernel")) >= Version("7.4"):
        from ipykernel.comm.comm import BaseComm

        assert hasattr(BaseComm, "_reply_subshell_for")


def test_the_flight_recorder_counts_collectives() -> None:
    def entries() -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        cheap = compat.flight_recorder(includeCollectives=False)
        entries = json.loads(compat.flight_recorder())["entries"]
        return entries, compat.traced_collectives(), len(cheap)

    calls, traced, length = launch(entries, nprocs=1, device="cpu", dashboard=False).results[0]
    assert length > 0, "the cheap form"
    assert [entry["profiling_name"] for entry in calls] == ["gloo:all_reduce", "gloo:barrier"]
    assert [entry["collective_seq_id"] for entry in calls] == [1, 2]
    assert calls[0]["input_sizes"] == [[3]]
    used = {"is_p2p", "retired", "state", "process_group", "pg_id", "time_created_ns", "input_dtypes"}
    assert used <= set(calls[0])
    assert [frame["name"] for frame in traced[0]["frames"]][-1:] == ["<module>"]
    assert ("entries", __file__) in [(frame["name"], frame["filename"]) for frame in traced[1]["frames"]]


def test_the_lines_of_a_collective_are_read_without_loading_more() -> None:
    """A program that loads `torch._dynamo` meanwhile, as DDP and optimizers do, would meet it half loaded."""
    program = """if True:
        import sys, torch, torch.distributed as dist
        from course_lib import compat
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        (entry,) = compat.traced_collectives()
        print(len(entry["frames"]) > 0, "torch._inductor" in sys.modules, torch._inductor.__name__)
    """
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "16"}
    told = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert told.split() == ["True", "False", "torch._inductor"]


def test_each_process_group_has_its_ranks() -> None:
    def made() -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        both = dist.new_group([1, 0])
        local = dist.new_group([0, 1], use_local_synchronization=True)  # after [0], before 2.14: hangs
        groups = both, dist.new_group([0])
        return compat.process_groups(), local.group_name, len(groups)

    first, second = launch(made, nprocs=2, device="cpu", dashboard=False).results
    local, count = first[1], first[0][1]
    assert count == (3 if compat.torch_before(2, 14) else 4), "an older one counts no local group"
    assert first[0][0] == {"0": [0, 1], "1": [0, 1], str(count - 1): [0], local: [0, 1]}
    assert second[0] == ({"0": [0, 1], "1": [0, 1], local: [0, 1]}, count)
    assert not local.isdigit()


def test_cpp_calls_us_before_it_gives_up() -> None:
    """In a thread of gloo's: one rank sends more than the other has room for.

    Threads that end while `faulthandler` reads the stacks of all would crash it.
    """

    def start_threads() -> None:
        while True:
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    def gives_up(path: str) -> None:
        import torch
        import torch.distributed as dist

        for _ in range(4):
            threading.Thread(target=start_threads, daemon=True).start()
        compat.on_cpp_terminate(Path(path, "forgotten").touch)()
        compat.on_cpp_terminate(Path(path, os.environ["RANK"]).touch)
        dist.init_process_group("gloo")
        dist.broadcast(torch.ones(5 - dist.get_rank()), 0)

    with tempfile.TemporaryDirectory() as path:
        with pytest.raises(RankError, match="SIGABRT"):
            launch(gives_up, path, nprocs=2, device="cpu", dashboard=False)
        if sys.platform == "linux":
            assert [each.name for each in Path(path).iterdir()] == ["1"]


def test_a_torch_whose_agent_ends_ranks_in_another_way_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    monkeypatch.delattr(subprocess_handler, "SubprocessHandler")
    compat.before_agent_ends_rank(print)


def test_multiprocessing_tells_of_ended_children() -> None:
    def ended() -> list[Any]:
        told: list[Any] = []
        compat.on_child_end(lambda pid, code: told.append((pid, code)))
        for method in ("fork", "spawn", "forkserver"):
            process: Any = multiprocessing.get_context(method).Process(target=signal.pause)
            process.start()
            process.kill()
            process.join()
            assert told.pop() == (process.pid, -signal.SIGKILL)
        return told

    assert launch(ended, nprocs=1, device="cpu", dashboard=False).results == [[]]


def test_an_array_is_made_by_what_we_allow() -> None:
    made_by = [value.__reduce__()[0] for value in (np.zeros(2), np.float64(1))]
    assert made_by == compat.array_constructors()


def test_gloos_network_threads_have_a_name() -> None:
    """And the function that makes them is called for each group."""

    def gloos() -> list[int]:
        names = {comm.parent.name: comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")}
        return [os.sched_getscheduler(int(thread)) for thread in names if names[thread] == "gloo_tcp_loop\n"]

    def policies() -> list[list[int]]:
        dist.init_process_group("gloo")
        one = gloos()
        group = dist.new_group()
        dist.barrier(group=group)
        return [one, gloos(), [os.sched_getscheduler(0)]]

    one, two, main = launch(policies, nprocs=2, device="cpu", dashboard=False).results[0]
    assert (len(one), len(two)) == (1, 2)
    assert {*one, *two} == {os.SCHED_BATCH}
    assert main == [os.SCHED_OTHER]


@pytest.mark.parametrize(
    ("found", "before"), [("2.10.0+cu128", True), ("2.14.0a0+git1", False), ("3.0", False)]
)
def test_versions_are_compared_by_number(monkeypatch: pytest.MonkeyPatch, found: str, before: bool) -> None:
    monkeypatch.setattr(torch, "__version__", found)
    assert compat.torch_before(2, 14) is before


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretend that this torch has a version; what is changed in it is as before after the test."""
    calls = "init_process_group", "destroy_process_group"
    names = "_is_barrier_after_init", "_new_process_group_helper", *calls
    for module in (dist, dist.distributed_c10d):
        for name in names:
            if function := getattr(module, name, None):
                monkeypatch.setattr(module, name, function.__wrapped__ if is_ours(function) else function)
    return lambda version: monkeypatch.setattr(torch, "__version__", version)


def is_ours(function: Any) -> bool:
    return function.__code__.co_filename == compat.__file__


def test_no_function_is_replaced_in_a_torch_that_needs_it_not(in_torch: Callable[[str], None]) -> None:
    in_torch("2.14.0")
    compat.adapt_torch()
    assert not is_ours(dist.destroy_process_group)
    assert not is_ours(dist.init_process_group)


def test_a_gloo_group_is_kept_until_the_next_one_begins(in_torch: Callable[[str], None]) -> None:
    in_torch("2.13.0+cpu")
    compat.adapt_torch()
    compat.adapt_torch()
    assert dist.distributed_c10d.destroy_process_group is dist.destroy_process_group
    assert not is_ours(dist.destroy_process_group.__wrapped__), "once"
    kept, in_a_list = compat.KEPT_GROUPS, [object()]
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert kept == []
        world, part = dist.group.WORLD, dist.new_group([0])
        dist.destroy_process_group(part)
        dist.destroy_process_group()
        assert set(kept) == {world, part}
        counts = sys.getrefcount(part), sys.getrefcount(in_a_list[0])
        assert counts[0] == counts[1] + 2, "by this name, and not by the list alone"
        assert not dist.is_initialized()
    with pytest.raises(AssertionError, match="None"):
        dist.destroy_process_group()
