"""Find out what the ranks are doing, during a run and at its end: who waits where, and for whom.

Each rank records where it is and which collectives it has called (`rank.standstill`). If no thread of a rank
can run, a signal asks it for its Python stack (`stacks`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..run_folder import ASKED, AT_WORK, ENDING, STARTING, RankFiles
from .cause_words import PRESENT, cause_text, mismatch_text
from .divergence import divergence
from .facts import Absence, Beside, Call, Circle, ExitCodes, Failure, Failures, RankState, Report, ThreadError
from .failed import failure_before, failure_of, first_failure, record_in
from .mismatch import apart, mismatch_of, other_groups
from .stacks import ask_stacks, asked_stack, beside, has_pending, position_of
from .words import lingering_text, restart_text, warning_text

if TYPE_CHECKING:
    from ..run.run import Run

WARN_SECONDS = 10.0  # without progress for this long, the dashboard says who waits where
ASK_SECONDS = 0.8  # how long the ranks get to say where they are; their threads look ten times a second
ASK_SECONDS_FAR = 3.0  # on other machines a new file on a shared disk shows up later; busy ones are late, too
LATE_SECONDS = 2.0  # a rank that was heard of since then is late, not silent
TELL_SECONDS = 2.0  # how long an ending rank gets to say how it ended; with a free core it does so at once
SILENT_SECONDS = 5.0  # a rank's recorder writes ten times a second, unless something keeps all threads
IDLE_PERCENT = 90.0  # of the machine's CPU time; where it works less, who has a thread to run can run it
BUSY = 0.2  # with a larger share of CPU time in one place, a rank does not wait there


def report_on(run: Run, exit_codes: ExitCodes, failures: Failures, timeout: float | None = None) -> Report:
    """Ask live ranks what they are doing, and report on the end of a run: after failures, or at a timeout."""
    cause = first_failure(failures) if failures else None
    aborted = cause is not None and cause.signal == "SIGABRT"  # perhaps since the calls did not match
    explained = not (cause is None or cause.consequence or cause.timed_out or aborted)
    ranks = range(run.world_size)
    living = [rank for rank in ranks if exit_codes.get(rank) is None]
    unanswered = [] if explained and run.is_job else _ask_for_records(run, living, patient=not explained)
    silent = {} if explained else {rank: silence_of(run, rank) for rank in unanswered}
    ask_stacks(run, unanswered)
    until = time.monotonic() + TELL_SECONDS
    while any(_is_about_to_tell(run, rank) for rank in living) and time.monotonic() < until:
        time.sleep(0.02)
    states = [
        state_of(run, rank, exit_codes.get(rank), failures.get(rank), silent.get(rank), at_end=True)
        for rank in ranks
    ]
    why = None if explained else mismatch_of(states) or apart(run)
    if aborted and isinstance(why, Absence | Circle):
        why = None
    return Report(cause, states, why, timeout, before=failure_before(run), divergence=divergence(run))


def _ask_for_records(run: Run, ranks: list[int], patient: bool) -> list[int]:
    """Ask ranks to record where they are, and return those that do not: none of their threads runs.

    If ``patient``, those that are only late, on a busy machine, get more time.
    """
    asked, began = [rank for rank in ranks if run.lives(rank)], time.monotonic()
    silent = asked
    with contextlib.suppress(OSError):  # the folder may have been removed
        (run.folder / ASKED).touch()
        while silent:
            waited = time.monotonic() - began
            late = patient and any(_unheard_seconds(run, rank) < LATE_SECONDS for rank in silent)
            if waited > (ASK_SECONDS_FAR if run.is_job or late else ASK_SECONDS):
                break
            time.sleep(0.01)
            silent = [rank for rank in silent if "forked" not in record_of(run, rank) and run.lives(rank)]
    return [rank for rank in asked if not record_of(run, rank).get("asked")]


def _is_about_to_tell(run: Run, rank: int) -> bool:
    """Return whether a rank is ending and has not yet recorded how."""
    if run.facts(rank).get("phase") != ENDING or run.trace(rank).has_returned():
        return False
    return run.lives(rank) and not RankFiles(run.folder, rank).failure.exists()


def stalled(run: Run) -> str:
    """Return a warning while ranks are stuck: which, where and for how long; empty while all progress."""
    ranks = range(run.world_size)
    working = [rank for rank in ranks if not run.trace(rank).has_returned()]
    since = {rank: record_of(run, rank).get("since", math.inf) for rank in working}
    silent = {rank: silence_of(run, rank) for rank in working}
    stood = {rank: silent[rank] or run.clock(rank) - since[rank] for rank in working}
    stuck = [rank for rank, seconds in stood.items() if seconds >= WARN_SECONDS]
    states = [state_of(run, rank, silent=silent.get(rank)) for rank in ranks] if stuck or not working else []
    shown = [state for state in states if state.seconds is not None and (state.rank in stuck or not working)]
    return warning_text(run, shown, cause_text(mismatch_of(states), states, PRESENT)) if shown else ""


def doubts(run: Run) -> str:
    """Say why torchrun restarted a run that is done, and why its results may be wrong, as far as known."""
    sentences = [restart_text(run, before)] if (before := failure_before(run)) else []
    with contextlib.suppress(Exception):  # a rank's program may have written anything into its files
        groups = [record_of(run, rank).get("groups", {}) for rank in range(run.world_size)]
        if cause := other_groups(groups) or apart(run):
            sentences.append(f"the run is done, but {mismatch_text(cause)}")
    return "\n".join(sentences)


# --- one rank ---------------------------------------------------------------------------------------------


def state_of(
    run: Run,
    rank: int,
    exit_code: int | None = None,
    failure: Failure | None = None,
    silent: float | None = None,
    at_end: bool = False,
) -> RankState:
    """Return what a rank does, by its record or, ``at_end``, by the stack that a signal has asked for."""
    record, facts, lives = record_of(run, rank), run.facts(rank), run.lives(rank)
    asked, recorded = record.get("asked", False), record.get("stack", [])
    seconds = max(0.0, run.clock(rank) - record["since"]) if "since" in record else None
    stack = asked_stack(run, rank) if at_end and not asked and not run.is_job else recorded
    phase = facts.get("phase", STARTING)
    if run.trace(rank).has_returned():
        phase, seconds = "returned", _lingers(run, rank)
    elif failure := failure or failure_of(run, rank, exit_code):
        phase = "failed"
    elif exit_code is not None or (not stack and facts and not lives):
        phase = "ended"  # a program ends its other ranks when one has failed
    if asked or not stack:  # on a busy machine it may have had no time to write its stack
        stack = recorded or stack
    position = position_of(stack, has_pending(record))
    errors = [
        ThreadError(each["thread"], each["type"], each["message"], each["frames"])
        for each in [*record.get("handles", []), *facts.get("thread_errors", [])]
    ]
    seconds = silent or seconds
    state = RankState(rank, phase, stack, position, seconds, failure, silent=silent, thread_errors=errors)
    state = replace(state, beside=_relevant(beside(record), state))
    function = position.function if position else None
    if lives and not asked and (run.folder / ASKED).exists():
        # it could not answer, and what it wrote before may be out of date
        return state if stack is recorded else replace(state, function=function)
    recent, pending = ([Call(**call) for call in record.get(which, [])] for which in ("recent", "pending"))
    if failure and (failure.consequence or failure.timed_out):
        pending = pending or recent[-1:]  # its last call has ended with the failure
    waits_in = _waits_in(pending, record.get("meets")) if phase != "returned" else None
    idle = phase == AT_WORK and seconds and not run.trace(rank).cpu_share(seconds) > BUSY
    own_call, joins = record.get("call", "") if idle else "", record.get("joins", {})
    called, groups = record.get("called"), record.get("groups", {})
    if own_call and (lock := record.get("lock_file", "")):
        state = replace(state, lock_file=lock, lock_holder=_holder_of(run, lock))
    state = replace(state, function=function, called=called, groups=groups, own_call=own_call, joins=joins)
    return replace(state, waits_in=waits_in, recent=recent)


def _holder_of(run: Run, path: str) -> int | str | None:
    """Return the rank that has locked a file, or name the process; None if there is none here (Linux)."""
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        inode = f":{os.stat(path).st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        pid = next(int(lock[4]) for lock in locks if lock[5].endswith(inode))
        ranks = (rank for rank in range(run.world_size) if run.facts(rank).get("pid") == pid)
        return next(ranks, f"process {pid}")
    return None


def _waits_in(pending: list[Call], meets: dict[str, Any] | None) -> Call | None:
    """Return the call in which a rank waits: prefer the main thread's to an older one that is pending."""
    if meets is None:
        return pending[0] if pending else None
    same = [call for call in pending if call.name == meets["name"]]
    return same[-1]._replace(root=meets["root"]) if same and "root" in meets else Call(**meets)


