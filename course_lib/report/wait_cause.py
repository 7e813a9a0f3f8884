"""Find out why ranks wait: whom they wait for, and in what their calls differ.

All ranks of a process group number its collectives alike. So a rank that waits in one waits for those of the
group that have not got that far, or that have called something else under that number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..learner_code import Place
from ..record.layout import of_everyone
from ..run.run import Run
from .facts import Absence, Apart, Call, Cause, Circle, Mismatch, OtherGroups, RankState

UNEVEN = {"scatter", "all_to_all"}  # collectives that ranks may call with tensors of different sizes
JOIN, NEW_GROUP = "init_process_group", "new_group"
PARTNER = {"recv": "send", "send": "recv"}


def wait_cause_of(states: Sequence[RankState]) -> Cause | None:
    """Return why the waiting ranks wait; None if that cannot be told.

    Ranks in ``init_process_group`` wait for those that are not. Otherwise the groups that they made may
    differ, or their calls of one group. If not, some ranks are missing where others wait; those that wait
    elsewhere themselves are no cause, unless they wait in a circle.
    """
    joining = [state.rank for state in states if state.phase != "returned" and state.function == JOIN]
    absent = [state for state in states if state.rank not in joining and not state.called]
    if joining and absent:
        return _absence(absent, joining, Call(JOIN))
    if joining and (differ := _apart({each.rank: each.joins for each in states if each.rank in joining})):
        return differ
    waits = {state.rank: _with_ranks(state.waits_in, states) for state in states if state.waits_in}
    if cause := other_groups([state.groups for state in states]) or _other_calls(states, waits):
        return cause
    missing = {rank: _missing(rank, call, states, waits) for rank, call in waits.items()}
    return _circle(states, waits, missing) or _first_absence(states, waits, missing)


def apart(run: Run) -> Apart | None:
    """Return which ranks are, or were, in a smaller group of all ranks than what was launched."""
    launched = run.world_size
    sizes = [trace.facts.get("world") or launched for trace in run.traces()]
    small = {rank: (str(size), str(launched)) for rank, size in enumerate(sizes) if size < launched}
    return Apart({"the world size": small}) if small else None


def _apart(joins: Mapping[int, Mapping[str, Sequence[str]]]) -> Apart | None:
    found = dict[str, dict[int, tuple[str, str]]]()
    for name in dict.fromkeys(name for join in joins.values() for name in join):
        by_rank = {rank: (join[name][0], join[name][1]) for rank, join in joins.items() if name in join}
        values = {now for now, _ in by_rank.values()}
        differ = {rank: (now, old) for rank, (now, old) in by_rank.items() if old not in ("", now)}
        if not differ and (len(values) < len(by_rank) if name == "RANK" else len(values) > 1):
            differ = {rank: (now, "") for rank, (now, _) in by_rank.items()}
        found |= {name: differ} if differ else {}
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


# --- calls that differ ------------------------------------------------------------------------------------


def other_groups(groups: Sequence[Mapping[str, Sequence[int]]]) -> OtherGroups | None:
    """Return the first group that is not the same on all ranks that made one of its name; given by rank."""
    made: dict[str, dict[int, Sequence[int]]] = {}
    for rank, by_name in enumerate(groups):
        for name, ranks in by_name.items():
            if not of_everyone(name):  # a program may have several worlds
                made.setdefault(name, {})[rank] = ranks
    for name, by_rank in made.items():
        meets = max(map(len, by_rank.values())) > 1  # alone, none meets another
        if meets and len({*map(tuple, by_rank.values())}) > 1:
            return OtherGroups(name, by_rank)
    return None


def _other_calls(states: Sequence[RankState], waits: Mapping[int, Call]) -> Mismatch | None:
    """Return the first collective on which ranks disagree, in a group in which a rank waits."""
    calls = [(state.rank, call) for state in states for call in state.recent]  # over on some, perhaps
    calls += waits.items()
    for group in dict.fromkeys(call.group for call in waits.values() if call.group):
        numbers = {call.number or 0 for call in waits.values() if call.group == group}
        for number in sorted({call.number or 0 for _, call in calls if call.group == group}):
            of_ranks = {rank: call for rank, call in calls if (call.group, call.number) == (group, number)}
            if number <= max(numbers) and _differ(of_ranks.values()):
                call = next(iter(of_ranks.values()))
                return Mismatch(number, of_ranks, _shown(_with_ranks(call, states)).ranks)
    return None


def _differ(calls: Collection[Call]) -> bool:
    names, roots = {call.name for call in calls}, {call.root for call in calls} - {None}
    tensors = {(str(call.sizes), str(call.dtypes)) for call in calls}
    return len(names) > 1 or len(roots) > 1 or (len(tensors) > 1 and not UNEVEN & names)


# --- ranks that are missing -------------------------------------------------------------------------------


def _missing(rank: int, call: Call, states: Sequence[RankState], waits: Mapping[int, Call]) -> list[int]:
    """Return the ranks for which a rank waits in a call: those that are known not to have called it."""
    others = [state for state in states if state.rank in call.ranks and state.rank != rank]
    if call.group:
        return [state.rank for state in others if _is_before(state, call)]

    def answered(state: RankState) -> bool:
        other = waits.get(state.rank)
        if call.name in PARTNER:  # they meet, if the message is on its way
            meets = Call(PARTNER[call.name], number=call.number)
            return other is not None and rank in other.ranks and other._replace(ranks=()) == meets
        return other == call or (call.name == NEW_GROUP and _has_made(state, call))

    return [state.rank for state in others if not answered(state)]


def _has_made(state: RankState, call: Call) -> bool:
    """Return whether a rank has made a new group; a locally synchronized one is not named by a number."""
    same = [name for name, ranks in state.groups.items() if ranks == list(call.ranks)]
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
    path, seen = list[int](), set[int]()
    follows = {rank: [other for other in others if other in stands] for rank, others in missing.items()}

    def walk(rank: int) -> list[int]:
        if rank in path:
            return path[path.index(rank) :]
        if rank in seen:
            return []
        seen.add(rank)
        path.append(rank)
        found = next(filter(None, (walk(other) for other in follows.get(rank, []))), [])
        if not found:
            path.pop()
        return found

    for rank in sorted(stands & follows.keys()):
        if around := walk(rank):
            following = dict(zip(around, [*around[1:], around[0]], strict=True))
            return Circle({each: _shown(waits[each]) for each in around}, following)
    return None


def _first_absence(
    states: Sequence[RankState], waits: Mapping[int, Call], missing: Mapping[int, list[int]]
) -> Absence | None:
    """Return the absence that explains the others: of ranks that do not wait for any rank themselves."""
    by_call: dict[tuple[str, int | None, str, tuple[int, ...]], list[int]] = {}
    for rank, call in waits.items():
        if missing[rank]:
            by_call.setdefault((call.name, call.number, call.group, tuple(call.ranks)), []).append(rank)
    found = []
    for (name, _, group, _), waiting in by_call.items():
        call = waits[waiting[0]]
        absent = [state for state in states if state.rank in missing[waiting[0]]]
        # a rank that could not answer, but is in that function according to its stack, waits as well
        stuck = [state.rank for state in states if group and state.called is None and state.function == name]
        apart = _last_places([*absent, *(state for state in states if state.rank in waiting)], group)
        found.append(_absence(absent, sorted({*waiting, *stuck}), _shown(call))._replace(apart=apart))
    found.sort(key=lambda absence: sum(rank in waits and bool(missing[rank]) for rank in absence.absent))
    if not found:
        return None
    first, *others = found
    further = [other for other in others if other.group != first.group or other.number is None]
    explained = {*first.waiting, *first.absent}
    return first._replace(further=[other for other in further if explained & {*other.absent}])


def _last_places(states: Sequence[RankState], group: str) -> dict[int, Place]:
    """Return where each rank called the last collective that all have called, if at different lines."""
    calls = {it.rank: {call.number or 0: call for call in it.recent if call.group == group} for it in states}
    common = set.intersection(*map(set, calls.values()))
    places = {rank: its[max(common)].place for rank, its in sorted(calls.items()) if common}
    known = {rank: place for rank, place in places.items() if place}
    return known if len({tuple(place[:2]) for place in known.values()}) > 1 else {}


def _absence(absent: list[RankState], waiting: list[int], call: Call) -> Absence:
    returned = all(state.phase == "returned" for state in absent)
    return Absence([state.rank for state in absent], waiting, call.name, call.number, returned, call.ranks)


def _shown(call: Call) -> Call:
    """Leave the ranks of the default group away."""
    return call._replace(ranks=()) if of_everyone(call.group) else call
