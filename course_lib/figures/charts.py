"""Draw charts of a lesson's own numbers: curves, bars, stacked bars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .style import COLORS, Picture, figure_with_margins, left_of, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    "128 tokens: DDP" and "512 tokens: DDP" have the same colour: it belongs to the words after the colon.
    """
    spreads = np.array([np.quantile(each, (0, 0.5, 1)) for each in values.values()])
    least, median, most = spreads.T
    lines = {"xerr": (median - least, most - median), "capsize": 3} if (least < most).any() else {}
    kinds = [name.rpartition(": ")[2] for name in values]
    colors = {kind: COLORS[i % len(COLORS)] for i, kind in enumerate(dict.fromkeys(kinds))}
    figure, (axes,) = new_figure(width=7.2, height=1.3 + 0.42 * len(values))
    with styled():
        color = [colors[kind] for kind in kinds]
        drawn = axes.barh(list(values), median, height=0.6, color=color, ecolor="0.25", **lines)
        axes.bar_label(drawn, fmt=form, padding=4)
        _from_above(axes, title, xlabel, 1.2 * most.max())
    words = []
    for name, spread in zip(values, spreads, strict=True):
        low, middle, high = map(form.format, spread)
        words.append(f"{name}: {middle}" + (f" ({low} to {high})" if low != high else ""))
    return Picture(figure, f"{title}. {xlabel}. {'; '.join(words)}.")


def stacked_bars(
    values: Mapping[str, Mapping[str, float]], title: str, xlabel: str, form: str = "{:,.1f}"
) -> Picture:
    """Draw bars by name, each made of named parts, with the sum at its end (lesson 03).

    A part has one colour in all bars, and is 0 where a bar lacks it. `form` is the format of the sums; if it
    is empty, they are left out, as for bars of equal length.
    """
    parts = list(dict.fromkeys(part for bar in values.values() for part in bar))
    widths = np.array([[bar.get(part, 0.0) for bar in values.values()] for part in parts])
    ends = widths.cumsum(axis=0)
    below = 0.22 * -(-len(parts) // 3)  # inches of the legend
    height = 1.15 + 0.42 * len(values) + below
    figure, axes = figure_with_margins(7.2, height, left_of(values), top=0.35, bottom=0.65 + below)
    with styled():
        for part, width, end in zip(parts, widths, ends, strict=True):
            drawn = axes.barh(list(values), width, left=end - width, height=0.6, label=part)
        axes.bar_label(drawn, labels=map(form.format, ends[-1]), padding=4)
        _from_above(axes, title, xlabel, (ends[-1].max() or 1) * (1.2 if form else 1))
        figure.legend(loc="lower center", ncols=3)
    say = (form or "{:,.0f}").format
    words = "; ".join(
        f"{name}: {say(end)} ({', '.join(f'{part} {say(value)}' for part, value in bar.items())})"
        for end, (name, bar) in zip(ends[-1], values.items(), strict=True)
    )
    return Picture(figure, f"{title}. {xlabel}. {words}.")


def _from_above(axes: Axes, title: str, xlabel: str, right: float) -> None:
    """Order horizontal bars from the top down; the axis goes from 0 to ``right``."""
    axes.set(title=title, xlabel=xlabel, xlim=(0, right))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
