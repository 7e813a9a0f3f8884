"""Who waits where, and for whom: what the ranks of a run are doing, while it lasts and at its end.

Two sources: each rank's own record of a standstill (`lookout`), with the collectives that it has called, and
the Python stack that it writes down when it is asked (`stacks`), which works from inside C code, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from ..rank.failure import is_learners, with_source
from .failed import SIGNALS, failure_of
from .stacks import ask_stacks, line_of, python_stack

if TYPE_CHECKING:
    from ..run.run import Run

WARN_SECONDS = 10.0  # after a standstill of so long the dashboard says who waits where
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
Stack = list[tuple[str, int, str]]  # file, line, function; innermost first


def whereabouts(run: Run, exit_codes: dict[Any, int | None]) -> dict[int, str]:
    """What each rank is doing, in words that follow "rank N"; living ranks are asked for their stacks."""
    numbers = list(range(run.world_size))
    ask_stacks(run, [rank for rank in numbers if exit_codes.get(rank) is None])
    return {rank: doing(run, rank, exit_codes.get(rank)) for rank in numbers}


def doing(run: Run, rank: int, exit_code: int | None) -> str:
    """What a rank was doing when it was last asked."""
    if run.has_returned(rank):
        return "had returned"
    if failure := failure_of(run, rank, exit_code):
        if failure.consequence and failure.frames:
            return f"then lost its connection ({line_of(failure.frames[-1])})"
        record = _record(run, rank)
        if failure.what == SIGNALS["SIGTERM"] and _is_in_the_learners_code(record.get("stack", [])):
            return f"{_in_the_learners_code(record['stack'], record)} when it was asked to end"
        return f"then {failure.what.splitlines()[0].removesuffix(' and said')}"
    if exit_code is not None:
        return "had ended"
    stack = python_stack(run, rank)
    if _is_in_the_learners_code(stack):
        return _in_the_learners_code(stack, _record(run, rank))
    ours = [function for file, _, function in stack if Path(__file__).parents[1] in Path(file).parents]
    if {"report_exception", "_save_result", "close"} & set(ours):
        return "was ending"
    if not stack and not psutil.pid_exists(run.facts(rank).get("pid", os.getpid())):
        return "had ended"  # a program ends its other ranks when one has failed
    if ours[:1] == ["_run"] == [stack[0][2]]:
        return "was at work"
    return "was starting" if not stack or ours else f"was in {stack[0][2]}"


def _is_in_the_learners_code(stack: Stack) -> bool:
    return any(is_learners(file) for file, _, _ in stack)


def _in_the_learners_code(stack: Stack, record: dict[str, Any], tense: Tense = PAST) -> str:
    mine = next(i for i, place in enumerate(stack) if is_learners(place[0]))
    called, line = _called(stack), line_of(with_source(*stack[mine]))
    since = record.get("since")
    still = f" for {time.time() - since:.1f} s" if since else ""
    if called is None:
        return f"{tense.is_} at {line}"
    in_distributed = any(DISTRIBUTED in file for file, _, _ in stack[:mine])
    verb = tense.waits if in_distributed or record.get("pending") else tense.is_
    return f"{verb} in {called}{still} ({line})"


def _called(stack: Stack) -> str | None:
    """The function that the learner's line called; None where it is busy itself."""
    inner = []
    for place in stack:
        if is_learners(place[0]):
            return next((name for _, _, name in reversed(inner) if name not in WRAPPERS), None)
        inner.append(place)
    return None


def stalled(run: Run) -> str:
    """A warning while ranks stand still for long: who, for how long, where; empty while all get on."""
    records = {rank: _record(run, rank) for rank in range(run.world_size)}
    now = time.time()
    still = {
        rank: record
        for rank, record in records.items()
        if now - record.get("since", now) >= WARN_SECONDS and not run.has_returned(rank)
    }
    if not still:
        return ""
    lines = [odd_one_out(run, PRESENT)]
    for rank, record in list(still.items())[:MOST_SHOWN]:
        if _is_in_the_learners_code(record["stack"]):
            lines.append(f"rank {rank} {_in_the_learners_code(record['stack'], record, PRESENT)}")
        else:
            lines.append(f"rank {rank} has not moved for {now - record['since']:.1f} s")
    if len(still) > MOST_SHOWN:
        lines.append(f"and {len(still) - MOST_SHOWN} more")
    return "\n".join(line for line in lines if line)


def odd_one_out(run: Run, tense: Tense = PAST) -> str:
    """Whom the waiting ranks wait for, in one line, where that can be told; empty otherwise."""
    records = {rank: _record(run, rank) for rank in range(run.world_size)}
    waiting = {rank: each for rank, each in records.items() if each and not run.has_returned(rank)}
    joining = [r for r, each in waiting.items() if _called(each.get("stack", [])) == "init_process_group"]
    if joining:
        late = [rank for rank in records if rank not in joining]
        return _late(run, late, "init_process_group", joining, tense) if late else ""
    calls: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)  # by group and rank
    for rank, record in waiting.items():
        failed = (run.folder / f"rank-{rank}.failure.json").exists()
        for call in (record["pending"] or (record["last"] if failed else []))[:1]:
            calls[call["group"]][rank] = call
    for group, by_rank in calls.items():
        number = min(call["number"] for call in by_rank.values())
        there = {rank: call for rank, call in by_rank.items() if call["number"] == number}
        over = {  # who got through it all the same
            rank: call
            for rank, record in records.items()
            for call in record.get("last", [])
            if (call["group"], call["number"]) == (group, number)
        }
        names = {rank: call["name"] for rank, call in (over | there).items()}
        if len(set(names.values())) > 1:
            return f"the ranks do not match: collective {number} is {_each(names)}"
        sizes = {r: f"{names[r]} of {_shapes(call['sizes'])}" for r, call in (over | there).items()}
        if len(set(sizes.values())) > 1 and not UNEVEN & set(names.values()):
            return f"the ranks do not match: collective {number} is {_each(sizes)}"
        # only the default group is known to have every rank in it
        members = records if group == "0" else [r for r in records if group in records[r].get("called", {})]
        late = [rank for rank in members if records[rank].get("called", {}).get(group, 0) < number]
        late = [rank for rank in late if records[rank]]  # of the others nothing is known
        if late:
            return _late(run, late, f"{next(iter(names.values()))} (collective {number})", list(there), tense)
    return ""


def _late(run: Run, late: list[int], name: str, waiting: list[int], tense: Tense) -> str:
    returned = [rank for rank in late if run.has_returned(rank)]
    has = ("; it has returned" if len(late) == 1 else "; they have returned") if returned == late else ""
    wait = tense.waits if len(waiting) == 1 else tense.wait
    never = tense.one_never if len(late) == 1 else tense.they_never
    return f"{_ranks(late)} {never} {name}, in which {_ranks(waiting)} {wait}{has}"


def _shapes(sizes: list[list[int]]) -> str:
    return f"shape{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}" if sizes else "no tensor"


def _each(by_rank: dict[int, str]) -> str:
    ranks = defaultdict(list)
    for rank, what in by_rank.items():
        ranks[what].append(rank)
    return " and ".join(f"{what} on {_ranks(who)}" for what, who in ranks.items())


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    return f"ranks {shown}" + (f" and {len(numbers) - MOST_SHOWN} more" if len(numbers) > MOST_SHOWN else "")


def _record(run: Run, rank: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run.folder / f"rank-{rank}.where").read_text())
    return {}
