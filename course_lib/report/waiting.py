"""Find out what the ranks are doing, during a run and at its end: who waits where, and for whom.

Each rank records where it is and which collectives it has called (`rank.standstill`), once it makes no
progress or is asked (`launcher.ask`). Here is what follows from that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..record.layout import AT_WORK, STARTING
from .cause_words import PRESENT, cause_text, mismatch_text
from .divergence import divergence
from .facts import (
    Absence,
    Call,
    Circle,
    ExitCodes,
    Failure,
    Failures,
    OtherActivity,
    RankState,
    Report,
    ThreadError,
)
from .failed import failure_before, failure_of, first_failure
from .stacks import asked_stack, beside, has_pending, position_of
from .wait_cause import apart, other_groups, wait_cause_of
from .words import lingering_text, restart_text, warning_text

if TYPE_CHECKING:
    from ..run.run import Run

WARN_SECONDS = 10.0  # without progress for this long, the dashboard says who waits where
BUSY = 0.2  # with a larger share of CPU time in one place, a rank does not wait there


def report_of(
    run: Run,
    exit_codes: ExitCodes,
    failures: Failures,
    silent: Mapping[int, float],
    timeout: float | None = None,
) -> Report:
    """Report on a run that ends, after failures or at a timeout; ``silent`` as for a `RankState`, by rank."""
    cause = first_failure(failures) if failures else None
    asked = not (explains(cause) and run.is_job)
    states = [
        state_of(run, rank, exit_codes.get(rank), failures.get(rank), silent.get(rank), asked)
        for rank in range(run.world_size)
    ]
    why = None if explains(cause) else wait_cause_of(states) or apart(run)
    if cause is not None and cause.signal == "SIGABRT" and isinstance(why, Absence | Circle):
        why = None
    return Report(cause, states, why, timeout, before=failure_before(run), divergence=divergence(run))


def explains(cause: Failure | None) -> bool:
    """Return whether a failure alone explains a run's end: no rank waited for another, no calls differed."""
    return cause is not None and not (cause.consequence or cause.timed_out or cause.signal == "SIGABRT")


def stalled(run: Run, silent: Mapping[int, float]) -> str:
    """Return a warning while ranks are stuck: which, where and for how long; empty while all progress."""
    working = [rank for rank, trace in enumerate(run.traces()) if not trace.has_returned]
    since = {rank: run.trace(rank).standstill.get("since", math.inf) for rank in working}
    stood = {rank: silent.get(rank) or run.clock(rank) - since[rank] for rank in working}
    stuck = [rank for rank, seconds in stood.items() if seconds >= WARN_SECONDS]
    if working and not stuck:
        return ""
    states = [state_of(run, rank, silent=silent.get(rank)) for rank in range(run.world_size)]
    shown = [state for state in states if state.seconds is not None and (state.rank in stuck or not working)]
    return warning_text(run, shown, cause_text(wait_cause_of(states), states, PRESENT)) if shown else ""


def doubts(run: Run) -> str:
    """Say why torchrun restarted a run that is done, and why its results may be wrong, as far as known."""
    sentences = [restart_text(run, before)] if (before := failure_before(run)) else []
    with contextlib.suppress(Exception):  # a rank's program may have written anything into its files
        groups = [trace.standstill.get("groups", {}) for trace in run.traces()]
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
    asked: bool = False,
) -> RankState:
    """Return what a rank does, by its record or, if it was ``asked``, by the stack that a signal got."""
    trace, lives = run.trace(rank), run.lives(rank)
    record, facts = trace.standstill, trace.facts
    answered, recorded = record.get("asked", False), record.get("stack", [])
    seconds = max(0.0, run.clock(rank) - record["since"]) if "since" in record else None
    stack = asked_stack(trace) if asked and not answered and not run.is_job else recorded
    phase = facts.get("phase", STARTING)
    if trace.has_returned:
        lingers = trace.seconds_since_return
        phase = "returned"
        seconds = lingers if lingers >= WARN_SECONDS and lives and not run.is_job else None
    elif failure := failure or failure_of(run, rank, exit_code):
        phase = "failed"
    elif exit_code is not None or (not stack and facts and not lives):
        phase = "ended"  # a program ends its other ranks when one has failed
    if answered or not stack:  # on a busy machine it may have had no time to write its stack
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
    if lives and asked and not answered:
        # what it wrote before may be out of date
        return state if stack is recorded else replace(state, function=function)
    recent, pending = ([Call(**call) for call in record.get(which, [])] for which in ("recent", "pending"))
    if failure and (failure.consequence or failure.timed_out):
        pending = pending or recent[-1:]  # its last call has ended with the failure
    waits_in = _waits_in(pending, record.get("meets")) if phase != "returned" else None
    idle = phase == AT_WORK and seconds and not trace.cpu_share(seconds) > BUSY
    own_call, lock = (record.get(name, "") if idle else "" for name in ("call", "lock_file"))
    return replace(
        state,
        function=function,
        called=record.get("called"),
        groups=record.get("groups", {}),
        own_call=own_call,
        joins=record.get("joins", {}),
        lock_file=lock if own_call else "",
        lock_holder=_named(run, record.get("lock_holder")),
        waits_in=waits_in,
        recent=recent,
    )


def _named(run: Run, pid: int | None) -> int | str | None:
    """Return the rank that has this pid, or the name of another process."""
    pids = [trace.facts.get("pid") for trace in run.traces()]
    return pids.index(pid) if pid in pids else pid and f"process {pid}"


def _waits_in(pending: list[Call], meets: dict[str, Any] | None) -> Call | None:
    """Return the call in which a rank waits: prefer the main thread's to an older one that is pending."""
    if meets is None:
        return pending[0] if pending else None
    same = [call for call in pending if call.name == meets["name"]]
    return same[-1]._replace(root=meets["root"]) if same and "root" in meets else Call(**meets)


def _relevant(besides: list[OtherActivity], state: RankState) -> list[OtherActivity]:
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
    states = [RankState(int(rank), "returned", beside=beside(run.trace(rank).standstill)) for rank in ranks]
    states = [replace(state, beside=[each for each in state.beside if not each.daemon]) for state in states]
    return lingering_text(run, states, seconds)
