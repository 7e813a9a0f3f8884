"""Say in one line why ranks wait: the first line of a report on a hang."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..record.layout import of_everyone
from .facts import Absence, Apart, Call, Cause, Circle, Mismatch, OtherGroups, RankState
from .wait_cause import NEW_GROUP, PARTNER

MOST_RANKS = 8  # named one by one in a sentence, or in the dashboard's warning
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32"}
SAME_GROUPS = "every rank has to call new_group for every group, in the same order"
JOINS = "ranks that never joined under the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
UNFINISHED = "an operation that has not finished, such as a message whose other rank never came"
# What a rank waits for outside of collectives, by the functions that its line has called or the call itself
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
PAST, PRESENT = 0, 2  # where a tense begins in the forms of a verb
FORMS = {  # for one rank and for several, in the past and in the present
    "is": ("was", "were", "is", "are"),
    "wait": ("waited", "waited", "waits", "wait"),
    "hold": ("held", "held", "holds", "hold"),
    "have": ("had", "had", "has", "have"),
    "never": ("never", "never", "has not", "have not"),  # in the present, they may just be slow
}


def cause_text(cause: Cause | None, states: Sequence[RankState], tense: int = PAST) -> str:
    """Say why ranks wait: for whom or, if they wait for no rank, for what; empty if that is not known."""
    if cause is None:
        return _own_waits(states, tense, idle=True)
    absent = [state for state in states if isinstance(cause, Absence) and state.rank in cause.absent]
    return "; ".join(filter(None, [mismatch_text(cause, tense), _own_waits(absent, tense)]))


def mismatch_text(cause: Cause, tense: int = PAST) -> str:
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
        call = next(iter(cause.calls.values()))
        collective = f"collective {call.number}{_of_group(call)}"
        return f"the ranks do not match: {collective} is {_differences(cause.calls)}"
    return _circle_text(cause, tense) if isinstance(cause, Circle) else _absence_text(cause, tense)


def _absence_text(cause: Absence, tense: int) -> str:
    """Say which ranks have not made a call, who waits in it, and who else waits for these ranks."""
    wait = _with_verb(cause.waiting, "wait", tense)
    missed = {
        "recv": f"sent what {wait} for in recv",
        "send": f"received what {ranks_text(cause.waiting)} sent, and {wait} in send",
    }.get(cause.call.name, f"called {_call_text(cause.call)}, in which {wait}")
    text = f"{_with_verb(cause.absent, 'never', tense)} {missed}"
    if cause.returned:
        text += "; it has returned" if len(cause.absent) == 1 else "; they have returned"
    for each in cause.further:
        wait = _with_verb(each.waiting, "wait", tense)
        text += f"; {wait} for {ranks_text(each.absent)} in {_call_text(each.call)}"
    if cause.apart:  # ranks may have called further collectives
        files = {os.path.basename(file) for file, _, _ in cause.apart.values()}
        where = {
            rank: f"at {f'{os.path.basename(file)}, ' * (len(files) > 1)}line {line}"
            for rank, (file, line, _) in cause.apart.items()
        }
        text += f"; the last that they all called was {_by_text(where)}"
    return text


def _circle_text(cause: Circle, tense: int) -> str:
    ranks, calls = list(cause.calls), cause.calls.values()
    # two groups of the same ranks differ only in their names
    named = len({tuple(_group_of(call)) for call in calls}) < len({call.group for call in calls})
    waits = []
    for call, rank, awaited in zip(calls, ranks, [*ranks[1:], ranks[0]], strict=True):
        number = f", its group {call.number}," if call.name == NEW_GROUP else ""
        waits.append(f"rank {rank} in {_call_text(call, named)}{number} for rank {awaited}")
    order = f"; {SAME_GROUPS}" if any(call.name == NEW_GROUP for call in calls) else ""
    return f"{_with_verb(ranks, 'wait', tense)} for each other: {', '.join(waits)}{order}"


def _call_text(call: Call, named: bool = False) -> str:
    """Name a call with its group and number; ``named``: also with torch's name of the group."""
    if call.name == NEW_GROUP:
        return f"new_group({_list(call.ranks)})"
    if call.name in PARTNER:
        return f"{call.name} (tag {call.number})" if call.number else call.name
    number = "" if call.number is None else f" (collective {call.number})"
    return f"{call.name}{_of_group(call, named)}{number}"


