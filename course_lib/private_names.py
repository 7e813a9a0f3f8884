"""Private names of Python and of the libraries that the course uses; the exercises use some more.

The comment or docstring of each has the versions in which it was seen. `tests/test_private_names.py` tries
each on the installed version, and says which library, in which version, has changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import popen_fork, popen_forkserver
from typing import Any

# Python 3.11 to 3.13: the type of what functools.lru_cache and functools.cache return
CachedFunction = functools._lru_cache_wrapper
# torch 2.14: torch.save without its zip archive, which takes a tenth of a warm launch's own time
WITHOUT_ZIP = {"_use_new_zipfile_serialization": False}


HANDLERS: list[Any] = []  # C++ may call them until the process ends: see `on_cpp_terminate`


def fork_server_pid() -> int | None:
    """Return the process id of this process's fork server; None if it has none (Python 3.11 to 3.13)."""
    return getattr(_fork_server(), "_forkserver_pid", None)


def leave_fork_server() -> bool:
    """In a child of the fork server, close its copy of the pipe that keeps the server running.

    A DataLoader here that needs a fork server then starts its own. Return False in a process that no fork
    server has started (Python 3.11 to 3.13).
    """
    server = _fork_server()
    fd = getattr(server, "_forkserver_alive_fd", None)
    if server is None or fd is None:
        return False
    os.close(fd)
    server._forkserver_alive_fd = server._forkserver_address = None
    return True


def _fork_server() -> Any:
    return getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)


def tell_of_ended_children(tell: Callable[[int, int], object]) -> None:
    """Have multiprocessing call ``tell(pid, exit code)`` when it sees that a process has ended.

    Its objects are gone by the time that a rank reports an error: a DataLoader's worker, with the exit code,
    when the loop is left (Python 3.11 to 3.13).
    """
    for module in (popen_fork, popen_forkserver):
        popen: Any = module.Popen
        popen.poll = functools.partialmethod(_poll_and_tell, popen.poll, tell)


def _poll_and_tell(
    self: Any, poll: Callable[..., Any], tell: Callable[[int, int], object], *args: Any
) -> Any:
    code = poll(self, *args)
    if code is not None:
        tell(self.pid, code)
    return code


def flight_recorder(of_nccl: bool = False, **options: Any) -> bytes:
    """Return a flight recorder's dump as JSON; empty without distributed, or if this torch has no recorder.

    NCCL has one recorder, all other backends have another (torch 2.10 to 2.14). NCCL's is read only if this
    process has used CUDA: otherwise NCCL has run nothing.
    """
    if "torch.distributed" not in sys.modules:
        return b""
    try:
        if of_nccl and not sys.modules["torch"].cuda.is_initialized():
            return b""
        from torch._C import _distributed_c10d

        dump = "_dump_nccl_trace_json" if of_nccl else "_dump_fr_trace_json"
        return getattr(_distributed_c10d, dump)(**options)
    except Exception:  # the stacks still show where a rank is
        return b""


def traced_collectives(of_nccl: bool = False) -> list[dict[str, Any]]:
    """Return a flight recorder's entries with the Python ``frames`` of each call (torch 2.10 to 2.14)."""
    try:
        from torch._C import _distributed_c10d

        dump = "_dump_nccl_trace" if of_nccl else "_dump_fr_trace"
        with _nothing_lazy():
            return pickle.loads(getattr(_distributed_c10d, dump)())["entries"]
    except Exception:  # the report then lacks the lines of calls that are over
        return []


_not_lazy: set[int] = set()  # threads


@contextlib.contextmanager
def _nothing_lazy() -> Iterator[None]:
    """Within, ``torch._inductor`` is not loaded when this thread asks for it (torch 2.10 to 2.14).

    C++ asks for it whenever it names the lines of a stack. Loading it takes a second, and a program that
    loads ``torch._dynamo`` meanwhile, as DDP and optimizers do, can find it half loaded: an ImportError.
    """
    torch: Any = sys.modules["torch"]
    load = torch.__getattr__
    if not hasattr(load, "__wrapped__"):

        @functools.wraps(load)
        def load_elsewhere(name: str) -> Any:
            if name == "_inductor" and threading.get_ident() in _not_lazy:
                raise AttributeError(name)
            return load(name)

        torch.__getattr__ = load_elsewhere
    _not_lazy.add(threading.get_ident())
    try:
        yield
    finally:
        _not_lazy.discard(threading.get_ident())


def process_groups() -> tuple[dict[str, list[int]], int]:
    """Return the ranks of each process group by name, and how many groups it made (torch 2.10 to 2.14).

    `new_group` counts where this rank is no member, too, unless ``use_local_synchronization``; a group is
    named by that count, from the group of all ranks, ``"0"``, on.
    """
    try:
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)
        return {str(name): list(ranks[group]) for group, name in names.items() if group in ranks}, int(
            world.group_count
        )
    except Exception:  # without the groups, all ranks are compared
        return {}, 0


