"""Who waits where, and for whom: what the ranks of a run are doing, while it lasts and at its end.

Two sources: each rank's own record of where it stands (`rank.standstill`), with the collectives that it has
called, and the Python stack that it writes down when it is asked (`stacks`), from inside C code, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..frames import Place, is_learners, is_ours, line_of, with_source
from ..run_folder import ASKED, AT_WORK, ENDING, STARTING, RankFiles, of_everyone
from .failed import SIGNALS, failure_of
from .stacks import ask_stacks, python_stack

if TYPE_CHECKING:
    from ..run.run import Run

WARN_SECONDS = 10.0  # after a standstill of so long the dashboard says who waits where
ASK_SECONDS = 0.8  # how long the ranks get to say where they stand; their threads look ten times a second
ASK_SECONDS_FAR = 3.0  # where they are on other machines: a shared disk tells of a new file later
TELL_SECONDS = 2.0  # and how long one that is ending gets to say how: at once, where it has a core
MOST_SHOWN = 8  # ranks in the dashboard's warning
UNEVEN = {"scatter", "all_to_all"}  # collectives that ranks may call with tensors of different sizes
WRAPPERS = {"wrapper", "decorate_context", "_fn", "__call__", "_wrapped_call_impl", "_call_impl"}
DISTRIBUTED = os.path.join("torch", "distributed") + os.sep


class Tense(NamedTuple):
    is_: str
    waits: str
    wait: str
    one_never: str
    they_never: str


PAST = Tense("was", "waited", "waited", "never called", "never called")
PRESENT = Tense("is", "waits", "wait", "has not called", "have not called")  # they may be slow


class Call(NamedTuple):
    """A collective, as PyTorch's flight recorder knows it."""

    group: str
    number: int  # every rank counts the collectives of a group alike
    name: str
    sizes: list[list[int]]

    def __str__(self) -> str:
        if not self.sizes:
            return f"{self.name} of no tensor"
        return f"{self.name} of shape{'s' * (len(self.sizes) > 1)} {', '.join(map(str, self.sizes))}"


@dataclass
class Standing:
    """What is known of one rank: where it stands, and which collectives it has called."""

    stack: list[Place] = field(default_factory=list)  # innermost first
    since: float | None = None  # time.time() when it came there
    called: dict[str, int] | None = None  # by group, how many collectives; None where that is not known
    waits_in: Call | None = None
    last: Call | None = None  # that it called, over or not
    returned: bool = False

    @property
    def joins(self) -> bool:
        return not self.returned and called_in(self.stack) == "init_process_group"


# --- what each rank is doing ------------------------------------------------------------------------------


def whereabouts(run: Run, exit_codes: dict[Any, int | None]) -> dict[int, str]:
    """What each rank is doing, in words that follow "rank N"; living ranks are asked for their stacks."""
    numbers = list(range(run.world_size))
    living = [rank for rank in numbers if exit_codes.get(rank) is None]
    ask_stacks(run, living)
    until = time.monotonic() + TELL_SECONDS
    while any(_is_about_to_tell(run, rank) for rank in living) and time.monotonic() < until:
        time.sleep(0.02)
    return {rank: doing(run, rank, exit_codes.get(rank)) for rank in numbers}


def _is_about_to_tell(run: Run, rank: int) -> bool:
    """Whether it is ending, and has not yet written down how."""
    if run.facts(rank).get("phase") != ENDING or run.trace(rank).has_returned():
        return False
    return run.lives(rank) and not RankFiles(run.folder, rank).failure.exists()


def doing(run: Run, rank: int, exit_code: int | None) -> str:
    """What a rank was doing when it was last asked."""
    if run.trace(rank).has_returned():
        if (seconds := _lingers(run, rank)) >= WARN_SECONDS:
            return f"had returned {seconds:.1f} s before, and its process had not ended"
        return "had returned"
    if failure := failure_of(run, rank, exit_code):
        if failure.consequence and failure.frames:
            return f"then lost its connection ({line_of(failure.frames[-1])})"
        record = record_of(run, rank)
        if failure.what == SIGNALS["SIGTERM"] and _is_in_the_learners_code(record.get("stack", [])):
            return f"{_in_the_learners_code(run, rank, record['stack'], record)} when it was asked to end"
        return f"then {failure.what.splitlines()[0].removesuffix(' and said')}"
    if exit_code is not None:
        return "had ended"
    record, facts, stack = record_of(run, rank), run.facts(rank), python_stack(run, rank)
    if run.is_job:  # nobody asks it for its stack from here
        stack = record.get("stack", [])
    if not stack and facts and not run.lives(rank):
        return "had ended"  # a program ends its other ranks when one has failed
    stack = stack or record.get("stack", [])  # on a busy machine it may not have got the time to answer
    if _is_in_the_learners_code(stack):
        return _in_the_learners_code(run, rank, stack, record)
    phase = facts.get("phase", STARTING)
    if phase != AT_WORK:
        return "was ending" if phase == ENDING else "was starting"
    if not stack or is_ours(stack[0][0]):
        return "was at work"
    return f"was in {stack[0][2]}"