def _of_group(call: Call, named: bool = False) -> str:
    ranks = _group_of(call)
    return f" of group {f'{call.group} = ' * named}{_list(ranks)}" if ranks else ""


def _group_of(call: Call) -> Sequence[int]:
    """Return the ranks of a call's group; none for the default group, which needs no words."""
    return () if of_everyone(call.group) else call.ranks


def _list(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"[{', '.join(map(str, ranks[:MOST_RANKS]))}{more}]"


def _differences(calls: Mapping[int, Call]) -> str:
    """Say which ranks called what, with as much about each call as tells them apart."""
    names, shapes, roots, types = (dict[int, str]() for _ in range(4))
    for rank, call in calls.items():
        sizes, many = ", ".join(map(str, call.sizes)), len(call.sizes) > 1
        names[rank] = call.name
        shapes[rank] = f"{call.name} of " + (f"shape{'s' * many} {sizes}" if sizes else "no tensor")
        types[rank] = f"{shapes[rank]} of {', '.join(DTYPES.get(each, each.lower()) for each in call.dtypes)}"
        if call.root is not None:
            way = "from" if call.name in ("broadcast", "scatter") else "to"
            roots[rank] = f"{call.name} {way} rank {call.root}"
    different = (texts for texts in (names, shapes, roots) if len({*texts.values()}) > 1)
    return _by_text(next(different, types))


def _own_waits(states: Iterable[RankState], tense: int, idle: bool = False) -> str:
    """Say what ranks wait for other than ranks; with ``idle``, name the call if that is unknown."""
    ranks = defaultdict(list)
    for state in states:
        ranks[_own_wait(state, idle)].append(state.rank)
    return "; ".join(f"{_with_verb(who, verb, tense)} {what}" for (verb, what), who in ranks.items() if what)


def _own_wait(state: RankState, idle: bool) -> tuple[str, str]:
    """Return the verb and what follows it; empty if the rank waits for ranks."""
    if state.silent is not None and state.position:
        held = f"Python's interpreter lock for {state.silent:.0f} s, so that no other thread could run"
        return "hold", held
    if state.silent is not None:  # a stopped process does not write its stack
        why = "it is stopped, or C code holds Python's interpreter lock"
        return "have", f"not run for {state.silent:.0f} s: {why}"
    if not state.own_call or state.waits_in:
        return "", ""
    if state.lock_file:
        left = "no process here has locked: if it was left behind, delete it"
        holds = f"{state.lock_holder} holds" if state.lock_holder else left
        what = f"the lock {state.lock_file}, which {holds}"
    else:
        inner = " ".join(f"{os.path.basename(file)}:{function}" for file, _, function in state.stack[:8])
        searched = f"{inner} | {state.own_call}"
        what = next((what for pattern, what in WAITS_FOR if re.search(pattern, searched)), "")
    if what:
        return "wait", f"for {what}: {state.own_call}"
    return "is", f"in {state.own_call}" if idle else ""


def _by_text(texts: Mapping[int, str]) -> str:
    ranks = defaultdict(list)
    for rank, text in texts.items():
        ranks[text].append(rank)
    return " and ".join(f"{text} on {ranks_text(numbers)}" for text, numbers in ranks.items())


def _with_verb(ranks: Collection[int], verb: str, tense: int) -> str:
    return f"{ranks_text(ranks)} {FORMS[verb][tense + (len(ranks) > 1)]}"


def ranks_text(numbers: Iterable[int]) -> str:
    """Name ranks, or the first of many: ``"rank 2"``, ``"ranks 0, 1"``."""
    numbers = list(numbers)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {_list(numbers)[1:-1]}"
