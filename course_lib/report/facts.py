"""What went wrong in a run, as facts: `failed` and `waiting` read them, `words` puts them into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..frames import Place

if TYPE_CHECKING:
    from .divergence import Divergence

Unrecorded = Literal["", "folder removed", "disk full"]


@dataclass(frozen=True)
class Failure:
    """How one rank failed, or a program outside of its ranks (rank ``"program"``)."""

    rank: int | str
    kind: Literal["raised", "signal", "exit code", "noted by the launcher"]
    time: float  # time.time() when it happened or was noticed
    exception: str = ""  # the type of what was raised, SystemExit, too
    message: str = ""  # of the exception, or the launcher's note
    causes: list[str] = field(default_factory=list)  # type and message of each exception that led to it
    signal: str = ""  # as in "SIGKILL"
    exit_code: int | None = None  # that of a signal is negative; None if it raised or was noted
    frames: list[dict[str, Any]] = field(default_factory=list)  # the learner's own, outermost first
    last_lines: list[str] = field(default_factory=list)  # of its output, where they say why
    unrecorded: Unrecorded = ""  # why it may have recorded no exception
    consequence: bool = False  # another rank was gone: something else came first
    short_of_memory: bool = False  # the exception says so or, of a rank that was killed, the system


ExitCodes = Mapping[int | str, int | None]  # by rank; None for one that is running
Failures = Mapping[int | str, Failure]  # by rank


class Call(NamedTuple):
    """A call of a collective, as PyTorch's flight recorder has it."""

    group: str
    number: int  # the same on every rank: each counts the collectives of a group
    name: str
    sizes: list[list[int]]


class Position(NamedTuple):
    """Where a rank is in the learner's code."""

    frame: dict[str, Any]  # the learner's innermost, with its source
    function: str | None  # that its line has called; None if that line is busy itself
    waits: bool  # for other ranks, in torch.distributed


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when it was last asked, or how it ended."""

    rank: int
    phase: str  # a phase of `run_folder`, "returned", "failed", or "ended": it is gone, no more is known
    stack: list[Place] = field(default_factory=list)  # of its main thread, innermost first; empty if unknown
    position: Position | None = None  # None outside of the learner's code
    seconds: float | None = None  # in this place or, if it matters, since it has returned; None if unknown
    failure: Failure | None = None
    function: str | None = None  # as in its position, unless that may be out of date
    called: dict[str, int] | None = None  # number of collectives by group; None if unknown
    waits_in: Call | None = None
    last: Call | None = None  # the last that it called, whether over or not


class Mismatch(NamedTuple):
    """Different collectives, or sizes of tensors, that ranks have called under one number."""

    number: int
    calls: dict[int, Call]  # by rank


class Absence(NamedTuple):
    """Ranks that have not called the function in which others wait for them."""

    absent: list[int]
    waiting: list[int]
    function: str
    number: int | None  # of the collective; None for init_process_group
    returned: bool  # all that are absent have returned


@dataclass(frozen=True)
class Report:
    """What went wrong in a run."""

    cause: Failure | None = None  # the first failure; None if no rank failed
    states: list[RankState] = field(default_factory=list)  # by rank
    mismatch: Mismatch | Absence | None = None  # whom the ranks waited for, if that led to it and is known
    timeout: float | None = None  # seconds after which the ranks were not done
    message: str = ""  # the launcher's, on anything else
    divergence: Divergence | None = None  # the first difference in what `track(…, same=…)` compares

    @property
    def failures(self) -> list[Failure]:
        """Every failure that is known, by rank."""
        failures = [state.failure for state in self.states if state.failure]
        return failures if self.cause is None or self.cause in failures else [self.cause, *failures]
