"""Find out what the ranks are doing, during a run and at its end: who waits where, and for whom.

There are two sources: each rank's record of where it is and which collectives it has called
(`rank.standstill`), and the Python stack that it writes when asked (`stacks`), even from inside C code.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..run_folder import ASKED, ENDING, STARTING, RankFiles, of_everyone
from .divergence import divergence
from .facts import Absence, Call, ExitCodes, Failure, Failures, Mismatch, RankState, Report
from .failed import failure_of, first_failure
from .stacks import ask_stacks, position_of, python_stack
from .words import warning_text

if TYPE_CHECKING:
    from ..run.run import Run

WARN_SECONDS = 10.0  # without progress for this long, the dashboard says who waits where
ASK_SECONDS = 0.8  # how long the ranks get to say where they are; their threads look ten times a second
ASK_SECONDS_FAR = 3.0  # on other machines: a new file on a shared disk shows up later
TELL_SECONDS = 2.0  # how long an ending rank gets to say how it ended; with a free core it does so at once
UNEVEN = {"scatter", "all_to_all"}  # collectives that ranks may call with tensors of different sizes
JOIN = "init_process_group"


def report_on(run: Run, exit_codes: ExitCodes, failures: Failures, timeout: float | None = None) -> Report:
    """Ask live ranks what they are doing, and report on the end of a run: after failures, or at a timeout."""
    cause = first_failure(failures) if failures else None
    explained = cause is not None and not cause.consequence
    ranks = range(run.world_size)
    living = [rank for rank in ranks if exit_codes.get(rank) is None]
    ask_stacks(run, living if explained else _ask_for_records(run, living))
    until = time.monotonic() + TELL_SECONDS
    while any(_is_about_to_tell(run, rank) for rank in living) and time.monotonic() < until:
        time.sleep(0.02)
    states = [state_of(run, rank, exit_codes.get(rank), failures.get(rank), at_end=True) for rank in ranks]
    mismatch = None if explained else mismatch_of(states)
    return Report(cause, states, mismatch, timeout, divergence=divergence(run))


def _ask_for_records(run: Run, ranks: list[int]) -> list[int]:
    """Ask ranks to record where they are, and return those that do not: none of their threads runs."""
    silent = [rank for rank in ranks if run.lives(rank)]
    until = time.monotonic() + (ASK_SECONDS_FAR if run.is_job else ASK_SECONDS)
    with contextlib.suppress(OSError):  # the folder may have been removed
        (run.folder / ASKED).touch()
        while silent and time.monotonic() < until:
            time.sleep(0.01)
            silent = [rank for rank in silent if not record_of(run, rank).get("asked")]
    return silent


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
    stuck = [rank for rank in working if run.clock(rank) - since[rank] >= WARN_SECONDS]
    states = [state_of(run, rank) for rank in ranks] if stuck or not working else []
    shown = [state for state in states if state.seconds is not None and (state.rank in stuck or not working)]
    return warning_text(run, shown, mismatch_of(states)) if shown else ""


# --- one rank ---------------------------------------------------------------------------------------------


def state_of(
    run: Run, rank: int, exit_code: int | None = None, failure: Failure | None = None, at_end: bool = False
) -> RankState:
    """Return what a rank does, by its record and, ``at_end``, by the stack that it was asked to write."""
    record, facts, lives = record_of(run, rank), run.facts(rank), run.lives(rank)
    asked, recorded = record.get("asked", False), record.get("stack", [])
    seconds = max(0.0, run.clock(rank) - record["since"]) if "since" in record else None
    stack = python_stack(run, rank) if at_end and not run.is_job else recorded
    phase = facts.get("phase", STARTING)
    if run.trace(rank).has_returned():
        phase, seconds = "returned", _lingers(run, rank)
    elif failure := failure or failure_of(run, rank, exit_code):
        phase = "failed"
    elif exit_code is not None or (not stack and facts and not lives):
        phase = "ended"  # a program ends its other ranks when one has failed
    if asked or not stack:  # on a busy machine it may have had no time to write its stack
        stack = recorded or stack
    position = position_of(stack, bool(record.get("pending")))
    state = RankState(rank, phase, stack, position, seconds, failure)
    function = position.function if position else None
    if lives and not asked and (run.folder / ASKED).exists():
        # it could not answer, and what it wrote before may be out of date
        return state if stack is recorded else replace(state, function=function)
    pending, last = ([Call(**call) for call in record.get(which, [])[:1]] for which in ("pending", "last"))
    if failure and failure.kind == "raised":
        pending = pending or last  # its last call has ended with the failure
    waits_in = pending[0] if pending and phase != "returned" else None
    called, last_call = record.get("called"), last[0] if last else None
    return replace(state, function=function, called=called, waits_in=waits_in, last=last_call)


def _lingers(run: Run, rank: int) -> float | None:
    """Return for how long a rank's process has outlived its function's return; None if that is normal.

    Something keeps the process: a thread that it waits for, an `atexit` function, or Python's own shutdown.
    """
    files = RankFiles(run.folder, rank)
    with contextlib.suppress(OSError):
        told = files.result if files.result.exists() else files.facts
        seconds = time.time() - told.stat().st_mtime
        if seconds >= WARN_SECONDS and not run.is_job and run.lives(rank):
            return seconds
    return None


def record_of(run: Run, rank: int) -> dict[str, Any]:
    """Return what a rank has recorded about where it is (`RankFiles.standstill`); empty without a record."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(RankFiles(run.folder, rank).standstill.read_text())
    return {}


