"""Which ranks failed, and which one first; the exceptions that say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..files import read_json
from ..record.layout import PROGRAM
from .cause_words import ranks_text
from .evidence import failure_in, failure_of
from .facts import ExitCodes, Failure, Failures, Report
from .words import error_text

if TYPE_CHECKING:
    from ..run.run import Run


class RankError(RuntimeError):
    """A rank failed. The message says which one, why, at which of your lines, and what the others did.

    Attributes
    ----------
    report : Report
        The same as data.
    rank : int, str or None
        The rank that failed first; ``"program"`` if a program failed outside its ranks; None if no rank did.
    run : Run
        The run, with what the ranks printed and measured until then.
    """

    def __init__(self, run: Run, report: Report) -> None:
        super().__init__(error_text(run, report))
        self.run, self.report = run, report
        self.rank = report.first_failure and report.first_failure.rank

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
    """Return the failure to name: a rank's before the program's, a cause before its report or consequence."""

    def order(failure: Failure) -> tuple[bool, bool, bool, float]:
        blamed = [failures[rank] for rank in failure.blames if rank in failures]
        reports = any(each.message == failure.message or not each.consequence for each in blamed)
        return failure.rank == PROGRAM, reports, failure.consequence, failure.time

    return min(failures.values(), key=order)


def failures_of(run: Run, exit_codes: ExitCodes) -> Failures:
    """Return the failures of the ranks that have ended."""
    failures = {}
    for rank, code in exit_codes.items():
        # exit code 0 is enough for a program; a rank must have left its result as well
        if code or (code == 0 and rank != PROGRAM):
            failures[rank] = failure_of(run, rank, code)
    return {rank: failure for rank, failure in failures.items() if failure}


def failure_before(run: Run) -> Failure | None:
    """Return the failure after which torchrun last restarted the ranks, if it has."""
    failures = dict[int | str, Failure]()
    for rank, trace in enumerate(run.traces() if run.restarts else ()):
        record = read_json(trace.files.failure_of_attempt(run.restarts - 1))
        if failure := failure_in(run, trace, record, None):
            failures[rank] = failure
    return first_failure(failures) if failures else None
