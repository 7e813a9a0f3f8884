"""Ask the ranks of a run what they are doing, and find those in which no thread runs.

A rank that is asked records where it is (`rank.standstill`). If no thread of a rank can run, a signal asks it
for its Python stack (`stack_dumps`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from ..record.layout import ASKED, AT_WORK, ENDING
from ..report.facts import ExitCodes, Failures, Report
from ..report.failed import first_failure
from ..report.waiting import explains, report_of
from ..run.run import Run
from ..tracebacks.stack_dumps import answer, request, size_of

ASK_SECONDS = 0.8  # how long the ranks get to say where they are; their threads look ten times a second
ASK_SECONDS_FAR = 3.0  # on a shared disk new files show up later, and ranks of a busy machine are late
LATE_SECONDS = 2.0  # a rank that has written something this recently is late, not silent
STACK_SECONDS = 1.0  # how long the ranks get to write their stacks; it takes milliseconds
TELL_SECONDS = 2.0  # how long an ending rank gets to say how it ended; with a free core it does so at once
SILENT_SECONDS = 5.0  # a rank's recorder writes ten times a second, unless no thread of the rank can run
BUSY_PERCENT = 90.0  # of the machine's CPU time; below it, a thread that could run does run


def report_on(run: Run, exit_codes: ExitCodes, failures: Failures, timeout: float | None = None) -> Report:
    """Ask live ranks what they are doing, and report on the end of a run: after failures, or at a timeout."""
    explained = explains(first_failure(failures) if failures else None)
    living = [rank for rank in range(run.world_size) if exit_codes.get(rank) is None]
    unanswered = [] if explained and run.is_job else _ask_for_records(run, living, patient=not explained)
    silent = {} if explained else silent_ranks(run, unanswered)
    _ask_stacks(run, unanswered)
    until = time.monotonic() + TELL_SECONDS
    while any(_is_about_to_report(run.snapshot(), rank) for rank in living) and time.monotonic() < until:
        time.sleep(0.02)
    return report_of(run.snapshot(), exit_codes, failures, silent, timeout)


def silent_ranks(run: Run, ranks: Iterable[int]) -> dict[int, float]:
    """Return those of the ranks at work in which no thread seems to run, and for how many seconds.

    Their main thread is in C code that does not release Python's interpreter lock, or they are stopped.
    """
    silent, now = dict[int, float](), run.snapshot()
    for rank in () if run.is_job else ranks:
        trace = now.trace(rank)
        if trace.facts.get("phase") == AT_WORK and trace.unheard_seconds >= SILENT_SECONDS:
            with contextlib.suppress(OSError):  # it has ended
                if not trace.has_returned and _waits_for_no_cpu(trace.facts["pid"]):
                    silent[rank] = trace.unheard_seconds
    return silent


def _ask_for_records(run: Run, ranks: list[int], patient: bool) -> list[int]:
    """Ask ranks to record where they are, and return those that do not: none of their threads runs.

    If ``patient``, give more time to ranks that are only late, on a busy machine.
    """
    asked, began = [rank for rank in ranks if run.lives(rank)], time.monotonic()
    silent = asked
    with contextlib.suppress(OSError):  # the folder may have been removed
        (run.folder / ASKED).touch()
        while silent:
            waited, now = time.monotonic() - began, run.snapshot()
            late = patient and any(now.trace(rank).unheard_seconds < LATE_SECONDS for rank in silent)
            if waited > (ASK_SECONDS_FAR if run.is_job or late else ASK_SECONDS):
                break
            time.sleep(0.01)
            # a complete answer ends with the stacks of the rank's forked processes
            answered = [rank for rank in silent if "forked" in run.trace(rank).standstill]
            silent = [rank for rank in silent if run.lives(rank) and rank not in answered]
    return [rank for rank in asked if not run.trace(rank).standstill.get("asked")]


def _ask_stacks(run: Run, ranks: Iterable[int]) -> None:
    """Ask ranks on this machine for their stacks by a signal, and wait until they have written them."""
    asked: dict[Path, int] = {}
    for trace in () if run.is_job else map(run.trace, ranks):  # a job's pids are those of other machines
        number, size = trace.facts.get("stack_signal"), size_of(trace.files.stack)
        if number and request(trace.facts["pid"], number):
            asked[trace.files.stack] = size
    until = time.monotonic() + STACK_SECONDS
    for path, size in asked.items():
        answer(path, size, until)


def _is_about_to_report(now: Run, rank: int) -> bool:
    """Return whether a rank is ending and has not yet recorded how."""
    trace = now.trace(rank)
    has_reported = trace.has_returned or trace.has_failed
    return trace.facts.get("phase") == ENDING and now.lives(rank) and not has_reported


def _waits_for_no_cpu(pid: int) -> bool:
    """Return whether no thread of a process waits for a CPU: the machine is not just busy.

    Only Linux shows what threads do; elsewhere some of the machine's cores must be idle.
    """
    for _ in range(10):
        try:
            # of each thread but the main one, which may compute; R: it runs or could, D: it waits for a disk
            stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
        except OSError:
            return psutil.pid_exists(pid) and psutil.cpu_percent(0.1) < BUSY_PERCENT
        states = {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}
        if states and not states & set("RDZX"):
            return True
        time.sleep(0.01)
    return False
