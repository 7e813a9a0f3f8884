"""What went wrong in a run, as facts: `evidence` reads them, `words` puts them into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..tracebacks.learner_code import Place

if TYPE_CHECKING:
    from .divergence import Divergence


class Related(NamedTuple):
    """An exception that belongs to another one."""

    how: Literal["inside", "from", "during"]  # in the group; the other was raised from it, or in handling it
    text: str  # type and message
    frames: list[dict[str, Any]]  # as of a `Failure`


@dataclass(frozen=True)
class Failure:
    """How one rank failed, or a program outside of its ranks (rank ``"program"``)."""

    rank: int | str
    kind: Literal["raised", "signal", "exit code", "noted by the launcher"]
    time: float  # time.time() when it happened or was noticed
    exception: str = ""  # the type of what it raised, SystemExit, too
    message: str = ""  # of the exception, or the launcher's note
    related: list[Related] = field(default_factory=list)  # what Python's traceback shows beside it
    signal: str = ""  # as in "SIGKILL"
    crashed_in: str = ""  # which thread crashed, unless it is that of the frames
    exit_code: int | None = None  # negative for a signal; None if it raised or was noted
    frames: list[dict[str, Any]] = field(default_factory=list)  # the learner's own, outermost first
    last_lines: list[str] = field(default_factory=list)  # of its output, if they say why
    unrecorded: Literal["", "folder removed", "disk full"] = ""  # why it may have recorded no exception
    workers: list[tuple[int, str]] = field(default_factory=list)  # pid and signal of killed ones
    memory: list[int] | None = None  # total and available bytes then, if workers were killed
    asked_to_end: bool = False  # by torchrun, as another rank had failed
    lost_peer: bool = False  # another rank was gone
    blames: list[int] = field(default_factory=list)  # ranks that its message names, unless it names itself
    lost_at: dict[str, Any] | None = None  # the frame in which it lost its peer
    timed_out: bool = False  # it gave up waiting for another rank
    short_of_memory: bool = False  # the exception says so or, if the rank was killed, the system

    @property
    def consequence(self) -> bool:
        """Whether something else failed first."""
        return self.asked_to_end or self.lost_peer


ExitCodes = Mapping[int | str, int | None]  # by rank; None for one that is running
Failures = Mapping[int | str, Failure]  # by rank


class Call(NamedTuple):
    """A call in which ranks meet: a collective, as PyTorch's flight recorder has it, or another call."""

    name: str
    group: str = ""  # torch's name; empty if the call is no collective
    number: int | None = None  # of a collective or a new group, counted on each rank; of a message, its tag
    sizes: Sequence[Sequence[int]] = ()
    dtypes: Sequence[str] = ()
    ranks: Sequence[int] = ()  # who meets: the group, the new group, or the other end of a message
    root: int | None = None  # of a broadcast, reduce, gather or scatter, if known
    place: Place | None = None  # the learner's line, if known


class Position(NamedTuple):
    """Where a rank is in the learner's code."""

    frame: dict[str, Any]  # the learner's innermost, with its source
    function: str | None  # called by its line; None if the line itself is busy
    waits: bool  # for other ranks, in torch.distributed


class OtherActivity(NamedTuple):
    """What runs beside the main thread of a rank: another thread, or a process that the rank has forked."""

    position: Position | None  # None outside of the learner's code
    thread: str = ""  # its name; empty for a process
    daemon: bool = True  # False: the rank's process does not end before it
    loads: bool = False  # it is a worker of a DataLoader


class ThreadError(NamedTuple):
    """An exception that ended a thread beside the main thread of a rank, or that the main thread handles."""

    thread: str  # its name; empty for the main thread
    type: str
    message: str
    frames: list[dict[str, Any]]  # the learner's own, outermost first


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when it was last asked, or how it ended."""

    rank: int
    phase: str  # a phase of `record.layout`, "returned", "failed", or "ended": it is gone, no more is known
    stack: list[Place] = field(default_factory=list)  # of its main thread, innermost first; empty if unknown
    position: Position | None = None  # None outside of the learner's code
    seconds: float | None = None  # in this place or, if it matters, since it has returned; None if unknown
    failure: Failure | None = None
    function: str | None = None  # as in its position, unless that may be out of date
    called: dict[str, int] | None = None  # number of collectives by group; None if unknown
    waits_in: Call | None = None
    recent: list[Call] = field(default_factory=list)  # the latest collectives, whether over or not
    groups: dict[str, list[int]] = field(default_factory=dict)  # the ranks of each group that it is in
    own_call: str = ""  # the source of the learner's call that has not ended, if the rank is idle in it
    joins: dict[str, list[str]] = field(default_factory=dict)  # by setting: its value now and at the launch
    lock_file: str = ""  # that it waits for in its own call
    lock_holder: str = ""  # which rank or process has locked it
    silent: float | None = None  # seconds for which none of its threads ran, though its process lives
    beside: list[OtherActivity] = field(default_factory=list)
    thread_errors: list[ThreadError] = field(default_factory=list)


class Mismatch(NamedTuple):
    """Different collectives, sizes, types or roots, that ranks have called under one number."""

    calls: dict[int, Call]  # by rank


class Absence(NamedTuple):
    """Ranks that have not made the call in which others wait for them."""

    absent: list[int]
    waiting: list[int]
    call: Call
    returned: bool  # whether all absent ranks have returned
    further: Sequence[Absence] = ()  # other waits, which this one explains
    apart: Mapping[int, Place] = {}  # where each called the last collective that all called, if lines differ


class Circle(NamedTuple):
    """Ranks that wait for each other, each in another call."""

    calls: dict[int, Call]  # by rank: each waits for the next one, and the last for the first


class OtherGroups(NamedTuple):
    """Groups of one name that have different members on different ranks."""

    name: str
    ranks: dict[int, Sequence[int]]  # its members, by the rank that made it


class Apart(NamedTuple):
    """Ranks whose settings for init_process_group differ, among themselves or from the launch."""

    joins: dict[str, dict[int, tuple[str, str]]]  # by setting and rank: its value now and at the launch


Cause = Mismatch | Absence | Circle | OtherGroups | Apart  # why ranks wait


@dataclass(frozen=True)
class Report:
    """What went wrong in a run."""

    first_failure: Failure | None = None  # None if no rank failed
    states: list[RankState] = field(default_factory=list)  # by rank
    wait_cause: Cause | None = None  # why the ranks waited, if that led to the end and is known
    timeout: float | None = None  # seconds after which the ranks were not done
    before: Failure | None = None  # what ended the attempt before a restart
    divergence: Divergence | None = None  # the first difference in what `track(…, same=…)` compares

    @property
    def failures(self) -> list[Failure]:
        """Every failure that is known, by rank."""
        failures = [state.failure for state in self.states if state.failure]
        first = self.first_failure
        return failures if first is None or first in failures else [first, *failures]
