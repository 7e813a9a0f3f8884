"""Private names of Python and of the libraries that the course uses; the exercises use some more.

The comment or docstring of each has the versions in which it was seen. `tests/test_private_names.py` tries
each on the installed version, and says which library, in which version, has changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

# Python 3.11 to 3.13: the type of what functools.lru_cache and functools.cache return
CachedFunction = functools._lru_cache_wrapper
# torch 2.14: torch.save without its zip archive, which takes a tenth of a warm launch's own time
WITHOUT_ZIP = {"_use_new_zipfile_serialization": False}


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
    when the loop is left (Python 3.11 to 3.13; absent on Windows).
    """
    for module in ("popen_fork", "popen_forkserver"):
        with contextlib.suppress(ImportError):
            popen: Any = importlib.import_module(f"multiprocessing.{module}").Popen
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

    NCCL has one recorder, all other backends have another (torch 2.14). NCCL's is read only if this
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


def choose_ports_by(free_port: Callable[[], int]) -> None:
    """Have torchrun's agent, in this process, choose the port of rank 0's store so (torch 2.14)."""
    from torch.distributed.elastic.rendezvous import api

    api.get_free_port = free_port


def tell_before_the_agent_ends(tell: Callable[[int], object]) -> None:
    """Have torchrun's agent, in this process, call ``tell(pid)`` when it ends a rank (torch 2.14)."""
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    handler_class: Any = subprocess_handler.SubprocessHandler
    close = handler_class.close

    def told(handler: Any, death_sig: Any = None) -> None:
        tell(handler.proc.pid)
        close(handler, death_sig)

    handler_class.close = told


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
