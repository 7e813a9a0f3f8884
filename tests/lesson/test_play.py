"""A picture with sliders: in plain Python, and in a kernel whose front end moves them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from course_lib import memory_use, play, rank_grid
from tests.support.front_end import FrontEnd


@pytest.fixture(scope="module")
def front_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    found = FrontEnd(tmp_path_factory.mktemp("home"))
    yield found
    found.close()


def test_plain_python_gets_the_picture_of_the_defaults() -> None:
    picture = play(rank_grid, nodes=(1, 8))
    assert picture is not None
    assert picture.alt == rank_grid().alt


def test_ones_own_default_comes_first() -> None:
    picture = play(functools.partial(memory_use, gpu_gib=80), gpu_gib=[24, 80])
    assert picture is not None
    assert picture.alt == memory_use(gpu_gib=80).alt


def test_a_slider_redraws_the_picture_in_its_place(front_end: FrontEnd) -> None:
    front_end.run("from course_lib import play, rank_grid, sampler_map")
    assert front_end.run("play(rank_grid, nodes=(1, 8), gpus=(1, 8))") == ""
    assert [state["value"] for state in front_end.widgets.values() if "value" in state] == [2, 4]
    before = len(front_end.shown)
    assert front_end.shown[-1]["data"]["text/plain"] == repr(rank_grid())
    assert front_end.move("nodes", 3) == ""
    assert len(front_end.shown) == before
    assert front_end.shown[-1]["data"]["text/plain"] == repr(rank_grid(3))
    assert set(front_end.shown[-1]["data"]) == {"image/png", "text/plain"}
    front_end.move("gpus", 2)
    assert front_end.shown[-1]["data"]["text/plain"] == repr(rank_grid(3, 2))


def test_switches_and_choices_begin_with_the_figures_default(front_end: FrontEnd) -> None:
    told = front_end.run(
        "from course_lib import play, sampler_map\n"
        "play(sampler_map, shuffle=False, drop_last=True, set_epoch=['nobody', 'rank 0', 'all'])"
    )
    assert told == ""
    states = {state["description"]: state for state in front_end.widgets.values() if "description" in state}
    assert states["shuffle"]["value"] is True
    assert states["drop last"]["value"] is False
    assert states["set epoch"]["index"] == 2
