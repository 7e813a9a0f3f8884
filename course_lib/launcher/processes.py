"""Start and kill processes: the ranks of a `launch`, or a program that starts its own ranks.

`watch` follows any `Execution`: these two, and a Slurm job (`slurm_job`).
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import threading
import time
from typing import Any, Protocol

import psutil

from ..kill import families, kill_families, kill_group, kill_group_of
from ..rank import entry_function
from ..record.layout import PROGRAM, RankFiles
from ..report.evidence import failure_of
from ..run.run import Run
from . import forkserver
from .forkserver import uninterrupted, wait_until_loaded, without_main
from .guard import protect, release

LOAD_SECONDS = 120.0  # after which a timeout begins to count even if spawned ranks still load PyTorch
INTERRUPT_SECONDS = 2.0  # for what a rank does on an interrupt, such as to save a checkpoint
KILL_SECONDS = 5.0  # how long a killed process may take to be gone
MOST_SHARED = 100  # a fork server passes on 254 files at most, and a queue has two
FULL = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
NO_ROOM = (
    "The processes for {} ranks could not all be started: the system has no room for them. Usually a limit "
    "has been reached: on processes and threads (a container's, `ulimit -u`), open files (`ulimit -n`) or "
    "memory. Take fewer ranks (nprocs), or shut down the kernels of other notebooks."
)
REPORT_SECONDS = 2.0  # how long a program may take to end after one of its ranks has failed


class Execution(Protocol):
    """Whatever runs the ranks, as `watch` sees it: it says whether it still runs, and can be killed."""

    def began(self) -> bool:
        """Return whether it has begun to run: the learner's ``timeout`` counts from then."""
        return True

    def wait(self, seconds: float) -> None:
        """Wait until something may have happened, at most about ``seconds``."""

    def exit_codes(self) -> dict[int | str, int | None]:
        """Return exit codes by rank, or the program's; None where it is still running."""

    def interrupt(self) -> float:
        """Interrupt it as Ctrl-C would, if that ends it; return how many seconds it gets before `kill`."""
        return 0.0

    def kill(self) -> None:
        """Kill what is left of it, and everything that it has started."""


class Ranks(Execution):
    """The rank processes of a launch; none if ``stop`` is set before they could start."""

    def __init__(self, assignment: entry_function.Assignment, world_size: int, stop: threading.Event) -> None:
        from torch.multiprocessing import start_processes

        self._processes: list[Any] = []
        self._family: list[psutil.Process] = []
        self._facts = [RankFiles(assignment.folder, rank).facts for rank in range(world_size)]
        self._until = time.monotonic() + LOAD_SECONDS
        wait_until_loaded(stop)
        if stop.is_set():
            return
        with without_main(), uninterrupted():
            before = set(multiprocessing.active_children())
            try:
                self._processes = start_processes(
                    entry_function.main,
                    (assignment,),
                    nprocs=world_size,
                    join=False,
                    start_method=forkserver.METHOD if len(assignment.shared) < MOST_SHARED else "spawn",
                ).processes
            except BaseException as reason:
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
                # the fork server could not fork and has ended, or this process itself has reached a limit
                if isinstance(reason, EOFError) or getattr(reason, "errno", None) in FULL:
                    raise RuntimeError(NO_ROOM.format(world_size)) from reason
                raise
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                self._family.append(psutil.Process(process.pid))
        protect(process.pid for process in self._processes)

    def began(self) -> bool:
        """Return whether all ranks run; a spawned rank runs once it has loaded PyTorch."""
        forked = forkserver.METHOD == "forkserver"
        return forked or time.monotonic() > self._until or all(path.exists() for path in self._facts)

    def wait(self, seconds: float) -> None:
        living = [process.sentinel for process in self._processes if process.exitcode is None]
        multiprocessing.connection.wait(living, seconds)

    def exit_codes(self) -> dict[int | str, int | None]:
        return {rank: process.exitcode for rank, process in enumerate(self._processes)}

    def interrupt(self) -> float:
        ranks, self._family = self._family, families(self._family)  # a rank may end before its children
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGINT)
        return INTERRUPT_SECONDS

    def kill(self) -> None:
        kill_families(self._family)
        for process in self._processes:
            kill_group(process.pid)
        for process in self._processes:
            process.join(KILL_SECONDS)
        release(process.pid for process in self._processes)


class ExternalLauncher(Execution):
    """What starts its own ranks; a rank that fails says so in a file."""

    report_seconds = REPORT_SECONDS

    def __init__(self, run: Run) -> None:
        self._run = run
        self._end_by: float | None = None  # by time.monotonic(), when its time to report a failure is up

    def code(self) -> int | None:
        """Return the exit code of what started the ranks; None while it is running."""
        raise NotImplementedError

    def exit_codes(self) -> dict[int | str, int | None]:
        """Return the exit code of the program and, once it is over, those of its failed ranks."""
        code = self.code()
        failed = [rank for rank, trace in enumerate(self._run.traces()) if trace.has_failed]
        if code is None and not self._has_failed_for_good(failed):
            return {PROGRAM: None}
        return {PROGRAM: code} | ({} if code == 0 else dict.fromkeys(failed, code or 1))

    def _has_failed_for_good(self, failed: list[int]) -> bool:
        """Return whether one of these ranks ends the program, and the time to report why is up."""
        # torchrun asks the other ranks to end once one has failed, and reports only when all are gone
        failures = [failure_of(self._run, rank, None) for rank in failed]
        by_itself = any(failure and not failure.asked_to_end for failure in failures)
        if self._run.record.facts.get("max_restarts") or not by_itself:
            return False
        self._end_by = self._end_by or time.monotonic() + self.report_seconds
        return time.monotonic() >= self._end_by


class Program(ExternalLauncher):
    """A program on this machine: one process, or one torchrun for each simulated node."""

    def __init__(self, commands: list[list[str]], environments: list[dict[str, str]], run: Run) -> None:
        super().__init__(run)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._family: list[psutil.Process] = []
        with open(RankFiles(run.folder, PROGRAM).log, "ab") as log:
            try:
                for command, environment in zip(commands, environments, strict=True):
                    process = subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                    self._processes.append(process)
                    self._family.append(psutil.Process(process.pid))
            except BaseException:
                self.kill()
                raise
        protect(process.pid for process in self._processes)

    def wait(self, seconds: float) -> None:
        running = [process for process in self._processes if process.poll() is None]
        with contextlib.suppress(subprocess.TimeoutExpired):
            if running:
                running[0].wait(seconds)

    def code(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        return None if None in codes else next(filter(None, codes), 0)

    def interrupt(self) -> float:
        self._family = families(self._family)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)  # torchrun passes it on to its ranks
        return INTERRUPT_SECONDS

    def kill(self) -> None:
        kill_families(self._family)
        for rank in range(self._run.world_size):  # torchrun's ranks lead groups, which may outlive them
            kill_group_of(RankFiles(self._run.folder, rank).facts)
        for process in self._processes:
            process.wait(KILL_SECONDS)
        release(process.pid for process in self._processes)
