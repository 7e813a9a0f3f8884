"""Private names of Python and of the libraries that the course uses; the exercises use some more.

Comments and docstrings say in which versions a name was seen. `tests/test_compat.py` tries each on the
installed version, and says which library, in which version, has changed.
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
KEPT_GROUPS: list[Any] = []  # see `keep_gloo_groups`


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> bool:
    """Have ``owner.name(…)`` call ``by(original, …)``, where it is there and does not yet; return that."""
    original = getattr(owner, name, None)
    if original is None or original.__code__.co_filename == __file__:
        return False

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(owner, name, replaced)
    return True


def _c10d() -> Any:
    return getattr(importlib.import_module("torch.distributed"), "distributed_c10d", None)


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
    if fd is None:
        return False
    os.close(fd)
    server._forkserver_alive_fd = server._forkserver_address = None
    return True


def _fork_server() -> Any:
    return getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)


def tell_of_ended_children(tell: Callable[[int, int], object]) -> None:
    """Have multiprocessing call ``tell(pid, exit code)`` when it sees that a process has ended.

    A DataLoader forgets its workers when the loop is left, before the rank reports an error (Python 3.11 to
    3.13).
    """

    def poll_and_tell(popen: Any, poll: Callable[..., Any], *args: Any) -> Any:
        code = poll(popen, *args)
        if code is not None:
            tell(popen.pid, code)
        return code

    for module in (popen_fork, popen_forkserver):
        module.Popen.poll = functools.partialmethod(poll_and_tell, module.Popen.poll)


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

    def load_elsewhere(load: Callable[[str], Any], name: str) -> Any:
        if name == "_inductor" and threading.get_ident() in _not_lazy:
            raise AttributeError(name)
        return load(name)

    _replace(sys.modules["torch"], "__getattr__", load_elsewhere)
    _not_lazy.add(threading.get_ident())
    try:
        yield
    finally:
        _not_lazy.discard(threading.get_ident())


def process_groups() -> tuple[dict[str, list[int]], int]:
    """Return the ranks of each process group by name, and how many groups torch has counted (2.10 to 2.14).

    The count numbers the groups: ``"0"`` is the group of all ranks. It includes those that `new_group` made
    without this rank, unless with ``use_local_synchronization``.
    """
    try:
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)
        named = {str(name): list(ranks[group]) for group, name in names.items() if group in ranks}
        return named, int(world.group_count)
    except Exception:  # without the groups, all ranks are compared
        return {}, 0


def tell_world_sizes(tell: Callable[[int], object]) -> None:
    """Call ``tell(world size)`` of each group of all ranks, once torch can make one (torch 2.10 to 2.14)."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")

    def update_and_tell(update: Callable[[Any], None], group: Any) -> None:
        update(group)
        tell(0 if group is None else group.size())

    if _replace(c10d, "_update_default_pg", update_and_tell):
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

    def asked_or_in_init(asked: Callable[[], bool]) -> bool:
        return bool(asked()) or sys._getframe(2).f_code.co_name == "init_process_group"

    _replace(_c10d(), "_is_barrier_after_init", asked_or_in_init)