# --- whom they wait for -----------------------------------------------------------------------------------


def mismatch_of(states: Sequence[RankState]) -> Mismatch | Absence | None:
    """Return whom the waiting ranks wait for; None if that cannot be told.

    Ranks in ``init_process_group`` wait for those that are not. Otherwise look at the first collective of a
    group in which a rank waits: all ranks number them alike, so another rank of the group has called
    something else under that number, or has not got that far.
    """
    joining = [state.rank for state in states if state.phase != "returned" and state.function == JOIN]
    absent = [state for state in states if state.rank not in joining and not state.called]
    if joining and absent:
        return _absence(absent, joining, JOIN, None)
    waited_in = [state.waits_in for state in states if state.waits_in]
    for group in dict.fromkeys(call.group for call in waited_in):
        number = min(call.number for call in waited_in if call.group == group)
        if mismatch := _other_calls(states, group, number) or _not_yet_called(states, group, number):
            return mismatch
    return None


def _other_calls(states: Sequence[RankState], group: str, number: int) -> Mismatch | None:
    """Return which ranks disagree on a collective: they called different ones, or with other tensor sizes."""
    # a rank that got through it all the same counts, too
    calls = [(state.rank, call) for state in states for call in (state.last, state.waits_in) if call]
    alike = {rank: call for rank, call in calls if (call.group, call.number) == (group, number)}
    names = {call.name for call in alike.values()}
    sizes = {str(call.sizes) for call in alike.values()}
    differ = len(names) > 1 or (len(sizes) > 1 and not UNEVEN & names)
    return Mismatch(number, alike) if differ else None


def _not_yet_called(states: Sequence[RankState], group: str, number: int) -> Absence | None:
    """Return which ranks of a group have not yet reached a collective in which others wait."""
    calls = {state.rank: state.waits_in for state in states if state.waits_in}
    waiting = [rank for rank, call in calls.items() if (call.group, call.number) == (group, number)]
    name = calls[waiting[0]].name
    # a rank that could not answer, but is in that function according to its stack, waits as well
    waiting += [state.rank for state in states if state.called is None and state.function == name]
    known = [(state, state.called) for state in states if state.called is not None]
    members = [(state, called) for state, called in known if of_everyone(group) or group in called]
    absent = [state for state, called in members if called.get(group, 0) < number]
    return _absence(absent, sorted(waiting), name, number) if absent else None


def _absence(absent: list[RankState], waiting: list[int], function: str, number: int | None) -> Absence:
    returned = all(state.phase == "returned" for state in absent)
    return Absence([state.rank for state in absent], waiting, function, number, returned)
