"""Start and end a rank of a `launch`, around the learner's own function.

A rank does not outlive the kernel that started it. It records its failure before it ends: what the other
ranks then report, a closed connection, comes later and is recognised as a consequence.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import linecache
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .. import by_value
from ..run_folder import AT_WORK, ENDING, EVERYONE, RankFiles, beside, discard
from .failure import end_now, report_exception
from .recorder import answer_stack_requests, attach, send_output_to
from .standstill import ONE_WAY, flight

PR_SET_PDEATHSIG = 1
JOIN_SECONDS = 2.0  # how long the other ranks may take to connect


@dataclass
class Job:
    """What a rank needs to know: the same for all ranks, sent once to each."""

    folder: Path  # the run's folder
    kernel_pid: int  # the process that called launch()
    call: bytes  # (function, args, kwargs), pickled by value
    environment: dict[str, str]
    threads: int  # CPU threads of each rank
    cells: dict[str, Any] = field(default_factory=dict)  # linecache's entries for the notebook's cells


def main(rank: int, job: Job) -> None:
    """Run the job as one rank of a launch, in a fresh process."""
    if hasattr(os, "setsid"):
        os.setsid()  # interrupts of the kernel do not reach us, and our DataLoader workers end with us
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocks it
    _take_environment(job.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    if not _part_from_forkserver():
        end_with(job.kernel_pid)
    # take the platform's start method, as a plain program does, instead of the fork server's
    multiprocessing.set_start_method(None, force=True)
    files = RankFiles(job.folder, rank)
    send_output_to(files.log)
    failed = True
    try:
        answer_stack_requests(files.stack)
        attach(rank)
        result = _run(job)
        _note(ENDING)
        _save_result(result, files.result)
        failed = False
        _let_the_others_join(job)
    except BaseException as error:
        _note(ENDING)
        report_exception(job.folder, rank, error)
    if recorder := attach():
        recorder.close()
    if failed:
        end_now(1)


def _note(phase: str) -> None:
    if recorder := attach():
        recorder.note(phase=phase)


def _take_environment(environment: dict[str, str]) -> None:
    """Take over the kernel's current environment; the fork server's, as of its start, is almost the same."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _run(job: Job) -> Any:
    import torch

    linecache.cache.update(job.cells)
    torch.set_num_threads(job.threads)
    own_autograd()
    # All forks, also those of the next launch, start with the same RNG state. Draw a seed for each, as in a
    # fresh process and as Python's own `random` does after a fork.
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    function, args, kwargs = by_value.loads(job.call)
    _note(AT_WORK)
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        raise


def own_autograd() -> None:
    """Give a forked process its own autograd engine, before it starts a thread.

    The first thread that uses autograd after a fork replaces the engine, and two at once crash the process:
    torch has no lock there (`get_python_engine`, torch 2.15).
    """
    import torch

    torch.zeros(1, requires_grad=True).exp()  # exp saves its result for the backward pass


def end_with(kernel_pid: int) -> None:
    """Kill this process and its children as soon as the kernel has ended, however it ended."""

    def watch() -> None:
        _wait_for_end_of(kernel_pid)
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="course-end-with-kernel", daemon=True).start()


def _wait_for_end_of(pid: int) -> None:
    """Wait until a process has ended, even if its parent has not collected its exit code yet."""
    try:
        with open(os.pidfd_open(pid), "rb") as end:
            select.select([end], [], [])
        return
    except (AttributeError, OSError):  # not Linux, or already gone
        pass
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.2)


def _part_from_forkserver() -> bool:
    """Make this rank die with the fork server, and close its copy of the pipe that keeps the server running.

    The server ends with the kernel, so this does what `end_with` does, in less time and even if the rank is
    busy in C code. Return False if there is no fork server, or on a system other than Linux.
    """
    server = getattr(multiprocessing, "forkserver", None)
    server = getattr(server, "_forkserver", None)
    fd = getattr(server, "_forkserver_alive_fd", None)
    if fd is None:
        return False
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    os.close(fd)
    # if a DataLoader of this rank needs a fork server, it starts its own
    server._forkserver_alive_fd = server._forkserver_address = None
    return sys.platform == "linux"


def _let_the_others_join(job: Job) -> None:
    """Stay connected for a moment if this rank has joined the group but may not have met all other ranks.

    Its own connections are made by then, but gloo's other ranks may still connect: they fail if it leaves.
    """
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_initialized():
        return
    if any(call["group"] == EVERYONE and call["name"] not in ONE_WAY for call in flight()["last"]):
        return
    until = time.monotonic() + JOIN_SECONDS
    waiting = list(range(int(os.environ["WORLD_SIZE"])))
    while waiting and time.monotonic() < until:
        time.sleep(0.005)
        there = [RankFiles(job.folder, rank) for rank in waiting]
        waiting = [each.rank for each in there if not (each.result.exists() or each.failure.exists())]


def _save_result(result: Any, path: Path) -> None:
    import torch

    part = beside(path)
    try:
        # without the zip archive, which would take a tenth of a warm launch's own time
        torch.save(result, part, pickle_module=by_value, _use_new_zipfile_serialization=False)
    except Exception as error:
        discard(part)
        if isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error):  # torch's lacks an errno
            raise OSError(f"what the function returned cannot be kept: {error}") from None
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be sent back ({error}); "
            f"return numbers, strings, tensors, arrays, or lists and dicts of them"
        ) from None
    part.replace(path)
