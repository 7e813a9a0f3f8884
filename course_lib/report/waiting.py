"""Find out what the ranks are doing, during a run and at its end: who waits where, and for whom.

There are two sources: each rank's record of where it is and which collectives it has called
(`rank.standstill`), and the Python stack that it writes when asked (`stacks`), even from inside C code.
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

WARN_SECONDS = 10.0  # without progress for this long, the dashboard says who waits where
ASK_SECONDS = 0.8  # how long the ranks get to say where they are; their threads look ten times a second
ASK_SECONDS_FAR = 3.0  # on other machines: a new file on a shared disk shows up later
TELL_SECONDS = 2.0  # how long an ending rank gets to say how it ended; with a free core it does so at once
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
PRESENT = Tense("is", "waits", "wait", "has not called", "have not called")  # they may just be slow


class Call(NamedTuple):
    """A call of a collective, as PyTorch's flight recorder has it."""

    group: str
    number: int  # the same on every rank: each counts the collectives of a group
    name: str
    sizes: list[list[int]]

    def __str__(self) -> str:
        if not self.sizes:
            return f"{self.name} of no tensor"
        return f"{self.name} of shape{'s' * (len(self.sizes) > 1)} {', '.join(map(str, self.sizes))}"


@dataclass
class Standing:
    """What is known about one rank: where it is, and which collectives it has called."""

    stack: list[Place] = field(default_factory=list)  # innermost first
    since: float | None = None  # time.time() when it got there
    called: dict[str, int] | None = None  # number of collectives by group; None if unknown
    waits_in: Call | None = None
    last: Call | None = None  # the last that it called, whether over or not
    returned: bool = False

    @property
    def joins(self) -> bool:
        return not self.returned and called_in(self.stack) == "init_process_group"


# --- what each rank is doing ------------------------------------------------------------------------------


def whereabouts(run: Run, exit_codes: dict[Any, int | None]) -> dict[int, str]:
    """Say what each rank is doing, in words that follow "rank N"; ask live ranks for their stacks first."""
    numbers = list(range(run.world_size))
    living = [rank for rank in numbers if exit_codes.get(rank) is None]
    ask_stacks(run, living)
    until = time.monotonic() + TELL_SECONDS
    while any(_is_about_to_tell(run, rank) for rank in living) and time.monotonic() < until:
        time.sleep(0.02)
    return {rank: doing(run, rank, exit_codes.get(rank)) for rank in numbers}


def _is_about_to_tell(run: Run, rank: int) -> bool:
    """Return whether a rank is ending and has not yet recorded how."""
    if run.facts(rank).get("phase") != ENDING or run.trace(rank).has_returned():
        return False
    return run.lives(rank) and not RankFiles(run.folder, rank).failure.exists()


def doing(run: Run, rank: int, exit_code: int | None) -> str:
    """Say what a rank was doing when it was last asked, or how it ended."""
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
    if run.is_job:  # its stack cannot be asked for from here
        stack = record.get("stack", [])
    if not stack and facts and not run.lives(rank):
        return "had ended"  # a program ends its other ranks when one has failed
    stack = stack or record.get("stack", [])  # on a busy machine it may have had no time to answer
    if _is_in_the_learners_code(stack):
        return _in_the_learners_code(run, rank, stack, record)
    phase = facts.get("phase", STARTING)
    if phase != AT_WORK:
        return "was ending" if phase == ENDING else "was starting"
    if not stack or is_ours(stack[0][0]):
        return "was at work"
    return f"was in {stack[0][2]}"


def stalled(run: Run) -> str:
    """Return a warning while ranks are stuck: which, where and for how long; empty while all progress."""
    records = {rank: record_of(run, rank) for rank in range(run.world_size)}
    now = {rank: run.clock(rank) for rank in records}
    still = {
        rank: record
        for rank, record in records.items()
        if now[rank] - record.get("since", now[rank]) >= WARN_SECONDS and not run.trace(rank).has_returned()
    }
    ending = {rank: seconds for rank in records if (seconds := _lingers(run, rank)) >= WARN_SECONDS}
    if not all(run.trace(rank).has_returned() for rank in records):  # the others are still at work
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
    """Return for how many seconds a rank's process has outlived its function's return; 0 if it has not.

    Something keeps the process: a thread that it waits for, an `atexit` function, or Python's own shutdown.
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
    """Return the function that the learner's line called; None if that line is busy itself."""
    inner = []
    for place in stack:
        if is_learners(place[0]):
            return next((name for _, _, name in reversed(inner) if name not in WRAPPERS), None)
        inner.append(place)
    return None


# --- whom they wait for -----------------------------------------------------------------------------------


def for_whom(run: Run, exit_codes: dict[Any, int | None]) -> str:
    """Ask live ranks where they are now, at the end of a run, and return `odd_one_out`."""
    living = [rank for rank in range(run.world_size) if exit_codes.get(rank) is None]
    waiting = {rank for rank in living if run.lives(rank)}
    with contextlib.suppress(OSError):  # the folder may have been removed
        (run.folder / ASKED).touch()
        until = time.monotonic() + (ASK_SECONDS_FAR if run.is_job else ASK_SECONDS)
        while waiting and time.monotonic() < until:
            time.sleep(0.01)
            waiting = {rank for rank in waiting if not record_of(run, rank).get("asked")}
    ask_stacks(run, waiting)  # even a rank whose thread cannot run can write its stack
    return odd_one_out(run)


def odd_one_out(run: Run, tense: Tense = PAST) -> str:
    """Say in one line whom the waiting ranks wait for; empty if that cannot be told.

    Ranks in ``init_process_group`` wait for those that are not. Otherwise look at the first collective of a
    group in which a rank waits: all ranks number them alike, so another rank of the group has called
    something else under that number, or has not got that far.
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
    """Say which ranks disagree on a collective: they called different ones, or with other tensor sizes."""
    calls = {
        rank: call
        for rank, each in ranks.items()
        for call in (each.last, each.waits_in)  # a rank that got through it all the same counts, too
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
    """Say which ranks of a group have not yet reached a collective in which others wait."""
    waiting = [r for r, each in ranks.items() if each.waits_in and each.waits_in[:2] == (group, number)]
    name = ranks[waiting[0]].waits_in.name
    known = {rank: each.called for rank, each in ranks.items() if each.called is not None}
    # a rank that could not answer, but is in that function according to its stack, waits as well
    waiting += [rank for rank in ranks if rank not in known and called_in(ranks[rank].stack) == name]
    members = [rank for rank, called in known.items() if of_everyone(group) or group in called]
    late = [rank for rank in members if known[rank].get(group, 0) < number]
    return _late(ranks, late, f"{name} (collective {number})", sorted(waiting), tense) if late else ""


def _standing(run: Run, rank: int) -> Standing:
    returned = run.trace(rank).has_returned()
    record = record_of(run, rank)
    if (run.folder / ASKED).exists() and not record.get("asked") and run.lives(rank):
        # it could not answer, and what it wrote before may be out of date
        return Standing(python_stack(run, rank), returned=returned)
    if not record:
        return Standing(returned=returned)
    pending, last = ([Call(**call) for call in record.get(which, [])[:1]] for which in ("pending", "last"))
    failed = RankFiles(run.folder, rank).failure.exists()  # in its last one, which has ended with the failure
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
