"""The map of samples, ranks and epochs: what it shows, in what words, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.colors import to_hex
from torch.utils.data import DistributedSampler

from course_lib import shard_map
from course_lib.figures.style import RANK_COLORS
from tests.support.pictures import is_whole, overlapping


def drawn(samples: int, ranks: int, epochs: int, **options: Any) -> list[list[list[int]]]:
    """What the samplers of so many ranks draw, by rank and epoch."""
    samplers = [DistributedSampler(range(samples), ranks, rank, **options) for rank in range(ranks)]
    found: list[list[list[int]]] = [[] for _ in samplers]
    for epoch in range(epochs):
        for sampler, mine in zip(samplers, found, strict=True):
            sampler.set_epoch(epoch)
            mine.append(list(sampler))
    return found


def labels(picture: Any) -> list[str]:
    return [text.get_text() for text in picture.figure.legends[0].get_texts()]


def test_a_cell_has_the_colour_of_the_rank_that_saw_it() -> None:
    seen = [[[0, 2]], [[1, 3]]]
    picture = shard_map(seen, 4, "Two ranks")
    fields, _ = picture.figure.axes[0].collections
    colors = {
        int(path.vertices[:, 0].min()): to_hex(color)
        for path, color in zip(fields.get_paths(), fields.get_facecolors(), strict=True)
    }
    assert [colors[x] for x in range(4)] == [RANK_COLORS[rank] for rank in (0, 1, 0, 1)]
    marks = {line.get_label(): list(line.get_xdata()) for line in picture.figure.axes[0].lines}
    assert marks == {"rank 0": [0.5, 2.5], "rank 1": [1.5, 3.5]}
    assert labels(picture) == ["rank 0", "rank 1"]


def test_padding_is_framed_and_the_words_count_it() -> None:
    picture = shard_map([[[0, 2, 4]], [[1, 3, 0]]], 5, "Padded")
    assert picture.alt == (
        "Padded. 5 samples, 2 ranks. "
        "Epoch 0: the ranks saw 3, 3 samples; more than once: 0; not at all: none."
    )
    _, frames = picture.figure.axes[0].collections
    assert [tuple(path.vertices.min(axis=0)) for path in frames.get_paths()] == [(0, 0)]
    assert labels(picture)[-1] == "seen more than once"


def test_what_nobody_saw_is_crossed_out() -> None:
    picture = shard_map([[[0], [1]], [[2], [3]]], 5, "Dropped")
    crosses = [line for line in picture.figure.axes[0].lines if line.get_label() == "seen by nobody"]
    assert [list(zip(*line.get_data(), strict=True)) for line in crosses] == [
        [(1.5, 0.5), (3.5, 0.5), (4.5, 0.5), (0.5, 1.5), (2.5, 1.5), (4.5, 1.5)]
    ]
    assert "Epoch 0: the ranks saw 1, 1 samples; more than once: none; not at all: 1, 3, 4." in picture.alt
    assert labels(picture)[-1] == "seen by nobody"


def test_epochs_alike_share_a_sentence_and_long_lists_are_counted() -> None:
    picture = shard_map([[list(range(9))] * 3] * 2, 9, "All")
    assert (
        "Epoch 0, 1, 2: the ranks saw 9, 9 samples; more than once: 9 of them; not at all: none."
        in picture.alt
    )


def test_several_maps_stand_below_each_other_by_name() -> None:
    picture = shard_map({"one": drawn(13, 3, 2), "other": drawn(13, 2, 3)}, 13, "Two maps")
    assert [axes.get_title(loc="left") for axes in picture.figure.axes] == ["one", "other"]
    assert "one: Epoch 0: the ranks saw 5, 5, 5 samples" in picture.alt
    assert "other: Epoch 0: the ranks saw 7, 7 samples" in picture.alt
    assert overlapping(picture.figure) == []


@pytest.mark.parametrize("options", [{}, {"drop_last": True}])
@pytest.mark.parametrize(("samples", "ranks", "epochs"), [(10, 2, 1), (13, 4, 4), (30, 8, 6), (40, 8, 6)])
def test_nothing_overlaps_and_nothing_is_cut(samples: int, ranks: int, epochs: int, options: Any) -> None:
    picture = shard_map(drawn(samples, ranks, epochs, **options), samples, "Every digit has its rank")
    assert overlapping(picture.figure) == []
    assert is_whole(picture.figure)


@pytest.mark.parametrize(
    ("seen", "samples", "words"),
    [
        ([[[0, 5]]], 5, r"rank 0 drew in epoch 0 the index 5; the 5 samples are 0 … 4"),
        ([[[0]], [[0, -1]]], 5, r"rank 1 drew in epoch 0 the index -1"),
        ({"a": [[[0]]], "b": [[[7]]]}, 5, "rank 0 drew in epoch 0 the index 7"),
        ([[[0]]] * 9, 5, "9 ranks, 1 epochs, 5 samples; the picture is for 1 to 8, 24, 40"),
        ([[[0]] * 25], 5, "25 epochs"),
        ([[[0]]], 0, "0 samples"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(seen: Any, samples: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as told:
        shard_map(seen, samples, "No")
    assert "\n" not in str(told.value)
