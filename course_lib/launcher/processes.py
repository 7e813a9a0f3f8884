"""Start processes and end them: the ranks of a `launch`, or a program that starts its own.

The ranks are started by ``torch.multiprocessing.start_processes`` from a fork server that has torch loaded:
each is a fresh process, with none of the kernel's state and no CUDA context, within milliseconds.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from typing import Any

import psutil

from ..rank import launched
from ..run.run import Run
from .guard import end_families, protect, release

KILL_SECONDS = 5.0  # how long a killed process may take to be gone
WAKE_SECONDS = 0.05  # how often the watching side looks around; the end of a rank wakes it at once
REPORT_SECONDS = 2.0  # how long a program may take to end after the failure of one of its ranks
_main_lock = threading.Lock()  # launches in several threads hide __main__ one after the other
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # for the heap of the fork server: a fork takes 5 ms instead of 9
_loaded: int | None = None  # the fork server that has loaded torch
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def warm_up() -> None:
    """Start the fork server, which loads torch meanwhile; nothing happens where it runs already."""
    if METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(["course_lib.rank.preload"])
        with without_main():
            multiprocessing.resource_tracker.ensure_running()  # or it would unblock the signal below
            # Jupyter's interrupt goes to the kernel's process group: it would end the server as it loads
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            tunables = os.environ.get("GLIBC_TUNABLES")
            os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [HUGE_PAGES, tunables]))
            try:
                multiprocessing.forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                del os.environ["GLIBC_TUNABLES"]
                if tunables is not None:
                    os.environ["GLIBC_TUNABLES"] = tunables


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


def wait_until_loaded(stop: threading.Event) -> None:
    """Until the fork server has loaded torch, which takes seconds, or until someone wants an end of it."""
    global _loaded
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if METHOD != "forkserver" or pid == _loaded is not None:
        return

    def probe() -> None:
        process = multiprocessing.get_context(METHOD).Process(target=int, daemon=True)
        with without_main():
            process.start()
        process.join()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    while thread.is_alive() and not stop.is_set():
        thread.join(WAKE_SECONDS)
    if not thread.is_alive():
        _loaded = pid


class Ranks:
    """The processes of a launch; none where ``stop`` is set before they could start."""

    def __init__(self, job: launched.Job, world_size: int, stop: threading.Event) -> None:
        from torch.multiprocessing import start_processes

        self._processes: list[Any] = []
        wait_until_loaded(stop)
        if stop.is_set():
            return
        with without_main():
            before = set(multiprocessing.active_children())
            try:
                self._processes = start_processes(
                    launched.main, (job,), nprocs=world_size, join=False, start_method=METHOD
                ).processes
            except BaseException:  # the system has no room for so many
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
                raise
        protect(each.pid for each in self._processes)

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
        release(each.pid for each in self._processes)


class Program:
    """A program that starts its own ranks; torchrun on several nodes is as many."""

    def __init__(
        self, commands: list[list[str]], environments: list[dict[str, str]], run: Run, restarts: bool = False
    ) -> None:
        self._run = run
        self._restarts = restarts  # whether the program goes on after the failure of a rank
        self._failed_at = math.inf
        self._processes: list[subprocess.Popen[bytes]] = []
        self._family: list[psutil.Process] = []
        with open(run.folder / "rank-program.log", "ab") as log:
            try:
                for command, environment in zip(commands, environments, strict=True):
                    self._processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
                    self._family.append(psutil.Process(self._processes[-1].pid))
            except BaseException:
                self.kill()
                raise
        protect(each.pid for each in self._processes)

    def wait(self, seconds: float) -> None:
        """Until one of them ends, at most so long."""
        running = [each for each in self._processes if each.poll() is None]
        with contextlib.suppress(subprocess.TimeoutExpired):
            if running:
                running[0].wait(seconds)

    def exit_codes(self) -> dict[int | str, int | None]:
        """Of the program, and of those of its ranks that have failed for good."""
        codes = [each.poll() for each in self._processes]
        code = None if None in codes else next(filter(None, codes), 0)
        failed = [
            rank
            for rank in range(self._run.world_size)
            if (self._run.folder / f"rank-{rank}.failure.json").exists()
        ]
        if code is None and (self._restarts or not failed):
            return {"program": None}
        self._failed_at = min(self._failed_at, time.monotonic())
        if code is None and time.monotonic() < self._failed_at + REPORT_SECONDS:
            return {"program": None}  # it has its own to say of the failure
        return {"program": code, **dict.fromkeys(failed if code != 0 else (), code or 1)}

    def kill(self) -> None:
        """End what is left of them, with all that they have started."""
        codes = [each.poll() for each in self._processes]
        end_families(self._family)
        if any(code is not None and code < 0 for code in codes):
            for rank in range(self._run.world_size):  # torchrun's ranks, which no agent looks after now
                kill_group(self._run.facts(rank).get("pid"))
        for process in self._processes:
            process.wait(KILL_SECONDS)
        release(each.pid for each in self._processes)


def kill_group(pid: int | None) -> None:
    if pid and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
