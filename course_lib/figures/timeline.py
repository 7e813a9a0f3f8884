"""`timeline`: draw which process was in which phase, and when, as bars on a common time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .style import COLORS, Picture, figure_with_margins, ink_on, left_of, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHORT = 0.2  # seconds: shorter times are in milliseconds
Bar = tuple[str, str, float, float]


def timeline(
    bars: Iterable[tuple[str | int, str, float, float]],
    title: str,
    since: float = 0.0,
    first: Sequence[str] = (),
) -> Picture:
    """Draw when each process, or rank, was in which phase: one row each, a colour for each phase (lesson 04).

    Each bar is ``(row, phase, start, end)``. A row is a name, or the number of a rank. Times are in seconds
    on one clock, such as ``time.time()`` on one machine; ``since`` is the time that is 0 on the axis. A
    picture of less than 0.2 s counts in milliseconds.

    Rows and phases are in order of first appearance; from the eighth phase on, the colours repeat. Phases in
    ``first`` take the first colours, even if they do not occur, so that related pictures use the same.
    """
    drawn: list[Bar] = [
        (f"rank {row}" if isinstance(row, int) else row, phase, start - since, end - since)
        for row, phase, start, end in bars
    ]
    rows = list(dict.fromkeys(row for row, *_ in drawn))
    phases = list(dict.fromkeys([*first, *(phase for _, phase, *_ in drawn)]))
    begin, end = min(start for *_, start, _ in drawn), max(end for *_, end in drawn)
    short = end - begin < SHORT
    more = 0.2 * ((len(phases) - 1) // 5)  # inches of the legend's further lines
    height = 1.3 + 0.34 * len(rows) + more
    figure, axes = figure_with_margins(8.2, height, left_of(rows), top=0.35, bottom=0.95 + more)
    with styled():
        for number, phase in enumerate(phases):
            if mine := [(rows.index(row), start, end) for row, each, start, end in drawn if each == phase]:
                y, starts, ends = map(np.array, zip(*mine, strict=True))
                look = {"color": COLORS[number % len(COLORS)], "edgecolor": "white", "linewidth": 0.6}
                axes.barh(y, ends - starts, left=starts, height=0.68, label=phase, **look)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(ylim=(len(rows) - 0.45, -0.55), xlim=(min(0.0, begin), end + 0.02 * (end - begin) or 1.0))
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set(title=title, xlabel="milliseconds" if short else "seconds")
        if short:
            axes.xaxis.set_major_formatter(lambda seconds, _: f"{1000 * seconds:g}")
        for columns in range(min(5, len(phases)), 0, -1):
            legend = figure.legend(loc="lower center", ncols=columns)
            if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
                break
            legend.remove()
        _label(axes, drawn, rows, phases)
    scale, form, unit = (1000, ".0f", "ms") if short else (1, ".2f", "s")
    words: dict[str, list[str]] = {row: [] for row in rows}
    for row, phase, start, end in drawn:
        words[row].append(f"{phase} from {scale * start:{form}} to {scale * end:{form}} {unit}")
    alt = "; ".join(f"{row}: {', '.join(stretches)}" for row, stretches in words.items())
    return Picture(figure, f"{title}. {alt}.")


def _label(axes: Axes, bars: list[Bar], rows: list[str], phases: list[str]) -> None:
    """Write each bar's length inside it if there is room."""
    for row, phase, start, end in bars:
        left, right = axes.transData.transform([(start, 0), (end, 0)])[:, 0]
        if right - left < 20:  # pixels: room for no text
            continue
        ink = ink_on(phases.index(phase) % len(COLORS))
        look = {"ha": "center", "va": "center", "fontsize": 8.5, "color": ink}
        words = axes.text((start + end) / 2, rows.index(row), _length(end - start), **look)
        if words.get_window_extent().width > right - left - 4:
            words.remove()


def _length(seconds: float) -> str:
    if seconds < SHORT:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