def tell_world_sizes(tell: Callable[[int], object]) -> None:
    """Call ``tell(world size)`` of each group of all ranks, once torch can make one (torch 2.10 to 2.14)."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    update = getattr(c10d, "_update_default_pg", None)
    if update is None or hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_and_tell(group: Any) -> None:
        update(group)
        tell(0 if group is None else group.size())

    c10d._update_default_pg = update_and_tell
    with contextlib.suppress(AttributeError, ValueError):  # half loaded; or there is no group yet
        tell(c10d.get_world_size())


def torch_before(*version: int) -> bool:
    """Return whether the torch that is loaded is older than a version: ``torch_before(2, 14)``."""
    found = re.findall(r"\d+", sys.modules["torch"].__version__)
    return tuple(int(part) for part in found[: len(version)]) < version


def adapt_torch() -> None:
    """In a rank: connect all, give gloo's threads their place, and even out how torch before 2.14 differs."""
    connect_all()
    put_gloo_behind()
    keep_gloo_groups()
    take_forward_sync_buffers()
    hide_buffer_broadcasts()


def read_environment(changed: set[str]) -> None:
    """Have torch read again those variables that it reads only while it is loaded (torch 2.10 to 2.14)."""
    torch: Any = sys.modules["torch"]
    if any(name.startswith("TORCH_LOGS") for name in changed):
        torch._logging._init_logs()
    if "TORCH_DISTRIBUTED_DEBUG" in changed and torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()
    if "TORCH_CPP_LOG_LEVEL" in changed:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(
                os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
            )._ZN3c1011initLoggingEv()


def connect_all() -> None:
    """Let no rank leave init_process_group before all are connected: one that ended would break the rest.

    TORCH_DIST_INIT_BARRIER=1 would have all ranks meet in new_group, too, where torch does not.
    """
    c10d: Any = getattr(importlib.import_module("torch.distributed"), "distributed_c10d", None)
    asked = getattr(c10d, "_is_barrier_after_init", None)
    if asked is None or hasattr(asked, "__wrapped__"):
        return

    @functools.wraps(asked)
    def asked_or_in_init() -> bool:
        return bool(asked()) or sys._getframe(1).f_code.co_name == "init_process_group"

    c10d._is_barrier_after_init = asked_or_in_init


