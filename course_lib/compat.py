"""What the course takes from private names of Python and other libraries, and what it changes in torch.

Docstrings say in which versions a name was seen. If the installed version has changed one, a test fails: most
of these are in `tests/test_compat.py`, which prints the versions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver, popen_fork, popen_forkserver
from pathlib import Path
from typing import Any

# Python 3.11 to 3.13: the type of what functools.lru_cache and functools.cache return
CachedFunction = functools._lru_cache_wrapper
# torch 2.14: torch.save without its zip archive, which takes a tenth of a warm launch's own time
WITHOUT_ZIP = {"_use_new_zipfile_serialization": False}
HANDLERS: list[Any] = []  # C++ may call them until the process ends: see `on_cpp_terminate`
KEPT_GROUPS: list[Any] = []  # see `_destroy_and_keep`


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> bool:
    """Have ``owner.name(…)`` call ``by(original, …)``; return False if it is missing or already replaced."""
    original = getattr(owner, name, None)
    if original is None or original.__code__.co_filename == __file__:
        return False

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    for holder in (owner, sys.modules.get("torch.distributed")):  # which exports some functions of c10d
        if getattr(holder, name, None) is original:
            setattr(holder, name, replaced)
    return True


# --- Python's multiprocessing (3.11 to 3.13) ---------------------------------------------------------------


def fork_server_pid() -> int | None:
    """Return the process id of this process's fork server, or None."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def leave_fork_server() -> bool:
    """In a child of the fork server, close the child's copy of the pipe that keeps the server running.

    A DataLoader then starts its own. Return False if no fork server started this process.
    """
    server: Any = forkserver._forkserver
    fd = getattr(server, "_forkserver_alive_fd", None)
    if fd is None:
        return False
    os.close(fd)
    server._forkserver_alive_fd = server._forkserver_address = None
    return True


def on_child_end(call: Callable[[int, int], object]) -> None:
    """Have multiprocessing call ``call(pid, exit code)`` when it sees that a child has ended.

    A DataLoader forgets its workers when its loop ends, before the rank reports an error.
    """

    def poll_and_call(popen: Any, poll: Callable[..., Any], *args: Any) -> Any:
        code = poll(popen, *args)
        if code is not None:
            call(popen.pid, code)
        return code

    for module in (popen_fork, popen_forkserver):
        module.Popen.poll = functools.partialmethod(poll_and_call, module.Popen.poll)


# --- what torch knows (2.10 to 2.14) ------------------------------------------------------------------------


def flight_recorder(of_nccl: bool = False, form: str = "_json", **options: Any) -> bytes:
    """Return a flight recorder's dump; empty without distributed, or if this torch has no recorder.

    NCCL has one recorder, all other backends share another. If this process has not used CUDA, NCCL has run
    nothing, and its recorder is not asked.
    """
    try:
        if "torch.distributed" not in sys.modules:
            return b""
        if of_nccl and not sys.modules["torch"].cuda.is_initialized():
            return b""
        from torch._C import _distributed_c10d

        dump = "_dump_nccl_trace" if of_nccl else "_dump_fr_trace"
        return getattr(_distributed_c10d, dump + form)(**options)
    except Exception:  # the stacks still show where a rank is
        return b""


def traced_collectives(of_nccl: bool = False) -> list[dict[str, Any]]:
    """Return a flight recorder's entries with the Python ``frames`` of each call.

    To name the lines of a stack, C++ asks for ``torch._inductor``, which this thread refuses to load: loading
    takes a second, and another thread that meanwhile loads ``torch._dynamo``, as DDP and optimizers do, could
    find it half loaded and fail with an ImportError.
    """
    thread = threading.get_ident()
    _replace(sys.modules["torch"], "__getattr__", _load_unless_naming_lines)
    _naming_lines.add(thread)
    try:
        return pickle.loads(flight_recorder(of_nccl, form=""))["entries"]
    except Exception:  # the report then lacks the lines of calls that are over
        return []
    finally:
        _naming_lines.discard(thread)


_naming_lines: set[int] = set()  # threads in `traced_collectives`


