"""A file that is there whole or not at all, and locks. Killed writers, full disks: test_checkpoint.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from course_lib.files import locked, whole_file, write_whole


@pytest.mark.parametrize("durable", [True, False])
def test_the_name_comes_at_the_end(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with whole_file(path, durable) as file:
        file.write(b"new" * 100_000)
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" * 100_000
    assert os.listdir(tmp_path) == ["a"]


def test_it_has_the_rights_of_the_users_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyError), whole_file(tmp_path / "a") as file:  # noqa: PT012
        file.write(b"new")
        raise KeyError
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "b"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("durable", [True, False])
def test_a_part_that_is_being_written_is_left_alone(durable: bool, tmp_path: Path) -> None:
    with whole_file(tmp_path / "a", durable) as slow:
        slow.write(b"slow")
        with whole_file(tmp_path / "a", durable) as quick:
            quick.write(b"quick")
        assert (tmp_path / "a").read_bytes() == b"quick"
    assert (tmp_path / "a").read_bytes() == b"slow", "the last to be done stays"
    assert os.listdir(tmp_path) == ["a"]


def test_what_dead_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.1-00.part", ".a.2-00.part", ".b.1-00.part", "a.part", ".a.old"):
        (tmp_path / name).touch()
    write_whole(tmp_path / "a", "it does not look for any")
    assert len(os.listdir(tmp_path)) == 6
    with whole_file(tmp_path / "a", durable=True):
        pass
    assert set(os.listdir(tmp_path)) == {"a", ".b.1-00.part", "a.part", ".a.old"}


def test_one_at_a_time_has_a_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as first, locked(tmp_path / "lock", seconds=0.2) as second:
        assert (first, second) == (True, False)
    with locked(tmp_path / "lock", seconds=0.2) as third:
        assert third
