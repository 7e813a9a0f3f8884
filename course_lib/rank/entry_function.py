"""Entry point of a rank of `launch`: set up, run the learner's function, save the outcome.

A rank does not outlive the kernel that started it. It records its failure before it ends. The other ranks
lose their connections later, so the report recognises their failures as consequences.
"""

from __future__ import annotations

import atexit
import errno
import functools
import inspect
import linecache
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import pickling
from ..compat import WITHOUT_ZIP, adapt_torch, leave_fork_server, read_environment
from ..files import whole_file
from ..kill import end_with, end_with_parent
from ..record.layout import AT_WORK, ENDING, NO_GRADIENT_SYNC, TRIAL, RankFiles
from .failure import watch_children
from .failure_reporter import FailureReporter
from .recorder import attach, note, report_failure, send_output_to
from .trial import never_synchronize

RETURN = "return numbers, strings, tensors, arrays, or lists and dicts of them, as a model's state_dict() is"


@dataclass
class Assignment:
    """What a rank needs to know; the same for all ranks."""

    folder: Path  # the run's folder
    kernel_pid: int  # the process that called launch()
    call: bytes  # (function, args, kwargs), pickled by value
    shared: list[Any]  # parts of the call that the processes share
    environment: dict[str, str]
    cells: dict[str, Any] = field(default_factory=dict)  # linecache's entries for the notebook's cells


def main(rank: int, assignment: Assignment) -> None:
    """Run one rank of a launch, in a fresh process."""
    os.setsid()  # interrupts of the kernel do not reach us, and our DataLoader workers end with us
    changed = _take_environment(assignment.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    # the fork server ends with the kernel
    if not (leave_fork_server() and end_with_parent()):
        end_with(assignment.kernel_pid)
    # take the platform's start method, as a plain program does, instead of the fork server's
    multiprocessing.set_start_method(None, force=True)
    files = RankFiles(assignment.folder, rank)
    send_output_to(files.log)
    failure_reporter = FailureReporter(functools.partial(report_failure, assignment.folder, rank))
    pid = os.getpid()
    atexit._clear()  # drops what the fork server's libraries registered
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocks it
        attach(rank)
        watch_children()
        result = _run(assignment, changed)
        if os.getpid() != pid:
            sys.exit(0)  # the function has forked this process and returned here as well
        note(phase=ENDING, result=type(result).__name__)
        _save_result(result, files.result)
        atexit._run_exitfuncs()
    except BaseException as error:
        failure_reporter.error = error
        try:
            failure_reporter.report()
        finally:
            failure_reporter.report_here()
    if recorder := attach():
        recorder.close()


def _take_environment(environment: dict[str, str]) -> set[str]:
    """Take over the kernel's present environment; return the names of the variables that change."""
    changed = {name for name, _ in os.environ.items() ^ environment.items()}
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    return changed


def _run(assignment: Assignment, changed: set[str]) -> Any:
    import torch

    linecache.cache.update(assignment.cells)
    read_environment(changed)
    if (threads := os.environ["OMP_NUM_THREADS"].partition(",")[0].lstrip(" 0")).isdecimal():
        torch.set_num_threads(int(threads))
    own_autograd()
    adapt_torch()
    # All forks, also those of the next launch, start with the same RNG state. Draw a seed for each, as in a
    # fresh process and as Python's own `random` does after a fork. A GPU's generator draws its own.
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if assignment.environment.get(TRIAL) == NO_GRADIENT_SYNC:
        never_synchronize(was_made=lambda: note(ddp=True))
    pickling.serve_multiprocessing()
    pickling.GIVEN[:] = assignment.shared
    function, args, kwargs = pickling.loads(assignment.call)
    names = getattr(inspect.unwrap(getattr(function, "func", function)), "__globals__", {})
    if names.get("__name__") == "__main__":  # pickle looks there for what a cell defines
        vars(sys.modules["__main__"]).update({k: v for k, v in names.items() if not k.startswith("__")})
    note(phase=AT_WORK)
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def own_autograd() -> None:
    """Give a forked process its own autograd engine, before it starts a thread.

    The first thread that uses autograd after a fork replaces the engine, and two at once crash the process:
    torch has no lock there (`get_python_engine`, torch 2.15).
    """
    import torch

    torch.zeros(1, requires_grad=True).exp()  # exp saves its result for the backward pass


def try_out() -> None:
    """Do some of a rank's work, to see whether forks of a process that has loaded PyTorch crash here."""
    import torch

    own_autograd()
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))


def _save_result(result: Any, path: Path) -> None:
    import torch

    try:
        with whole_file(path) as file:
            torch.save(result, file, pickle_module=pickling, **WITHOUT_ZIP)
    except Exception as error:
        if isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error):  # torch's lacks an errno
            raise OSError(f"what the function returned cannot be kept: {error}") from None
        found = pickling.culprit("result", result)
        why = f"{found[0]} is {found[1]}" if found else error
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be sent back ({why}); {RETURN}"
        ) from None