def put_gloo_behind() -> None:
    """Keep gloo's network threads from taking the core of a thread that they wait for (Linux; torch 2.14).

    When bytes come, such a thread wakes and tries the lock of their connection. If another thread of the rank
    has the lock, it asks for the bytes again, and so on without a pause (gloo's `Pair::handleEvents`). Where
    the ranks have no core to spare, Linux may have given it the core of that very thread, for milliseconds.
    Under SCHED_BATCH a thread that wakes takes no running thread's core; each one's share stays the same.
    The name of the threads is torch's, and so is the function that makes them.
    """
    dist: Any = importlib.import_module("torch.distributed")
    if not (dist.is_available() and hasattr(os, "SCHED_BATCH")):
        return
    c10d: Any = dist.distributed_c10d
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_and_put_behind(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        for thread in gloo_threads():
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        return group

    c10d._new_process_group_helper = make_and_put_behind


def gloo_threads() -> list[int]:
    """Return the system's numbers of gloo's network threads in this process; none but on Linux."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as name:
                found += [int(thread)] if name.read() == "gloo_tcp_loop\n" else []
    return found


def take_forward_sync_buffers() -> None:
    """Before torch 2.13, have DDP take ``forward_sync_buffers``, as it has since.

    Its older ``broadcast_buffers=False`` also leaves out the broadcast at the start; this only says what DDP
    does in its forward passes, for which it reads the attribute (torch 2.10).
    """
    if not torch_before(2, 13):
        return
    ddp_class: Any = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    init = ddp_class.__init__
    if init.__code__.co_filename == __file__:
        return

    @functools.wraps(init)
    def with_the_new_name(
        self: Any, *args: Any, forward_sync_buffers: bool | None = None, **others: Any
    ) -> None:
        init(self, *args, **others)
        if forward_sync_buffers is not None:
            self.broadcast_buffers = forward_sync_buffers

    ddp_class.__init__ = with_the_new_name


def hide_buffer_broadcasts() -> None:
    """Before torch 2.12, hide DDP's broadcast of buffers from autograd, as it has done since.

    Two forward passes before a backward pass, over batch norm, otherwise raise "modified by an inplace
    operation" (PyTorch's issue 175024; torch 2.10 and 2.11).
    """
    if not torch_before(2, 12):
        return
    ddp_class: Any = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    send = ddp_class._sync_module_buffers
    if send.__code__.co_filename == __file__:
        return

    @functools.wraps(send)
    def send_unseen(self: Any, *args: Any) -> None:
        preserve: Any = sys.modules["torch"].autograd._unsafe_preserve_version_counter
        with preserve(tuple(self.modules_buffers)):
            send(self, *args)

    ddp_class._sync_module_buffers = send_unseen


def keep_gloo_groups() -> None:
    """Before torch 2.14, have `destroy_process_group` leave gloo's groups in memory: they go with their rank.

    A DDP that dies after its group has the last reference to it, and lets go of it with Python's lock held:
    gloo's destructor then joins its threads, and the one that has just ended a collective waits for that
    lock, to let go of a tensor. Neither ends. Where Python's own object of the group goes last, the lock is
    free (PyTorch's issue 56297, pull request 154976). Seen with torch 2.10 to 2.13; not with 2.14.
    """
    if not torch_before(2, 14):
        return
    dist: Any = importlib.import_module("torch.distributed")
    if not dist.is_available() or hasattr(dist.destroy_process_group, "__kept__"):
        return
    c10d, kept = dist.distributed_c10d, list[Any]()
    init, destroy = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_keep(*args: Any, **kwargs: Any) -> Any:
        for group, backends in c10d._world.pg_backend_config.items():
            if "gloo" in str(backends) and group not in kept:
                # not in the list alone: Python would let go of it while it ends
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                kept.append(group)
        return destroy(*args, **kwargs)

    @functools.wraps(init)
    def let_go_and_init(*args: Any, **kwargs: Any) -> Any:
        while kept:  # or rank 0 would go on with the store that they hold, and the addresses in it
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept[-1]))
            kept.pop()
        return init(*args, **kwargs)

    destroy_and_keep.__kept__ = kept  # type: ignore[attr-defined]
    dist.destroy_process_group = c10d.destroy_process_group = destroy_and_keep
    dist.init_process_group = c10d.init_process_group = let_go_and_init


def on_cpp_terminate(call: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when C++ code gives up (std::terminate), before the process aborts.

    Gloo does so in a thread of its own if tensors do not match. Return what undoes this (GNU's libstdc++).
    The function needs the interpreter's lock: the process aborts once no other thread holds that in C code.
    It keeps the lock while it aborts: `faulthandler` reads the stacks then, and a thread that runs changes
    its own.
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
    """Have torchrun's agent, in this process, choose the port of rank 0's store so (torch 2.14)."""
    from torch.distributed.elastic.rendezvous import api

    api.get_free_port = free_port


def tell_before_the_agent_ends(tell: Callable[[int], object]) -> None:
    """Have torchrun's agent, in this process, call ``tell(pid)`` when it ends a rank (torch 2.14).

    Where the name is missing, nothing is told.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.elastic.multiprocessing import subprocess_handler

        handler_class: Any = subprocess_handler.SubprocessHandler
        close = handler_class.close

        def told(handler: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                if kwargs.get("death_sig") != signal.SIGINT:  # the learner's; no rank has failed
                    tell(handler.proc.pid)
            return close(handler, *args, **kwargs)

        handler_class.close = told


def dispatch_mode(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return a context manager in which torch runs each operation by ``call(operation, args, kwargs)``.

    Operations on DTensors arrive as those on their local parts (torch 2.14).
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(each.__name__ == "DTensor" for each in types):
                return NotImplemented
            return call(func, args, kwargs or {})

    return Mode()


def local_part(tensor: Any) -> Any:
    """Return a DTensor's part on this rank, and any other tensor itself (torch 2.14)."""
    return getattr(tensor, "_local_tensor", tensor)


def active_fake_mode() -> Any:
    """Return the FakeTensorMode that is on, or None (torch 2.14)."""
    try:
        from torch._guards import active_fake_mode as active
    except ImportError:  # DTensor's own fake tensors then count, too, for a moment
        return None
    return active()


def array_constructors() -> list[Any]:
    """Return what a pickled NumPy array or number is made by (NumPy 2.4; in NumPy 1 under another module)."""
    loaded = sys.modules
    multiarray = loaded.get("numpy._core.multiarray") or loaded["numpy.core.multiarray"]
    return [multiarray._reconstruct, multiarray.scalar]


def let_clicks_in(widget: Any) -> None:
    """Let a widget's messages arrive while a cell runs (ipykernel 7.4).

    JupyterLab sends widget messages to a subshell, a thread of the kernel that is free while a cell runs;
    ipykernel 7.4 forwards them to the shell that made the widget, which is busy. Where the name is missing,
    nothing is changed, and the kernel's own interrupt still works.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
