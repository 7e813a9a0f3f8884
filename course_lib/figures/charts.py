"""Draw charts of a lesson's own numbers: curves, bars, stacked bars."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from .style import COLORS, Picture, margins_of, new_figure, styled


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    logx: bool = False,
    logy: bool = False,
    dashed: Collection[str] = (),
    ymin: float | None = None,
) -> Picture:
    """Draw lines by name, each ``(x, y)``; the title says what there is to see, the labels carry the units.

    A line in ``dashed`` lies on top, without dots: a formula, or one that coincides with another line. A
    single point is a star. The y axis begins at ``ymin``, or by default just below the lowest point.
    """
    figure, (axes,) = new_figure(width=7.2, height=3.8)
    with styled():
        for name, (x, y) in series.items():
            over = {"linestyle": (0, (4, 3)), "zorder": 3} if name in dashed else {}
            marker = "*" if len(x) == 1 else "o" if len(x) <= 12 and not over else None
            axes.plot(x, y, label=name, marker=marker, markersize=12 if len(x) == 1 else 5, **over)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if all(float(value).is_integer() for x, _ in series.values() for value in x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if logx:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if logy:
            axes.set_yscale("log")
        if ymin is not None:
            axes.set_ylim(bottom=ymin)
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=3)
    words = "; ".join(f"{name}: from {y[0]:.3g} to {y[-1]:.3g}" for name, (_, y) in series.items() if len(y))
    return Picture(figure, f"{title}. {ylabel} against {xlabel}. {words}.")


def bars(
    values: Mapping[str, float | Sequence[float]], title: str, xlabel: str, form: str = "{:,.0f}"
) -> Picture:
    """Draw bars by name, each labelled with its number.

    Several numbers, as of repeated runs, are one bar: their median, with a line from the least to the most.
    "128 tokens: DDP" and "512 tokens: DDP" have one colour: that of what follows the colon.
    """
    samples = [value if isinstance(value, Sequence) else [value] for value in values.values()]
    medians = [statistics.median(numbers) for numbers in samples]
    below, above = ([abs(of(s) - m) for s, m in zip(samples, medians, strict=True)] for of in (min, max))
    lines = {"xerr": [below, above], "capsize": 3} if any(len(numbers) > 1 for numbers in samples) else {}
    kinds = [name.rpartition(": ")[2] for name in values]
    figure, (axes,) = new_figure(width=7.2, height=1.3 + 0.42 * len(values))
    with styled():
        drawn = axes.barh(list(values), medians, height=0.6, ecolor="0.25", **lines)
        for kind, bar in zip(kinds, drawn, strict=True):
            bar.set_color(COLORS[list(dict.fromkeys(kinds)).index(kind) % len(COLORS)])
        axes.bar_label(drawn, fmt=form, padding=4)
        axes.set_xlim(0, max(max(numbers) for numbers in samples) * 1.2)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title=title, xlabel=xlabel)
    words = "; ".join(f"{name}: {_spread(value, form)}" for name, value in values.items())
    return Picture(figure, f"{title}. {xlabel}. {words}.")


def _spread(value: float | Sequence[float], form: str) -> str:
    """Return a number, or the median of several with the least and the most of them, as text."""
    if not isinstance(value, Sequence):
        return form.format(value)
    least, median, most = (form.format(of(value)) for of in (min, statistics.median, max))
    return median if least == most else f"{median} ({least} to {most})"


def stacked_bars(
    values: Mapping[str, Mapping[str, float]], title: str, xlabel: str, form: str = "{:,.1f}"
) -> Picture:
    """Draw bars by name, each made of named parts, with the sum at its end (lesson 03).

    Parameters
    ----------
    values
        For each bar by name, its parts by name; a part that it lacks is 0. A part has one colour in all bars.
    title, xlabel
        The message and the unit.
    form
        The format of the sum at the end of a bar; empty to leave the sums out, as when all are the same.
    """
    parts = list(dict.fromkeys(part for bar in values.values() for part in bar))
    rows = -(-len(parts) // 3)
    width, height = 7.2, 1.15 + 0.42 * len(values) + 0.22 * rows
    margins = margins_of(width, height, values, 0.35, 0.65 + 0.22 * rows)
    figure, (axes,) = new_figure(width=width, height=height, margins=margins)
    ends = dict.fromkeys(values, 0.0)
    with styled():
        for color, part in zip(COLORS, parts, strict=False):
            widths = [values[name].get(part, 0) for name in values]
            left = list(ends.values())
            drawn = axes.barh(list(values), widths, left=left, height=0.6, color=color, label=part)
            ends = {name: end + width for (name, end), width in zip(ends.items(), widths, strict=True)}
        axes.bar_label(drawn, labels=[form.format(end) for end in ends.values()], padding=4)
        axes.set_xlim(0, (max(ends.values()) or 1) * (1.2 if form else 1))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title=title, xlabel=xlabel)
        figure.legend(loc="lower center", ncols=3)
    say = (form or "{:,.0f}").format
    words = "; ".join(
        f"{name}: {say(ends[name])} ({', '.join(f'{p} {say(v)}' for p, v in bar.items())})"
        for name, bar in values.items()
    )
    return Picture(figure, f"{title}. {xlabel}. {words}.")
