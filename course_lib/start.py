"""Start processes and end them: the ranks of a `launch`, or a program that starts its own.

The ranks are started by ``torch.multiprocessing.start_processes`` from a fork server that has torch loaded:
each is a fresh process, with none of the kernel's state and no CUDA context, within milliseconds.
"""

from __future__ import annotations

import contextlib
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
import types
from collections.abc import Iterator

import psutil

from . import entry
from .run import Run

KILL_SECONDS = 5.0  # how long a killed process may take to be gone
_main_lock = threading.Lock()  # launches in several threads hide __main__ one after the other
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def warm_up() -> None:
    """Start the fork server, which loads torch meanwhile; nothing happens where it runs already."""
    if METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(["course_lib.preload"])
        with without_main():
            multiprocessing.resource_tracker.ensure_running()  # or it would unblock the signal below
            # Jupyter's interrupt goes to the kernel's process group: it would end the server as it loads
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                multiprocessing.forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
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
def loopback_store() -> Iterator[int]:
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


class Ranks:
    """The processes of a launch."""

    def __init__(self, job: entry.Job, world_size: int) -> None:
        from torch.multiprocessing import start_processes

        with without_main():
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
            kill_group(process.pid)
            process.kill()
        for process in self._processes:
            process.join(KILL_SECONDS)
        if self._guard.pid is not None:
            self._guard.kill()
            self._guard.join(KILL_SECONDS)


class Program:
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
        kill_group(self._process.pid)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait(KILL_SECONDS)


def kill_group(pid: int | None) -> None:
    if pid and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
