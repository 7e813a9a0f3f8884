"""Progress that is shared: only when asked for, nothing but points and tries, and never at a check's cost."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from course_lib import check, progress, share_progress
from course_lib.exercises import sharing
from course_lib.exercises.progress import note
from course_lib.exercises.sharing import note_try


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The class's."""
    made = tmp_path / "class"
    made.mkdir()
    return made


def shared(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    return json.loads(file.read_text())


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(sharing.time, "time", lambda: seconds)


def test_nothing_is_kept_or_shared_unless_asked_for(folder: Path, course_home: Path) -> None:
    note_try("06.1", 1)
    assert not list(folder.iterdir())
    assert not (course_home / "sharing.json").exists()
    assert "shared" not in repr(progress())


def test_what_is_shared_is_points_and_tries_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note("05.1", 2, 3)  # before it was shared
    share_progress(folder, "  anna \n b. ")
    for seconds, points in ((100.0, 1), (200.0, 2), (300.0, 0), (400.0, 2)):
        at(monkeypatch, seconds)
        note_try("06.1", points)
    before = {"tries": 0, "in_vain": 0, "last": 0.0, "since": 0.0}
    tried = {"tries": 4, "in_vain": 2, "last": 400.0, "since": 200.0}
    assert shared(folder) == {
        "path": str(next(folder.iterdir())),
        "name": "anna b.",
        "questions": {"05.1": {"points": 2.0, **before}, "06.1": {"points": 2, **tried}},
    }


def test_each_check_is_a_try(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("course_lib.exercises.check")
    monkeypatch.setattr(module, "judged", lambda number, *_: module.Feedback(number))
    share_progress(folder, "anna")
    for number in ("06.1", "06.1", "06.9", "no question"):
        check(number, None)
    assert {number: tries["tries"] for number, tries in shared(folder)["questions"].items()} == {"06.1": 2}


def test_others_may_read_the_file_and_not_write_it(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        share_progress(folder, "../../anna")
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    assert re.fullmatch(r"learner-[0-9a-f]{16}\.json", file.name)


def test_sharing_again_keeps_the_tries_in_one_file_only(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for place, name in ((folder, "anna"), (folder, "bert"), (other, "cleo")):
        share_progress(place, name)
        assert f"Whoever can read {place} sees you as “{name}”" in capsys.readouterr().out
        assert f"points, shared in {place} as “{name}”" in repr(progress())
        note_try("06.1", 1)
        assert shared(place)["name"] == name
    assert not list(folder.iterdir())
    assert shared(other)["questions"]["06.1"]["tries"] == 3


def test_stopping_takes_the_file_away(
    folder: Path, course_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    share_progress(folder, "anna")
    capsys.readouterr()
    share_progress(None)
    assert capsys.readouterr().out == "Your progress is not shared any more.\n"
    assert not (course_home / "sharing.json").exists()
    note_try("06.1", 1)
    assert not list(folder.iterdir())
    share_progress(None)
    assert capsys.readouterr().out == "Your progress was not shared.\n"


def test_a_folder_that_is_not_there_is_said_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    share_progress(folder, "anna")
    (tmp_path / "file").touch()
    for wrong in ("gone", "file"):
        with pytest.raises(OSError, match=r"is not a folder that you can write in: ask your teacher"):
            share_progress(tmp_path / wrong, "bert")
    assert shared(folder)["name"] == "anna"


def test_a_folder_that_takes_no_file_leaves_the_sharing_as_it_was(
    folder: Path, tmp_path: Path, course_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: sharing.Sharing, path: str | Path) -> None:
        if Path(path).parent == tmp_path / "full":
            raise OSError(28, "No space left on device")
        real(self, path)

    (tmp_path / "full").mkdir()
    real = sharing.Sharing.write
    monkeypatch.setattr(sharing.Sharing, "write", write)
    with pytest.raises(OSError, match="No space left"):
        share_progress(tmp_path / "full", "anna")
    assert not (course_home / "sharing.json").exists()
    share_progress(folder, "anna")
    with pytest.raises(OSError, match="No space left"):
        share_progress(tmp_path / "full", "bert")
    share_progress(None)
    assert not list(folder.iterdir()), "the file that is shared is the one that is taken away"


def test_what_cannot_be_noted_is_not_shared(folder: Path, course_home: Path) -> None:
    """Else nobody could take it away."""
    (course_home / "sharing.json").mkdir(parents=True)
    with pytest.raises(OSError, match=r"sharing\.json"):
        share_progress(folder, "anna")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["", " \n", "\u202e", "a" * 41])
def test_a_name_is_asked_for_that_can_be_shown(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=r'of 1 to 40 letters, as in share_progress\(".*class", "Anna"\)'):
        share_progress(folder, name)
    assert not list(folder.iterdir())


def test_a_folder_that_vanished_spoils_no_check_and_may_come_back(folder: Path) -> None:
    share_progress(folder, "anna")
    (file,) = folder.iterdir()
    file.unlink()
    folder.rmdir()
    note_try("06.1", 1)
    folder.mkdir()
    note_try("06.1", 2)
    assert shared(folder)["questions"]["06.1"]["tries"] == 2


@pytest.mark.parametrize("damage", ["", "[]", "3", "{}", '{"path": 1, "name": 3, "questions": 4}'])
def test_a_damaged_note_of_it_spoils_no_check(damage: str, folder: Path, course_home: Path) -> None:
    share_progress(folder, "anna")
    (course_home / "sharing.json").write_text(damage)
    note_try("06.1", 1)
    share_progress(folder, "anna")


def test_a_link_in_the_folder_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    share_progress(folder, "anna")
    (file,) = folder.iterdir()
    mine = tmp_path / "mine"
    mine.write_text("mine")
    file.unlink()
    file.symlink_to(mine)
    note_try("06.1", 1)
    assert mine.read_text() == "mine"
    assert shared(folder)["questions"]["06.1"]["tries"] == 1
