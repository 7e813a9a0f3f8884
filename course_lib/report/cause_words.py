"""Say in one line why ranks wait: the first line of a report on a hang."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..learner_code import Place
from .facts import Absence, Apart, Call, Cause, Circle, Mismatch, OtherGroups, RankState
from .wait_cause import NEW_GROUP, PARTNER

MOST_RANKS = 8  # that a sentence, or the dashboard's warning, names one by one
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32"}
SAME_GROUPS = "every rank has to call new_group for every group, in the same order"
JOINS = "ranks that never joined under the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
UNFINISHED = "an operation that has not finished, such as a message whose other rank never came"
# What a rank waits for outside of collectives, by the functions that its line has called, and the call itself
WAITS_FOR = [
    (r"distributed_c10d\.py:init_process_group", JOINS),
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
    (r"\.(wait|synchronize)\(", UNFINISHED),
    (r"\b(input|breakpoint)\(", "a keyboard, which a rank does not have"),
    (r"\.(accept|recv\w*|connect|read\w*|select|poll)\(|\bopen\(|socket\.py:", "another process or a file"),
]
Tense = Mapping[str, tuple[str, str]]  # by word, the form for one rank and that for several
PAST: Tense = {
    "is": ("was", "were"),
    "wait": ("waited", "waited"),
    "hold": ("held", "held"),
    "have": ("had", "had"),
    "never": ("never", "never"),
}
PRESENT: Tense = {
    "is": ("is", "are"),
    "wait": ("waits", "wait"),
    "hold": ("holds", "hold"),
    "have": ("has", "have"),
    "never": ("has not", "have not"),  # they may just be slow
}


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
        differences = []
        for name, by_rank in cause.joins.items():
            values = {rank: " instead of ".join(filter(None, two)) for rank, two in by_rank.items()}
            differences.append(_by_text({rank: f"{name} is {value}" for rank, value in values.items()}))
        return f"the ranks do not meet in init_process_group: {'; '.join(differences)}"
    if isinstance(cause, Mismatch):
        return f"the ranks do not match: collective {cause.number}{_of(cause.group)} is {_differences(cause)}"
    if isinstance(cause, Circle):
        return _around(cause, tense)
    text = f"{_with_verb(cause.absent, 'never', tense)} {_did(cause, tense)}"
    if cause.returned:
        text += "; it has returned" if len(cause.absent) == 1 else "; they have returned"
    for each in cause.further:
        text += f"; {_with_verb(each.waiting, 'wait', tense)} for {ranks_text(each.absent)} in {_place(each)}"
    return text + _lines(cause.apart)


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
    return f"{_with_verb(calls, 'wait', tense)} for each other: {', '.join(waits)}{order}"


def _did(cause: Absence, tense: Tense) -> str:
    """Say what absent ranks have not done, and who waits for it."""
    wait = _with_verb(cause.waiting, "wait", tense)
    if cause.function == "recv":
        return f"sent what {wait} for in recv"
    if cause.function == "send":
        return f"received what {ranks_text(cause.waiting)} sent, and {wait} in send"
    return f"called {_place(cause)}, in which {wait}"


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
    typed = {rank: f"{shapes[rank]} of {_dtypes(call)}" for rank, call in calls.items()}
    different = (texts for texts in (names, shapes, roots) if len({*texts.values()}) > 1)
    return _by_text(next(different, typed))


def _with_root(call: Call) -> str:
    return f"{call.name} {'from' if call.name in ('broadcast', 'scatter') else 'to'} rank {call.root}"


def _with_shapes(call: Call) -> str:
    if not call.sizes:
        return f"{call.name} of no tensor"
    return f"{call.name} of shape{'s' * (len(call.sizes) > 1)} {', '.join(map(str, call.sizes))}"


def _dtypes(call: Call) -> str:
    return ", ".join(DTYPES.get(dtype, dtype.lower()) for dtype in call.dtypes)


# --- waits for no rank ------------------------------------------------------------------------------------


def _own_waits(states: Iterable[RankState], tense: Tense, slept: bool = False) -> str:
    """Say what ranks wait for, if for no other rank; ``slept``: also where they just stand."""
    ranks = defaultdict(list)
    for state in states:
        ranks[_own_wait(state, slept)].append(state.rank)
    return "; ".join(f"{_with_verb(who, verb, tense)} {what}" for (verb, what), who in ranks.items() if what)


def _own_wait(state: RankState, slept: bool) -> tuple[str, str]:
    """Return the verb and what follows it; nothing if it waits for ranks."""
    if state.silent is not None and state.position:
        held = f"Python's interpreter lock for {state.silent:.0f} s, so that no other thread could run"
        return "hold", held
    if state.silent is not None:  # a stopped process does not write its stack
        why = "it is stopped, or C code holds Python's interpreter lock"
        return "have", f"not run for {state.silent:.0f} s: {why}"
    if not state.own_call or state.waits_in:
        return "", ""
    if state.lock_file:
        holder = state.lock_holder
        who = f"which {ranks_text([holder]) if isinstance(holder, int) else holder} holds"
        if holder is None:
            who = "which no process here has locked: if it was left behind, delete it"
        return "wait", f"for the lock {state.lock_file}, {who}: {state.own_call}"
    inner = " ".join(f"{os.path.basename(file)}:{function}" for file, _, function in state.stack[:8])
    searched = f"{inner} | {state.own_call}"
    what = next((what for pattern, what in WAITS_FOR if re.search(pattern, searched)), "")
    if what:
        return "wait", f"for {what}: {state.own_call}"
    return "is", f"in {state.own_call}" if slept else ""


# --- ranks ------------------------------------------------------------------------------------------------


def _by_text(texts: Mapping[int, str]) -> str:
    ranks = defaultdict(list)
    for rank, text in texts.items():
        ranks[text].append(rank)
    return " and ".join(f"{text} on {ranks_text(numbers)}" for text, numbers in ranks.items())


def _with_verb(ranks: Collection[int], verb: str, tense: Tense) -> str:
    return f"{ranks_text(ranks)} {tense[verb][len(ranks) > 1]}"


def ranks_text(numbers: Iterable[int]) -> str:
    """Name ranks, or the first of many: ``"rank 2"``, ``"ranks 0, 1"``."""
    numbers = list(numbers)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {_list(numbers)[1:-1]}"
