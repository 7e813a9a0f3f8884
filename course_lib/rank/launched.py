"""How a rank of a `launch` begins and ends, around the learner's own function.

Nothing of it outlives the kernel that started it, and its failure is told before it ends: what the other
ranks meet then, a closed connection, comes later and is known for a consequence.
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
JOIN_SECONDS = 2.0  # how long the connecting of the others may take


@dataclass
class Job:
    """What a rank needs to know: sent once to each, the same for all."""

    folder: Path  # the run's
    kernel_pid: int  # the process that called launch()
    call: bytes  # (function, args, kwargs), by value
    environment: dict[str, str]
    threads: int  # CPU threads of each rank
    cells: dict[str, Any] = field(default_factory=dict)  # linecache's entries of the notebook's cells


def main(rank: int, job: Job) -> None:
    """Run the job as one rank of a launch, in a fresh process."""
    if hasattr(os, "setsid"):
        os.setsid()  # an interrupt meant for the kernel is not for us; our DataLoader workers end with us
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server lets none through
    _take_environment(job.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    if not _part_from_forkserver():
        end_with(job.kernel_pid)
    # a process of a fork server would start its own by one: the platform's way, as in a plain program
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
    """The kernel's present one; the fork server has that of its own start, which is almost the same."""
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
    # Forked processes share their random state, and so would the next launch; fresh ones draw a seed each, as
    # Python's own `random` does after a fork.
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
    """For a forked process, before its first thread.

    The first one there that uses autograd makes a new engine in the place of the old one, and two at once end
    the process: torch has no lock there (`get_python_engine`, torch 2.15).
    """
    import torch

    torch.zeros(1, requires_grad=True).exp()  # which keeps its result for a backward


def end_with(kernel_pid: int) -> None:
    """End this process and its children, hard, as soon as the kernel is gone, however it went."""

    def watch() -> None:
        _wait_for_end_of(kernel_pid)
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="course-end-with-kernel", daemon=True).start()


def _wait_for_end_of(pid: int) -> None:
    """Until a process has ended, also where its parent has not asked for its exit code yet."""
    try:
        with open(os.pidfd_open(pid), "rb") as end:
            select.select([end], [], [])
        return
    except (AttributeError, OSError):  # no Linux, or gone
        pass
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.2)


def _part_from_forkserver() -> bool:
    """Die with the fork server, and let it die: each rank inherits the pipe that keeps it running.

    The server ends with the kernel, so this does what `end_with` does, in less time and also in a rank that
    sits in C code; False where there is no such server, or no such signal.
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
    # a rank whose DataLoader wants a fork server gets one of its own
    server._forkserver_alive_fd = server._forkserver_address = None
    return sys.platform == "linux"


def _let_the_others_join(job: Job) -> None:
    """Stay for a moment, connected, where this rank has joined the group and may not have met them all.

    Its own connections stand then, but gloo's ranks may be at work on theirs still: who leaves fails them.
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
        # without the zip archive around it: a tenth of a warm launch's own time
        torch.save(result, part, pickle_module=by_value, _use_new_zipfile_serialization=False)
    except Exception as error:
        discard(part)
        if isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error):  # torch's has no errno
            raise OSError(f"what the function returned cannot be kept: {error}") from None
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be sent back ({error}); "
            f"return numbers, strings, tensors, arrays, or lists and dicts of them"
        ) from None
    part.replace(path)
