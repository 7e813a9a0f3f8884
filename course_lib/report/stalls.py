"""`stalls`: where each rank of a run was when it ended, and since when; a figure is drawn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .stacks import has_pending, position_of
from .words import line_of, position_text

if TYPE_CHECKING:
    from ..run.run import Run


class Stall(NamedTuple):
    """Where one rank was at the end of a run, and since when.

    Attributes
    ----------
    rank : int
    doing : str
        ``"waits in all_reduce"``, ``"is in save"``, ``"is at a line of its own"``, ``"has returned"``,
        ``"has failed"``, or ``"is gone"`` if it made progress until it ended.
    since, until : float
        Seconds since the launch: when it got there (its last tick if it has ended), and the end of the run.
    line : str
        The learner's line; empty if there is none.
    """

    rank: int
    doing: str
    since: float
    until: float
    line: str


def stalls(run: Run) -> list[Stall]:
    """Return where each rank was when the run ended: who waited where, and since when (lesson 13).

    It is for a run that did not end well: ``error.run`` of a `RankTimeout` or `RankError`, or ``Run.open()``.
    A thread in each rank looks at it ten times a second, so the times may be 0.1 s late.
    """
    now = run.snapshot()
    return [_stall(now, rank) for rank in range(now.world_size)]


def _stall(run: Run, rank: int) -> Stall:
    trace = run.trace(rank)
    launched = trace.facts.get("launched", run.started)
    until = run.started + run.seconds - launched
    ticks = trace.ticks["seconds"]
    last_seen = min(float(ticks[-1]), until) if len(ticks) else 0.0
    record = trace.standstill
    position = position_of(record.get("stack", []), has_pending(record))
    ended = "" if position and "since" in record else "is gone"
    if trace.has_returned:
        ended = "has returned"
    elif trace.has_failed:
        ended = "has failed"
    if ended or position is None:
        return Stall(rank, ended, last_seen, until, "")
    since = min(max(record["since"] - launched, 0.0), until)
    return Stall(rank, position_text(position), since, until, line_of(position.frame))
