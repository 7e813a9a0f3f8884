"""`shard_map`: draw which rank saw which sample in which epoch, from the indices that the ranks drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .style import RANK_COLORS, Picture, ink_on, new_figure, rank_color, styled, without_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Seen = Sequence[Sequence[Sequence[int]]]  # by rank, by epoch: the indices

Table = list[list[list[int]]]  # by epoch, by sample: the ranks that saw it, once for each time
MOST_RANKS, MOST_EPOCHS, MOST_SAMPLES = len(RANK_COLORS), 24, 40
NAMED = 6  # the text lists up to this many samples by number; of more, it gives the count


def shard_map(seen: Seen | Mapping[str, Seen], samples: int, title: str) -> Picture:
    """Draw which rank saw which sample in which epoch (lesson 07).

    A column is a sample, a row is an epoch, the colour (and the number in the cell) is the rank that saw it.
    A sample that was seen more than once in an epoch is split into as many strips and framed in black; one
    that no rank saw is crossed out.

    ``seen[rank][epoch]`` is a list of indices, as in ``run.results`` when each rank returns one list per
    epoch. Several of these, by name, are drawn one below the other. ``samples`` is the size of the data set.

    More than 8 ranks, 40 samples or 24 epochs, or an index that is not in the data set, are a ValueError.
    """
    panels = dict(seen) if isinstance(seen, Mapping) else {"": seen}
    tables = {name: _table(panel, samples) for name, panel in panels.items()}
    ranks = max(map(len, panels.values()))
    cells = [cell for table in tables.values() for row in table for cell in row]
    deep = max(0.3, 0.16 * min(max(map(len, cells)), 4))  # inches of a row
    heights = [len(table) * deep for table in tables.values()]
    handles = _handles(ranks, cells)
    top, between, bottom = 0.4 + 0.2 * any(tables), 0.42, 0.55 + 0.22 * -(-len(handles) // 6)  # inches
    height = top + sum(heights) + between * (len(heights) - 1) + bottom
    margins = {"left": 0.07, "right": 0.99, "top": 1 - top / height, "bottom": bottom / height}
    figure, (empty,) = new_figure(height=height, margins=margins)  # no layout to fit: a slider waits
    empty.remove()
    with styled():
        look = margins | {"hspace": between * len(heights) / sum(heights)}
        places = figure.subplots(
            len(heights), squeeze=False, sharex=True, height_ratios=heights, gridspec_kw=look
        )
        for (axes,), (name, table) in zip(places, tables.items(), strict=True):
            _draw(axes, table, deep)
            axes.set_title(name, fontsize=10, fontweight="normal")
        axes.set_xlabel("sample")
        y = 1 - 0.08 / height
        figure.suptitle(title, x=0.01, y=y, ha="left", va="top", fontsize=11, fontweight="bold")
        figure.legend(handles=handles, ncols=6, loc="lower center", handlelength=1.2, columnspacing=1.4)
    words = " ".join(_words(name, table, len(panels[name])) for name, table in tables.items())
    return Picture(figure, f"{title}. {samples} samples, {ranks} rank{'s' * (ranks > 1)}. {words}")


def _table(seen: Seen, samples: int) -> Table:
    """Order the indices by epoch and sample, instead of by rank and epoch."""
    epochs = max(map(len, seen), default=0)
    if not (1 <= len(seen) <= MOST_RANKS and 1 <= epochs <= MOST_EPOCHS and 1 <= samples <= MOST_SAMPLES):
        raise ValueError(
            f"seen has {len(seen)} ranks, {epochs} epochs, {samples} samples; "
            f"the picture is for 1 to {MOST_RANKS}, {MOST_EPOCHS}, {MOST_SAMPLES}"
        )
    table: Table = [[[] for _ in range(samples)] for _ in range(epochs)]
    for rank, by_epoch in enumerate(seen):
        for epoch, drawn in enumerate(by_epoch):
            for index in drawn:
                if not 0 <= index < samples:
                    what = f"rank {rank} drew in epoch {epoch} the index {index}"
                    raise ValueError(f"{what}; the {samples} samples are 0 … {samples - 1}")
                table[epoch][index].append(rank)
    return table


def _draw(axes: Axes, table: Table, deep: float) -> None:
    """Draw cells of a kind together; a slider cannot wait for a patch or a text for each."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    samples = len(table[0])
    fields, frames, crosses = [], [], []
    marks: dict[tuple[int, float], list[tuple[float, float]]] = {}  # by rank and size
    for y, row in enumerate(table):
        for x, ranks in enumerate(row):
            if not ranks:
                fields.append(Rectangle((x, y), 1, 1, facecolor="white", edgecolor="#bbbbbb", lw=0.6))
                crosses.append((x + 0.5, y + 0.5))
            for i, rank in enumerate(ranks):
                tall = 1 / len(ranks)
                look = {"facecolor": rank_color(rank), "edgecolor": "white", "lw": 0.6}
                fields.append(Rectangle((x, y + i * tall), 1, tall, **look))
                if (size := min(6.5, 45 * deep * tall)) > 5:  # points: it can be read
                    marks.setdefault((rank, size), []).append((x + 0.5, y + (i + 0.5) * tall))
            if len(ranks) > 1:
                frames.append(Rectangle((x, y), 1, 1, fill=False, edgecolor="black", lw=1.8))
    axes.add_collection(PatchCollection(fields, match_original=True))
    axes.add_collection(PatchCollection(frames, match_original=True, zorder=3))  # on top of the neighbours
    for (rank, size), places in marks.items():
        look = {"marker": f"${rank}$", "markersize": size, "color": ink_on(rank), "markeredgewidth": 0.1}
        axes.plot(*zip(*places, strict=True), linestyle="none", label=f"rank {rank}", **look)
    if crosses:
        axes.plot(*zip(*crosses, strict=True), "x", color="black", markersize=8, label="seen by nobody")
    shown = range(0, samples, 1 if samples <= 30 else 5)  # all of 40 numbers would touch
    axes.set_xticks([x + 0.5 for x in shown], list(map(str, shown)))
    axes.set_yticks([y + 0.5 for y in range(len(table))], list(map(str, range(len(table)))))
    axes.set(xlim=(-0.08, samples + 0.08), ylim=(len(table) + 0.06, -0.06), ylabel="epoch")
    without_lines(axes)


def _handles(ranks: int, cells: list[list[int]]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=rank_color(rank), label=f"rank {rank}") for rank in range(ranks)]
    if any(len(cell) > 1 for cell in cells):
        handles.append(Patch(fill=False, linewidth=1.8, label="seen more than once"))
    if not all(cells):
        handles.append(Line2D([], [], marker="x", color="black", linestyle="none", label="seen by nobody"))
    return handles


def _words(name: str, table: Table, ranks: int) -> str:
    """Describe each epoch, with the counts; equal epochs share a sentence."""
    epochs: dict[str, list[str]] = {}
    for epoch, row in enumerate(table):
        share = [str(sum(cell.count(rank) for cell in row)) for rank in range(ranks)]
        more = _some([x for x, cell in enumerate(row) if len(cell) > 1])
        none = _some([x for x, cell in enumerate(row) if not cell])
        text = f"the ranks saw {', '.join(share)} samples" if ranks > 1 else f"{share[0]} samples"
        epochs.setdefault(f"{text}; more than once: {more}; not at all: {none}", []).append(str(epoch))
    words = " ".join(f"Epoch {', '.join(numbers)}: {sentence}." for sentence, numbers in epochs.items())
    return f"{name}: {words}" if name else words


def _some(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers)) or "none"
    return listed if len(numbers) <= NAMED else f"{len(numbers)} of them"