def _load_unless_naming_lines(load: Callable[[str], Any], name: str) -> Any:
    if name == "_inductor" and threading.get_ident() in _naming_lines:
        raise AttributeError(name)
    return load(name)


def process_groups() -> tuple[dict[str, list[int]], int]:
    """Return the ranks of each process group by name, and how many groups torch has counted.

    The count numbers the groups: ``"0"`` is the group of all ranks. It includes groups that `new_group` made
    without this rank, unless with ``use_local_synchronization``.
    """
    try:
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)
        named = {str(name): list(ranks[group]) for group, name in names.items() if group in ranks}
        return named, int(world.group_count)
    except Exception:  # without groups, the report compares all ranks
        return {}, 0


def on_world_size(call: Callable[[int], object]) -> None:
    """Call ``call(world size)`` for each group of all ranks, once torch can make one."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")

    def update_and_call(update: Callable[[Any], None], group: Any) -> None:
        update(group)
        call(0 if group is None else group.size())

    if _replace(c10d, "_update_default_pg", update_and_call):
        with contextlib.suppress(AttributeError, ValueError):  # half loaded; or there is no group yet
            call(c10d.get_world_size())


def torch_before(*version: int) -> bool:
    """Return whether the torch that is loaded is older than a version: ``torch_before(2, 14)``."""
    found = re.findall(r"\d+", sys.modules["torch"].__version__)
    return tuple(int(part) for part in found[: len(version)]) < version


def read_environment(changed: set[str]) -> None:
    """Have torch read again those variables that it reads only while it is loaded."""
    torch: Any = sys.modules["torch"]
    if any(name.startswith("TORCH_LOGS") for name in changed):
        torch._logging._init_logs()
    if "TORCH_DISTRIBUTED_DEBUG" in changed and torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()
    if "TORCH_CPP_LOG_LEVEL" in changed:
        with contextlib.suppress(OSError, AttributeError):
            c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            c10._ZN3c1011initLoggingEv()


# --- what a rank changes in torch ---------------------------------------------------------------------------


def adapt_torch() -> None:
    """Replace functions of torch by those below, each in the versions that need it."""
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    _replace(c10d, "_is_barrier_after_init", _connect_all)
    _replace(c10d, "_new_process_group_helper", _put_gloo_behind)
    if torch_before(2, 14):
        _replace(c10d, "init_process_group", _let_go_and_init)
        _replace(c10d, "destroy_process_group", _destroy_and_keep)
    if torch_before(2, 13):
        _replace(DistributedDataParallel, "__init__", _take_forward_sync_buffers)
    if torch_before(2, 12):
        _replace(DistributedDataParallel, "_sync_module_buffers", _hide_buffer_broadcasts)


def _connect_all(original: Callable[[], bool]) -> bool:
    """Let no rank leave init_process_group before all are connected: one that ended would break the rest.

    TORCH_DIST_INIT_BARRIER=1 would do so in new_group, too, where torch's ranks do not meet.
    """
    return bool(original()) or sys._getframe(2).f_code.co_name == "init_process_group"


def _put_gloo_behind(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep gloo's network threads from taking the core of a thread that they wait for (Linux; torch 2.14).

    A network thread wakes when bytes come. If another thread holds the lock of that connection, the network
    thread spins until the lock is free (gloo's `Pair::handleEvents`), perhaps on the core of the very thread
    that holds the lock. Under SCHED_BATCH a thread that wakes takes no running thread's core; the share of
    each thread stays the same.
    """
    group = make(*args, **kwargs)
    for comm in map(Path, glob.iglob("/proc/self/task/*/comm")):  # Path.glob raises where it may not list
        with contextlib.suppress(OSError):  # the thread has ended, or a sandbox refuses
            if comm.read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(comm.parent.name), os.SCHED_BATCH, os.sched_param(0))
    return group


