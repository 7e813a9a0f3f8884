"""Start ranks, watch them, hand back a `Run`.

The ranks are started by ``torch.multiprocessing.start_processes`` from a fork server that has torch loaded:
each is a fresh process, with none of the kernel's state and no CUDA context, within milliseconds.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from . import entry, report
from .dashboard import View, view_of
from .entry import Job
from .machine import cores, gpu_count
from .run import Run

WAKE_SECONDS = 0.05  # how often the watching side looks around; the end of a rank wakes it at once
LINGER_SECONDS = 5.0  # a rank that has returned its result may take this long to end
KILL_SECONDS = 5.0
CONSEQUENCE_SECONDS = 0.5  # how long the cause may come to light after its consequence
_main_lock = threading.Lock()  # launches in several threads hide __main__ one after the other
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


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
    _check_timeout(timeout)
    if dashboard and 0 < (gpus := 0 if device == "cpu" else gpu_count()) < world_size:
        print(f"{world_size} ranks share {gpus} GPU{'s' if gpus > 1 else ''}, over gloo")
    warm_up()
    call = _packed(function, args, kwargs)
    name = getattr(function, "__name__", type(function).__name__)
    with _loopback_store() as port:
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
        _watch(run, lambda: _Ranks(job, world_size), timeout, view_of(run, dashboard))
    return run


def python(
    script: str | os.PathLike[str], *args: Any, timeout: float | None = None, dashboard: bool = True
) -> Run:
    """Run ``python script args…``, a program that starts its own ranks with ``mp.spawn``, and watch it.

    Its ranks show up once they call `place`, `track` or `log`. The same faults are told in the same way; the
    results stay in the program (``run.output`` has what it printed outside its ranks).

    Parameters
    ----------
    script
        Its path, from the current folder.
    args
        Its arguments; numbers and paths are turned to text.

    Raises
    ------
    FileNotFoundError
        There is no such script. Otherwise as `launch`.
    """
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {str(script)!r} in {Path.cwd()}")
    _check_timeout(timeout)
    run = Run.create(path.name, 0, program=True)
    environment = {
        **os.environ,
        "COURSE_RUN": str(run.folder),
        "COURSE_KERNEL": str(os.getpid()),
        "COURSE_STARTED": repr(time.time()),
        "PYTHONUNBUFFERED": "1",
        "MPLBACKEND": "Agg",
    }
    command = [sys.executable, "-m", "course_lib.program", str(path), *map(str, args)]
    _watch(run, lambda: _Program(command, environment, run), timeout, view_of(run, dashboard))
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


def _check_timeout(timeout: float | None) -> None:
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
        return cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        user = getattr(function, "__name__", type(function).__name__)
        named = {f"argument {i} of {user}": value for i, value in enumerate(args, 1)}
        named |= {f"argument {name}=": value for name, value in kwargs.items()}
        with contextlib.suppress(TypeError, ValueError):  # no plain function; a name without a value yet
            used = inspect.getclosurevars(function)
            named |= {f"{name}, which {user} uses,": v for v_ in used[:2] for name, v in v_.items()}
        for name, value in named.items():
            try:
                cloudpickle.dumps(value)
            except Exception as reason:
                raise TypeError(
                    f"{name} cannot be sent to the ranks: it is {value!r:.80} ({reason}); "
                    f"make it inside the function instead"
                ) from None
        raise TypeError(f"{function!r:.80} cannot be sent to the ranks: {error}") from None


def _environment(run: Run, world_size: int, port: int, device: str | None) -> dict[str, str]:
    """What torchrun sets, what keeps gloo and NCCL on this machine, and where the figures go."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
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


# --- what is started --------------------------------------------------------------------------------------


