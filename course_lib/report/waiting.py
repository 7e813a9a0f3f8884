"""Make the report on ranks that hang or have failed, and the warning while they wait."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .cause_words import PRESENT, cause_text, mismatch_text
from .divergence import divergence
from .evidence import WARN_SECONDS, state_of
from .facts import Absence, Circle, ExitCodes, Failure, Failures, RankState, Report
from .failed import failure_before, first_failure
from .stacks import others_in, position_in
from .wait_cause import apart, other_groups, wait_cause_of
from .words import line_of, position_text, restart_text, state_lines, warning_text

if TYPE_CHECKING:
    from ..record.trace import Trace
    from ..run.run import Run


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
    """Return a warning while ranks are stuck: which, where and for how long; empty while none is."""
    still_seconds = [
        silent.get(rank) or run.clock(rank) - trace.standstill.get("since", math.inf)
        for rank, trace in enumerate(run.traces())
        if not trace.has_returned
    ]
    if still_seconds and max(still_seconds) < WARN_SECONDS:
        return ""  # nearly every look of the dashboard ends here: states take longer
    states = [state_of(run, rank, silent=silent.get(rank)) for rank in range(run.world_size)]
    working = [state for state in states if state.phase != "returned"]
    stuck = [state for state in working or states if (state.seconds or 0) >= WARN_SECONDS]
    return warning_text(run, stuck, cause_text(wait_cause_of(states), states, PRESENT)) if stuck else ""


def doubts(run: Run) -> str:
    """Say why torchrun restarted a run that is done, and why its results may be wrong, as far as known."""
    sentences = [restart_text(run, before)] if (before := failure_before(run)) else []
    with contextlib.suppress(Exception):  # a rank's program may have written anything into its files
        groups = [trace.standstill.get("groups", {}) for trace in run.traces()]
        if cause := other_groups(groups) or apart(run):
            sentences.append(f"the run is done, but {mismatch_text(cause)}")
    return "\n".join(sentences)


def what_lingers(run: Run, ranks: Sequence[int | str], seconds: float) -> str:
    """Say what keeps processes of ranks alive ``seconds`` after their functions have returned."""
    head = f"These ranks were killed {seconds:g} s after their function had returned"
    lines = [f"{head} (torchrun would have kept waiting):"]
    for rank in ranks:
        threads = [each for each in others_in(run.trace(rank).standstill) if not each.daemon]
        lines += state_lines(run, RankState(int(rank), "returned", beside=threads))
    return "\n".join(lines)


class Stall(NamedTuple):
    """Where one rank was at the end of a run.

    What it was ``doing``: ``"waits in all_reduce"``, ``"is in save"``, ``"is at a line of its own"``, ``"has
    returned"``, ``"has failed"``, or ``"is gone"`` if it made progress until it ended.
    """

    rank: int
    doing: str
    line: str  # the learner's; empty if there is none


def stalls(run: Run) -> list[Stall]:
    """Return where each rank was when the run ended: who waited where (lesson 13).

    It is for a run that did not end well: ``error.run`` of a `RankTimeout` or `RankError`, or ``Run.open()``.
    """
    return [_stall(rank, trace) for rank, trace in enumerate(run.snapshot().traces())]


def _stall(rank: int, trace: Trace) -> Stall:
    if trace.has_returned:
        return Stall(rank, "has returned", "")
    if trace.has_failed:
        return Stall(rank, "has failed", "")
    position = position_in(trace.standstill, trace.standstill.get("stack", []))
    if position is None:
        return Stall(rank, "is gone", "")
    return Stall(rank, position_text(position), line_of(position.frame))
