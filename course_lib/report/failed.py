"""Describe a failure: which rank failed, where, and what the other ranks were doing then."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..frames import shortened, show
from ..run_folder import PROGRAM, RankFiles
from .stacks import stack_of

if TYPE_CHECKING:
    from ..run.run import Run

MESSAGE_LINES = 12
NO_ROOM = 1 << 16  # bytes of free space; the record of a failure may take as many
# Errors that a rank meets when another one is gone: a consequence of that rank's failure, never the cause.
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|error|closed)|recvvalue failed|"
    r"remote process exited|sendbytes failed|failed to recv",
    re.IGNORECASE,
)
SIGNALS = {
    "SIGKILL": "was killed (SIGKILL); the system does that when memory runs out, a person by kill -9",
    "SIGSEGV": "crashed (SIGSEGV: it touched memory that is not its own)",
    "SIGABRT": "aborted (SIGABRT): a library gave up; its last words are in the log",
    "SIGBUS": "crashed (SIGBUS): often no space left in shared memory (/dev/shm)",
    "SIGTERM": "was asked to end (SIGTERM)",
}
# Advice on errors that give none themselves. NCCL changed its wording in version 2.30.
HINTS = [
    (
        re.compile(r"Duplicate GPU detected|Multiple Ranks are using the same GPU"),
        "NCCL takes one rank for each GPU, and two of these ranks use the same one. Where there is a GPU for "
        "each rank, call torch.cuda.set_device(local_rank) before init_process_group; where ranks share a "
        "GPU, use gloo. place() does the one and names the other.",
    ),
    (
        re.compile(r"Cannot re-initialize CUDA in forked subprocess"),
        "A process that was forked from one that uses CUDA cannot use it. Let a DataLoader's workers return "
        "CPU tensors and move them to the GPU in the training loop, or start processes by the spawn method: "
        'DataLoader(…, multiprocessing_context="spawn"), torch.multiprocessing.spawn.',
    ),
    (
        re.compile(r"CUDA (error: )?out of memory"),
        "The GPU has no memory left for this. Every rank has a model, gradients, optimizer state and "
        "activations of its own there: a smaller batch needs less, and so do fewer ranks on one GPU "
        "(nprocs). Run.open().metrics has what each rank held.",
    ),
    (
        re.compile(r"^(\[Errno \d+\] )?Resource temporarily unavailable$|can't start new thread"),
        "Where a process or a thread was to start: a limit on their number has been reached (a container's, "
        "`ulimit -u`). Take fewer ranks (nprocs) or DataLoader workers, or shut down the kernels of other "
        "notebooks. Where a lock was asked for: somebody else holds it.",
    ),
    (
        re.compile(r"MemoryError\b|an(not|'t) allocate memory"),
        "There is no memory left for this, on the machine or under a limit (a container's, ulimit's). Every "
        "rank has a model, gradients and data of its own: a smaller batch needs less, and so do fewer ranks "
        "(nprocs). Run.open().metrics has what each rank held.",
    ),
]
OUT_OF_MEMORY = (
    "was killed (SIGKILL) because memory ran out, the machine's or that of a container's limit; take fewer "
    "ranks, smaller batches or fewer DataLoader workers"
)


class RankError(RuntimeError):
    """A rank failed. The message says which one, why, at which of your lines, and what the others did.

    Attributes
    ----------
    rank : int, str or None
        The rank that failed first; ``"program"`` if a program failed outside its ranks; None if no rank did.
    run : Run
        The run, with what the ranks printed and measured until then.
    """

    def __init__(self, report: str, rank: int | str | None, run: Run) -> None:
        super().__init__(report)
        self.rank, self.run = rank, run

    def _render_traceback_(self) -> list[str]:  # IPython shows this instead of the launcher's frames
        head, _, rest = str(self).partition("\n")
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {head}", *rest.splitlines()]


class RankTimeout(RankError, TimeoutError):
    """The ranks were not done at the timeout. The message says where each one was."""


class Stopped(KeyboardInterrupt):
    """You stopped the run by the Stop button, the kernel's interrupt or Ctrl-C; ``run`` has what was kept."""

    def __init__(self, run: Run) -> None:
        super().__init__(
            f"stopped after {run.duration()}; no rank is left, and Run.open() has what was measured"
        )
        self.run = run

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[33mStopped\x1b[0m: {self}"]


@dataclass
class Failure:
    """How one rank failed."""

    rank: int | str
    what: str  # "raised ValueError: …", "was killed (SIGKILL) …"
    seen: float  # time.time() when it happened, or was noticed
    frames: list[dict[str, Any]] = field(default_factory=list)
    consequence: bool = False
    hint: str = ""  # what to do about it, where that is known


def failure_of(run: Run, rank: int | str, exit_code: int | None) -> Failure | None:
    """Return how a rank failed; None if it is running or has finished well."""
    files = RankFiles(run.folder, rank)
    if files.result.exists():
        return None
    seen = time.time()
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(files.failure.read_text())
        if record["type"]:
            return _raised(run, rank, record)
        if record["message"]:  # the launcher's own words
            return Failure(rank, record["message"], record["time"])
        exit_code, seen = record["exit_code"], record["time"]
    if exit_code is None:
        return None
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
            frames = stack_of(run, rank)[:1]
            what = SIGNALS.get(name, f"was ended by {name}")
            if name == "SIGKILL" and run.short_of_memory:
                what = OUT_OF_MEMORY
            return Failure(rank, what, seen, frames)
    if rank == PROGRAM:  # argparse, sys.exit("words"): its last lines say why
        what = f"ended with exit code {exit_code}" + (_unheard(run) or _said(run, rank))
    else:
        why = _unheard(run) or " and without an exception (os._exit?)"
        what = f"ended with exit code {exit_code}{why}"
    return Failure(rank, what, seen)


def _raised(run: Run, rank: int | str, record: dict[str, Any]) -> Failure:
    lines = [shortened(line) for line in record["message"].strip().splitlines()] or [""]
    if len(lines) > MESSAGE_LINES:  # a DataLoader worker's own error is at the end
        half = MESSAGE_LINES // 2
        path = RankFiles(run.folder, rank).failure
        lines[half:-half] = [f"[{len(lines) - MESSAGE_LINES} more lines in {path}]"]
    message = "\n".join(lines)
    if record["type"] == "SystemExit":  # argparse raises it, too, and prints what was wrong
        what = f"ended itself by sys.exit({message})" + (_said(run, rank) if message.isdigit() else "")
    else:
        what = f"raised {record['type']}: {message}".rstrip(": ")
    causes = record["causes"]
    what += "".join(f"\nfrom {shortened(cause.partition(chr(10))[0])}" for cause in causes)
    texts = [record["message"], *causes]
    consequence = any(LOST_PEER.search(text) for text in texts)
    hint = next((hint for words, hint in HINTS if any(map(words.search, [record["type"], *texts]))), "")
    return Failure(rank, what, record["time"], record["frames"], consequence, hint)


def _unheard(run: Run) -> str:
    """Say why a rank's last words may be lost; empty if there is no sign that they are."""
    try:
        free_bytes = shutil.disk_usage(run.folder).free
    except OSError:
        return f"; the run's folder was removed, and with it what was kept: {run.folder}"
    if free_bytes < NO_ROOM:
        return f"; its last words are lost, for the disk is full on which the run is kept: {run.folder}"
    return ""


def _said(run: Run, rank: int | str) -> str:
    lines = [shortened(line) for line in run.trace(rank).last_lines(MESSAGE_LINES)]
    return "\n".join([" and said", *lines]) if lines else ""


def cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the earliest failure, preferring any that is more than the loss of a peer."""
    return min(failures, key=lambda each: (each.consequence, each.seen), default=None)


def describe(run: Run, failure: Failure, others: dict[int, str], why: str = "") -> str:
    """Return the whole report; ``why`` goes first: whom the ranks waited for, if that led to the failure."""
    parts = [*filter(None, [why]), f"{run.who(failure.rank)} {failure.what}"]
    parts += [show(frame) for frame in failure.frames]
    parts += [f"{run.who(rank)} {doing}" for rank, doing in others.items() if rank != failure.rank]
    text = "\n".join([parts[0], "", *parts[1:]]).rstrip()
    return f"{text}\n\n{failure.hint}" if failure.hint else text