def stalled(run: Run) -> str:
    """A warning while ranks stand still for long: who, for how long, where; empty while all get on."""
    records = {rank: record_of(run, rank) for rank in range(run.world_size)}
    now = {rank: run.clock(rank) for rank in records}
    still = {
        rank: record
        for rank, record in records.items()
        if now[rank] - record.get("since", now[rank]) >= WARN_SECONDS and not run.trace(rank).has_returned()
    }
    ending = {rank: seconds for rank in records if (seconds := _lingers(run, rank)) >= WARN_SECONDS}
    if not all(run.trace(rank).has_returned() for rank in records):  # the others work on, or wait
        ending = {}
    if not still and not ending:
        return ""
    lines = []
    for rank, record in still.items():
        if _is_in_the_learners_code(record["stack"]):
            doing_now = _in_the_learners_code(run, rank, record["stack"], record, PRESENT)
            lines.append(f"{run.who(rank)} {doing_now}")
        else:
            lines.append(f"{run.who(rank)} has not moved for {now[rank] - record['since']:.1f} s")
    for rank, seconds in ending.items():
        lines.append(f"{run.who(rank)} returned {seconds:.1f} s ago, and its process has not ended")
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return "\n".join(filter(None, [odd_one_out(run, PRESENT), *lines[:MOST_SHOWN], *more]))


def _lingers(run: Run, rank: int) -> float:
    """How long ago a rank returned whose process is still there; 0 for all others.

    Something keeps it: a thread that it waits for, a function of `atexit`, or the end of Python itself.
    """
    if run.is_job or not run.trace(rank).has_returned() or not run.lives(rank):
        return 0.0
    files = RankFiles(run.folder, rank)
    with contextlib.suppress(OSError):
        told = files.result if files.result.exists() else files.facts
        return max(0.0, time.time() - told.stat().st_mtime)
    return 0.0


def _is_in_the_learners_code(stack: list[Place]) -> bool:
    return any(is_learners(file) for file, _, _ in stack)


def _in_the_learners_code(
    run: Run, rank: int, stack: list[Place], record: dict[str, Any], tense: Tense = PAST
) -> str:
    mine = next(i for i, place in enumerate(stack) if is_learners(place[0]))
    called, line = called_in(stack), line_of(with_source(*stack[mine]))
    since = record.get("since")
    still = f" for {max(0.0, run.clock(rank) - since):.1f} s" if since else ""
    if called is None:
        return f"{tense.is_} at {line}"
    in_distributed = any(DISTRIBUTED in file for file, _, _ in stack[:mine])
    verb = tense.waits if in_distributed or record.get("pending") else tense.is_
    return f"{verb} in {called}{still} ({line})"


def called_in(stack: list[Place]) -> str | None:
    """The function that the learner's line called; None where it is busy itself."""
    inner = []
    for place in stack:
        if is_learners(place[0]):
            return next((name for _, _, name in reversed(inner) if name not in WRAPPERS), None)
        inner.append(place)
    return None


# --- for whom they wait -----------------------------------------------------------------------------------


def for_whom(run: Run, exit_codes: dict[Any, int | None]) -> str:
    """`odd_one_out` at the end of a run: living ranks are asked first where they stand now."""
    living = [rank for rank in range(run.world_size) if exit_codes.get(rank) is None]
    waiting = {rank for rank in living if run.lives(rank)}
    with contextlib.suppress(OSError):  # a folder that was removed
        (run.folder / ASKED).touch()
        until = time.monotonic() + (ASK_SECONDS_FAR if run.is_job else ASK_SECONDS)
        while waiting and time.monotonic() < until:
            time.sleep(0.01)
            waiting = {rank for rank in waiting if not record_of(run, rank).get("asked")}
    ask_stacks(run, waiting)  # a rank whose thread cannot run has a stack all the same
    return odd_one_out(run)


