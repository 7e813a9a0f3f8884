"""Find out why ranks wait: whom they wait for, and in what their calls differ.

All ranks of a process group number its collectives in the same way. So a rank that waits in a collective
waits for ranks of the group that have not reached its number, or have called something else under it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ..record.layout import of_everyone
from ..run.run import Run
from ..tracebacks.learner_code import Place
from .facts import Absence, Apart, Call, Cause, Circle, Mismatch, OtherGroups, RankState

UNEVEN = {"scatter", "all_to_all"}  # collectives that ranks may call with tensors of different sizes
JOIN, NEW_GROUP = "init_process_group", "new_group"
PARTNER = {"recv": "send", "send": "recv"}


def wait_cause_of(states: Sequence[RankState]) -> Cause | None:
    """Return why the waiting ranks wait; None if that cannot be told.

    Ranks in ``init_process_group`` wait for those that have not called it. Otherwise the ranks' groups may
    differ, or their calls in one group. If neither does, some ranks are missing where others wait. A rank
    that itself waits elsewhere is no cause, unless ranks wait in a circle.
    """
    joins = {each.rank: each.joins for each in states if each.phase != "returned" and each.function == JOIN}
    absent = [state for state in states if state.rank not in joins and not state.called]
    if joins and absent:
        return _absence(absent, list(joins), Call(JOIN))
    if differ := _apart(joins):
        return differ
    waits = {state.rank: _with_ranks(state.waits_in, states) for state in states if state.waits_in}
    if cause := other_groups([state.groups for state in states]) or _other_calls(states, waits):
        return cause
    missing = {rank: _missing(rank, call, states, waits) for rank, call in waits.items()}
    return _circle(states, waits, missing) or _first_absence(states, waits, missing)


def apart(run: Run) -> Apart | None:
    """Return the ranks whose group of all ranks is, or was, smaller than the number of ranks launched."""
    launched = run.world_size
    sizes = [trace.facts.get("world") or launched for trace in run.traces()]
    small = {rank: (str(size), str(launched)) for rank, size in enumerate(sizes) if size < launched}
    return Apart({"the world size": small}) if small else None


def _apart(joins: Mapping[int, Mapping[str, Sequence[str]]]) -> Apart | None:
    """Return the settings that keep joining ranks apart: each differs from the launch or between ranks."""
    found = {}
    for name in dict.fromkeys(name for join in joins.values() for name in join):
        by_rank = {rank: (join[name][0], join[name][1]) for rank, join in joins.items() if name in join}
        values = {now for now, _ in by_rank.values()}
        changed = {rank: (now, old) for rank, (now, old) in by_rank.items() if old not in ("", now)}
        if changed or len(values) != (len(by_rank) if name == "RANK" else 1):
            found[name] = changed or {rank: (now, "") for rank, (now, _) in by_rank.items()}
    return Apart(found) if found else None


def _with_ranks(call: Call, states: Sequence[RankState]) -> Call:
    """Add the ranks of the call's group: as a rank has recorded them, or else all that have used it."""
    if call.ranks:
        return call
    if of_everyone(call.group):
        return call._replace(ranks=[state.rank for state in states])
    name = call.group.partition(" ")[0]
    called = [state.rank for state in states if call.group in (state.called or {})]
    recorded = (state.groups[name] for state in states if name in state.groups)
    return call._replace(ranks=next(recorded, called))


def other_groups(groups: Sequence[Mapping[str, Sequence[int]]]) -> OtherGroups | None:
    """Return the first group whose members differ between the ranks that made it; ``groups`` is by rank."""
    made: dict[str, dict[int, Sequence[int]]] = defaultdict(dict)
    for rank, by_name in enumerate(groups):
        for name, ranks in by_name.items():
            if not of_everyone(name):  # a program may have several worlds
                made[name][rank] = ranks
    for name, by_rank in made.items():
        meets = max(map(len, by_rank.values())) > 1  # in a group of one, nobody meets
        if meets and len({*map(tuple, by_rank.values())}) > 1:
            return OtherGroups(name, by_rank)
    return None


def _other_calls(states: Sequence[RankState], waits: Mapping[int, Call]) -> Mismatch | None:
    """Return the first collective on which ranks disagree, in a group in which a rank waits."""
    calls = [(state.rank, call) for state in states for call in state.recent]  # some may be over
    calls += waits.items()
    for group in dict.fromkeys(call.group for call in waits.values() if call.group):
        latest = max(call.number or 0 for call in waits.values() if call.group == group)
        by_number: dict[int, dict[int, Call]] = defaultdict(dict)
        for rank, call in calls:
            if call.group == group and (call.number or 0) <= latest:
                by_number[call.number or 0][rank] = _with_ranks(call, states)
        for _, by_rank in sorted(by_number.items()):
            if _differ(by_rank.values()):
                return Mismatch(by_rank)
    return None