def _take_forward_sync_buffers(
    init: Any, ddp: Any, *args: Any, forward_sync_buffers: bool | None = None, **others: Any
) -> None:
    """Have DDP take ``forward_sync_buffers``, as it has since torch 2.13.

    DDP reads ``broadcast_buffers`` in its forward passes. If its constructor got ``broadcast_buffers=False``,
    it would also leave out the broadcast at the start (torch 2.10).
    """
    init(ddp, *args, **others)
    if forward_sync_buffers is not None:
        ddp.broadcast_buffers = forward_sync_buffers


def _hide_buffer_broadcasts(send: Any, ddp: Any, *args: Any) -> None:
    """Hide DDP's broadcast of buffers from autograd, as torch has done since 2.12.

    Otherwise two forward passes over batch norm before a backward pass raise "modified by an inplace
    operation" (PyTorch's issue 175024; torch 2.10 and 2.11).
    """
    with sys.modules["torch"].autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):
        send(ddp, *args)


def _destroy_and_keep(destroy: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep gloo's groups after `destroy_process_group` until the rank ends, to avoid a deadlock.

    A DDP that dies later would drop the last reference to its group while it holds Python's lock: gloo's
    destructor joins its threads, and a thread that has just ended a collective waits for that lock to drop a
    tensor. Python's own object of the group drops the lock first (PyTorch's issue 56297, pull request 154976;
    seen with torch 2.10 to 2.13).
    """
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    for group, backends in world.pg_backend_config.items():
        if "gloo" in str(backends) and group not in KEPT_GROUPS:
            # the list alone is not enough: Python clears it when it exits
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            KEPT_GROUPS.append(group)
    return destroy(*args, **kwargs)


def _let_go_and_init(init: Any, *args: Any, **kwargs: Any) -> Any:
    """Let go of the kept groups: otherwise rank 0 would go on with their store and the addresses in it."""
    while KEPT_GROUPS:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(KEPT_GROUPS[-1]))
        KEPT_GROUPS.pop()
    return init(*args, **kwargs)


# --- where torch and C++ call us ----------------------------------------------------------------------------


def on_cpp_terminate(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function when C++ code gives up (std::terminate of GNU's libstdc++); return how to undo this.

    Gloo gives up in one of its threads if tensors do not match. The function takes Python's lock as soon as
    no other thread holds it in C code, and keeps it while the process aborts: all threads stand still while
    `faulthandler` reads their stacks.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):  # another system
        return lambda: None
    handler = ctypes.CFUNCTYPE(None)
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def give_up() -> None:
        try:
            call()
        finally:
            ctypes.PYFUNCTYPE(None)(before)()

    ours = handler(give_up)
    HANDLERS.append(ours)
    before = set_terminate(ctypes.cast(ours, ctypes.c_void_p))

    def undo() -> None:
        now = set_terminate(before)
        if now != ctypes.cast(ours, ctypes.c_void_p).value:  # the program's own
            set_terminate(now)

    return undo


def choose_ports_by(free_port: Callable[[], int]) -> None:
    """Have torchrun's agent, in this process, choose rank 0's port by this function (torch 2.14)."""
    from torch.distributed.elastic.rendezvous import api

    api.get_free_port = free_port


def before_agent_ends_rank(call: Callable[[int], object]) -> None:
    """Have torchrun's agent, in this process, call ``call(pid)`` before it ends a rank (torch 2.14)."""

    def call_and_close(close: Any, handler: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            if kwargs.get("death_sig") != signal.SIGINT:  # the learner's; no rank has failed
                call(handler.proc.pid)
        return close(handler, *args, **kwargs)

    with contextlib.suppress(ImportError):
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        _replace(SubprocessHandler, "close", call_and_close)


def array_constructors() -> list[Any]:
    """Return what restores a pickled NumPy array or number (NumPy 2.4; in NumPy 1 in another module)."""
    loaded = sys.modules
    multiarray = loaded.get("numpy._core.multiarray") or loaded["numpy.core.multiarray"]
    return [multiarray._reconstruct, multiarray.scalar]


def let_clicks_in(widget: Any) -> None:
    """Let a widget's messages arrive while a cell runs (ipykernel 7.4).

    JupyterLab sends the messages to a subshell, a thread of the kernel that is free while a cell runs, and
    ipykernel 7.4 forwards them to the busy shell that made the widget.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