def odd_one_out(run: Run, tense: Tense = PAST) -> str:
    """Whom the waiting ranks wait for, in one line, where that can be told; empty otherwise.

    Whoever is in ``init_process_group`` waits for those who are not. Otherwise the first collective of a
    group in which a rank waits tells: every rank counts them alike, so another rank of the group has called
    something else by this number, or has not come so far.
    """
    ranks = {rank: _standing(run, rank) for rank in range(run.world_size)}
    joining = [rank for rank, each in ranks.items() if each.joins]
    late = [rank for rank, each in ranks.items() if not each.joins and not each.called]
    if joining and late:
        return _late(ranks, late, "init_process_group", joining, tense)
    waited_in = [each.waits_in for each in ranks.values() if each.waits_in]
    for group in dict.fromkeys(call.group for call in waited_in):
        number = min(call.number for call in waited_in if call.group == group)
        if told := mismatch(ranks, group, number) or latecomers(ranks, group, number, tense):
            return told
    return ""


def mismatch(ranks: Mapping[int, Standing], group: str, number: int) -> str:
    """Which ranks have called something else by one number: another collective, tensors of other sizes."""
    calls = {
        rank: call
        for rank, each in ranks.items()
        for call in (each.last, each.waits_in)  # who got through it all the same counts, too
        if call and (call.group, call.number) == (group, number)
    }
    names = {rank: call.name for rank, call in calls.items()}
    if len(set(names.values())) > 1:
        return f"the ranks do not match: collective {number} is {_each(names)}"
    whole = {rank: str(call) for rank, call in calls.items()}
    if len(set(whole.values())) > 1 and not UNEVEN & set(names.values()):
        return f"the ranks do not match: collective {number} is {_each(whole)}"
    return ""


def latecomers(ranks: Mapping[int, Standing], group: str, number: int, tense: Tense) -> str:
    """Which ranks of a group have not come to a collective yet in which others wait."""
    waiting = [r for r, each in ranks.items() if each.waits_in and each.waits_in[:2] == (group, number)]
    name = ranks[waiting[0]].waits_in.name
    known = {rank: each.called for rank, each in ranks.items() if each.called is not None}
    # a rank that could not answer, and is in that function by its stack, waits as well
    waiting += [rank for rank in ranks if rank not in known and called_in(ranks[rank].stack) == name]
    members = [rank for rank, called in known.items() if of_everyone(group) or group in called]
    late = [rank for rank in members if known[rank].get(group, 0) < number]
    return _late(ranks, late, f"{name} (collective {number})", sorted(waiting), tense) if late else ""


def _standing(run: Run, rank: int) -> Standing:
    returned = run.trace(rank).has_returned()
    record = record_of(run, rank)
    if (run.folder / ASKED).exists() and not record.get("asked") and run.lives(rank):
        # it could not answer, and what it wrote before may be over by now
        return Standing(python_stack(run, rank), returned=returned)
    if not record:
        return Standing(returned=returned)
    pending, last = ([Call(**call) for call in record.get(which, [])[:1]] for which in ("pending", "last"))
    failed = RankFiles(run.folder, rank).failure.exists()  # in its last one, which is over by that
    waits_in = None if returned else next(iter(pending or (last if failed else [])), None)
    return Standing(
        stack=record.get("stack", []),
        since=record.get("since"),
        called=record.get("called", {}),
        waits_in=waits_in,
        last=next(iter(last), None),
        returned=returned,
    )


def record_of(run: Run, rank: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(RankFiles(run.folder, rank).standstill.read_text())
    return {}


# --- in words ---------------------------------------------------------------------------------------------


def _late(ranks: Mapping[int, Standing], late: list[int], name: str, waiting: list[int], tense: Tense) -> str:
    has = ""
    if all(ranks[rank].returned for rank in late):
        has = "; it has returned" if len(late) == 1 else "; they have returned"
    wait = tense.waits if len(waiting) == 1 else tense.wait
    never = tense.one_never if len(late) == 1 else tense.they_never
    return f"{_ranks(late)} {never} {name}, in which {_ranks(waiting)} {wait}{has}"


def _each(by_rank: Mapping[int, str]) -> str:
    ranks = defaultdict(list)
    for rank, what in by_rank.items():
        ranks[what].append(rank)
    return " and ".join(f"{what} on {_ranks(who)}" for what, who in ranks.items())


def _ranks(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    return f"ranks {shown}" + (f" and {len(numbers) - MOST_SHOWN} more" if len(numbers) > MOST_SHOWN else "")