def warm_up() -> None:
    """Start the fork server, which loads torch meanwhile; nothing happens where it runs already."""
    if METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(["course_lib.preload"])
        with _without_main():
            multiprocessing.resource_tracker.ensure_running()  # or it would unblock the signal below
            # Jupyter's interrupt goes to the kernel's process group: it would end the server as it loads
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                multiprocessing.forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide a script's own file from multiprocessing, which would run it again in each rank.

    The function travels by value, so the ranks need nothing of it. A notebook has no such file.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        if getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None:
            yield
            return
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def _loopback_store() -> Iterator[int]:
    """The store where the ranks meet, on a free port of the loopback address; yields the port.

    A ``TCPStore`` left to itself listens on every interface of the machine, so it is given a socket.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    try:
        yield port
    finally:
        del store


class _Ranks:
    """The processes of a launch."""

    def __init__(self, job: Job, world_size: int) -> None:
        from torch.multiprocessing import start_processes

        with _without_main():
            before = set(multiprocessing.active_children())
            try:
                self._processes = start_processes(
                    entry.main, (job,), nprocs=world_size, join=False, start_method=METHOD
                ).processes
                pids = [each.pid for each in self._processes]
                self._guard = multiprocessing.get_context(METHOD).Process(
                    target=entry.guard, args=(job.kernel_pid, pids), daemon=True
                )
                if METHOD == "forkserver":
                    self._guard.start()
            except BaseException:  # the system has no room for so many
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
                raise

    def wait(self, seconds: float) -> None:
        """Until one of them ends, at most so long."""
        multiprocessing.connection.wait(
            [each.sentinel for each in self._processes if each.exitcode is None], seconds
        )

    def exit_codes(self) -> dict[int | str, int | None]:
        return {rank: process.exitcode for rank, process in enumerate(self._processes)}

    def kill(self) -> None:
        """End what is left of them, their DataLoader workers included."""
        for process in self._processes:
            _kill_group(process.pid)
            process.kill()
        for process in self._processes:
            process.join(KILL_SECONDS)
        if self._guard.pid is not None:
            self._guard.kill()
            self._guard.join(KILL_SECONDS)


class _Program:
    """A program that starts its own ranks."""

    def __init__(self, command: list[str], environment: dict[str, str], run: Run) -> None:
        self._run = run
        with open(run.folder / "rank-program.log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def exit_codes(self) -> dict[int | str, int | None]:
        code = self._process.poll()
        ranks = range(self._run.world_size) if code else ()
        failed = [rank for rank in ranks if (self._run.folder / f"rank-{rank}.failure.json").exists()]
        return {"program": code, **dict.fromkeys(failed, code)}

    def kill(self) -> None:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
        _kill_group(self._process.pid)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait(KILL_SECONDS)


def _kill_group(pid: int | None) -> None:
    if pid and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


# --- watching ---------------------------------------------------------------------------------------------


def _watch(run: Run, start: Callable[[], _Ranks | _Program], timeout: float | None, view: View) -> None:
    """From the start of the processes to their end, and to what the learner is left with."""
    error: BaseException | None = None
    with _interrupts_held(view.stop):
        try:
            ranks = start()
        except Exception as reason:
            run.end("failed", f"the ranks could not be started: {reason}")
            view.finish()
            raise
        try:
            error = _follow(run, ranks, timeout, view)
        finally:
            ranks.kill()
        state = "done" if error is None else "stopped" if isinstance(error, report.Stopped) else "failed"
        run.end(state, "" if error is None else str(error))
        if error is None:
            error = _load_results(run)
        view.finish()
    if error is not None:
        raise error from None


def _load_results(run: Run) -> report.RankError | None:
    """While the interrupt is held, so that nothing is left half read."""
    try:
        _ = run.results
    except Exception as error:
        text = f"the ranks are done, but a result cannot be read here: {type(error).__name__}: {error}"
        run.end("failed", text)
        return report.RankError(text, None, run)
    return None


def _follow(
    run: Run, ranks: _Ranks | _Program, timeout: float | None, view: View
) -> report.RankError | report.Stopped | None:
    """Wait for the end; what went wrong, if anything did."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    all_returned_at = math.inf
    while True:
        ranks.wait(WAKE_SECONDS)
        if view.stop.is_set():
            return report.Stopped(run)
        codes = ranks.exit_codes()
        failure = _first_failure(run, codes)
        if failure is not None:
            if failure.consequence:  # whose end was it that this rank met?
                time.sleep(CONSEQUENCE_SECONDS)
                failure = _first_failure(run, ranks.exit_codes()) or failure
            others = _what_others_do(run, ranks)
            return report.RankError(report.describe(run, failure, others), failure.rank, run)
        if all(code is not None for code in codes.values()):
            return None
        if time.monotonic() > deadline:
            lines = [f"rank {rank} {doing}" for rank, doing in _what_others_do(run, ranks).items()]
            text = f"not done after {timeout:g} s; the ranks were ended\n\n" + "\n".join(lines)
            return report.RankTimeout(text, None, run)
        if all((run.folder / f"rank-{rank}.result").exists() for rank in codes):
            all_returned_at = min(all_returned_at, time.monotonic())
            if time.monotonic() > all_returned_at + LINGER_SECONDS:
                return None
        view.update()


def _first_failure(run: Run, codes: dict[int | str, int | None]) -> report.Failure | None:
    # a rank that ended well has its result; a program may just end
    ended = {rank: code for rank, code in codes.items() if code or (code == 0 and rank != "program")}
    failures = [report.failure_of(run, rank, code) for rank, code in ended.items()]
    found = [each for each in failures if each is not None]
    of_ranks = [each for each in found if each.rank != "program"]
    return report.cause(of_ranks or found)


def _what_others_do(run: Run, ranks: _Ranks | _Program) -> dict[int, str]:
    codes = ranks.exit_codes()
    numbers = list(range(run.world_size))
    report.ask_stacks(run, [rank for rank in numbers if codes.get(rank) is None])
    codes = ranks.exit_codes()  # some may have ended meanwhile
    return {rank: report.doing(run, rank, codes.get(rank)) for rank in numbers}


@contextlib.contextmanager
def _interrupts_held(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and the kernel's interrupt set ``stop``, so that none strikes between two processes' starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
