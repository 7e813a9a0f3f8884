"""A picture of amounts that consist of parts: one bar each, its parts side by side (lesson 03)."""

from __future__ import annotations

from collections.abc import Mapping

from .charts import COLORS, Picture, new_figure, styled


def stacked_bars(
    values: Mapping[str, Mapping[str, float]], title: str, xlabel: str, form: str = "{:,.1f}"
) -> Picture:
    """Bars by name, each made of named parts, with its sum at the end (lesson 03).

    Parameters
    ----------
    values
        Parts by name, for each bar by name; a part that a bar lacks is 0. Equal parts have one colour.
    title, xlabel
        The message; the unit.
    form
        How the sum at the end of a bar is written.

    Raises
    ------
    ValueError
        There is no bar, no part, a negative part, or more parts than there are colours.
    """
    parts = list(dict.fromkeys(part for bar in values.values() for part in bar))
    if not parts:
        raise ValueError("stacked_bars needs at least one bar with one part: {'device 0': {'weights': 1.5}}")
    if len(parts) > len(COLORS):
        raise ValueError(f"{len(parts)} parts are more than the {len(COLORS)} colours that can be told apart")
    for name, bar in values.items():
        for part, value in bar.items():
            if not value >= 0:
                raise ValueError(f"a part of a bar cannot be {value}: {part!r} of {name!r}")
    rows = -(-len(parts) // 3)
    figure, (axes,) = new_figure(1, width=7.2, height=1.3 + 0.42 * len(values) + 0.25 * rows)
    ends = dict.fromkeys(values, 0.0)
    with styled():
        for color, part in zip(COLORS, parts, strict=False):
            widths = [values[name].get(part, 0) for name in values]
            drawn = axes.barh(
                list(values), widths, left=list(ends.values()), height=0.6, color=color, label=part
            )
            ends = {name: end + width for (name, end), width in zip(ends.items(), widths, strict=True)}
        axes.bar_label(drawn, labels=[form.format(end) for end in ends.values()], padding=4)
        axes.set_xlim(0, (max(ends.values()) or 1) * 1.2)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title=title, xlabel=xlabel)
        figure.legend(loc="outside lower center", ncols=3)
    words = "; ".join(
        f"{name}: {form.format(ends[name])} ({', '.join(f'{p} {form.format(v)}' for p, v in bar.items())})"
        for name, bar in values.items()
    )
    return Picture(figure, f"{title}. {xlabel}. {words}.")
