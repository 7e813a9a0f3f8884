"""course_lib.data.pictures: what is drawn. (Once, though a maker is killed: test_once.py.)"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import PIL.Image
import pytest
from torchvision.datasets import ImageFolder

from course_lib.data import pictures as module
from course_lib.data.pictures import PATTERNS, SHAPES, pictures


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
