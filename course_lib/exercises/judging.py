"""What judges share: they read reports, compare them with what is right, and choose hints."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .question import Ask, Finding, Judge, Refused

Faults = Iterator[tuple[str, str]]  # what was seen, and a hint
SizedJudge = Callable[[Ask, random.Random, int], Iterator[Finding]]  # with a world size


def read(text: str) -> Any:
    """Read what `in_rank.work.run_work` wrote: untrusted, but as JSON it can only become data.

    Raises
    ------
    Refused
        The work refused the answer, or `run_work` did not write the text.
    """
    try:
        report = json.loads(text)
        refused = report.get("refused")
        if refused is None:
            return report["seen"]
    except (ValueError, KeyError, AttributeError, RecursionError):
        refused = "the check's report cannot be read"
    raise Refused(str(refused))


def with_two_world_sizes(*first: int) -> Callable[[SizedJudge], Judge]:
    """Decorate a judge that takes a world size to run with two: an answer may have one of them hard-coded.

    Nothing counts until the judge has run with both, since an answer may fail, or hang, with only the second.
    A fault with both is shown as it is with the first, which is one of ``first``, or 2 to 5. They are never 2
    and 3, for which two hand-written steps would be enough.
    """

    def decorated(judge: SizedJudge) -> Judge:
        @functools.wraps(judge)
        def both(ask: Ask, rng: random.Random) -> Iterator[Finding]:
            one = rng.choice(first or (2, 3, 4, 5))
            other = rng.choice([size for size in range(2, 6) if size != one and max(size, one) > 3])
            yield from [finding for ranks in (one, other) for finding in judge(ask, rng, ranks)]

        return both

    return decorated


def by_call(results: Iterable[list[Any]]) -> list[list[Any]]:
    """Turn reports by rank and call into reports by call and rank."""
    return [list(of_call) for of_call in zip(*results, strict=True)]


def far(a: Any, b: Any) -> float:
    """Return the largest difference of two tensors or (nested) lists; inf for a NaN or different shapes."""
    try:
        a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    except (TypeError, ValueError, OverflowError):  # no numbers, uneven lengths, an int too large for a float
        return math.inf
    if a.shape != b.shape:
        return math.inf
    return (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if a.numel() else 0.0


def first_wrong(right: Iterable[bool]) -> int:
    """Return the rank to show: the first one that is not right, or 0 if all are."""
    return next((rank for rank, is_right in enumerate(right) if not is_right), 0)


def furthest(gaps: Iterable[float]) -> tuple[int, float]:
    """Return the rank with the largest gap (the first of several), and that gap."""
    gaps = list(gaps)
    return gaps.index(max(gaps)), max(gaps)


def place_of_furthest(numbers: Any, right: Tensor | float) -> int:
    """Return the index, in the flat tensor, of the number furthest from the right one; a NaN is furthest."""
    gaps = torch.as_tensor(numbers, dtype=torch.float64) - right
    return int(gaps.abs().nan_to_num(math.inf).argmax())


def in_digits(*numbers: float) -> list[str]:
    """Format numbers with enough digits to tell them apart, and at least four."""
    for digits in (4, 8, 12, 17):
        words = [f"{number:.{digits}g}" for number in numbers]
        if len(set(words)) == len(set(numbers)):
            break
    return words


def nearest(value: Any, *known: tuple[Any, str], otherwise: str, within: float) -> str:
    """Return the hint of the first known wrong value that equals the answer's, or ``otherwise``."""
    return next((hint for wrong, hint in known if far(value, wrong) < within), otherwise)


def first_fault(what: str, faults: Faults) -> Finding:
    """Return a property's finding: its first fault, or that it holds."""
    for seen, hint in faults:
        return Finding(what, False, seen, hint)
    return Finding(what, True)
