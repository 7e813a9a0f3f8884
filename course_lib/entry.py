"""How a started process begins and ends, around the learner's own code.

`main` is what each rank of a `launch` runs; ``python -m course_lib.entry script.py`` is the frame around a
program that `python` starts. Both see to it that nothing outlives the kernel that started them, and that
a failure is told (in ``rank-N.failure.json``) before the process ends: what the other ranks meet then, a
closed connection, comes later and is known for a consequence.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import psutil

from .recorder import answer_stack_requests, attach, send_output_to

PR_SET_PDEATHSIG = 1
CONTEXT_LINES = 2  # source lines shown above and below the failing one
NOT_THE_LEARNERS = tuple(
    {
        str(Path(__file__).parent) + os.sep,
        "<frozen ",
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


@dataclass
class Job:
    """What a rank needs to know: sent once to each, the same for all."""

    folder: Path  # the run's
    kernel_pid: int  # the process that called launch()
    call: bytes  # (function, args, kwargs), by cloudpickle
    environment: dict[str, str]
    threads: int  # CPU threads of each rank
    cells: dict[str, Any] = field(default_factory=dict)  # linecache's entries of the notebook's cells


def main(rank: int, job: Job) -> None:
    """Run the job as one rank of a launch, in a fresh process."""
    if hasattr(os, "setsid"):
        os.setsid()  # an interrupt meant for the kernel is not for us; our DataLoader workers end with us
    os.environ.clear()
    os.environ.update(job.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    _part_from_forkserver()
    end_with(job.kernel_pid)
    # a process of a fork server would start its own by one: the platform's way, as in a plain program
    multiprocessing.set_start_method(None, force=True)
    send_output_to(job.folder / f"rank-{rank}.log")
    failed = True
    try:
        answer_stack_requests(job.folder / f"rank-{rank}.stack")
        attach(rank)
        _save_result(_run(job), job.folder / f"rank-{rank}.result")
        failed = False
    except BaseException as error:
        _report(job.folder, rank, error)
    if recorder := attach():
        recorder.close()
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # told already; an orderly exit may hang or abort in a backend that lost its peers


def _run(job: Job) -> Any:
    import torch

    linecache.cache.update(job.cells)
    torch.set_num_threads(job.threads)
    if "numpy" in sys.modules:  # forked processes share NumPy's random state; fresh ones would not
        sys.modules["numpy"].random.seed()
    function, args, kwargs = pickle.loads(job.call)
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        raise


def end_with(kernel_pid: int) -> None:
    """End this process and its children, hard, as soon as the kernel is gone, however it went."""

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(kernel_pid).wait()
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="course-end-with-kernel", daemon=True).start()


def _part_from_forkserver() -> None:
    """Die with the fork server, and let it die: each rank inherits the pipe that keeps it running.

    The thread of `end_with` needs the interpreter; this works also in a rank that sits in C code.
    """
    server = getattr(multiprocessing, "forkserver", None)
    server = getattr(server, "_forkserver", None)
    fd = getattr(server, "_forkserver_alive_fd", None)
    if fd is None:
        return
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    os.close(fd)
    # a rank whose DataLoader wants a fork server gets one of its own
    server._forkserver_alive_fd = server._forkserver_address = None


def _save_result(result: Any, path: Path) -> None:
    import torch

    part = path.with_suffix(".part")
    try:
        torch.save(result, part, pickle_module=cloudpickle)
    except OSError:
        raise
    except Exception as error:
        part.unlink(missing_ok=True)
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be sent back ({error}); "
            f"return numbers, strings, tensors, arrays, or lists and dicts of them"
        ) from None
    part.replace(path)


def _report(folder: Path, rank: int | str, error: BaseException) -> None:
    """Write down what failed: read by `report.failure_of`."""
    kind = type(error)
    try:
        message = str(error)
    except Exception:  # an exception whose own __str__ fails
        message = "(its message cannot be shown)"
    name = (
        kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
    )
    text = "".join(traceback.format_exception(error))
    write_failure(folder, rank, name, message, _frames(error.__traceback__), text)


def write_failure(
    folder: Path, rank: int | str, kind: str, message: str, frames: list[dict[str, Any]], text: str
) -> None:
    path = folder / f"rank-{rank}.failure.json"
    record = {"time": time.time(), "type": kind, "message": message, "frames": frames, "text": text}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.replace(path)


def _frames(tb: TracebackType | None) -> list[dict[str, Any]]:
    """The learner's own frames, outermost first; the innermost of all where none is the learner's."""
    places = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(tb)]
    own = [place for place in places if is_learners(place[0])]
    last = [place for place in places[-1:] if Path(place[0]).parent != Path(__file__).parent]
    return [with_source(*place) for place in own or last]


def is_learners(filename: str) -> bool:
    return not filename.startswith(NOT_THE_LEARNERS)


def with_source(filename: str, line: int, function: str) -> dict[str, Any]:
    """A frame with the source lines around it, so that it can be read where the source is not at hand."""
    lines = linecache.getlines(filename)
    first = max(1, line - CONTEXT_LINES)
    shown = lines[first - 1 : line + CONTEXT_LINES]
    return {
        "file": filename,
        "line": line,
        "function": function,
        "source": [[first + i, text.rstrip("\n")] for i, text in enumerate(shown)],
    }


# --- a program that starts its own ranks ------------------------------------------------------------------

FRAME_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def program(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script arguments…`` would, and tell which of its ranks failed."""
    folder = Path(os.environ["COURSE_RUN"])
    end_with(int(os.environ["COURSE_KERNEL"]))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        rank = getattr(error, "error_index", None)  # torch.multiprocessing's two exceptions carry it
        if rank is None:
            _report(folder, "program", error)
        else:
            _report_spawned(folder, rank, error)
        sys.exit(1)


def _report_spawned(folder: Path, rank: int, error: BaseException) -> None:
    """A rank of mp.spawn failed: its traceback reaches us as text."""
    text = str(error)
    signal_name = getattr(error, "signal_name", None)
    if signal_name or hasattr(error, "exit_code"):
        how = f"was ended by {signal_name}" if signal_name else f"ended with exit code {error.exit_code}"
        write_failure(folder, rank, "", how, [], text)
    else:
        last = [line for line in text.splitlines() if line and not line.startswith(" ")][-1]
        kind, _, message = last.partition(": ")
        frames = [(m["file"], int(m["line"]), m["function"]) for m in FRAME_LINE.finditer(text)]
        own = [frame for frame in frames if is_learners(frame[0])]
        write_failure(folder, rank, kind, message, [with_source(*f) for f in own or frames[-1:]], text)


if __name__ == "__main__":
    program(sys.argv[1], sys.argv[2:])
