"""`grid`: draw a table of marks that shows how several candidates do in the same tests."""

from __future__ import annotations

from collections.abc import Mapping

from .style import Picture, new_figure, styled, without_lines

# The states of a cell: mark, colour of the field, colour of the mark. Colour is never the only sign.
STATES = {
    "works": ("✓", "#c9ebdf", "#00563f"),
    "wrong": ("≠", "#f3dcea", "#8a2a62"),
    "refuses": ("✗", "#fadfcc", "#a34700"),
    "crashes": ("!", "#f7c6c0", "#8c1007"),
    "not here": ("–", "#eeeeee", "#666666"),
}
ROW, HEAD, LEFT = 0.27, 1.35, 2.6  # inches: a row; title, column names and legend together; row names


def grid(columns: Mapping[str, Mapping[str, str]], title: str) -> Picture:
    """Draw results as a table of marks: ✓ works, ≠ wrong, ✗ refuses, ! crashes, – not here (lesson 09).

    Each column, by name, has the same rows: ``{"gloo": {"broadcast": "works", "all_reduce": "refuses"}}``. A
    cell may also be ``"wrong"`` (it ran, but the numbers are not right), ``"crashes"`` (it ended a rank), or
    ``"not here"`` (could not be tried on this machine).
    """
    rows = list(next(iter(columns.values())))
    width = min(11.0, max(7.2, LEFT + 0.95 * len(columns)))
    height = HEAD + ROW * (len(rows) + max(name.count("\n") for name in columns))
    figure, (axes,) = new_figure(width=width, height=height)
    used = {state for cells in columns.values() for state in cells.values()}
    with styled():
        for x, cells in enumerate(columns.values()):
            for y, row in enumerate(rows):
                mark, field, ink = STATES[cells[row]]
                axes.barh(y, 0.94, left=x - 0.47, height=0.88, color=field)
                axes.text(x, y, mark, color=ink, size=11, weight="bold", ha="center", va="center")
        axes.set_title(title, pad=10)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axes.set_xticks(range(len(columns)), list(columns))
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(labelbottom=False, labeltop=True)
        without_lines(axes)
        legend = "     ".join(f"{mark} {state}" for state, (mark, _, _) in STATES.items() if state in used)
        axes.set_xlabel(legend, labelpad=8)
    return Picture(figure, f"{title}. " + " ".join(map(_words, columns, columns.values())))


def _words(name: str, cells: Mapping[str, str]) -> str:
    """Describe a column: ``"gloo, CPU: works: broadcast, reduce; refuses: scatter."``"""
    rows = {state: [row for row, cell in cells.items() if cell == state] for state in STATES}
    parts = [f"{state}: {', '.join(found)}" for state, found in rows.items() if found]
    if len(parts) == 1 and len(cells) > 1:
        parts = [f"{next(iter(cells.values()))}: all {len(cells)}"]
    return f"{name.replace(chr(10), ', ')}: {'; '.join(parts)}."
