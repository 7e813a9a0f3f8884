"""The table that the benchmarks end with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

HEADINGS = ("", "median", "least – most", "ratio", "target")


@dataclass
class Section:
    """A part of the table: a title, and rows with a cell for each heading."""

    title: str
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, what: str, taken: Sequence[float], form: str, beside: str = "") -> None:
        """Add a contender: the median and the span of its measurements, formatted, and a ratio."""
        median, span = statistics.median(taken), f"{form.format(min(taken))} – {form.format(max(taken))}"
        self.rows.append((what, form.format(median), span, beside, ""))

    def judge(self, what: str, found: float, *, most: float = math.inf, least: float = 0) -> None:
        """Add a ratio, and whether it meets its target: at most, or at least."""
        target = f"at least {least:.3g}" if least else f"at most {most:.3g}"
        met = "met" if least <= found <= most else "NOT MET"
        self.rows.append((what, "", "", f"{found:.3f}", f"{target}: {met}"))

    def remark(self, text: str) -> None:
        """Add a line of words across the table."""
        self.rows.append((text,))


def text_of(sections: Sequence[Section]) -> str:
    """Return all sections as text, under one row of headings."""
    rows = [HEADINGS, *(row for section in sections for row in section.rows if len(row) > 1)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]

    def line(row: tuple[str, ...]) -> str:
        if len(row) == 1:
            return f"  {row[0]}"
        first, *others, last = row
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:-1], strict=True)]
        return "  ".join([f"  {first:{widths[0]}}", *cells, last]).rstrip()

    lines = [line(HEADINGS)]
    for section in sections:
        lines += ["", section.title, *map(line, section.rows)]
    return "\n".join(lines)
