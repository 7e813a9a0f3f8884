"""`node_map`: draw which rank runs on which node, from the environment variables of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .style import Picture, ink_on, new_figure, rank_color, styled

TOLD = ("RANK", "LOCAL_RANK", "GROUP_RANK")
MOST_NODES, MOST_ON_A_NODE = 8, 16
ACROSS = 4  # ranks of a node side by side, or nodes; further ones go below
RANKS_ACROSS = 8  # side by side, on all nodes
GAP = 0.12  # between nodes, as a fraction of a node's width


def node_map(
    environments: Sequence[Mapping[str, str]], title: str, names: Sequence[str] = (), link: str = ""
) -> Picture:
    """Draw which rank runs on which node: a frame for each node, a field for each rank (lesson 17).

    Parameters
    ----------
    environments
        The environment of each rank, as in ``run.environments``: RANK, LOCAL_RANK and GROUP_RANK (the number
        of the node), as strings or numbers.
    title
        What there is to see.
    names
        A name for each node, in the order of the nodes' numbers; by default "node 0", "node 1", …
    link
        What connects the nodes, in words; written below them.

    Raises
    ------
    ValueError
        There is no rank, one lacks a variable or its value is not a whole number, two have the same RANK,
        or there are more than 8 nodes, or more than 16 ranks on one. The message says which.
    """
    nodes = _nodes(environments)
    if names and len(names) != len(nodes):
        raise ValueError(f"names has {len(names)} names, and there are {len(nodes)} nodes")
    called = [names[i] if names else f"node {number}" for i, number in enumerate(nodes)]
    most = max(map(len, nodes.values()))
    wide, deep = min(ACROSS, most), -(-most // ACROSS)
    columns = min(ACROSS, len(nodes), RANKS_ACROSS // wide)
    rows = -(-len(nodes) // columns)
    height = 0.55 + 0.5 * deep  # of a node, in inches
    figure, (axes,) = new_figure(
        1,
        width=max(6.0, 0.4 + columns * (0.3 + 0.95 * wide)),
        height=0.6 + rows * (height + 0.2) + 0.3 * bool(link),
    )
    with styled():
        for place, (name, ranks) in enumerate(zip(called, nodes.values(), strict=True)):
            left, top = place % columns * (1 + GAP), place // columns * (height + 0.2)
            axes.add_patch(
                _frame(left, top, 1, height, edgecolor="#555555", facecolor="#f5f5f5", linewidth=1.4)
            )
            axes.text(left + 0.5, top + 0.24, name, ha="center", va="center", weight="bold", size=10)
            for i, (rank, local) in enumerate(ranks):
                x, y = left + (i % ACROSS + 0.06) / wide, top + 0.45 + i // ACROSS * 0.5
                axes.add_patch(_frame(x, y, 0.88 / wide, 0.44, facecolor=rank_color(rank), edgecolor="none"))
                words = f"RANK {rank}\nLOCAL_RANK {local}"
                middle = {"ha": "center", "va": "center", "size": 8, "color": ink_on(rank)}
                axes.text(x + 0.44 / wide, y + 0.22, words, **middle)
        bottom = rows * (height + 0.2)
        if link:
            axes.text(
                columns * (1 + GAP) / 2 - GAP / 2, bottom + 0.05, link, ha="center", va="center", size=9
            )
        axes.set(xlim=(-0.02, columns * (1 + GAP) - GAP + 0.02), ylim=(bottom + 0.2 * bool(link), -0.03))
        axes.axis("off")
        axes.set_title(title)
    words = "; ".join(
        f"{name}: " + ", ".join(f"rank {rank} (local rank {local})" for rank, local in ranks)
        for name, ranks in zip(called, nodes.values(), strict=True)
    )
    return Picture(figure, f"{title}. {words}." + (f" {link[:1].upper()}{link[1:]}." if link else ""))


def _frame(left: float, top: float, width: float, height: float, **look: object):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, height, **look)


def _nodes(environments: Sequence[Mapping[str, str]]) -> dict[int, list[tuple[int, int]]]:
    """Return the (rank, local rank) pairs of each node, in order, by node number."""
    nodes: dict[int, list[tuple[int, int]]] = {}
    seen: set[int] = set()
    for told in environments:
        try:
            rank, local, node = (int(told[name]) for name in TOLD)
        except (KeyError, TypeError, ValueError):
            shown = {name: told.get(name) for name in TOLD} if isinstance(told, Mapping) else told
            raise ValueError(
                f"each rank needs whole numbers for {', '.join(TOLD)}; got {shown!r:.120}"
            ) from None
        if rank in seen:
            raise ValueError(f"two ranks have RANK={rank}")
        seen.add(rank)
        nodes.setdefault(node, []).append((rank, local))
    if not nodes:
        raise ValueError("node_map needs at least one rank: [{'RANK': 0, 'LOCAL_RANK': 0, 'GROUP_RANK': 0}]")
    if len(nodes) > MOST_NODES or max(map(len, nodes.values())) > MOST_ON_A_NODE:
        most = max(map(len, nodes.values()))
        raise ValueError(
            f"{len(nodes)} nodes with up to {most} ranks are more than can be drawn: "
            f"{MOST_NODES} nodes, {MOST_ON_A_NODE} ranks on each"
        )
    return {node: sorted(nodes[node]) for node in sorted(nodes)}
