"""Infer from the values alone which ranks each result of a collective came from (lesson 05)."""

from __future__ import annotations

import itertools
import math
from functools import cached_property

import numpy as np

EXACT, SINGLE = 1e-12, 1e-6  # how far a value may be from its explanation, as a fraction of the terms

Held = list[list[float]]  # one rank's values, in groups (the tensors of a list)
Origin = frozenset[int]  # the ranks that a value came from


def origins(before: list[Held], after: list[Held], rounding: float = SINGLE) -> list[list[list[Origin]]]:
    """Find, for each value after, the ranks whose values before are in it: copied, summed or averaged."""
    known = _Known([[value for group in held for value in group] for held in before], rounding)
    return [
        [
            [known.origin(rank, place, value) for place, value in enumerate(group, offset)]
            for offset, group in zip(_offsets(held), held, strict=True)
        ]
        for rank, held in enumerate(after)
    ]


def _offsets(held: Held) -> list[int]:
    return [0, *itertools.accumulate(map(len, held))][: len(held)]


class _Known:
    """The ranks' values before, and all sums that can be made of them."""

    def __init__(self, flat: list[list[float]], rounding: float) -> None:
        self.flat, self.rounding = flat, rounding

    def origin(self, rank: int, place: int, value: float) -> Origin:
        """Return the first explanation that fits: unchanged, copied, summed at one place, averaged there."""
        for tolerance in (EXACT, SINGLE):  # exact first: to SINGLE, 10,000,000 and 10,000,001 are equal
            origin = self._copied(rank, place, value, tolerance) or self._summed(place, value, tolerance)
            if origin:
                return origin
        return self._summed(place, value, self.rounding) if self.rounding > SINGLE else frozenset()

    def _copied(self, rank: int, place: int, value: float, tolerance: float) -> Origin:
        others = [(rank - distance) % len(self.flat) for distance in range(len(self.flat))]  # as on a ring
        for at_place in (True, False):
            for r in others:
                for p, v in enumerate(self.flat[r]):
                    if (not at_place or p == place) and _equal(value, v, tolerance):
                        return frozenset({r})
        return frozenset()

    def _summed(self, place: int, value: float, tolerance: float) -> Origin:
        choices, counts, totals, sizes = self._sums
        for divide in (1.0, counts):
            for places in (slice(place, place + 1), slice(None)):
                away = np.abs(value - totals[places] / divide)
                away = np.where(away <= tolerance * sizes[places] / divide, away, np.inf)
                if away.size and np.isfinite(away.min()):
                    return choices[int(away.argmin()) % len(choices)]
        return frozenset()

    @cached_property
    def _sums(self) -> tuple[list[Origin], np.ndarray, np.ndarray, np.ndarray]:
        """All choices of ranks, largest first; their sizes; by place, their sums and sums of magnitudes."""
        ranks, places = len(self.flat), max(map(len, self.flat), default=0)
        values = np.full((places, ranks), np.nan)  # a sum with a missing value is missing
        for rank, held in enumerate(self.flat):
            values[: len(held), rank] = held
        values[~np.isfinite(values)] = np.nan
        choices = [c for size in range(ranks, 1, -1) for c in itertools.combinations(range(ranks), size)]
        totals, sizes = np.empty((2, places, len(choices)))
        for i, choice in enumerate(choices):
            totals[:, i] = values[:, choice].sum(axis=1)
            sizes[:, i] = np.abs(values[:, choice]).sum(axis=1)
        return list(map(frozenset, choices)), np.array(list(map(len, choices))), totals, sizes


def _equal(a: float, b: float, tolerance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=tolerance)