def put_gloo_behind() -> None:
    """Keep gloo's network threads from taking the core of a thread that they wait for (Linux; torch 2.14).

    Such a thread wakes when bytes come. If another thread holds the lock of that connection, it spins until
    the lock is free (gloo's `Pair::handleEvents`), perhaps on the core of the very thread that holds it.
    Under SCHED_BATCH a thread that wakes takes no running thread's core; each one's share stays the same.
    """

    def make_and_put_behind(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        for thread in gloo_threads():
            with contextlib.suppress(OSError):  # it has ended, or a sandbox refuses
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        return group

    _replace(_c10d(), "_new_process_group_helper", make_and_put_behind)


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

    DDP reads ``broadcast_buffers`` in its forward passes. Given to its constructor, that name would leave out
    the broadcast at the start, too (torch 2.10).
    """

    def with_the_new_name(
        init: Any, ddp: Any, *args: Any, forward_sync_buffers: bool | None = None, **others: Any
    ) -> None:
        init(ddp, *args, **others)
        if forward_sync_buffers is not None:
            ddp.broadcast_buffers = forward_sync_buffers

    if torch_before(2, 13):
        _replace(_ddp(), "__init__", with_the_new_name)


def hide_buffer_broadcasts() -> None:
    """Before torch 2.12, hide DDP's broadcast of buffers from autograd, as it has done since.

    Two forward passes before a backward pass, over batch norm, otherwise raise "modified by an inplace
    operation" (PyTorch's issue 175024; torch 2.10 and 2.11).
    """

    def send_unseen(send: Any, ddp: Any, *args: Any) -> None:
        with sys.modules["torch"].autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):
            send(ddp, *args)

    if torch_before(2, 12):
        _replace(_ddp(), "_sync_module_buffers", send_unseen)


def _ddp() -> Any:
    return importlib.import_module("torch.nn.parallel").DistributedDataParallel


def keep_gloo_groups() -> None:
    """Before torch 2.14, keep gloo's groups after `destroy_process_group` until the rank ends: no deadlock.

    A DDP that dies later would drop the last reference to its group while it holds Python's lock: gloo's
    destructor joins its threads, and a thread that has just ended a collective waits for that lock to drop a
    tensor. Python's own object of the group drops the lock first (PyTorch's issue 56297, pull request 154976;
    seen with torch 2.10 to 2.13).
    """

    def destroy_and_keep(destroy: Any, *args: Any, **kwargs: Any) -> Any:
        for group, backends in c10d._world.pg_backend_config.items():
            if "gloo" in str(backends) and group not in KEPT_GROUPS:
                # not in the list alone: Python would let go of it while it ends
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                KEPT_GROUPS.append(group)
        return destroy(*args, **kwargs)

    def let_go_and_init(init: Any, *args: Any, **kwargs: Any) -> Any:
        while KEPT_GROUPS:  # or rank 0 would go on with the store that they hold, and the addresses in it
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(KEPT_GROUPS[-1]))
            KEPT_GROUPS.pop()
        return init(*args, **kwargs)

    c10d, dist = _c10d(), sys.modules["torch.distributed"]
    if torch_before(2, 14):
        for name, by in {
            "destroy_process_group": destroy_and_keep,
            "init_process_group": let_go_and_init,
        }.items():
            if _replace(c10d, name, by):
                setattr(dist, name, getattr(c10d, name))


def on_cpp_terminate(call: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when C++ code gives up (std::terminate, of GNU's libstdc++); return an undo.

    Gloo gives up in a thread of its own if tensors do not match. The function takes Python's lock as soon as
    no other thread holds it in C code, and keeps it while the process aborts: `faulthandler` then reads the
    stacks of threads that stand still.
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

    def tell_and_close(close: Any, handler: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            if kwargs.get("death_sig") != signal.SIGINT:  # the learner's; no rank has failed
                tell(handler.proc.pid)
        return close(handler, *args, **kwargs)

    with contextlib.suppress(ImportError):
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        _replace(SubprocessHandler, "close", tell_and_close)


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
    from torch._guards import active_fake_mode as active

    return active()


def array_constructors() -> list[Any]:
    """Return what a pickled NumPy array or number is made by (NumPy 2.4; in NumPy 1 under another module)."""
    loaded = sys.modules
    multiarray = loaded.get("numpy._core.multiarray") or loaded["numpy.core.multiarray"]
    return [multiarray._reconstruct, multiarray.scalar]


def let_clicks_in(widget: Any) -> None:
    """Let a widget's messages arrive while a cell runs (ipykernel 7.4).

    JupyterLab sends them to a subshell, a thread of the kernel that is free while a cell runs; ipykernel 7.4
    forwards them to the busy shell that made the widget. Where the name is missing, nothing is changed, and
    the kernel's own interrupt still works.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
