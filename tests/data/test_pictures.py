"""course_lib.data.pictures: what is drawn, once, though a maker is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import PIL.Image
import pytest
from torchvision.datasets import ImageFolder

from course_lib.data import pictures as module
from course_lib.data.pictures import PATTERNS, SHAPES, pictures
from tests.support.processes import wait_for

MAKE = "from course_lib import pictures; pictures()"


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real maker, for few pictures."""
    monkeypatch.setattr(module, "TRAIN_EACH", 2)
    monkeypatch.setattr(module, "VAL_EACH", 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.jpg")}


def test_what_is_made(course_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures()
    assert folder == course_home / "data" / "pictures-v1"
    for split, each in (("train", 2), ("val", 1)):
        data = ImageFolder(folder / split)
        assert data.classes == sorted(PATTERNS)
        assert set(Counter(data.targets).values()) == {each}
        for path, _ in data.samples:
            with PIL.Image.open(path) as image:
                image.load()
                assert (image.format, image.mode) == ("JPEG", "RGB")
                assert image.size in SHAPES
    made = contents(folder)
    assert len(set(made.values())) == 30, "no picture twice"
    assert sorted(os.listdir(folder)) == [".lock", ".whole", "train", "val"]

    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "another"))
    assert contents(pictures()) == made, "the same bytes"


def test_a_killed_maker_leaves_no_half_picture_and_the_next_one_goes_on(course_home: Path) -> None:
    folder = course_home / "data" / "pictures-v1"
    with subprocess.Popen([sys.executable, "-c", MAKE]) as killed:
        wait_for(lambda: list(folder.glob("*/*/*.jpg")))
        assert killed.poll() is None, "it is still at work"
        killed.kill()
    assert not (folder / ".whole").exists()
    for path in folder.glob("*/*/*.jpg"):
        PIL.Image.open(path).load()
    assert len(contents(pictures())) >= 30
