"""What is written is known, whichever way it was done."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import save

from course_lib.exercises.in_rank.file_audit import audit_files

WAYS: dict[str, tuple[Callable[[Path], object], int]] = {
    "torch.save": (lambda path: save({"a": 1}, path), 1),
    "into a file": (lambda path: save({"a": 1}, path.open("wb")), 1),
    "the old format": (lambda path: save({"a": 1}, path, _use_new_zipfile_serialization=False), 1),
    "pickle": (lambda path: pickle.dump(1, open(path, "wb")), 0),
    "bytes": (lambda path: path.write_bytes(b"1"), 0),
    "the system": (lambda path: os.write(os.open(path, os.O_WRONLY | os.O_CREAT), b"1"), 0),
    "a copy": (lambda path: shutil.copy(path.parent / "there", path), 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_seen_alike(way: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("1")
    write, saves = WAYS[way]
    with audit_files(tmp_path) as audit:
        write(tmp_path / "here")
        (tmp_path / "there").read_bytes()
        assert audit.opened == [os.path.realpath(tmp_path / "here")]
    assert (audit.saves, audit.gone) == (saves, [])


def test_what_was_removed_and_renamed_is_seen(tmp_path: Path) -> None:
    names = [tmp_path / name for name in "abc"]
    for name in names:
        name.write_text("1")
    with audit_files(tmp_path) as audit:
        names[0].unlink()
        names[1].replace(names[0])
        os.rename(names[2], names[1])
    names[0].unlink()
    assert audit.gone == [os.path.realpath(name) for name in names]
    assert audit.opened == []


def test_a_disk_can_be_slow(tmp_path: Path) -> None:
    there = []
    with audit_files(tmp_path, lambda what, _: there.append((what, (tmp_path / "here").exists()))):
        torch.save({"a": 1}, tmp_path / "here")
    assert there == [("open", False), ("save", True)]


def test_each_step_can_be_looked_at_before_it_is_done(tmp_path: Path) -> None:
    path, part, steps = tmp_path / "whole", tmp_path / "part", []

    def before(what: str, name: str) -> None:
        steps.append((what, Path(name).name, sorted(path.name for path in tmp_path.glob("[pw]*"))))
        (tmp_path / "of its own").write_text("not watched")

    path.write_text("of before")
    with audit_files(tmp_path, before) as audit:
        part.write_text("new")
        path.unlink()
        part.rename(path)
        os.truncate(path, 0)
    assert steps == [
        ("open", "part", ["whole"]),
        ("os.remove", "whole", ["part", "whole"]),
        ("os.rename", "part", ["part"]),
        ("os.truncate", "whole", ["whole"]),
    ]
    assert audit.opened == [os.path.realpath(part), os.path.realpath(path)]


def test_what_another_thread_writes_elsewhere_is_its_own(tmp_path: Path) -> None:
    """A rank's recorder writes all the time, and must not be held up, nor stop the watching."""
    (tmp_path / "mine").mkdir()
    done, steps = threading.Event(), []

    def records() -> None:
        while not done.is_set():
            (tmp_path / "notes.new").write_text("of the rank")
            (tmp_path / "notes.new").replace(tmp_path / "notes")

    thread = threading.Thread(target=records)
    thread.start()
    for turn in range(200):
        with audit_files(tmp_path / "mine", lambda what, name: steps.append(what)) as audit:
            (tmp_path / "mine" / "here").write_text("1")
        assert audit.opened == [os.path.realpath(tmp_path / "mine" / "here")], turn
    done.set()
    thread.join()
    assert steps == ["open"] * 200


def test_a_file_from_elsewhere_may_get_a_name_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "there").write_text("1")
    steps = []
    with audit_files(tmp_path / "mine", lambda what, name: steps.append((what, Path(name).name))):
        (tmp_path / "there").rename(tmp_path / "mine" / "here")
    assert steps == [("os.rename", "there")]
