"""Which rank sits where: each is drawn on its node and told in words, nothing overlaps, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.patches import Rectangle

from course_lib import node_map
from tests.support.pictures import overlapping


def told(nodes: int, each: int) -> list[dict[str, str]]:
    return [
        {"RANK": str(i), "LOCAL_RANK": str(i % each), "GROUP_RANK": str(i // each)}
        for i in range(nodes * each)
    ]


@pytest.mark.parametrize(("nodes", "each"), [(1, 1), (2, 1), (2, 2), (4, 8), (8, 16)])
def test_each_rank_stands_in_its_node_and_nothing_overlaps(nodes: int, each: int) -> None:
    picture = node_map(told(nodes, each), "Where the ranks sit", link="a cable joins them")
    (axes,) = picture.figure.axes
    boxes: list[Any] = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    frames = [box.get_bbox() for box in boxes if box.get_edgecolor()[3]]
    assert len(frames) == nodes
    assert len(boxes) == nodes * (1 + each)
    for rank in range(nodes * each):
        (text,) = [t for t in axes.texts if t.get_text() == f"RANK {rank}\nLOCAL_RANK {rank % each}"]
        inside = [number for number, frame in enumerate(frames) if frame.contains(*text.get_position())]
        assert inside == [rank // each]
    assert overlapping(picture.figure) == []
    assert picture.figure.get_figwidth() < 10


def test_it_reads_as_words() -> None:
    picture = node_map(told(2, 1), "T", names=["gpu-a", "gpu-b"], link="a cable of 50 MB/s")
    assert picture.alt == (
        "T. gpu-a: rank 0 (local rank 0); gpu-b: rank 1 (local rank 0). A cable of 50 MB/s."
    )


@pytest.mark.parametrize(
    ("environments", "options", "words"),
    [
        ([], {}, "needs at least one rank"),
        ([{"RANK": "0", "LOCAL_RANK": "0"}], {}, "needs whole numbers for RANK, LOCAL_RANK, GROUP_RANK"),
        ([{"RANK": "x", "LOCAL_RANK": "0", "GROUP_RANK": "0"}], {}, "'RANK': 'x'"),
        ([*told(1, 2), *told(1, 2)], {}, "two ranks have RANK=0"),
        (told(9, 1), {}, "9 nodes with up to 1 ranks"),
        (told(1, 17), {}, "1 nodes with up to 17 ranks"),
        (told(2, 1), {"names": ["gpu-a"]}, "names has 1 names, and there are 2 nodes"),
    ],
)
def test_what_it_refuses(environments: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        node_map(environments, "T", **options)
