"""`divergence`: which ranks differ in tensors that should be the same on all, in which ones, since when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..record.trace import Check
from .cause_words import ranks_text

if TYPE_CHECKING:
    from ..run.run import Run

LATEST = 1 << 10  # rows of each rank, and four checks, to read first: ranks that differ stay different


@dataclass(frozen=True)
class Divergence:
    """The first difference between ranks in tensors that should be the same on all."""

    tensors: list[str]  # those that differ, in the order of the model
    groups: list[list[int]]  # ranks that hold the same, the largest group first
    check: Check  # when they were first seen to differ: after this ``step`` of this pass (``number``)
    equal: Check | None  # when they were last seen to be equal before that; None if they never were

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - 1} more" if self.tensors[1:] else ""
        return f"the ranks have differed {self._since()}: in {self.tensors[0]}{more}; {self._who()}"

    def _since(self) -> str:
        before, after = self.equal, self.check
        if not before:
            return "from the start" if after.step == 0 else f"since {_place(after)} or before"
        if (before.number, before.step + 1) == (after.number, after.step):
            return f"since {_place(after)}"
        return f"since a step between {_place(before)} and {_place(after)}"

    def _who(self) -> str:
        first, *others = self.groups
        ranks = sum(map(len, self.groups))
        if ranks == 2:
            return "of two ranks, nobody can tell which one is wrong"
        if 2 * len(first) > ranks:
            odd = sorted(rank for group in others for rank in group)
            return f"{ranks_text(odd)} {'is the odd one' if len(odd) == 1 else 'are the odd ones'} out"
        if len(first) == 1:
            return "no two ranks hold the same"
        return " and ".join(map(ranks_text, self.groups)) + " each hold something else"


def _place(check: Check) -> str:
    step = f"step {check.step}" if check.step else "the start"
    return step + (f" of pass {check.number}" if check.number > 1 else "")


def divergence(run: Run) -> Divergence | None:
    """Return the first difference between ranks in what ``track(loader, same=…)`` compares (lesson 06).

    Printed, it says since which step, in which tensor, and which rank is the odd one out. Return None if all
    ranks were equal whenever they were compared.
    """
    run = run.snapshot()
    return _first_difference(run, None) if run.record.is_over or _first_difference(run, LATEST) else None


def _first_difference(run: Run, last: int | None) -> Divergence | None:
    by_rank, equal = [], None
    for trace in run.traces():
        if not (names := trace.tensors):
            return None
        checks = trace.fingerprints(None if last is None else last + 4 * len(names))
        by_rank.append((names, checks))
    for check in sorted(set.intersection(*(set(checks) for _, checks in by_rank))) if by_rank else ():
        values = [
            {names[int(tensor)]: value for tensor, value in checks[check] if tensor < len(names)}
            for names, checks in by_rank
        ]
        equal = equal if equal and equal.attempt == check.attempt else None
        first = values[0].items()
        tensors = [name for name, value in first if any(each.get(name, value) != value for each in values)]
        if not tensors:
            equal = check
            continue
        equal_ranks = defaultdict[tuple[float | None, ...], list[int]](list)
        for rank, each in enumerate(values):
            equal_ranks[tuple(each.get(name) for name in tensors)].append(rank)
        return Divergence(tensors, sorted(equal_ranks.values(), key=len, reverse=True), check, equal)
    return None