def silence_of(run: Run, rank: int) -> float | None:
    """Return for how long none of the threads of a rank at work has run; None if they do, as far as known.

    Its main thread is in C code that does not release Python's interpreter lock, or its process is stopped.
    """
    if run.is_job or run.facts(rank).get("phase") != AT_WORK or run.trace(rank).has_returned():
        return None
    seconds = _unheard_seconds(run, rank)
    with contextlib.suppress(OSError):
        if seconds >= SILENT_SECONDS and _waits_for_no_cpu(run.facts(rank)["pid"]):
            return seconds
    return None


def _unheard_seconds(run: Run, rank: int) -> float:
    """Return for how long a rank's recorder has written nothing."""
    files = RankFiles(run.folder, rank)
    wrote = []
    for path in (files.ticks, files.facts):
        with contextlib.suppress(OSError):  # before a rank's first tick there are only its facts
            wrote.append(path.stat().st_mtime)
    return time.time() - max(wrote) if wrote else 0.0


def _waits_for_no_cpu(pid: int) -> bool:
    """Return whether no thread of a process waits for a CPU: the machine is not just busy.

    Only Linux tells of threads; elsewhere some of the machine's cores must be idle.
    """
    for _ in range(10):
        try:
            # of each thread but the main one, which may compute: R for running or runnable, D for a disk
            stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
        except OSError:
            return psutil.pid_exists(pid) and psutil.cpu_percent(0.1) < IDLE_PERCENT
        states = {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}
        if states and not states & set("RDZX"):
            return True
        time.sleep(0.01)
    return False


