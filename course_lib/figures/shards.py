"""`shard_map`: draw which rank saw which sample in which epoch, from the indices that the ranks drew."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .style import RANK_COLORS, Picture, ink_on, new_figure, rank_color, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Seen = Sequence[Sequence[Sequence[int]]]  # by rank, by epoch: the indices

MOST_RANKS, MOST_SAMPLES, MOST_EPOCHS = len(RANK_COLORS), 120, 24
DIGITS_UP_TO = 60  # samples; with more, a cell is too narrow for its rank's number
NAMED = 6  # the text lists up to this many samples by number; of more it gives the count


def shard_map(
    seen: Seen | Mapping[str, Seen], samples: int, title: str, epochs: Sequence[int] | None = None
) -> Picture:
    """Draw which rank saw which sample in which epoch (lesson 07).

    A column is a sample, a row is an epoch, the colour (and the number in the cell) is the rank that saw it.
    A sample that was seen more than once in an epoch is split into as many strips and framed in black; one
    that no rank saw is crossed out.

    Parameters
    ----------
    seen
        The indices that each rank drew: ``seen[rank][epoch]`` is a list of them, as in ``run.results`` when
        each rank returns one list per epoch. Several of these, by name, are drawn one below the other.
    samples
        The size of the data set, at most 120; its indices are 0 … samples − 1.
    title
        What there is to see.
    epochs
        The labels of the rows; by default 0, 1, 2, …

    Raises
    ------
    TypeError
        ``seen`` is not made of lists of whole numbers by rank and epoch.
    ValueError
        An index is not in the data set, ranks have different numbers of epochs, there are more than 8 ranks,
        120 samples or 24 epochs, or there is nothing to draw. The message says where, with the value.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MOST_SAMPLES:
        raise ValueError(
            f"samples is how many the data set has, a whole number from 1 to {MOST_SAMPLES}; got {samples!r}"
        )
    panels = dict(seen) if isinstance(seen, Mapping) else {"": seen}
    if not panels:
        raise ValueError("there is nothing to draw: seen is empty")
    tables = {name: _table(panel, samples, name) for name, panel in panels.items()}
    rows = [len(table) for table in tables.values()]
    if epochs is not None and any(len(epochs) != count for count in rows):
        raise ValueError(f"epochs numbers {len(epochs)} rows, and there are {max(rows)}")
    ranks = max(len(panel) for panel in panels.values())
    deepest = max(len(cell) for table in tables.values() for row in table for cell in row)
    deep = max(0.3, 0.16 * min(deepest, 4))  # inches of a row
    figure, axes = _stacked([count * deep for count in rows])
    with styled():
        for at, (name, table) in zip(axes, tables.items(), strict=True):
            _draw(at, table, deep, list(epochs) if epochs is not None else list(range(len(table))))
            at.set_title(name, fontsize=10, fontweight="normal")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        axes[-1].set_xlabel("sample")
        cells = [cell for table in tables.values() for row in table for cell in row]
        figure.legend(
            handles=_legend(ranks, any(len(c) > 1 for c in cells), any(not c for c in cells)),
            loc="outside lower center",
            ncols=6,
            handlelength=1.2,
            columnspacing=1.4,
        )
    words = " ".join(_words(name, table, len(panels[name]), epochs) for name, table in tables.items())
    return Picture(figure, f"{title}. {samples} samples, {ranks} rank{'s' * (ranks > 1)}. {words}")


def _table(seen: Any, samples: int, name: str) -> list[list[list[int]]]:
    """List, by epoch and sample, the ranks that saw the sample, one entry for each time."""
    where = f" of {name!r}" if name else ""
    if isinstance(seen, str | bytes) or not isinstance(seen, Sequence):
        raise TypeError(
            f"seen{where} is a list by rank, of lists by epoch, of indices (what the ranks returned); "
            f"got {seen!r:.60}, a {type(seen).__name__}"
        )
    if not 1 <= len(seen) <= MOST_RANKS:
        raise ValueError(f"seen{where} has {len(seen)} ranks; the picture is for 1 to {MOST_RANKS}")
    counts = []
    for rank, epochs in enumerate(seen):
        if isinstance(epochs, str | bytes) or not isinstance(epochs, Sequence):
            raise TypeError(
                f"seen[{rank}]{where} is a list by epoch, of lists of indices; got {epochs!r:.60}"
            )
        counts.append(len(epochs))
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks{where} have different numbers of epochs: {counts}, by rank")
    if not 1 <= counts[0] <= MOST_EPOCHS:
        raise ValueError(f"seen{where} has {counts[0]} epochs; the picture is for 1 to {MOST_EPOCHS}")
    table: list[list[list[int]]] = [[[] for _ in range(samples)] for _ in range(counts[0])]
    for rank, epochs in enumerate(seen):
        for epoch, drawn in enumerate(epochs):
            place = f"rank {rank} drew in epoch {epoch}{where}"
            try:
                indices = [operator.index(index) for index in drawn]
            except TypeError:
                raise TypeError(f"what {place} is no list of whole numbers: {drawn!r:.60}") from None
            for index in indices:
                if not 0 <= index < samples:
                    raise ValueError(
                        f"{place} the index {index}; the {samples} samples are 0 … {samples - 1}"
                    )
                table[epoch][index].append(rank)
    return table


