"""Start and kill processes: the ranks of a `launch`, or a program that starts its own ranks.

`watch` follows any `Started`: these two, and a Slurm job (`job`).
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
from enum import Enum, auto
from pathlib import Path
from typing import Any

import psutil

from ..rank import launched
from ..run.run import Run
from ..run_folder import PROGRAM, RankFiles
from .forkserver import METHOD, wait_until_loaded, without_main
from .guard import end_families, protect, release

KILL_SECONDS = 5.0  # how long a killed process may take to be gone
CLOCK_SECONDS = 2.0  # how much two clocks may disagree about when a process began
FULL = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
NO_ROOM = (
    "The processes for {} ranks could not all be started: the system has no room for them. Usually a limit "
    "has been reached: on processes and threads (a container's, `ulimit -u`), open files (`ulimit -n`) or "
    "memory. Take fewer ranks (nprocs), or shut down the kernels of other notebooks."
)
REPORT_SECONDS = 2.0  # how long a program may take to end after one of its ranks has failed


class Started:
    """Something that was started, as `watch` needs it: it reports whether it runs, and can be killed."""

    def began(self) -> bool:
        """Return whether it has begun to run: the learner's ``timeout`` counts from then."""
        return True

    def overdue(self) -> str:
        """Say why to give it up before it has begun; empty if there is no reason to."""
        return ""

    def wait(self, seconds: float) -> None:
        """Wait until something may have happened, for about this long at most."""
        raise NotImplementedError

    def exit_codes(self) -> dict[int | str, int | None]:
        """Return exit codes by rank, or the program's; None for each that is still running."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill what is left of it, and everything that it has started."""
        raise NotImplementedError


class Ranks(Started):
    """The rank processes of a launch; none if ``stop`` is set before they could start."""

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
            except BaseException as reason:
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
                # the fork server could not fork, and has ended, or this process has reached a limit itself
                if isinstance(reason, EOFError) or getattr(reason, "errno", None) in FULL:
                    raise RuntimeError(NO_ROOM.format(world_size)) from reason
                raise
        protect(each.pid for each in self._processes)

    def wait(self, seconds: float) -> None:
        """Wait until one of them ends, for this long at most."""
        multiprocessing.connection.wait(
            [each.sentinel for each in self._processes if each.exitcode is None], seconds
        )

    def exit_codes(self) -> dict[int | str, int | None]:
        return {rank: process.exitcode for rank, process in enumerate(self._processes)}

    def kill(self) -> None:
        """Kill what is left of them, including their DataLoader workers."""
        living = []
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                if process.exitcode is None:
                    living.append(psutil.Process(process.pid))
        end_families(living)
        for process in self._processes:
            kill_group(process.pid)
            process.kill()
        for process in self._processes:
            process.join(KILL_SECONDS)
        release(each.pid for each in self._processes)


class Stage(Enum):
    """How far a program has come."""

    AT_WORK = auto()
    REPORTS = auto()  # one of its ranks has failed, and the program still has time to report why
    OVER = auto()  # it has ended, or its time to report is up


class WithRanks(Started):
    """Something that starts its own ranks; a rank that fails says so in a file."""

    report_seconds = REPORT_SECONDS

    def __init__(self, run: Run, restarts: bool) -> None:
        self._run = run
        self._goes_on = restarts  # whether it goes on after a rank has failed
        self._end_by: float | None = None  # time.monotonic() at which its time to report a failure is up

    def code(self) -> int | None:
        """Return the exit code of what started the ranks; None while it is running."""
        raise NotImplementedError

    def exit_codes(self) -> dict[int | str, int | None]:
        """Return the exit code of the program and, once it is over, those of its failed ranks."""
        code = self.code()
        failed = [
            rank for rank in range(self._run.world_size) if RankFiles(self._run.folder, rank).failure.exists()
        ]
        if self._stage(code, bool(failed)) is not Stage.OVER:
            return {PROGRAM: None}
        return {PROGRAM: code} | ({} if code == 0 else dict.fromkeys(failed, code or 1))

    def _stage(self, code: int | None, a_rank_failed: bool) -> Stage:
        if code is not None:
            return Stage.OVER
        if self._goes_on or not a_rank_failed:
            return Stage.AT_WORK
        if self._end_by is None:
            self._end_by = time.monotonic() + self.report_seconds
        return Stage.REPORTS if time.monotonic() < self._end_by else Stage.OVER


class Program(WithRanks):
    """A program on this machine: one process, or one torchrun for each simulated node."""

    def __init__(
        self, commands: list[list[str]], environments: list[dict[str, str]], run: Run, restarts: bool = False
    ) -> None:
        super().__init__(run, restarts)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._family: list[psutil.Process] = []
        with open(RankFiles(run.folder, PROGRAM).log, "ab") as log:
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
        """Wait until one of them ends, for this long at most."""
        running = [each for each in self._processes if each.poll() is None]
        with contextlib.suppress(subprocess.TimeoutExpired):
            if running:
                running[0].wait(seconds)

    def code(self) -> int | None:
        codes = [each.poll() for each in self._processes]
        return None if None in codes else next(filter(None, codes), 0)

    def kill(self) -> None:
        """Kill what is left of them, and everything that they have started."""
        codes = [each.poll() for each in self._processes]
        end_families(self._family)
        if any(code is not None and code < 0 for code in codes):
            for rank in range(self._run.world_size):  # torchrun's ranks, left without their agent
                kill_group(self._run.facts(rank).get("pid"))
        for process in self._processes:
            process.wait(KILL_SECONDS)
        release(each.pid for each in self._processes)


def kill_group(pid: int | None) -> None:
    if pid and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def end_marked(folder: Path, began: float) -> None:
    """Kill processes that a run's ranks have started and that escaped when the ranks were killed.

    Such a process has the run's folder in its environment, or has a file in it open. One that clears both,
    from a rank that ends itself at once, is not found.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.create_time() < began - CLOCK_SECONDS:
                continue
            named = process.environ().get("COURSE_RUN") == str(folder)
            if named or any(Path(each.path).is_relative_to(folder) for each in process.open_files()):
                end_families([process])
