"""Measurements in turns, so that other work on the machine affects all alike; and the table of them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Take = Callable[[], float]  # does the work once and returns what was measured
PAUSE = 0.3  # seconds for what the last contender left behind to end
HEADINGS = ("", "median", "least – most", "ratio", "target")


def interleaved(takes: Mapping[str, Take], rounds: int) -> dict[str, list[float]]:
    """Measure each contender once in each round, in an order that rotates."""
    names = list(takes)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        first = i % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            taken[name].append(takes[name]())
    return taken


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios of two measurements in the same round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


@dataclass
class Section:
    """A part of the table: a title, and rows with a cell for each heading."""

    title: str
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, what: str, taken: Sequence[float], form: str, beside: str = "") -> None:
        """Add a contender: the median and the span of its measurements, formatted, and a ratio."""
        median, span = statistics.median(taken), f"{form.format(min(taken))} – {form.format(max(taken))}"
        self.rows.append((what, form.format(median), span, beside, ""))

    def judge(self, what: str, found: float, *, most: float) -> None:
        """Add a ratio, and whether it is at most its target."""
        met = "met" if found <= most else "NOT MET"
        self.rows.append((what, "", "", f"{found:.3f}", f"at most {most:.3g}: {met}"))


def text_of(sections: Sequence[Section]) -> str:
    """Return all sections as text, under one row of headings."""
    rows = [HEADINGS, *(row for section in sections for row in section.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]

    def line(row: tuple[str, ...]) -> str:
        first, *others, last = row
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:-1], strict=True)]
        return "  ".join([f"  {first:{widths[0]}}", *cells, last]).rstrip()

    lines = [line(HEADINGS)]
    for section in sections:
        lines += ["", section.title, *map(line, section.rows)]
    return "\n".join(lines)
