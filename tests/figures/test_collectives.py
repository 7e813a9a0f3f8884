"""A collective's picture: what it shows, whose colours, and that nothing in it overlaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course_lib import collective, collectives
from course_lib.figures.collectives import UNKNOWN, _groups, origins
from course_lib.figures.style import RANK_COLORS
from tests.support.pictures import is_whole, overlapping


def numbers(ranks: int) -> list[torch.Tensor]:
    return [torch.arange(1, ranks + 1) * 10**rank for rank in range(ranks)]


def cases(ranks: int) -> dict[str, tuple[list[Any], list[Any]]]:
    """Every collective, as its definition has it."""
    mine = numbers(ranks)
    pieces = [list(each.split(1)) for each in mine]
    ones = [each[:1] for each in mine]
    total = sum(mine[1:], mine[0])
    return {
        "broadcast": (mine, [mine[0]] * ranks),
        "scatter": ([pieces[0], *[None] * (ranks - 1)], pieces[0]),
        "gather": (ones, [ones, *[None] * (ranks - 1)]),
        "reduce": (mine, [total, *mine[1:]]),
        "all_gather": (ones, [ones] * ranks),
        "all_reduce": (mine, [total] * ranks),
        "reduce_scatter": (pieces, list(total.split(1))),
        "all_to_all": (pieces, [[each[rank : rank + 1] for each in mine] for rank in range(ranks)]),
    }


def found(before: Any, after: Any) -> list[list[set[int]]]:
    """For each rank, for each of its values after, the ranks in it."""
    came = origins(list(map(_groups, before)), list(map(_groups, after)))
    return [[set(each) for group in groups for each in group] for groups in came]


def test_the_origins_of_every_collective_are_found_from_its_values() -> None:
    everyone = {0, 1, 2}
    came = {name: found(*case) for name, case in cases(3).items()}
    assert came["broadcast"] == [[{0}] * 3] * 3
    assert came["scatter"] == [[{0}]] * 3
    assert came["gather"] == [[{0}, {1}, {2}], [], []]
    assert came["reduce"] == [[everyone] * 3, [{1}] * 3, [{2}] * 3]
    assert came["all_gather"] == [[{0}, {1}, {2}]] * 3
    assert came["all_reduce"] == [[everyone] * 3] * 3
    assert came["reduce_scatter"] == [[everyone]] * 3
    assert came["all_to_all"] == [[{0}, {1}, {2}]] * 3


def test_partial_sums_and_values_from_nowhere() -> None:
    assert found([1.0, 10.0, 100.0], [111.0, 110.0, 37.0]) == [[{0, 1, 2}], [{1, 2}], [set()]]
    assert found([1.0, 10.0], [5.0, float("nan")]) == [[set()], [set()]]
    assert found([7, 7], [7, 7]) == [[{0}], [{1}]], "unchanged, not copied"
    assert found([None, 3], [3, None]) == [[{1}], []]
    assert found([1, 10**6, 10**7], [10**7 + 1, 10**7, 1 + 10**6]) == [[{0, 2}], [{2}], [{0, 1}]]


def facecolors(picture: Any) -> set[str]:
    boxes = [patch for axes in picture.figure.axes for patch in axes.patches if isinstance(patch, Rectangle)]
    return {to_hex(box.get_facecolor()) for box in boxes if box.get_fill()}


def test_the_colours_are_those_of_the_ranks_and_grey_for_what_no_rank_held() -> None:
    assert facecolors(collective(numbers(3), [numbers(3)[1]] * 3, "t")) == set(RANK_COLORS[:3])
    assert facecolors(collective([1, 10], [5, 10], "t")) == {RANK_COLORS[0], RANK_COLORS[1], UNKNOWN}


def test_the_colours_may_refer_to_an_earlier_state() -> None:
    start, before, after = [1, 10, 100], [1, 11, 100], [1, 11, 111]
    picture = collectives({"step": (before, after)}, "t", start=start)
    stripes = [patch for patch in picture.figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(stripes) == (1 + 2 + 1) + (1 + 2 + 3)


@pytest.mark.parametrize("ranks", [1, 4])
def test_nothing_overlaps_and_the_words_have_the_values(ranks: int) -> None:
    for name, (before, after) in cases(ranks).items():
        picture = collective(before, after, f"{name}: what it does")
        assert overlapping(picture.figure) == [], name
        assert is_whole(picture.figure), name
    picture = collectives(cases(ranks), "All")
    assert overlapping(picture.figure) == []
    assert is_whole(picture.figure)
    assert picture.alt.startswith("All. broadcast. Before: rank 0 holds 1")
    assert len(picture.figure.axes) == 8


def test_eight_ranks_can_be_read() -> None:
    powers = [[2**rank] for rank in range(8)]
    picture = collective(powers, [[255]] * 8, "all_reduce of eight")
    assert overlapping(picture.figure) == []
    assert is_whole(picture.figure)
    assert "rank 7 holds 255" in picture.alt


def test_arrows_go_where_something_moved() -> None:
    def arrows(picture: Any) -> tuple[int, int]:
        drawn = [
            text.arrowprops for text in picture.figure.axes[0].texts if getattr(text, "arrowprops", None)
        ]
        moved = sum(each["ls"] == "-" for each in drawn)
        return moved, len(drawn) - moved

    assert arrows(collective(numbers(3), [numbers(3)[0]] * 3, "broadcast")) == (2, 1)
    assert arrows(collective([1, 10, 100], [100, 1, 10], "ring")) == (3, 0)
    assert arrows(collective([1, 10], [1, 10], "barrier")) == (0, 2)
    assert arrows(collective([1, 10], [11, 11], "all_reduce")) == (2, 2)


def framed(picture: Any) -> list[tuple[float, float]]:
    """Return where the boxes with a frame are, by (place in its row, row); a box and a gap are 1.34 wide."""
    (axes,) = picture.figure.axes
    frames = [box for box in axes.patches if isinstance(box, Rectangle) and box.get_linewidth() == 2]
    left = min(box.get_x() for box in axes.patches if isinstance(box, Rectangle))
    return [(round((box.get_x() - left) / 1.34), round((0.5 - box.get_y() - 1) / 1.42)) for box in frames]


def test_the_piece_that_travels_round_a_ring_has_a_frame() -> None:
    before = [[[1], [2], [3]], [[10], [20], [30]], [[100], [200], [300]]]
    after = [[[1], [202], [3]], [[10], [20], [33]], [[110], [200], [300]]]
    places = framed(collective(before, after, "step 1"))
    assert places[::2] == [(2, 0), (0, 1), (1, 2)], "sent by ranks 0, 1, 2: third, first, second"
    assert [row for _, row in places[1::2]] == [0, 1, 2], "each received one"
    after = [[[1], [2], [3]], [[1], [20], [30]], [[100], [200], [300]]]
    assert framed(collective(before, after, "one message")) == [], "not one each"
    for case in cases(3).values():
        assert framed(collective(*case, "no ring")) == []


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([], r"a picture is for 1 to 8 ranks with up to 16 values; got \[\] values"),
        (list(range(9)), r"got \[1, 1, 1, 1, 1, 1, 1, 1, 1\] values"),
        ([torch.zeros(17)], r"got \[17\] values"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(held: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        collective(held, held, "t")


def test_tensors_lists_and_arrays_can_be_drawn() -> None:
    tensor = torch.ones(2, requires_grad=True)
    held = [[tensor, tensor], (1.0, 2.0), torch.ones(2).numpy(), True]
    assert "rank 0 holds 1, 1 | 1, 1" in collective(held, [None] * 4, "t").alt


def test_numbers_are_drawn_and_told_as_they_are() -> None:
    picture = collective([torch.tensor([277.75, 999.5, -0.0, 12345678])], [None], "t")
    assert "rank 0 holds 277.8, 999.5, 0, 12345678. After" in picture.alt
    drawn = {text.get_text() for text in picture.figure.axes[0].texts}
    assert {"277.8", "999.5", "0", "12345678"} <= drawn
