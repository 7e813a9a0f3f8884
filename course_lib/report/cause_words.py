"""Say in one line why ranks wait: the first line of a report on a hang."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..frames import Place
from .facts import Absence, Apart, Call, Cause, Circle, Mismatch, OtherGroups, RankState
from .mismatch import NEW_GROUP, PARTNER

MOST_RANKS = 8  # that a sentence, or the dashboard's warning, names one by one
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32"}
SAME_GROUPS = "every rank has to call new_group for every group, in the same order"
# What a rank waits for outside of collectives, by the functions that its line has called, and the call itself
WAITS_FOR = [
    (
        r"distributed_c10d\.py:init_process_group",
        "ranks that never joined under the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
    ),
    (r"subprocess\.py:|popen_\w+\.py:wait", "a process that has not ended"),
    (r"threading\.py:join", "a thread that has not ended"),
    (r"dataloader\.py:", "a batch of its DataLoader's workers"),
    (r"_base\.py:result", "a result that is not there"),
    (r"\bpool\.py:", "a result of its pool's workers"),
    (r"queues?\.py:get|\.get\(\)", "an item that nobody has put into the queue"),
    (r"queues?\.py:put", "room in a queue that nobody takes from"),
    (r"threading\.py:wait|synchronize\.py:wait", "an event or a condition that nobody has signalled"),
    (r"\.acquire\(|^(?!.*:__exit__).*\| with [^(]+$|\b(flock|lockf)\(", "a lock that has not been released"),
    (r"\.wait\(\[|\.get\(|store\.py:", "a key that no rank has set in the store"),
    (r"base_events\.py:", "a task of its asyncio loop"),
    (
        r"\.(wait|synchronize)\(",
        "an operation that has not finished, such as a message whose other rank never came",
    ),
    (r"\b(input|breakpoint)\(", "a keyboard, which a rank does not have"),
    (r"\.(accept|recv\w*|connect|read\w*|select|poll)\(|\bopen\(|socket\.py:", "another process or a file"),
]


class Tense(NamedTuple):
    is_: str
    are: str
    waits: str
    wait: str
    holds: str
    hold: str
    has: str
    have: str
    never: str  # "rank 1 never called"
    they_never: str


PAST = Tense("was", "were", "waited", "waited", "held", "held", "had", "had", "never", "never")
# They may just be slow
PRESENT = Tense("is", "are", "waits", "wait", "holds", "hold", "has", "have", "has not", "have not")


def cause_text(cause: Cause | None, states: Sequence[RankState], tense: Tense = PAST) -> str:
    """Say why ranks wait: for whom or, if they wait for no rank, for what; empty if that is not known."""
    if cause is None:
        return _own_waits(states, tense, slept=True)
    absent = [state for state in states if isinstance(cause, Absence) and state.rank in cause.absent]
    return "; ".join(filter(None, [mismatch_text(cause, tense), _own_waits(absent, tense)]))


def mismatch_text(cause: Cause, tense: Tense = PAST) -> str:
    """Say in what the ranks' calls differ, or which rank is missing where others wait."""
    if isinstance(cause, OtherGroups):
        groups = _by_text({rank: _list(ranks) for rank, ranks in cause.ranks.items()})
        return f"the ranks made different groups: new_group {cause.name} is {groups}; {SAME_GROUPS}"
    if isinstance(cause, Apart):
        told = [
            _by_text({r: f"{name} is {' instead of '.join(filter(None, two))}" for r, two in its.items()})
            for name, its in cause.joins.items()
        ]
        return f"the ranks do not meet in init_process_group: {'; '.join(told)}"
    if isinstance(cause, Mismatch):
        return f"the ranks do not match: collective {cause.number}{_of(cause.group)} is {_differences(cause)}"
    if isinstance(cause, Circle):
        return _around(cause, tense)
    one = len(cause.absent) == 1
    returned = ("; it has returned" if one else "; they have returned") if cause.returned else ""
    further = [
        f"; {ranks_text(each.waiting)} {_wait(each.waiting, tense)} for {ranks_text(each.absent)} "
        f"in {_place(each)}"
        for each in cause.further
    ]
    never = tense.never if one else tense.they_never
    further.append(_lines(cause.apart))
    return f"{ranks_text(cause.absent)} {never} {_did(cause, tense)}{returned}{''.join(further)}"


def _lines(places: Mapping[int, Place]) -> str:
    """Say where ranks called the last collective before: one of them may have called another one, too."""
    many = len({file for file, _, _ in places.values()}) > 1
    named = {rank: f"{os.path.basename(file)}, " * many for rank, (file, _, _) in places.items()}
    texts = {rank: f"at {named[rank]}line {line}" for rank, (_, line, _) in places.items()}
    return f"; the last that they all called was {_by_text(texts)}" if texts else ""


def _around(cause: Circle, tense: Tense) -> str:
    calls = cause.calls
    # two groups of the same ranks differ only in their names
    named = len({tuple(call.ranks) for call in calls.values()}) < len({call.group for call in calls.values()})
    waits = [
        f"rank {rank} in {_call_text(call, named, its=True)} for rank {cause.waits_for[rank]}"
        for rank, call in calls.items()
    ]
    order = f"; {SAME_GROUPS}" if any(call.name == NEW_GROUP for call in calls.values()) else ""
    return f"{ranks_text(calls)} {tense.wait} for each other: {', '.join(waits)}{order}"