def _differ(calls: Collection[Call]) -> bool:
    names, roots = {call.name for call in calls}, {call.root for call in calls} - {None}
    tensors = {(str(call.sizes), str(call.dtypes)) for call in calls}
    return len(names) > 1 or len(roots) > 1 or (len(tensors) > 1 and not UNEVEN & names)


def _missing(rank: int, call: Call, states: Sequence[RankState], waits: Mapping[int, Call]) -> list[int]:
    """Return the ranks for which a rank waits in a call: those that are known not to have called it."""
    others = [state for state in states if state.rank in call.ranks and state.rank != rank]
    if call.group:
        return [state.rank for state in others if _is_before(state, call)]
    return [state.rank for state in others if not _answers(state, waits.get(state.rank), rank, call)]


def _answers(state: RankState, other: Call | None, rank: int, call: Call) -> bool:
    """Return whether a rank that waits in the ``other`` call meets ``rank``, which waits in this call."""
    if call.name in PARTNER:  # their message is on its way
        partner = Call(PARTNER[call.name], number=call.number)
        return other is not None and rank in other.ranks and other._replace(ranks=()) == partner
    if other == call or call.name != NEW_GROUP:
        return other == call
    same = [name for name, ranks in state.groups.items() if ranks == list(call.ranks)]
    # the rank has made it; a locally synchronized group is not named by a number
    return any(name == str(call.number) or not name.isdigit() for name in same)


def _is_before(state: RankState, call: Call) -> bool:
    """Return whether a rank has not called a collective; if unknown, judge by its silence and its stack."""
    if state.called is None:
        return state.silent is not None and state.function != call.name
    return state.called.get(call.group, 0) < (call.number or 0)


def _circle(
    states: Sequence[RankState], waits: Mapping[int, Call], missing: Mapping[int, list[int]]
) -> Circle | None:
    """Return ranks that stand still: each waits for the next one, and the last for the first."""
    stands = {state.rank for state in states if state.seconds is not None}
    seen = set[int]()

    def around(path: list[int]) -> list[int]:
        seen.add(path[-1])
        for other in missing.get(path[-1], []):
            if other in path:
                return path[path.index(other) :]
            if other in stands - seen and (found := around([*path, other])):
                return found
        return []

    for rank in sorted(stands & missing.keys()):
        if rank not in seen and (circle := around([rank])):
            return Circle({each: waits[each] for each in circle})
    return None


def _first_absence(
    states: Sequence[RankState], waits: Mapping[int, Call], missing: Mapping[int, list[int]]
) -> Absence | None:
    """Return the absence that explains the others: its absent ranks themselves wait for no rank."""
    by_call: dict[tuple[str, int | None, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, call in waits.items():
        if missing[rank]:
            by_call[call.name, call.number, call.group, tuple(call.ranks)].append(rank)
    found = []
    for waiting in by_call.values():
        call, absent = waits[waiting[0]], missing[waiting[0]]
        places = _last_places([each for each in states if each.rank in (*absent, *waiting)], call.group)
        if call.group:  # a rank that could not answer waits, too, if its stack is in that function
            silent = [state for state in states if state.called is None]
            waiting += [state.rank for state in silent if state.function == call.name]
        absence = _absence([each for each in states if each.rank in absent], sorted({*waiting}), call)
        found.append(absence._replace(apart=places))
    if not found:
        return None
    found.sort(key=lambda absence: sum(bool(missing.get(rank)) for rank in absence.absent))
    first, *others = found
    explained, group = {*first.waiting, *first.absent}, (first.call.group, first.call.ranks)
    further = [other for other in others if (other.call.group, other.call.ranks) != group]
    return first._replace(further=[other for other in further if explained & {*other.absent}])


def _last_places(states: Sequence[RankState], group: str) -> dict[int, Place]:
    """Return where each rank called the last collective that all have called, if at different lines."""
    by_rank = {
        state.rank: {call.number or 0: call.place for call in state.recent if call.group == group}
        for state in states
    }
    common = set.intersection(*map(set, by_rank.values()))
    known = {rank: place for rank, places in by_rank.items() if common and (place := places[max(common)])}
    return known if len({tuple(place[:2]) for place in known.values()}) > 1 else {}


def _absence(absent: list[RankState], waiting: list[int], call: Call) -> Absence:
    returned = all(state.phase == "returned" for state in absent)
    return Absence([state.rank for state in absent], waiting, call, returned)
