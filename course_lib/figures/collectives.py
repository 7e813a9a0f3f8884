"""Draw a collective, before and after, from the values that the ranks really held (lesson 05).

A value has the colour of the rank that it came from, a sum has stripes of all the ranks that are in it. The
picture infers these ranks from the values alone. So a sum that equals one rank's value is taken for a copy,
the result of MAX or MIN is drawn as a copy, and that of PRODUCT is grey. Where each rank sends one of several
pieces, as in a step round a ring, that piece and the one it receives have a frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .origins import SINGLE, Held, Origin, origins
from .style import Picture, ink_on, new_figure, rank_color, rank_ink, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS, MOST_VALUES = 8, 16  # more could not be read
UNKNOWN = "#d9d9d9"  # for a value that nothing the ranks held at the start explains
BOX, SPACE, GROUP_GAP = 1.0, 0.14, 0.34  # in units of a box
ROW = 1.42
INCHES = 0.46  # of a box, at most
TITLE = 0.36  # inches
ROUND = "round,pad=0,rounding_size=0.12"
MARGINS = {"left": 0.0, "right": 1.0, "bottom": 0.0, "top": 1.0}

WIDTH = 9.2  # inches, of a picture of several collectives
OTHER_COLUMNS = 4.6  # boxes' width, for the ranks' names and the arrows

HALF = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # the distance from 1 to the next larger number


def collective(
    before: Sequence[Any], after: Sequence[Any], title: str, start: Sequence[Any] | None = None
) -> Picture:
    """Draw what each rank held before and after a collective, coloured by the ranks it came from (lesson 05).

    Parameters
    ----------
    before, after
        What each rank held: a number, a tensor, a list of tensors (drawn apart from each other), or None for
        nothing. Take values such as 1, 10, 100, so that each sum shows which ranks are in it: a sum that
        equals one rank's value is taken for a copy. The result of MAX or MIN is drawn as a copy, that of
        PRODUCT in grey.
    title
        The message of the picture.
    start
        What the ranks held at the very beginning: the colours refer to it. By default ``before``.

    Raises
    ------
    ValueError
        There is no rank, the number of ranks changes, there are too many ranks or values to be read, or
        something is not made of numbers.
    """
    step = _step(before, after, start)
    columns = step.columns + OTHER_COLUMNS
    inches = min(INCHES, 7.6 / columns)
    height = inches * (ROW * len(step.before) + 0.75) + TITLE
    figure, (axes,) = new_figure(width=7.6, height=height, margins=MARGINS | {"top": 1 - TITLE / height})
    with styled():
        _draw(axes, step, 7.6 / inches)
        figure.text(0.012, 1 - 0.08 / height, title, va="top", size=11, weight="bold")
    return Picture(figure, f"{title}. {_words(step)}")


def collectives(
    cases: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], title: str, start: Sequence[Any] | None = None
) -> Picture:
    """Draw several collectives side by side, given by name as ``(before, after)``; see `collective`.

    Raises
    ------
    ValueError
        There is none, or one that `collective` would refuse; the message names it.
    """
    if not cases:
        raise ValueError("collectives needs at least one: collectives({'broadcast': (before, after)}, title)")
    steps = {name: _step(*case, start, f"{name}, ") for name, case in cases.items()}
    widest = max(step.columns for step in steps.values()) + OTHER_COLUMNS
    ranks = max(len(step.before) for step in steps.values())
    across = 1 if widest > 22 or len(steps) == 1 else 2
    width = WIDTH / across
    inches = min(INCHES * 0.85, width / widest)
    panel_height = inches * (ROW * ranks + 0.75) + TITLE
    height = math.ceil(len(steps) / across) * panel_height + TITLE
    figure, (empty,) = new_figure(width=WIDTH, height=height, margins=MARGINS)
    empty.remove()
    with styled():
        figure.text(0.012, 1 - 0.1 / height, title, va="top", size=12, weight="bold")
        for i, (name, step) in enumerate(steps.items()):
            row, column = divmod(i, across)
            bottom = 1 - (TITLE + (row + 1) * panel_height) / height
            place = (column / across, bottom, 1 / across, (panel_height - 0.32) / height)
            _draw(figure.add_axes(place), step, width / inches)
            above = bottom + (panel_height - 0.3) / height
            figure.text(column / across + 0.012, above, name, va="bottom", size=10, weight="bold")
    return Picture(figure, f"{title}. " + " ".join(f"{name}. {_words(step)}" for name, step in steps.items()))


# --- what the ranks held ----------------------------------------------------------------------------------


def _held_by_all(values: Sequence[Any], when: str) -> list[Held]:
    ranks = list(values)
    if not 0 < len(ranks) <= MOST_RANKS:
        raise ValueError(f"{when}: what each of 1 to {MOST_RANKS} ranks held; got {len(ranks)} ranks")
    return [_held(value, f"{when}, rank {rank}") for rank, value in enumerate(ranks)]


def _held(value: Any, whose: str) -> Held:
    if value is None:
        return []
    if isinstance(value, list | tuple) and any(not isinstance(item, int | float) for item in value):
        groups = [_numbers(item, whose) for item in value if item is not None]
    else:
        groups = [_numbers(value, whose)]
    groups = [group for group in groups if group]
    if (count := sum(map(len, groups))) > MOST_VALUES:
        raise ValueError(f"{whose}: {count} values; {MOST_VALUES} at most can be read, so draw a few of them")
    return groups


def _numbers(value: Any, whose: str) -> list[float]:
    if hasattr(value, "detach"):
        value = value.detach().flatten().tolist()
    elif hasattr(value, "ravel"):
        value = value.ravel().tolist()
    try:
        return [float(item) for item in (value if isinstance(value, list | tuple) else [value])]
    except (TypeError, ValueError):
        raise ValueError(
            f"{whose}: numbers, a tensor, a list of tensors or None can be drawn; this is {value!r:.60}"
        ) from None


class Step(NamedTuple):
    """What all ranks held before and after, and at the start, to which the colours refer."""

    before: list[Held]
    after: list[Held]
    start: list[Held]
    rounding: float = SINGLE

    @property
    def columns(self) -> float:
        return _columns(self.before) + _columns(self.after)


def _step(before: Sequence[Any], after: Sequence[Any], start: Sequence[Any] | None, name: str = "") -> Step:
    first, last = _held_by_all(before, f"{name}before"), _held_by_all(after, f"{name}after")
    at_start = first if start is None else _held_by_all(start, f"{name}start")
    counts = sorted({len(ranks) for ranks in (first, last, at_start)})
    if len(counts) > 1:
        raise ValueError(f"{name}{counts[0]} ranks at one time and {counts[1]} at another: none may be lost")
    return Step(first, last, at_start, rounding=max(map(_rounding, (before, after, start))))


def _rounding(value: Any) -> float:
    """Return the relative rounding error of the coarsest dtype in a value."""
    if isinstance(value, list | tuple):
        return max(map(_rounding, value), default=SINGLE)
    return HALF.get(str(getattr(value, "dtype", "")).removeprefix("torch."), SINGLE)


# --- the drawing ------------------------------------------------------------------------------------------


def _columns(held: list[Held]) -> float:
    """Return the width of the widest rank, in boxes."""
    return max(_width(ranks) for ranks in held)


def _width(held: Held) -> float:
    if not held:
        return BOX
    count = sum(map(len, held))
    return count * BOX + (count - len(held)) * SPACE + (len(held) - 1) * GROUP_GAP


def _draw(axes: Axes, step: Step, width: float) -> None:
    """Draw a row per rank, before at the left, after at the right, and arrows from the sources of values."""
    before, after, start, rounding = step
    ranks = len(before)
    axes.axis("off")
    axes.set(xlim=(0, width), ylim=(-(ROW * (ranks - 1)) - 0.75, 1.3), aspect="equal", anchor="W")
    left, gap = 2.1, min(5.0, width - 2.4 - step.columns)
    middle = left + _columns(before)
    right = middle + max(gap, 2.0)
    label = min(9.0, 0.31 * _points(axes))
    grey = {"color": "#555555", "size": label, "va": "center"}
    axes.text(left, 0.92, "before", **grey)
    axes.text(right, 0.92, "after", **grey)
    came = origins(before, after, rounding)
    sent, received = _travelled(before, after, came)
    colors, colors_before = origins(start, after, rounding), origins(start, before, rounding)
    for rank in range(ranks):
        y = -ROW * rank
        axes.text(0.2, y, f"rank {rank}", color=rank_ink(rank), weight="bold", size=label, va="center")
        end = _boxes(axes, left, y, before[rank], colors_before[rank], sent.get(rank))
        _boxes(axes, right, y, after[rank], colors[rank], received.get(rank))
        for other in range(ranks):
            sources = frozenset().union(*(origin for group in came[other] for origin in group))
            if rank in sources and before[rank]:
                moved = rank != other
                axes.annotate(
                    "",
                    (right - 0.14, -ROW * other + (0.5 * ((rank + 0.5) / ranks - 0.5) if moved else 0)),
                    (end + 0.14, y),
                    arrowprops={
                        "arrowstyle": "-|>,head_width=0.16,head_length=0.32" if moved else "-",
                        "color": rank_ink(rank),
                        "lw": 1.3 if moved else 1.0,
                        "ls": "-" if moved else (0, (1, 2)),
                        "shrinkA": 0,
                        "shrinkB": 0,
                    },
                )


def _travelled(
    before: list[Held], after: list[Held], came: list[list[list[Origin]]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by rank, the piece it sent and the one it received, if each rank sent one of several."""
    if {len(held) for held in (*before, *after)} != {len(before[0])} or len(before[0]) < 2:
        return {}, {}
    changed = [
        [i for i, (old, new) in enumerate(zip(*each, strict=True)) if old != new]
        for each in zip(before, after, strict=True)
    ]
    if any(len(pieces) != 1 for pieces in changed):
        return {}, {}
    received = {rank: piece for rank, (piece,) in enumerate(changed)}
    sent = {}
    for rank, piece in received.items():
        for source in frozenset().union(*came[rank][piece]) - {rank}:
            sent[source] = piece
    return sent, received