def _stacked(heights: list[float]) -> tuple[Any, list[Axes]]:
    """Create a figure with axes of these heights (inches), one below the other."""
    figure, (first,) = new_figure(1, width=8.6, height=1.35 + sum(heights) + 0.42 * (len(heights) - 1))
    first.remove()
    with styled():
        axes = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    return figure, list(axes)


def _draw(axes: Axes, table: list[list[list[int]]], deep: float, epochs: list[int]) -> None:
    from matplotlib.patches import Rectangle

    samples = len(table[0])
    frames = []
    for y, row in enumerate(table):
        for x, ranks in enumerate(row):
            if not ranks:
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor="white", edgecolor="#bbbbbb", lw=0.6))
                axes.plot([x + 0.2, x + 0.8], [y + 0.2, y + 0.8], color="black", lw=1)
                axes.plot([x + 0.2, x + 0.8], [y + 0.8, y + 0.2], color="black", lw=1)
                continue
            tall = 1 / len(ranks)
            for i, rank in enumerate(ranks):
                color = rank_color(rank)
                axes.add_patch(
                    Rectangle((x, y + i * tall), 1, tall, facecolor=color, edgecolor="white", lw=0.6)
                )
                if samples <= DIGITS_UP_TO and deep * tall > 0.11:
                    axes.text(
                        *(x + 0.5, y + (i + 0.52) * tall, str(rank)),
                        ha="center",
                        va="center",
                        fontsize=8 if samples <= 30 and deep * tall > 0.14 else 6,
                        color=ink_on(rank),
                    )
            if len(ranks) > 1:
                frames.append(Rectangle((x, y), 1, 1, fill=False, edgecolor="black", lw=1.8, zorder=3))
    for frame in frames:  # on top of the neighbouring cells
        axes.add_patch(frame)
    step = 1 if samples <= 30 else 5 if samples <= 60 else 10
    ticks = range(0, samples, step)
    axes.set_xticks([x + 0.5 for x in ticks], [str(x) for x in ticks])
    axes.set_yticks([y + 0.5 for y in range(len(table))], [str(epoch) for epoch in epochs])
    axes.set(xlim=(-0.08, samples + 0.08), ylim=(len(table) + 0.06, -0.06), ylabel="epoch")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _legend(ranks: int, twice: bool, missing: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=rank_color(rank), label=f"rank {rank}") for rank in range(ranks)]
    if twice:
        label = "seen more than once"
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.8, label=label))
    if missing:
        cross = {"marker": "x", "color": "black", "linestyle": "none", "label": "seen by nobody"}
        handles.append(Line2D([], [], **cross))
    return handles


def _words(name: str, table: list[list[list[int]]], ranks: int, epochs: Sequence[int] | None) -> str:
    """Describe each epoch, with the counts; identical epochs share a sentence."""
    numbers = list(epochs) if epochs is not None else list(range(len(table)))
    sentences: dict[str, list[int]] = {}
    for number, row in zip(numbers, table, strict=True):
        share = [sum(cell.count(rank) for cell in row) for rank in range(ranks)]
        more = [x for x, cell in enumerate(row) if len(cell) > 1]
        none = [x for x, cell in enumerate(row) if not cell]
        text = (
            f"the ranks saw {', '.join(map(str, share))} samples; " if ranks > 1 else f"{share[0]} samples; "
        )
        text += f"more than once: {_some(more)}; not at all: {_some(none)}"
        sentences.setdefault(text, []).append(number)
    alike = {sentence: ", ".join(map(str, epochs)) for sentence, epochs in sentences.items()}
    head = f"{name}: " if name else ""
    return head + " ".join(f"Epoch {epochs}: {sentence}." for sentence, epochs in alike.items())


def _some(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return ", ".join(map(str, numbers)) if len(numbers) <= NAMED else f"{len(numbers)} of them"
