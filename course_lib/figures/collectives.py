"""Draw a collective, before and after, from the values that the ranks really held (lesson 05).

A value has the colour of the rank that it came from, and a sum has stripes in the colours of its ranks: the
values alone show which. If each rank sends one of several pieces, as in a step round a ring, the piece sent
and the piece received have frames.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .style import Picture, ink_on, new_figure, rank_color, rank_ink, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS, MOST_VALUES = 8, 16  # more could not be read
UNKNOWN = "#d9d9d9"  # for a value that the ranks' values at the start do not explain
SPACE, GROUP_GAP, ROW = 0.14, 0.34, 1.42  # in boxes, as all lengths where no other unit is named
ABOVE, BELOW = 1.3, 0.75  # the first and the last row; "before" and "after" stand above
INCHES = 0.43  # of a box, at most
TITLE, NAME = 0.36, 0.3  # inches
PLATE = {"boxstyle": "round,pad=0.15", "facecolor": "white", "lw": 0}
ONE, SEVERAL = 7.6, 9.2  # inches, the width of a picture of one collective and of several
OTHER_COLUMNS = 4.6  # for the ranks' names and the arrows

Held = list[list[float]]  # one rank's values, in groups (the tensors of a list)
Origin = frozenset[int]  # the ranks that a value came from


def collective(before: Sequence[Any], after: Sequence[Any], title: str) -> Picture:
    """Draw what each rank held before and after a collective, coloured by the ranks it came from (lesson 05).

    Each rank held a number, a tensor, a list of tensors (drawn apart from each other), or None for nothing.
    Take whole numbers with sums that can be told apart, such as 1, 10, 100. A result of MAX or MIN is drawn
    as a copy, one of AVG or PRODUCT in grey. More than 8 ranks, or 16 values of one, are a ValueError.
    """
    return collectives({"": (before, after)}, title)


def collectives(
    cases: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], title: str, start: Sequence[Any] | None = None
) -> Picture:
    """Draw several collectives side by side, given by name as ``(before, after)``; see `collective`.

    The colours refer to ``start``, what the ranks held at the very beginning; by default, to each ``before``.
    """
    steps = {
        name: [list(map(_groups, held)) for held in (before, after, start or before)]
        for name, (before, after) in cases.items()
    }
    for held in (held for step in steps.values() for held in step):
        counts = [sum(map(len, groups)) for groups in held]
        if not 0 < len(held) <= MOST_RANKS or max(counts) > MOST_VALUES:
            room = f"1 to {MOST_RANKS} ranks with up to {MOST_VALUES} values"
            raise ValueError(f"a picture is for {room}; got {counts} values")
    width = ONE if "" in cases else SEVERAL
    widest = max(_columns(before) + _columns(after) for before, after, _ in steps.values()) + OTHER_COLUMNS
    ranks = max(len(before) for before, *_ in steps.values())
    across = 1 if widest > 22 or len(steps) == 1 else 2
    inches = min(INCHES, width / across / widest)
    drawn = inches * (ROW * (ranks - 1) + BELOW + ABOVE)
    panel = drawn + NAME * (width == SEVERAL)
    height = TITLE + math.ceil(len(steps) / across) * panel
    figure, (empty,) = new_figure(width=width, height=height, margins={"left": 0})
    empty.remove()
    alt = f"{title}."
    with styled():
        figure.text(0.012, 1 - 0.08 / height, title, va="top", size=11, weight="bold")
        for i, (name, step) in enumerate(steps.items()):
            left, bottom = i % across / across, 1 - (TITLE + (i // across + 1) * panel) / height
            axes = figure.add_axes((left, bottom, 1 / across, drawn / height))
            _draw(axes, step, width / across / inches, 72 * inches)
            figure.text(left + 0.012, bottom + drawn / height, name, va="bottom", size=10, weight="bold")
            alt += f" {name}." * bool(name) + f" Before: {_words(step[0])}. After: {_words(step[1])}."
    return Picture(figure, alt)


def _groups(value: Any) -> list[list[float]]:
    """Return the numbers in each tensor that a rank held."""
    tensors = value if isinstance(value, list | tuple) else [value]
    plain = [each.tolist() if hasattr(each, "tolist") else each for each in tensors if each is not None]
    return [numbers for each in plain if (numbers := np.ravel(each).astype(float).tolist())]


def origins(before: list[Held], after: list[Held]) -> list[list[list[Origin]]]:
    """Find the ranks from whose values each value in ``after`` comes: one if copied, more if summed."""
    flat = (itertools.chain(*held) for held in before)
    table = list(itertools.zip_longest(*flat, fillvalue=math.nan))  # by place, then by rank
    ranks = len(before)

    def origin(rank: int, value: float) -> Origin:  # the first explanation: unchanged, copied, or summed
        from_the_left = [(rank - distance) % ranks for distance in range(ranks)]  # as on a ring
        for choice in (c for size in range(ranks) for c in itertools.combinations(from_the_left, size + 1)):
            if any(value == sum(values[each] for each in choice) for values in table):
                return frozenset(choice)
        return frozenset()

    return [[[origin(rank, value) for value in group] for group in held] for rank, held in enumerate(after)]


def _columns(held: list[Held]) -> float:
    """Return the width of the widest rank, in boxes."""
    counts = [(sum(map(len, groups)), len(groups)) for groups in held]
    return max(1.0, *(n * (1 + SPACE) - SPACE + (groups - 1) * (GROUP_GAP - SPACE) for n, groups in counts))


def _draw(axes: Axes, step: Sequence[list[Held]], width: float, points: float) -> None:
    """Draw a row per rank, with arrows; ``width`` is in boxes, and ``points`` is the width of a box."""
    before, after, start = step
    ranks = len(before)
    axes.axis("off")
    axes.set(xlim=(0, width), ylim=(-(ROW * (ranks - 1)) - BELOW, ABOVE), aspect="equal", anchor="W")
    left = 2.1
    middle = left + _columns(before)
    right = middle + max(2.0, min(5.0, width - 0.3 - middle - _columns(after)))
    label = min(9.0, 0.31 * points)
    for x, word in ((left, "before"), (right, "after")):
        axes.text(x, 0.92, word, color="#555555", size=label, va="center")
    came = origins(before, after)
    sent, received = _travelled(before, after, came)
    colors, colors_before = origins(start, after), origins(start, before)
    for rank in range(ranks):
        y = -ROW * rank
        axes.text(0.2, y, f"rank {rank}", color=rank_ink(rank), weight="bold", size=label, va="center")
        end = _boxes(axes, left, y, before[rank], colors_before[rank], sent.get(rank), points)
        _boxes(axes, right, y, after[rank], colors[rank], received.get(rank), points)
        for other in range(ranks):
            if before[rank] and any(rank in origin for group in came[other] for origin in group):
                moved = rank != other
                to = (right - 0.14, -ROW * other + (0.5 * ((rank + 0.5) / ranks - 0.5) if moved else 0))
                look: dict[str, Any] = {"color": rank_ink(rank), "shrinkA": 0, "shrinkB": 0}
                look |= {"ls": "-" if moved else (0, (1, 2)), "lw": 1.3 if moved else 1.0}
                look |= {"arrowstyle": "-|>,head_width=0.16,head_length=0.32" if moved else "-"}
                axes.annotate("", to, (end + 0.14, y), arrowprops=look)


def _travelled(
    before: list[Held], after: list[Held], came: list[list[list[Origin]]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by rank, the piece sent and the piece received, if each rank sent one of several."""
    if len(before[0]) < 2 or len({len(held) for held in (*before, *after)}) > 1:
        return {}, {}
    sent, received = dict[int, int](), dict[int, int]()
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = [piece for piece in range(len(old)) if old[piece] != new[piece]]
        if len(changed) != 1:
            return {}, {}
        (received[rank],) = changed
        sent |= dict.fromkeys(frozenset().union(*came[rank][changed[0]]) - {rank}, changed[0])
    return sent, received


