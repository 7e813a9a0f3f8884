"""`conversion_map`: draw the conversions that lesson 01 tries, as arrows between the forms of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .style import COLORS, Picture, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COPIED, SHARED, REFUSED = COLORS[0], COLORS[1], "#767676"
KEYS = {"call", "source", "target", "shares", "dtype", "lost", "error"}
ROW = 0.36  # inches
AT_MEMORY, AT_DTYPE, AT_VALUES, RIGHT = 0.42, 1.05, 2.05, 3.4  # columns of text, right of the last form
LOOP = 0.28  # how far the arrow from a form to itself reaches out


def conversion_map(
    tried: Sequence[Mapping[str, Any]], title: str | None = None, forms: Iterable[str] = ()
) -> Picture:
    """Draw conversions between forms of the same numbers, one arrow each, with their results (lesson 01).

    Parameters
    ----------
    tried
        One mapping for each conversion, with the keys ``call`` (its code), ``source`` and ``target`` (names
        of forms), ``shares`` (whether writing to one side changes the other), ``dtype`` (what became of the
        type, such as ``"kept"``), ``lost`` (names of the values that did not survive) and ``error`` (what it
        raised; empty if it worked).
    title
        By default, the counts of all conversions, of those that share memory and of those that lose a value.
    forms
        The forms from left to right; all others follow in order of first appearance.

    Raises
    ------
    ValueError
        Nothing was tried, or a conversion lacks a key.
    """
    rows = list(tried)
    if not rows:
        raise ValueError("conversion_map needs at least one conversion that was tried")
    for row in rows:
        if missing := sorted(KEYS - set(row)):
            raise ValueError(f"the conversion {row.get('call', row)!r} lacks {', '.join(missing)}")
    used = list(dict.fromkeys(form for row in rows for form in (row["source"], row["target"])))
    columns = [form for form in dict.fromkeys([*forms, *used]) if form in used]
    done = [row for row in rows if not row["error"]]
    if title is None:
        shared = sum(bool(row["shares"]) for row in done)
        lossy = sum(bool(row["lost"]) for row in done)
        title = f"Of {len(rows)} conversions, {shared} share memory and {lossy} change a number"

    figure, (axes,) = new_figure(1, width=9.6, height=1.25 + ROW * len(rows))
    with styled():
        _columns(axes, columns, len(rows))
        for at, row in enumerate(rows):
            _arrow(axes, columns, row, len(rows) - at - 0.5)
        axes.set_title(title)
        _legend(axes)
    words = "; ".join(f"{row['call']} from {row['source']} to {row['target']}: {_words(row)}" for row in rows)
    return Picture(figure, f"{title}. {words}.")


def _words(row: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, _cells(row)))


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Describe a conversion: its memory, dtype and values."""
    if row["error"]:
        return "refused", str(row["error"]), ""
    values = f"loses {', '.join(row['lost'])}" if row["lost"] else "exact"
    return "shared" if row["shares"] else "copied", str(row["dtype"]), values


def _columns(axes: Axes, forms: list[str], rows: int) -> None:
    last = len(forms) - 1
    for x, form in enumerate(forms):
        axes.plot([x, x], [0, rows], color="#bbbbbb", linewidth=1, zorder=0)
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#444444"}
        axes.text(
            x, rows + 0.75, form.replace(" ", "\n"), ha="center", va="center", weight="bold", size=9, bbox=box
        )
    for offset, name in ((AT_MEMORY, "memory"), (AT_DTYPE, "dtype"), (AT_VALUES, "values")):
        axes.text(last + offset, rows + 0.75, name, weight="bold", size=9, va="center")
    axes.set(xlim=(-0.5, last + RIGHT), ylim=(-0.1, rows + 1.5), xticks=[], yticks=[])
    axes.axis("off")


def _arrow(axes: Axes, forms: list[str], row: Mapping[str, Any], y: float) -> None:
    start, end = forms.index(row["source"]), forms.index(row["target"])
    color = REFUSED if row["error"] else SHARED if row["shares"] else COPIED
    style = ":" if row["error"] else "--" if row["lost"] else "-"
    low = y - 0.22
    arrow = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.6}
    if start == end:  # out, and back to itself
        axes.plot([start, start + LOOP, start + LOOP], [y + 0.2, y + 0.2, low], style, color=color)
        axes.annotate("", (end, low), (start + LOOP, low), arrowprops=arrow | {"linestyle": style})
        where, align = (start + LOOP + 0.08, y), ("left", "center")
    else:
        axes.annotate("", (end, low), (start, low), arrowprops=arrow | {"linestyle": style})
        where, align = ((start + end) / 2, low + 0.1), ("center", "bottom")
    axes.text(
        *where,
        row["call"],
        ha=align[0],
        va=align[1],
        family="DejaVu Sans Mono",
        size=7.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )
    for offset, text in zip((AT_MEMORY, AT_DTYPE, AT_VALUES), _cells(row), strict=True):
        axes.text(len(forms) - 1 + offset, low, text, color=color, size=8.5, va="center")


def _legend(axes: Axes) -> None:
    for color, style, name in (
        (COPIED, "-", "memory of its own"),
        (SHARED, "-", "the same memory"),
        ("#444444", "--", "a value is lost"),
        (REFUSED, ":", "refused"),
    ):
        axes.plot([], [], style, color=color, label=name)
    axes.figure.legend(loc="outside lower center", ncols=4)