def _did(cause: Absence, tense: Tense) -> str:
    """Say what absent ranks have not done, and who waits for it."""
    waiting, wait = ranks_text(cause.waiting), _wait(cause.waiting, tense)
    if cause.function == "recv":
        return f"sent what {waiting} {wait} for in recv"
    if cause.function == "send":
        return f"received what {waiting} sent, and {waiting} {wait} in send"
    return f"called {_place(cause)}, in which {waiting} {wait}"


def _place(cause: Absence) -> str:
    return _call_text(Call(cause.function, number=cause.number, ranks=cause.group))


def _call_text(call: Call, named: bool = False, its: bool = False) -> str:
    """Name a call with its group; ``named``: and torch's name of it, ``its``: the number of a new one."""
    if call.name == NEW_GROUP:
        return f"new_group({_list(call.ranks)})" + (f", its group {call.number}," if its else "")
    if call.name in PARTNER:
        return f"{call.name} (tag {call.number})" if call.number else call.name
    number = "" if call.number is None else f" (collective {call.number})"
    return f"{call.name}{_of(call.ranks, call.group if named else '')}{number}"


def _of(ranks: Sequence[int], name: str = "") -> str:
    return f" of group {name}{' = ' * bool(name)}{_list(ranks)}" if ranks else ""


def _list(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"[{', '.join(map(str, ranks[:MOST_RANKS]))}{more}]"


def _differences(cause: Mismatch) -> str:
    """Say which ranks called what, with as much about each call as tells them apart."""
    calls = cause.calls
    names = {rank: call.name for rank, call in calls.items()}
    roots = {rank: _with_root(call) for rank, call in calls.items() if call.root is not None}
    shapes = {rank: _with_shapes(call) for rank, call in calls.items()}
    typed = {rank: f"{shapes[rank]} of {', '.join(_dtypes(call))}" for rank, call in calls.items()}
    different = (texts for texts in (names, shapes, roots) if len({*texts.values()}) > 1)
    return _by_text(next(different, typed))


def _with_root(call: Call) -> str:
    return f"{call.name} {'from' if call.name in ('broadcast', 'scatter') else 'to'} rank {call.root}"


def _with_shapes(call: Call) -> str:
    if not call.sizes:
        return f"{call.name} of no tensor"
    return f"{call.name} of shape{'s' * (len(call.sizes) > 1)} {', '.join(map(str, call.sizes))}"


def _dtypes(call: Call) -> list[str]:
    return [DTYPES.get(dtype, dtype.lower()) for dtype in call.dtypes]


# --- waits for no rank ------------------------------------------------------------------------------------


def _own_waits(states: Iterable[RankState], tense: Tense, slept: bool = False) -> str:
    """Say what ranks wait for that is no other rank; ``slept``: also that they only stand there."""
    ranks = defaultdict(list)
    for state in states:
        ranks[_own_wait(state, slept)].append(state.rank)
    return "; ".join(
        f"{ranks_text(alike)} {getattr(tense, verbs[len(alike) > 1])} {what}"
        for (verbs, what), alike in ranks.items()
        if what
    )


def _own_wait(state: RankState, slept: bool) -> tuple[tuple[str, str], str]:
    """Return the verb, for one rank and for several, and what follows it; nothing if it waits for ranks."""
    if state.silent is not None and state.position:
        held = f"Python's interpreter lock for {state.silent:.0f} s, so that no other thread could run"
        return ("holds", "hold"), held
    if state.silent is not None:  # a stopped process does not write its stack
        why = "it is stopped, or C code holds Python's interpreter lock"
        return ("has", "have"), f"not run for {state.silent:.0f} s: {why}"
    if not state.own_call or state.waits_in:
        return ("", ""), ""
    if state.lock_file:
        holder = state.lock_holder
        who = f"which {ranks_text([holder]) if isinstance(holder, int) else holder} holds"
        if holder is None:
            who = "which no process here has locked: if it was left behind, delete it"
        return ("waits", "wait"), f"for the lock {state.lock_file}, {who}: {state.own_call}"
    inner = " ".join(f"{os.path.basename(file)}:{function}" for file, _, function in state.stack[:8])
    searched = f"{inner} | {state.own_call}"
    what = next((what for pattern, what in WAITS_FOR if re.search(pattern, searched)), "")
    if what:
        return ("waits", "wait"), f"for {what}: {state.own_call}"
    return ("is_", "are"), f"in {state.own_call}" if slept else ""


# --- ranks ------------------------------------------------------------------------------------------------


def _by_text(texts: Mapping[int, str]) -> str:
    ranks = defaultdict(list)
    for rank, text in texts.items():
        ranks[text].append(rank)
    return " and ".join(f"{text} on {ranks_text(numbers)}" for text, numbers in ranks.items())


def _wait(waiting: Sequence[int], tense: Tense) -> str:
    return tense.waits if len(waiting) == 1 else tense.wait


def ranks_text(numbers: Iterable[int]) -> str:
    """Name ranks, of many the first: ``"rank 2"``, ``"ranks 0, 1"``."""
    numbers = list(numbers)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:MOST_RANKS]))
    return f"ranks {shown}" + (f" and {len(numbers) - MOST_RANKS} more" if len(numbers) > MOST_RANKS else "")