def _boxes(
    axes: Axes, x: float, y: float, held: Held, came: list[list[Origin]], framed: int | None, points: float
) -> float:
    """Draw the values of one rank from x on, one group with a frame, and return where they end."""
    from matplotlib.patches import Rectangle

    if not held:
        look = {"edgecolor": "#aaaaaa", "ls": (0, (2, 2)), "lw": 1}
        axes.add_patch(Rectangle((x, y - 0.5), 1, 1, fill=False, **look))
        return x + 1
    for number, (values, ranks) in enumerate(zip(held, came, strict=True)):
        begin = x
        for value, origin in zip(values, ranks, strict=True):
            _box(axes, x, y, value, sorted(origin), points)
            x += 1 + SPACE
        if number == framed:
            axes.add_patch(Rectangle((begin, y - 0.5), x - SPACE - begin, 1, fill=False, lw=2))
        x += GROUP_GAP - SPACE
    return x - GROUP_GAP


def _box(axes: Axes, x: float, y: float, value: float, ranks: list[int], points: float) -> None:
    from matplotlib.patches import Rectangle

    colors = [rank_color(rank) for rank in ranks] or [UNKNOWN]
    stripe = 1 / len(colors)
    for i, color in enumerate(colors):
        axes.add_patch(Rectangle((x + i * stripe, y - 0.5), stripe, 1, facecolor=color, lw=0))
    text = _number(value)
    size = points * (0.4 if len(text) <= 2 else 0.92 / len(text))
    look: dict[str, Any] = {"size": size, "color": ink_on(ranks[0]) if len(ranks) == 1 else "black"}
    if len(ranks) > 1:  # put the number on a plate, or the stripes would cross it
        look |= {"size": 0.86 * size, "bbox": PLATE}
    axes.text(x + 0.5, y - 0.02, text, ha="center", va="center_baseline", weight="bold", **look)


def _number(value: float) -> str:
    value += 0.0  # -0.0 is drawn as 0
    return f"{value:.0f}" if abs(value) < 1e8 and value % 1 == 0 else f"{value:.4g}"


def _words(held: list[Held]) -> str:
    parts = [" | ".join(", ".join(map(_number, group)) for group in groups) for groups in held]
    return "; ".join(f"rank {rank} holds {part or 'nothing'}" for rank, part in enumerate(parts))
