"""Who failed, where, and what the other ranks were doing then."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .failure import is_learners, with_source

if TYPE_CHECKING:
    from .run import Run

STACK_SECONDS = 0.3  # how long the ranks get to write their stacks down
MESSAGE_LINES, LINE_LENGTH = 12, 400
THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+).*\n((?:  .*\n)*)", re.MULTILINE)
STACK_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')
WRAPPERS = {"wrapper", "decorate_context", "_fn", "__call__", "_wrapped_call_impl", "_call_impl"}
# What a rank meets when another one is gone: a consequence of that rank's failure, never the cause.
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
# What to do about errors whose own words do not say it. NCCL's words are others since its version 2.30.
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
]


class RankError(RuntimeError):
    """A rank failed. Its text is the report: rank, cause, the learner's own lines, the other ranks.

    Attributes
    ----------
    rank : int or str
        The rank that failed first; ``"program"`` where a program failed outside its ranks.
    run : Run
        What the ranks printed and measured until then.
    """

    def __init__(self, report: str, rank: int | str | None, run: Run) -> None:
        super().__init__(report)
        self.rank, self.run = rank, run

    def _render_traceback_(self) -> list[str]:  # IPython shows this instead of the launcher's frames
        head, _, rest = str(self).partition("\n")
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {head}", *rest.splitlines()]


class RankTimeout(RankError, TimeoutError):
    """The ranks were not done at the timeout. Its text says where each one was."""


class Stopped(KeyboardInterrupt):
    """The run was stopped by the Stop button, the kernel's interrupt or Ctrl-C; ``run`` has what was kept."""

    def __init__(self, run: Run) -> None:
        super().__init__(
            f"stopped after {run.seconds:.1f} s; no rank is left, and Run.open() has what was measured"
        )
        self.run = run

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[33mStopped\x1b[0m: {self}"]


@dataclass
class Failure:
    """How one rank ended before its time."""

    rank: int | str
    what: str  # "raised ValueError: …", "was killed (SIGKILL) …"
    seen: float  # time.time() when it happened, or was noticed
    frames: list[dict[str, Any]] = field(default_factory=list)
    consequence: bool = False
    hint: str = ""  # what to do about it, where that is known


def failure_of(run: Run, rank: int | str, exit_code: int | None) -> Failure | None:
    """The failure of a rank; None while it works and where it finished."""
    if (run.folder / f"rank-{rank}.result").exists():
        return None
    path = run.folder / f"rank-{rank}.failure.json"
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        lines = record["message"].strip().splitlines() or [""]
        if len(lines) > MESSAGE_LINES:  # what a DataLoader's worker met stands at the end
            half = MESSAGE_LINES // 2
            lines[half:-half] = [f"[{len(lines) - MESSAGE_LINES} more lines in {path}]"]
        message = "\n".join(shortened(line) for line in lines)
        if record["type"] == "SystemExit":
            what = f"ended itself by sys.exit({message})"
        elif record["type"]:
            what = f"raised {record['type']}: {message}".rstrip(": ")
        else:
            what = message
        causes = record.get("causes", [])
        what += "".join(f"\nfrom {shortened(cause.partition(chr(10))[0])}" for cause in causes)
        texts = [record["message"], *causes]
        consequence = any(LOST_PEER.search(text) for text in texts)
        hint = next((hint for words, hint in HINTS if any(map(words.search, texts))), "")
        return Failure(rank, what, record["time"], record["frames"], consequence, hint)
    if exit_code is None:
        return None
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
            frames = stack_of(run, rank)[:1]
            return Failure(rank, SIGNALS.get(name, f"was ended by {name}"), time.time(), frames)
    what = f"ended with exit code {exit_code} and without an exception (os._exit?)"
    if rank == "program":  # argparse, sys.exit("words"): its last lines say why
        said = [shortened(line) for line in run.last_lines(rank, MESSAGE_LINES)]
        what = "\n".join([f"ended with exit code {exit_code}" + (" and said" if said else ""), *said])
    return Failure(rank, what, time.time())


def cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that came first, and rather one that is more than the loss of a peer."""
    return min(failures, key=lambda each: (each.consequence, each.seen), default=None)


def describe(run: Run, failure: Failure, others: dict[int, str]) -> str:
    """The whole report."""
    who = "the program" if failure.rank == "program" else f"rank {failure.rank}"
    parts = [f"{who} {failure.what}"]
    parts += [show(frame) for frame in failure.frames]
    parts += [f"rank {rank} {doing}" for rank, doing in others.items() if rank != failure.rank]
    text = "\n".join([parts[0], "", *parts[1:]]).rstrip()
    return f"{text}\n\n{failure.hint}" if failure.hint else text


def show(frame: dict[str, Any]) -> str:
    """A frame as lines of source with the failing one marked."""
    lines = [f"[{frame['left_out']} more calls]\n"] if frame.get("left_out") else []
    lines.append(f"{label(frame['file'])}, line {frame['line']}, in {frame['function']}")
    for number, text in frame["source"]:
        mark = "---->" if number == frame["line"] else "     "
        lines.append(f"{mark} {number:4} {shortened(text)}".rstrip())
    return "\n".join(lines) + "\n"


def shortened(line: str) -> str:
    return line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + " …"


def label(filename: str) -> str:
    """``Cell In[7]`` for a cell of this kernel, a short path for a file."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        with contextlib.suppress(AttributeError, TypeError):
            return " ".join(shell.compile.format_code_name(filename))
    with contextlib.suppress(ValueError):
        return str(Path(filename).relative_to(Path.cwd()))
    return Path(filename).name


# --- where a rank is ----------------------------------------------------------------------------------------


def ask_stacks(run: Run, ranks: Iterable[int]) -> None:
    """Have living ranks write down their Python stacks (SIGUSR1), and wait a moment for them."""
    if not hasattr(signal, "SIGUSR1"):
        return
    before: dict[Path, int] = {}
    pids: dict[Path, int] = {}
    for rank in ranks:
        path = run.folder / f"rank-{rank}.stack"
        with contextlib.suppress(OSError, KeyError):
            size = path.stat().st_size
            if size:  # it has said that it listens; the signal would end it otherwise
                pids[path] = run.facts(rank)["pid"]
                os.kill(pids[path], signal.SIGUSR1)
                before[path] = size
    seen: dict[Path, int] = {}
    until = time.monotonic() + STACK_SECONDS
    while before and time.monotonic() < until:
        time.sleep(0.01)
        sizes = {path: path.stat().st_size if path.exists() else 0 for path in before}
        before = {path: size for path, size in before.items() if not size < sizes[path] == seen.get(path)}
        before = {path: size for path, size in before.items() if psutil.pid_exists(pids[path])}
        seen = sizes


def stack_of(run: Run, rank: int | str) -> list[dict[str, Any]]:
    """The learner's frames of a rank's main thread when it was last asked, or crashed, innermost first."""
    return [with_source(*place) for place in _stack(run, rank) if is_learners(place[0])]


def _stack(run: Run, rank: int | str) -> list[tuple[str, int, str]]:
    try:
        text = (run.folder / f"rank-{rank}.stack").read_text(errors="replace")
    except OSError:
        return []
    head, _, text = text.partition("\n")
    main_thread = int(head.rpartition("0x")[2] or "0", 16)
    stacks = [match[2] for match in THREAD.finditer(text) if int(match[1], 16) == main_thread]
    if not stacks:
        return []
    stack = [(file, int(line), function) for file, line, function in STACK_LINE.findall(stacks[-1])]
    started_by = ("<string>", 1, "<module>")  # multiprocessing's python -c
    return stack[:-1] if stack[-1:] == [started_by] else stack


def doing(run: Run, rank: int, exit_code: int | None) -> str:
    """What a rank was doing when it was asked, in words that follow "rank N"."""
    if (run.folder / f"rank-{rank}.result").exists():
        return "had returned"
    if failure := failure_of(run, rank, exit_code):
        if failure.consequence and failure.frames:
            return f"then lost its connection ({_where(failure.frames[-1])})"
        return f"then {failure.what.splitlines()[0]}"
    if exit_code is not None:
        return "had ended"
    stack = _stack(run, rank)
    mine = next((i for i, place in enumerate(stack) if is_learners(place[0])), None)
    if mine is None:
        ours = [function for file, _, function in stack if Path(file).parent == Path(__file__).parent]
        if {"report_exception", "_save_result", "close"} & set(ours):
            return "was ending"
        if not stack and not psutil.pid_exists(run.facts(rank).get("pid", os.getpid())):
            return "had ended"  # a program ends its other ranks when one has failed
        if ours[:1] == ["_run"] == [stack[0][2]]:
            return "was at work"
        if not stack or ours:
            return "was starting"
        return f"was in {stack[0][2]}"
    called = next((name for _, _, name in reversed(stack[:mine]) if name not in WRAPPERS), None)
    where = _where(with_source(*stack[mine]))
    return f"was in {called} ({where})" if called else f"was at {where}"


def _where(frame: dict[str, Any]) -> str:
    """Place and source of a frame's line, in one line."""
    source = dict(frame["source"]).get(frame["line"], "").strip()
    return f"{label(frame['file'])}, line {frame['line']}" + (f": {shortened(source)}" if source else "")
