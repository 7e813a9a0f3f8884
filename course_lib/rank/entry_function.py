"""Entry point of a rank of `launch`: set up, run the learner's function, save the outcome.

A rank does not outlive the kernel that started it. It records its failure before it ends: what the other
ranks then report, a closed connection, comes later and is recognised as a consequence.
"""

from __future__ import annotations

import errno
import functools
import linecache
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import by_value
from ..files import whole_file
from ..kill import end_with, end_with_parent
from ..private_names import WITHOUT_ZIP, adapt_torch, leave_fork_server
from ..run_folder import AT_WORK, ENDING, EVERYONE, NO_GRADIENT_SYNC, TRIAL, RankFiles
from .failure import report_exception, watch_children
from .last_words import LastWords
from .recorder import attach, note, send_output_to, tell_collectives
from .standstill import ONE_WAY, flight
from .trial import never_synchronize

JOIN_SECONDS = 2.0  # how long the other ranks may take to connect


@dataclass
class Assignment:
    """What a rank needs to know: the same for all ranks, sent once to each."""

    folder: Path  # the run's folder
    kernel_pid: int  # the process that called launch()
    call: bytes  # (function, args, kwargs), pickled by value
    environment: dict[str, str]
    threads: int  # CPU threads of each rank
    cells: dict[str, Any] = field(default_factory=dict)  # linecache's entries for the notebook's cells


def main(rank: int, assignment: Assignment) -> None:
    """Be one rank of a launch, in a fresh process."""
    os.setsid()  # interrupts of the kernel do not reach us, and our DataLoader workers end with us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocks it
    _take_environment(assignment.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    # the fork server ends with the kernel
    if not (leave_fork_server() and end_with_parent()):
        end_with(assignment.kernel_pid)
    # take the platform's start method, as a plain program does, instead of the fork server's
    multiprocessing.set_start_method(None, force=True)
    files = RankFiles(assignment.folder, rank)
    send_output_to(files.log)
    last_words = LastWords(functools.partial(_report, assignment.folder, rank))
    try:
        attach(rank)
        watch_children()
        result = _run(assignment)
        note(phase=ENDING)
        _save_result(result, files.result)
        _let_the_others_join(assignment.folder)
    except BaseException as error:
        last_words.error = error
        try:
            last_words.say()
        finally:
            last_words.say_here()
    if recorder := attach():
        recorder.close()


def _report(folder: Path, rank: int, error: BaseException) -> int:
    note(phase=ENDING)
    tell_collectives()  # torchrun ends all ranks once one has failed
    report_exception(folder, rank, error)
    if recorder := attach():
        recorder.close()
    return 1


def _take_environment(environment: dict[str, str]) -> None:
    """Take over the kernel's current environment; the fork server's, as of its start, is almost the same."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _run(assignment: Assignment) -> Any:
    import torch

    linecache.cache.update(assignment.cells)
    torch.set_num_threads(assignment.threads)
    own_autograd()
    adapt_torch()
    # All forks, also those of the next launch, start with the same RNG state. Draw a seed for each, as in a
    # fresh process and as Python's own `random` does after a fork. A GPU's generator draws its own.
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if assignment.environment.get(TRIAL) == NO_GRADIENT_SYNC:
        never_synchronize(was_made=lambda: note(ddp=True))
    by_value.serve_multiprocessing()
    function, args, kwargs = by_value.loads(assignment.call)
    note(phase=AT_WORK)
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


def try_out() -> None:
    """Do some of a rank's work: where forks of a process that has loaded PyTorch crash, this one does."""
    import torch

    own_autograd()
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))


def _let_the_others_join(folder: Path) -> None:
    """Stay connected for a moment if this rank has joined the group but may not have met all other ranks.

    Its own connections are made by then, but gloo's other ranks may still connect: they fail if it leaves.
    """
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_initialized():
        return
    if any(call["group"] == EVERYONE and call["name"] not in ONE_WAY for call in flight()["recent"][-1:]):
        return
    until = time.monotonic() + JOIN_SECONDS
    waiting = list(range(int(os.environ["WORLD_SIZE"])))
    while waiting and time.monotonic() < until:
        time.sleep(0.005)
        waiting = [rank for rank in waiting if not _has_ended(RankFiles(folder, rank))]


def _has_ended(files: RankFiles) -> bool:
    return files.result.exists() or files.failure.exists()


def _save_result(result: Any, path: Path) -> None:
    import torch

    try:
        with whole_file(path) as file:
            torch.save(result, file, pickle_module=by_value, **WITHOUT_ZIP)
    except Exception as error:
        if isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error):  # torch's lacks an errno
            raise OSError(f"what the function returned cannot be kept: {error}") from None
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be sent back ({error}); "
            f"return numbers, strings, tensors, arrays, or lists and dicts of them"
        ) from None
