"""`timeline`: draw which process was in which phase, and when, as bars on a common time axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .style import COLORS, Picture, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HATCHES = ["", "///", "..."]  # from the eighth phase on, the colours repeat, hatched
ROWS_IN_WORDS = 4  # if there are more rows, the text alternative sums them up
Bar = tuple[str, str, float, float]


def timeline(
    bars: Iterable[tuple[str | int, str, float, float]],
    title: str,
    since: float = 0.0,
    first: Sequence[str] = (),
) -> Picture:
    """Draw when each process, or rank, was in which phase: one row each, a colour for each phase (lesson 04).

    A bar that is wide enough shows its length. Rows and phases are in order of first appearance. A picture of
    less than 0.2 s counts in milliseconds.

    Parameters
    ----------
    bars
        ``(row, phase, start, end)`` for each stretch of time, in seconds on one clock that all rows share
        (``time.time()`` is one, between the processes of a machine; ``time.perf_counter()`` need not be).
        A row is a name, or the number of a rank.
    title
        What there is to see.
    since
        The time on that clock that is 0 on the axis: ``time.time()`` before the start, or 0 if the seconds
        are counted from there already.
    first
        Phases that take the first colours, even if they do not occur, so that related pictures use the same
        ones.

    Raises
    ------
    ValueError
        There is no bar, one is not made of these four items, or one ends before it starts.
    """
    drawn = [_checked(bar, since) for bar in bars]
    if not drawn:
        raise ValueError("timeline needs at least one bar: timeline([('rank 0', 'import', 0.0, 1.5)], …)")
    rows = list(dict.fromkeys(row for row, *_ in drawn))
    phases = list(dict.fromkeys([*first, *(phase for _, phase, *_ in drawn)]))
    figure, (axes,) = new_figure(
        1, width=8.2, height=1.45 + 0.34 * len(rows) + 0.2 * ((len(phases) - 1) // 5)
    )
    with styled():
        for number, phase in enumerate(phases):
            mine = [bar for bar in drawn if bar[1] == phase]
            if not mine:
                continue
            axes.barh(
                [rows.index(row) for row, *_ in mine],
                [end - start for *_, start, end in mine],
                left=[start for *_, start, _ in mine],
                height=0.68,
                color=COLORS[number % len(COLORS)],
                hatch=HATCHES[number // len(COLORS) % len(HATCHES)],
                edgecolor="white",
                linewidth=0.6,
                label=phase,
            )
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        begin, end = min(start for *_, start, _ in drawn), max(end for *_, end in drawn)
        axes.set_xlim(min(0.0, begin), end + 0.02 * (end - begin) or 1.0)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set(title=title, xlabel="milliseconds" if _is_short(drawn) else "seconds")
        if _is_short(drawn):
            axes.xaxis.set_major_formatter(lambda seconds, _: f"{1000 * seconds:g}")
        for columns in range(min(5, len(phases)), 0, -1):
            legend = figure.legend(loc="outside lower center", ncols=columns)
            if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
                break
            legend.remove()
        _label(figure, axes, drawn, rows, phases)
    return Picture(figure, f"{title}. {_words(drawn, rows, phases)}.")


def _checked(bar: Any, since: float) -> Bar:
    try:
        row, phase, start, end = bar
        start, end = float(start) - since, float(end) - since
    except (TypeError, ValueError):
        raise ValueError(f"a bar is (row, phase, start second, end second); got {bar!r:.100}") from None
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError(f"a bar starts and ends at a second; {phase!r} of {row!r} is from {start} to {end}")
    if end < start:
        raise ValueError(
            f"{phase!r} of {row!r} ends before it starts: from {start:g} s to {end:g} s; a bar is "
            f"(row, phase, start, end), all on one clock"
        )
    return f"rank {row}" if isinstance(row, int) else str(row), str(phase), start, end


def _label(figure: Figure, axes: Axes, bars: list[Bar], rows: list[str], phases: list[str]) -> None:
    """Write each bar's length inside it if there is room."""
    figure.draw_without_rendering()  # computes the layout, so that widths are known
    for row, phase, start, end in bars:
        number = phases.index(phase)
        color = COLORS[number % len(COLORS)]
        words = axes.text(
            (start + end) / 2,
            rows.index(row),
            _length(end - start),
            ha="center",
            va="center",
            fontsize=8.5,
            color="black" if _light(color) else "white",
            bbox={"facecolor": color, "edgecolor": "none", "pad": 1.5} if number >= len(COLORS) else None,
        )
        box = words.get_window_extent()
        left, right = axes.transData.transform([(start, 0), (end, 0)])[:, 0]
        if box.width > right - left - 4:
            words.remove()


def _light(color: str) -> bool:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def _length(seconds: float) -> str:
    return (
        f"{seconds * 1000:.0f} ms"
        if seconds < 0.2
        else f"{seconds:.1f} s"
        if seconds >= 1
        else f"{seconds:.2f} s"
    )


def _is_short(bars: list[Bar]) -> bool:
    return max(end for *_, end in bars) - min(start for *_, start, _ in bars) < 0.2


def _words(bars: list[Bar], rows: list[str], phases: list[str]) -> str:
    scale, form, unit = (1000, ".0f", "ms") if _is_short(bars) else (1, ".2f", "s")

    def stretch(words: str, start: float, end: float, joined: str) -> str:
        return f"{words} {scale * start:{form}} {joined} {scale * end:{form}} {unit}"

    if len(rows) <= ROWS_IN_WORDS:
        return "; ".join(
            f"{row}: "
            + ", ".join(stretch(f"{phase} from", a, b, "to") for name, phase, a, b in bars if name == row)
            for row in rows
        )
    parts = []
    for phase in phases:
        mine = [(row, start, end) for row, name, start, end in bars if name == phase]
        if not mine:
            continue
        lengths = [end - start for _, start, end in mine]
        parts.append(
            f"{phase}: {len({row for row, *_ in mine})} of {len(rows)} rows, "
            f"{_length(min(lengths))} to {_length(max(lengths))} long, "
            + stretch("between", min(start for _, start, _ in mine), max(end for *_, end in mine), "and")
        )
    return "; ".join(parts)
