"""`launch`: what a learner calls to run a function on several ranks."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import linecache
import math
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from ..hardware import cores, gpu_count
from ..rank.launched import Job
from ..run.run import Run
from .dashboard import view_of
from .processes import Ranks, loopback_store, warm_up
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
    torchrun sets them, so the function begins with ``dist.init_process_group(backend)``. The store they meet
    at listens on the loopback address alone.

    Parameters
    ----------
    function
        Also one defined in a cell, or a lambda: it goes to the ranks by value. ``args`` and ``kwargs`` go
        to it.
    nprocs
        How many ranks; by default one for each GPU, or 2 without one.
    device
        ``"cpu"`` keeps the ranks off the GPUs; by default they use what is there.
    timeout
        Seconds after which ranks that are still at work are ended, with a report of where each one was.
    dashboard
        Show progress, memory and throughput while it runs; False prints nothing.

    Returns
    -------
    Run
        With ``results``, ``logs``, ``metrics`` by rank.

    Raises
    ------
    RankError
        A rank raised, was killed or ended early.
    RankTimeout
        The ranks were not done after ``timeout`` seconds.
    KeyboardInterrupt
        Stopped by the Stop button, the kernel's interrupt or Ctrl-C; the ranks are gone then.
    ValueError, TypeError
        Something about the call is wrong; nothing was started.
    """
    called = time.time()
    world_size = _world_size(nprocs, device)
    check_timeout(timeout)
    if dashboard and 0 < (gpus := 0 if device == "cpu" else gpu_count()) < world_size:
        print(f"{world_size} ranks share {gpus} GPU{'s' if gpus > 1 else ''}, over gloo")
    warm_up()
    call = _packed(function, args, kwargs)
    name = getattr(function, "__name__", type(function).__name__)
    with loopback_store() as port:
        # made last: an interrupt of the first call, while torch is imported, leaves no run behind
        run = Run.create(name, world_size, started=called)
        job = Job(
            folder=run.folder,
            kernel_pid=os.getpid(),
            call=call,
            environment=_environment(run, world_size, port, device),
            threads=max(1, cores() // world_size),
            cells={
                name: kept
                for name, kept in list(linecache.cache.items())  # other threads add to it
                if len(kept) == 4 and kept[1] is None
            },
        )
        watch(run, lambda stop: Ranks(job, world_size, stop), timeout, view_of(run, dashboard))
    return run


# --- what is asked for ------------------------------------------------------------------------------------


def _world_size(nprocs: int | None, device: str | None) -> int:
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device is 'cpu', 'cuda', or left out to take what is there; got {device!r}")
    gpus = 0 if device == "cpu" else gpu_count()
    if device == "cuda" and gpus == 0:
        raise ValueError("device='cuda', but torch sees no CUDA GPU on this machine; leave device out")
    if nprocs is None:
        return gpus or 2
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs is the number of ranks, a whole number from 1 on; got {nprocs!r}")
    return nprocs


def check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"timeout is a number of seconds above 0, or None for no limit; got {timeout!r}")


def _packed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """(function, args, kwargs) as bytes; refused with the name of what cannot be sent."""
    if not callable(function):
        raise TypeError(
            f"launch takes the function itself and then its arguments, launch(train, 3); its first argument "
            f"is {function!r:.60}, a {type(function).__name__}, which cannot be called"
        )
    with contextlib.suppress(ValueError):  # some builtins have no signature
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(function, "__name__", "the function")
            raise TypeError(f"{name} cannot be called with these arguments: {error}") from None
    try:
        return _dumps((function, args, kwargs))
    except Exception as error:
        user = getattr(function, "__name__", type(function).__name__)
        named = {f"argument {i} of {user}": value for i, value in enumerate(args, 1)}
        named |= {f"argument {name}=": value for name, value in kwargs.items()}
        with contextlib.suppress(TypeError, ValueError):  # no plain function; a name without a value yet
            used = inspect.getclosurevars(function)
            named |= {f"{name}, which {user} uses,": v for v_ in used[:2] for name, v in v_.items()}
        for name, value in named.items():
            try:
                _dumps(value)
            except Exception as reason:
                raise TypeError(
                    f"{name} cannot be sent to the ranks: it is {value!r:.80} ({reason}); "
                    f"make it inside the function instead"
                ) from None
        raise TypeError(f"{function!r:.80} cannot be sent to the ranks: {error}") from None


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, and by name also modules of a class of their own (``torch.backends.cudnn`` is one)."""

    def reducer_override(self, obj: Any) -> Any:
        own_class = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if own_class and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _environment(run: Run, world_size: int, port: int, device: str | None) -> dict[str, str]:
    """What torchrun sets, what keeps gloo and NCCL on this machine, and where the figures go."""
    return {
        **loopback_environment(),
        **os.environ,
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(max(1, cores() // world_size)),
        "MPLBACKEND": "Agg",  # the notebook's own backend cannot draw in a rank
        "COURSE_RUN": str(run.folder),
        "COURSE_STARTED": repr(time.time()),
    }


def loopback_environment() -> dict[str, str]:
    """What keeps gloo and NCCL on this machine, and PyTorch's flight recorder small."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "TORCH_FR_BUFFER_SIZE": "16",  # it keeps 2000 collectives, and a look at those takes 20 ms
    }
