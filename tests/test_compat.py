"""Private names and habits of libraries that the course uses: a release that changes one is named here."""

from __future__ import annotations

import functools
import importlib.metadata
import io
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.profiler import ProfilerActivity, profile

from course_lib import RankError, by_value, compat, launch


def version_of(library: str) -> str:
    return platform.python_version() if library == "Python" else importlib.metadata.version(library)


def the_fork_server_has_our_names() -> None:
    server = multiprocessing.forkserver._forkserver
    names = ("_forkserver_pid", "_forkserver_alive_fd", "_forkserver_address")
    assert [name for name in names if not hasattr(server, name)] == []


def the_fork_server_leads_its_ranks() -> None:
    """A rank's parent is the server, whose process the kernel knows by a private name."""
    parent = launch(os.getppid, nprocs=1, device="cpu", dashboard=False).results[0]
    assert parent == compat.fork_server_pid()


def a_rank_has_left_its_fork_server() -> None:
    def has() -> list[Any]:
        server = multiprocessing.forkserver._forkserver
        return [server._forkserver_alive_fd, server._forkserver_address, compat.leave_fork_server()]

    assert launch(has, nprocs=1, device="cpu", dashboard=False).results[0] == [None, None, False]


def a_cached_function_has_its_type() -> None:
    for cached in (functools.cache(version_of), functools.lru_cache(3)(version_of)):
        assert type(cached) is compat.CachedFunction
        assert cached.__wrapped__ is version_of
        assert set(cached.cache_parameters()) == {"maxsize", "typed"}


def a_cell_is_in_linecache() -> None:
    """As (size, None, lines, name), which `launch` sends on."""
    from IPython.core.interactiveshell import InteractiveShell

    before = set(linecache.cache)
    InteractiveShell().run_cell("number = 1\n", store_history=True)
    (added,) = (linecache.cache[name] for name in set(linecache.cache) - before)
    assert (len(added), added[1], added[2]) == (4, None, ["number = 1\n"])


def a_cell_has_a_number() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("def f(): pass", store_history=True)
    assert shell.compile.format_code_name(shell.user_ns["f"].__code__.co_filename) == ("Cell", "In[1]")


def a_click_can_be_let_in() -> None:
    if Version(importlib.metadata.version("ipykernel")) >= Version("7.4"):
        from ipykernel.comm.comm import BaseComm

        assert hasattr(BaseComm, "_reply_subshell_for")


def the_flight_recorder_counts_collectives() -> None:
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


def the_lines_of_a_collective_are_read_without_loading_more() -> None:
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


def each_process_group_has_its_ranks() -> None:
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


def cpp_calls_us_before_it_gives_up() -> None:
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


def torchrun_asks_us_for_a_port() -> None:
    from torch.distributed.elastic.rendezvous import api

    real = api.get_free_port
    try:
        compat.choose_ports_by(lambda: 12345)
        told = api.RendezvousStoreInfo.build(0, torch.distributed.HashStore(), "127.0.0.1")
        assert told.master_port == 12345
    finally:
        api.get_free_port = real


def the_agent_ends_ranks_by_a_method_of_ours() -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    real, told = SubprocessHandler.close, list[int]()
    try:
        compat.before_agent_ends_rank(told.append)
        rank = SubprocessHandler("sleep", ("1000",), {}, None, None, 0, None)
        rank.close()
        assert rank.proc.wait(60) == -signal.SIGTERM
        assert told == [rank.proc.pid]
    finally:
        SubprocessHandler.close = real


def test_a_torch_whose_agent_ends_ranks_in_another_way_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    monkeypatch.delattr(subprocess_handler, "SubprocessHandler")
    compat.before_agent_ends_rank(print)


def multiprocessing_tells_of_ended_children() -> None:
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