def _relevant(besides: list[Beside], state: RankState) -> list[Beside]:
    """Return what may keep a rank: threads at the learner's lines, and processes if it waits outside others.

    A process that has returned waits for threads that are no daemons, whatever they do.
    """
    if state.phase == "returned":
        if state.seconds is None:  # others may have waited for what its end has cut off
            return [each for each in besides if each.daemon and each.position and each.position.waits]
        return [each for each in besides if not each.daemon]
    if state.phase not in (STARTING, AT_WORK):
        return []
    position = state.position
    called = position is not None and position.function is not None and not position.waits
    return [each for each in besides if each.position and (called or each.thread)]


def what_lingers(run: Run, ranks: Sequence[int | str], seconds: float) -> str:
    """Say what keeps the processes of ranks for so many seconds after their functions have returned."""
    states = [RankState(int(rank), "returned", beside=beside(record_of(run, int(rank)))) for rank in ranks]
    states = [replace(state, beside=[each for each in state.beside if not each.daemon]) for state in states]
    return lingering_text(run, states, seconds)


def _lingers(run: Run, rank: int) -> float | None:
    """Return for how long a rank's process has outlived its function's return; None if that is normal.

    Something keeps the process: a thread that it waits for, an `atexit` function, or Python's own shutdown.
    """
    files = RankFiles(run.folder, rank)
    with contextlib.suppress(OSError):
        returned = files.result if files.result.exists() else files.facts
        seconds = time.time() - returned.stat().st_mtime
        if seconds >= WARN_SECONDS and not run.is_job and run.lives(rank):
            return seconds
    return None


def record_of(run: Run, rank: int) -> dict[str, Any]:
    """Return what a rank has recorded about where it is (`RankFiles.standstill`); empty without a record."""
    return record_in(RankFiles(run.folder, rank).standstill)
