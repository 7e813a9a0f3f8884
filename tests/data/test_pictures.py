"""course_lib.data.pictures: what is made, once, and what a broken folder gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import PIL.Image
import pytest
from torchvision.datasets import ImageFolder

from course_lib.data import pictures as module
from course_lib.data.digits import DataError
from course_lib.data.pictures import PATTERNS, SHAPES, pictures

MAKE = """
import sys
from course_lib.data import pictures as module
module.TRAIN_EACH, module.VAL_EACH = 2, 1
print("begins", flush=True)
module.pictures(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real maker, for few pictures."""
    monkeypatch.setattr(module, "TRAIN_EACH", 2)
    monkeypatch.setattr(module, "VAL_EACH", 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.jpg")}


def test_what_is_made(course_home: Path, tmp_path: Path) -> None:
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
    assert not [each for each in os.listdir(folder) if each.startswith(".making")], "no part is left"

    before = {each: each.stat().st_mtime_ns for each in folder.rglob("*.jpg")}
    assert pictures() == folder
    assert before == {each: each.stat().st_mtime_ns for each in folder.rglob("*.jpg")}, "made once"

    assert contents(pictures(tmp_path / "again")) == made, "the same bytes"

    cut, gone = sorted(folder.glob("val/*/*.jpg"))[:2]
    cut.write_bytes(cut.read_bytes()[:-9])
    gone.unlink()
    assert contents(pictures()) == made, "a cut file and a missing one are found, and made again"


def test_several_makers_and_one_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    command = [sys.executable, "-c", MAKE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        deadline = time.monotonic() + 60
        while not list(folder.glob(".making-*/*/*/*.jpg")):
            assert time.monotonic() < deadline
            assert killed.poll() is None, "it is still at work"
            time.sleep(0.001)
        killed.send_signal(signal.SIGKILL)
    assert not (folder / "sizes.json").exists()
    makers = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait(120) for each in makers] == [0, 0]
    assert len(contents(folder)) == 30
    assert sorted(os.listdir(folder)) == [".made-pictures", "sizes.json", "train", "val"]
    assert len(json.loads((folder / "sizes.json").read_text())) == 30


def test_what_the_course_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train" / "cats").mkdir(parents=True)
    mine = tmp_path / "train" / "cats" / "0000.jpg"
    mine.write_bytes(b"mine")
    with pytest.raises(DataError, match="and the course did not make it: pass another root"):
        pictures(tmp_path)
    assert mine.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["train"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the pictures cannot be kept in") as caught:
        pictures(tmp_path / "file" / "pictures")
    assert "\n" not in str(caught.value)