def a_new_group_of_all_ranks_tells_its_size() -> None:
    """Scripts load torch.distributed after their rank has begun; `launch` has loaded it before."""
    told = list[int]()
    compat.on_world_size(told.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    dist.distributed_c10d._update_default_pg = dist.distributed_c10d._update_default_pg.__wrapped__
    assert told == [1, 0]


def ddp_reads_its_switch() -> None:
    """Which `why` turns off, as its no_sync() does."""
    from torch.nn.parallel import DistributedDataParallel

    assert "require_backward_grad_sync" in DistributedDataParallel._pre_forward.__code__.co_names


def a_profile_keeps_its_raw_events() -> None:
    """`record_traffic` reads them, each with a name, a start and the shapes of what it was given; and
    `profiled` the start of them all."""
    before = time.time_ns()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch.ones(2, 3).sum()
    events = profiler.profiler.kineto_results.events()
    sums = [event for event in events if event.name() == "aten::sum"]  # one may call another
    assert sums[0].shapes()[0] == [2, 3]
    began = profiler.profiler.kineto_results.trace_start_ns()
    assert before - 10**9 < began <= sums[0].start_ns() < time.time_ns() + 10**9


def an_array_is_made_by_what_we_allow() -> None:
    made_by = [value.__reduce__()[0] for value in (np.zeros(2), np.float64(1))]
    assert made_by == compat.array_constructors()


def gloos_network_threads_have_a_name() -> None:
    """And the function that makes them is called for each group; only Linux has this policy."""

    def policies() -> list[list[int]]:
        dist.init_process_group("gloo")
        one = compat.gloo_threads()
        group = dist.new_group()
        dist.barrier(group=group)
        two = compat.gloo_threads()
        return [[os.sched_getscheduler(thread) for thread in threads] for threads in (one, two, [0])]

    if hasattr(os, "SCHED_BATCH"):
        one, two, main = launch(policies, nprocs=2, device="cpu", dashboard=False).results[0]
        assert (len(one), len(two)) == (1, 2)
        assert {*one, *two} == {os.SCHED_BATCH}
        assert main == [os.SCHED_OTHER]


def torch_save_takes_our_pickler() -> None:
    file = io.BytesIO()
    torch.save({"t": torch.ones(2)}, file, pickle_module=by_value, **compat.WITHOUT_ZIP)
    file.seek(0)
    assert torch.load(file, weights_only=True)["t"].tolist() == [1, 1]


def cloudpickle_asks_us_about_code() -> None:
    def work() -> None:
        """Defined here."""

    arrived = by_value.loads(by_value.dumps([work]))[0]
    assert arrived.__code__.co_filename == work.__code__.co_filename
    assert arrived.__code__.co_firstlineno == work.__code__.co_firstlineno


def an_operation_passes_through_a_dispatch_mode() -> None:
    seen: list[str] = []

    def call(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(f"{operation.namespace} {operation} {operation.__name__}")
        return operation(*args, **kwargs)

    with compat.dispatch_mode(call):
        torch.ones(2).add_(1)
    assert seen == ["aten aten.ones.default ones.default", "aten aten.add_.Tensor add_.Tensor"]


def a_dtensor_has_its_local_part() -> None:
    def parts() -> list[int]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        dist.init_process_group("gloo")
        whole = torch.ones(4)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        dist.barrier()
        return [len(compat.local_part(each)) for each in (whole, sharded)]

    assert launch(parts, nprocs=2, device="cpu", dashboard=False).results == [[4, 2], [4, 2]]


def a_fake_mode_can_be_seen() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert compat.active_fake_mode() is None
    with FakeTensorMode() as mode:
        assert compat.active_fake_mode() is mode


RELIES_ON: dict[str, list[Callable[[], None]]] = {
    "Python": [
        the_fork_server_has_our_names,
        the_fork_server_leads_its_ranks,
        a_rank_has_left_its_fork_server,
        a_cached_function_has_its_type,
        multiprocessing_tells_of_ended_children,
    ],
    "ipython": [a_cell_is_in_linecache, a_cell_has_a_number],
    "ipykernel": [a_click_can_be_let_in],
    "torch": [
        the_flight_recorder_counts_collectives,
        the_lines_of_a_collective_are_read_without_loading_more,
        each_process_group_has_its_ranks,
        cpp_calls_us_before_it_gives_up,
        gloos_network_threads_have_a_name,
        torch_save_takes_our_pickler,
        torchrun_asks_us_for_a_port,
        the_agent_ends_ranks_by_a_method_of_ours,
        a_new_group_of_all_ranks_tells_its_size,
        ddp_reads_its_switch,
        an_operation_passes_through_a_dispatch_mode,
        a_dtensor_has_its_local_part,
        a_fake_mode_can_be_seen,
        a_profile_keeps_its_raw_events,
    ],
    "numpy": [an_array_is_made_by_what_we_allow],
    "cloudpickle": [cloudpickle_asks_us_about_code],
}


def judged(library: str, check: Callable[[], None]) -> None:
    """Run a check; what fails in it is told with the library's version."""
    try:
        check()
    except Exception as error:
        what = check.__name__.replace("_", " ")
        raise AssertionError(f"{library} {version_of(library)}: no longer so: {what} ({error!r})") from error


@pytest.mark.parametrize(
    ("library", "check"),
    [
        pytest.param(library, check, id=check.__name__)
        for library, checks in RELIES_ON.items()
        for check in checks
    ],
)
def test_it_works_as_we_use_it(library: str, check: Callable[[], None]) -> None:
    judged(library, check)


def test_a_change_is_told_with_name_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(multiprocessing.forkserver.ForkServer, "__init__")
    monkeypatch.setattr(multiprocessing.forkserver, "_forkserver", multiprocessing.forkserver.ForkServer())
    told = f"Python {platform.python_version()}: no longer so: the fork server has our names"
    with pytest.raises(AssertionError, match=told):
        judged("Python", the_fork_server_has_our_names)


@pytest.mark.parametrize(
    ("found", "before"),
    [
        ("2.10.0+cu128", True),
        ("2.13.1", True),
        ("2.14.0a0+git1", False),
        ("2.14.1+cpu", False),
        ("3.0", False),
    ],
)
def test_versions_are_compared_by_number(monkeypatch: pytest.MonkeyPatch, found: str, before: bool) -> None:
    monkeypatch.setattr(torch, "__version__", found)
    assert compat.torch_before(2, 14) is before


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretend that this torch has a version; what is changed in it is as before after the test."""
    for module in (dist, dist.distributed_c10d):
        for find_owner, name, _, _ in compat.CHANGES:
            if find_owner is compat._c10d and hasattr(module, name):
                function = getattr(module, name)
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
