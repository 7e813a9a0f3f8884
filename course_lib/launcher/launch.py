"""`launch`: run a function on several ranks."""

from __future__ import annotations

import linecache
import os
import time
from collections.abc import Callable
from typing import Any

from ..hardware import cores, gpu_count
from ..rank.launched import Job
from ..run.run import Run
from .arguments import check_timeout, packed, world_size_of
from .dashboard import view_of
from .environment import loopback_store, of_a_launch
from .forkserver import warm_up
from .processes import Ranks, end_marked
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
    the ranks meet listens on the loopback address only.

    Parameters
    ----------
    function
        Any function, even a lambda or one defined in a cell: it is sent to the ranks by value, and called
        with ``args`` and ``kwargs``.
    nprocs
        Number of ranks; by default one per GPU, or 2 without a GPU.
    device
        ``"cpu"`` keeps the ranks off the GPUs, ``"cuda"`` demands one; by default they use what is there.
    timeout
        Seconds after which ranks that are still running are killed, with a report of where each one was.
    dashboard
        Show progress, memory and throughput while it runs; False prints nothing.

    Returns
    -------
    Run
        Its ``results``, ``logs`` and ``metrics`` are by rank.

    Raises
    ------
    RankError
        A rank raised an exception, was killed or ended early.
    RankTimeout
        The ranks were not done after ``timeout`` seconds.
    KeyboardInterrupt
        You stopped it by the Stop button, the kernel's interrupt or Ctrl-C; no rank is left running.
    ValueError, TypeError
        An argument is wrong; nothing was started.
    """
    return start(function, args, kwargs, nprocs, device, timeout, dashboard)


def start(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nprocs: int | None,
    device: str | None,
    timeout: float | None,
    dashboard: bool,
    trusted: bool = True,
) -> Run:
    """Do the work of `launch`; ranks that are not ``trusted`` leave nothing behind.

    Their results are not read, since unpickling runs code, and processes that they have started in other
    sessions are killed.
    """
    called = time.time()
    world_size = world_size_of(nprocs, device)
    check_timeout(timeout)
    if dashboard and 0 < (gpus := 0 if device == "cpu" else gpu_count()) < world_size:
        print(f"{world_size} ranks share {gpus} GPU{'s' if gpus > 1 else ''}, over gloo")
    warm_up()
    call = packed(function, args, kwargs)
    name = getattr(function, "__name__", type(function).__name__)
    with loopback_store() as port:
        # created last: an interrupt of the first call, while torch is imported, leaves no run behind
        run = Run.create(name, world_size, trusted, started=called)
        job = Job(
            folder=run.folder,
            kernel_pid=os.getpid(),
            call=call,
            environment=of_a_launch(run, world_size, port, device),
            threads=max(1, cores() // world_size),
            cells={
                name: kept
                for name, kept in list(linecache.cache.items())  # a copy: other threads add to it
                if len(kept) == 4 and kept[1] is None
            },
        )
        try:
            watch(run, lambda stop: Ranks(job, world_size, stop), timeout, view_of(run, dashboard))
        finally:
            if not trusted:
                end_marked(run.folder, called)
    return run
