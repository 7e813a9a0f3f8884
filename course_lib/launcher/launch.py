"""`launch`: run a function on several ranks."""

from __future__ import annotations

import linecache
import os
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ..host.hardware import gpu_count
from ..rank.entry_function import Assignment
from ..run.run import Run
from .arguments import check_timeout, name_of, packed, world_size_of
from .dashboard import View, view_of
from .environment import loopback_store, of_a_launch
from .forkserver import warm_up
from .processes import Ranks
from .watch import watch


def launch(
    function: Callable[..., Any],
    *args: Any,
    nprocs: int | None = None,
    device: str | None = None,
    timeout: float | None = None,
    dashboard: bool = True,
    **kwargs: Any,
) -> Run:
    """Run a function on several ranks, each a fresh process, and wait for them (lesson 00).

    In each rank RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as
    torchrun sets them, so the function begins with ``dist.init_process_group(backend)``. The store at which
    the ranks meet listens on the loopback address only. All ranks are forked from one process, so a ``set``
    of strings has the same order on all of them. Under torchrun it does not: sort it where order counts.

    Parameters
    ----------
    function
        Any function, even a lambda or one defined in a cell: it is sent to the ranks by value, and called
        with ``args`` and ``kwargs``.
    nprocs
        Number of ranks; by default one per GPU, or 2 without a GPU.
    device
        ``"cpu"`` keeps the ranks off the GPUs, ``"cuda"`` requires one; by default they use GPUs, if any.
    timeout
        Seconds until ranks that still run are killed, with a report of where each one was.
    dashboard
        Show progress, memory and throughput while it runs; False prints nothing.

    Returns
    -------
    Run
        ``results``, ``logs`` and ``metrics`` have an entry for each rank.

    Raises
    ------
    RankError
        A rank raised an exception, was killed or ended early.
    RankTimeout
        The ranks were not done after ``timeout`` seconds.
    KeyboardInterrupt
        You stopped it by the Stop button, the kernel's interrupt or Ctrl-C; no rank is left running. It is
        raised in the ranks, too: they get two seconds to save what they have (``finally``).
    ValueError, TypeError
        An argument is wrong; nothing was started.
    """
    request = Launch(function, args, kwargs, nprocs=nprocs, device=device, timeout=timeout)
    return start(request, view=lambda run: view_of(run, dashboard))


@dataclass(frozen=True)
class Launch:
    """What to run on which ranks; `launch` explains the fields that are its parameters."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    nprocs: int | None = None
    device: str | None = None
    timeout: float | None = None
    environment: dict[str, str] = field(default_factory=dict)  # additional variables of the ranks
    unpickle: bool = True  # load the ranks' results, which runs code that the ranks chose


def start(request: Launch, view: Callable[[Run], View] = View) -> Run:
    """Run a function on several ranks and wait for them, as `launch` does."""
    called = time.time()
    world_size = world_size_of(request.nprocs, request.device)
    check_timeout(request.timeout)
    warm_up()
    call, shared = packed(request.function, request.args, request.kwargs)
    gpus = 0 if request.device == "cpu" else gpu_count()
    with loopback_store() as port:
        # created last: an interrupt of the first call, while torch is imported, leaves no run behind
        run = Run.create(name_of(request.function), world_size, request.unpickle, started=called)
        shown = view(run)
        if 0 < gpus < world_size:
            shown.tell(f"{world_size} ranks share {gpus} GPU{'s' if gpus > 1 else ''}, over gloo")
        assignment = Assignment(
            folder=run.folder,
            kernel_pid=os.getpid(),
            call=call,
            shared=shared,
            environment=of_a_launch(run, world_size, port, request.device) | request.environment,
            cells={
                name: entry
                for name, entry in list(linecache.cache.items())  # a copy: other threads add to it
                if len(entry) == 4 and entry[1] is None
            },
        )
        return watch(run, lambda stop: Ranks(assignment, world_size, stop), request.timeout, shown)