def _boxes(
    axes: Axes, x: float, y: float, held: Held, came: list[list[Origin]], framed: int | None = None
) -> float:
    """Draw the values of one rank from x on, one group with a frame, and return where they end."""
    from matplotlib.patches import Rectangle

    if not held:
        empty = Rectangle((x, y - 0.5), BOX, 1, fill=False, edgecolor="#aaaaaa", ls=(0, (2, 2)), lw=1)
        axes.add_patch(empty)
        return x + BOX
    for number, (values, ranks) in enumerate(zip(held, came, strict=True)):
        begin = x
        for value, origin in zip(values, ranks, strict=True):
            _box(axes, x, y, value, sorted(origin))
            x += BOX + SPACE
        if number == framed:
            frame = Rectangle((begin, y - 0.5), x - SPACE - begin, 1, fill=False, edgecolor="black", lw=2)
            axes.add_patch(frame)
        x += GROUP_GAP - SPACE
    return x - GROUP_GAP


def _box(axes: Axes, x: float, y: float, value: float, ranks: list[int]) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    colors = [rank_color(rank) for rank in ranks] or [UNKNOWN]
    stripe = BOX / len(colors)
    for i, color in enumerate(colors):
        axes.add_patch(Rectangle((x + i * stripe, y - 0.5), stripe, 1, facecolor=color, lw=0))
    text = _number(value)
    if len(ranks) > 1:  # put the number on a plate, or the stripes would cross it
        corner = (x + 0.1, y - 0.22)
        axes.add_patch(FancyBboxPatch(corner, BOX - 0.2, 0.44, boxstyle=ROUND, facecolor="white", lw=0))
    size = _points(axes) * (0.4 if len(text) <= 2 else 0.92 / len(text))
    axes.text(
        x + BOX / 2,
        y - 0.02,
        text,
        size=size if len(ranks) == 1 else 0.86 * size,
        weight="bold",
        color=ink_on(ranks[0]) if len(ranks) == 1 else "black",
        ha="center",
        va="center_baseline",
    )


def _points(axes: Axes) -> float:
    """Return the size of a box in points."""
    low, high = axes.get_xlim()
    return axes.get_position().width * axes.figure.get_figwidth() * 72 / (high - low)


def _number(value: float, digits: int = 4) -> str:
    value += 0.0  # -0.0 is drawn as 0
    return f"{value:.0f}" if abs(value) < 1e8 and value % 1 == 0 else f"{value:.{digits}g}"


# --- the same in words ------------------------------------------------------------------------------------


def _words(step: Step) -> str:
    return f"Before: {_told(step.before)}. After: {_told(step.after)}."


def _told(held: list[Held]) -> str:
    return "; ".join(
        f"rank {rank} holds "
        + (" | ".join(", ".join(_number(value, 6) for value in group) for group in groups) or "nothing")
        for rank, groups in enumerate(held)
    )
