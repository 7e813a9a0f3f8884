"""A file that is there whole or not at all. Killed writers, full disks: test_checkpoint.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from course_lib.checkpoint.whole_file import whole_file


def test_the_name_comes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new" * 100_000)
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" * 100_000
    assert os.listdir(tmp_path) == ["a"]


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyError), whole_file(tmp_path / "a") as file:  # noqa: PT012
        file.write(b"new")
        raise KeyError
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "b"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_part_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as slow:
        slow.write(b"slow")
        with whole_file(tmp_path / "a") as quick:
            quick.write(b"quick")
        assert (tmp_path / "a").read_bytes() == b"quick"
    assert (tmp_path / "a").read_bytes() == b"slow", "the last to be done stays"
    assert os.listdir(tmp_path) == ["a"]


def test_what_dead_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.1-00.part", ".a.2-00.part", ".b.1-00.part", "a.part", ".a.old"):
        (tmp_path / name).touch()
    with whole_file(tmp_path / "a"):
        pass
    assert set(os.listdir(tmp_path)) == {"a", ".b.1-00.part", "a.part", ".a.old"}


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "no/a"):
        pass
