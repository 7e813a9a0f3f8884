"""Read from a run's folder which ranks failed and how; the exceptions that say so."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..learner_code import is_learners
from ..record.layout import PROGRAM
from .cause_words import ranks_text
from .facts import ExitCodes, Failure, Failures, Related, Report
from .stacks import crash_position
from .words import MESSAGE_LINES, error_text

if TYPE_CHECKING:
    from ..record.trace import Trace
    from ..run.run import Run

# What gloo, NCCL and the store say in errors that a rank meets when another one is gone; a connection of the
# program's own, as to a worker, may be reset, too
GONE = r"(connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|error|closed))"
LOST_PEER = re.compile(
    rf"\bgloo/.*{GONE}|{GONE}.*\bremote worker|^torch\.distributed\.\w+: .*{GONE}|recvvalue failed|"
    r"remote process exited|sendbytes failed|failed to recv",
    re.IGNORECASE | re.DOTALL,
)
CRASHES = {"SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL"}  # `faulthandler` writes the stacks on these
TIMED_OUT = re.compile(r"timed out waiting|wait timeout|failed to pass monitoredbarrier", re.IGNORECASE)
NAMED = re.compile(r"\branks?[ :=#]{0,2}(?:dict_keys)?[(\[{]*(\d+(?:, *\d+)*)", re.IGNORECASE)
NO_MEMORY = re.compile(r"MemoryError\b|an(not|'t) allocate memory")


class RankError(RuntimeError):
    """A rank failed. The message says which one, why, at which of your lines, and what the others did.

    Attributes
    ----------
    report : Report
        The same as data: ``cause`` (kind, exception or signal, frames), ``states`` (what each rank was doing)
        and ``mismatch`` (which ranks called what, or have not called it).
    rank : int, str or None
        The rank that failed first; ``"program"`` if a program failed outside its ranks; None if no rank did.
    run : Run
        The run, with what the ranks printed and measured until then.
    """

    def __init__(self, run: Run, report: Report) -> None:
        super().__init__(error_text(run, report))
        self.run, self.report = run, report
        self.rank = report.cause and report.cause.rank

    def _render_traceback_(self) -> list[str]:  # IPython shows this instead of the launcher's frames
        head, _, rest = str(self).partition("\n")
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {head}", *rest.splitlines()]


class RankTimeout(RankError, TimeoutError):
    """The ranks were not done at the timeout. The message says where each one was."""


class Stopped(KeyboardInterrupt):
    """You stopped the run by the Stop button, the kernel's interrupt or Ctrl-C; ``run`` has what was kept."""

    def __init__(self, run: Run, seconds: float = 0, killed: Sequence[int] = ()) -> None:
        text = f"stopped after {run.duration()}; no rank is left, and Run.open() has what was measured"
        if seconds and killed:
            text += f"; killed, as still running {seconds:g} s after the interrupt: {ranks_text(killed)}"
        super().__init__(text)
        self.run = run

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[33mStopped\x1b[0m: {self}"]


def first_failure(failures: Failures) -> Failure:
    """Return the first failure: a rank's before the program's, a cause before its report or consequence."""

    def order(failure: Failure) -> tuple[bool, bool, bool, float]:
        blamed = [failures[rank] for rank in failure.blames if rank in failures]
        reports = any(each.message == failure.message or not each.consequence for each in blamed)
        return failure.rank == PROGRAM, reports, failure.consequence, failure.time

    return min(failures.values(), key=order)


def failures_of(run: Run, exit_codes: ExitCodes, known: Failures) -> Failures:
    """Return the failures of those that have ended, by rank; a known exception is not read again."""
    # exit code 0 is enough for a program; a rank must have left its result as well
    ended = {rank: code for rank, code in exit_codes.items() if code or (code == 0 and rank != PROGRAM)}
    raised = {rank: failure for rank, failure in known.items() if failure.kind == "raised"}
    failures = {rank: raised.get(rank) or failure_of(run, rank, code) for rank, code in ended.items()}
    return {rank: failure for rank, failure in failures.items() if failure}


def failure_of(run: Run, rank: int | str, exit_code: int | None) -> Failure | None:
    """Return how a rank failed; None if it is running or has finished well."""
    trace, seen = run.trace(rank), time.time()
    if trace.has_result:
        return None
    asked_to_end = False
    if record := trace.failure:
        if record["type"] or record["message"]:
            return _recorded(run, trace, record)
        exit_code, seen = record["exit_code"], record["time"]
        asked_to_end = trace.was_asked_to_end(record.get("process", ""), seen)
    if exit_code is None:
        return None
    name = _signal_of(exit_code)
    unrecorded = "" if name else run.unrecorded
    position, crashed_in = crash_position(trace) if name in CRASHES else (None, "")
    # a library that gives up prints why, and so do argparse and sys.exit("…") in a program
    prints = name == "SIGABRT" or (rank == PROGRAM and not name and not unrecorded)
    return Failure(
        rank,
        "signal" if name else "exit code",
        seen,
        signal=name,
        crashed_in=crashed_in,
        exit_code=exit_code,
        frames=[position.frame] if position else [],
        last_lines=trace.last_lines(MESSAGE_LINES) if prints else [],
        unrecorded=unrecorded,
        asked_to_end=asked_to_end,
        short_of_memory=name == "SIGKILL" and run.short_of_memory,
    )


def failure_before(run: Run) -> Failure | None:
    """Return what ended the attempt after which torchrun has last restarted the ranks, if it has."""
    failures = dict[int | str, Failure]()
    for rank, trace in enumerate(run.traces() if run.restarts else ()):
        if record := trace.failure_of_attempt(run.restarts - 1):
            failures[rank] = _recorded(run, trace, record)
    return first_failure(failures) if failures else None


def _recorded(run: Run, trace: Trace, record: dict[str, Any]) -> Failure:
    rank = trace.files.rank
    if not record["type"]:
        return Failure(rank, "noted by the launcher", record["time"], message=record["message"])
    kind, frames = record["type"], record["frames"]
    related = [Related(**each) for each in record.get("related", [])]
    texts = [f"{kind}: {record['message']}", *(each.text for each in related)]
    places = [frames, *(each.frames for each in related)]
    lost = [at for at, text in zip(places, texts, strict=True) if LOST_PEER.search(text)]
    where = [at[-1] for at in (frames, *lost) if at]
    workers = [(pid, _signal_of(code)) for pid, code in record.get("workers", [])]
    named = {int(rank) for text in texts for ranks in NAMED.findall(text) for rank in ranks.split(",")}
    killed = any(name == "SIGKILL" for _, name in workers)
    # argparse raises it, too, and prints what was wrong
    prints = kind == "SystemExit" and record["message"].strip().isdigit()
    return Failure(
        rank,
        "raised",
        record["time"],
        exception=kind,
        message=record["message"],
        related=related,
        frames=frames,
        last_lines=trace.last_lines(MESSAGE_LINES) if prints else [],
        workers=workers,
        memory=record.get("memory"),
        asked_to_end=trace.was_asked_to_end(record.get("process", ""), record["time"]),
        blames=[] if rank in named else sorted(named),
        lost_peer=bool(lost),
        lost_at=next((at for at in reversed(where) if is_learners(at["file"])), (where or [None])[-1]),
        timed_out=any(map(TIMED_OUT.search, texts)),
        short_of_memory=any(map(NO_MEMORY.search, [kind, *texts])) or (killed and run.short_of_memory),
    )


def _signal_of(exit_code: int) -> str:
    """Return the name of the signal that an exit code tells of; empty if it tells of none."""
    return {-number: number.name for number in signal.Signals}.get(exit_code, "")
