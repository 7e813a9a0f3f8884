"""A class's folder, in which anybody may have written anything."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from course_lib.exercises.board import shared
from course_lib.exercises.board.shared import ClassFolder, stuck_seconds
from course_lib.exercises.sharing import Tries

MOST = {"05.1": 3.0, "06.1": 3.0, "06.2": 2.0}
NOW = time.time()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The class's; each look at it is a new one, and it is always NOW."""
    monkeypatch.setattr(shared, "FRESH_SECONDS", 0)
    monkeypatch.setattr(shared, "time", SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic))
    made = tmp_path / "class"
    made.mkdir()
    return made


def board(folder: Path) -> ClassFolder:
    return ClassFolder(folder, MOST, dict.fromkeys(MOST, "answer"))


def tries(**changed: Any) -> dict[str, Any]:
    usual = {"points": 1, "most": 3, "tries": 4, "first": NOW - 900, "last": NOW - 60, "in_vain": 2}
    return {**usual, "since": NOW - 400, **changed}


def write(folder: Path, file: str, name: Any = "anna", **questions: Any) -> Path:
    """``q06_1`` stands for the question 06.1."""
    path = folder / file
    numbers = {number[1:].replace("_", "."): told for number, told in questions.items()}
    path.write_text(json.dumps({"name": name, "questions": numbers}))
    return path


def names(view: dict[str, Any]) -> list[str]:
    return [each["name"] for each in view["learners"]]


def test_what_a_learner_shares_is_shown(folder: Path) -> None:
    write(folder, "a.json", q06_1=tries(), q99_9=tries())
    view = board(folder).view()
    (learner,) = view["learners"]
    found = learner["questions"]["06.1"]
    assert (found["points"], found["tries"], found["in_vain"], found["stuck"]) == (1, 4, 2, None)
    assert found["ago"] == pytest.approx(60)
    assert list(learner["questions"]) == ["06.1"], "one that this course does not have is left out"
    assert view["questions"] == {"06.1": {"most": 3.0, "title": "answer"}}
    assert (view["unreadable"], view["left_out"], view["busiest"]) == (0, 0, "06")


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        ({"in_vain": 3}, 400),
        ({"in_vain": 2}, None),
        ({"in_vain": 3, "points": 3}, None),
        ({"in_vain": 3, "since": NOW - 299}, None),
        ({"in_vain": 3, "last": NOW - 1201, "since": NOW - 2000}, None),
        ({"in_vain": 3, "last": NOW - 1199, "since": NOW - 2000}, 2000),
        ({"in_vain": 3, "since": None}, None),
    ],
)
def test_stuck(changed: dict[str, Any], seconds: float | None) -> None:
    found = stuck_seconds(Tries(**tries(**changed)), 3, NOW)
    assert found == (seconds if seconds is None else pytest.approx(seconds))


WRONG = {
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "no name": b'{"questions": {}}',
    "a name that is none": b'{"name": 3, "questions": {}}',
    "no questions": b'{"name": "anna"}',
    "questions that are none": b'{"name": "anna", "questions": [1]}',
    "nested": b"[" * 20_000,
    "nested objects": b'{"a":' * 5_000,
    "long": b'{"name": "anna", "questions": {}}' + b" " * 40_000,
    "a number of many digits": b'{"name": "anna", "questions": {"06.1": ' + b"9" * 5_000 + b"}}",
}
IMPOSSIBLE = {
    "more than there is": {"points": 4, "most": 4},
    "huge": {"points": 1e308, "most": 1e308},
    "infinite": {"points": math.inf, "most": math.inf},
    "not a number": {"points": math.nan},
    "no most": {"most": math.nan},
    "negative": {"points": -1},
    "a list": {"points": [], "most": []},
    "true": {"points": True},
    "words": {"tries": "<b>"},
    "half a try": {"tries": 2.5},
    "too many tries": {"tries": 10**4000, "in_vain": 10**4000},
    "more in vain than there were": {"in_vain": 5},
    "tries that are none": {"tries": [], "in_vain": 1},
    "in the future": {"last": NOW + 86400},
    "at no time": {"since": math.nan},
    "more fields": {"code": "import os"},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_none_of_ours_is_counted(what: str, folder: Path) -> None:
    write(folder, "good.json")
    (folder / "bad.json").write_bytes(WRONG[what])
    view = board(folder).view()
    assert (names(view), view["unreadable"]) == (["anna"], 1)


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_value_that_cannot_be_is_not_shown(what: str, folder: Path) -> None:
    write(folder, "good.json", q06_1=tries())
    write(folder, "bad.json", q06_1=tries(**IMPOSSIBLE[what]))
    view = board(folder).view()
    assert (names(view), view["unreadable"]) == (["anna"], 1)
    json.dumps(view, allow_nan=False)


def test_links_pipes_folders_and_giants_are_not_opened(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, "outside.json")
    (folder / "link.json").symlink_to(tmp_path / "outside.json")
    (folder / "loop.json").symlink_to(folder / "loop.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    with open(folder / "giant.json", "wb") as giant:
        giant.truncate(100 << 20)
    began = time.monotonic()
    view = board(folder).view()
    assert (names(view), view["unreadable"]) == ([], 6)
    assert time.monotonic() - began < 10


def test_a_file_that_turned_into_another_is_not_read_either(folder: Path, tmp_path: Path) -> None:
    """Between the look and the opening."""
    (folder / "link.json").symlink_to(write(tmp_path, "outside.json"))
    os.mkfifo(folder / "pipe.json")
    for name in ("link.json", "pipe.json"):
        with pytest.raises((OSError, ValueError)):
            shared.read_learner(str(folder / name), NOW)


def test_what_is_no_learners_file_does_not_count(folder: Path) -> None:
    for name in ("notes.txt", ".hidden.json", "learner-1.part"):
        (folder / name).write_text("{")
    assert board(folder).view()["unreadable"] == 0


def test_names_are_short_lines_and_those_that_meet_are_told_apart(folder: Path) -> None:
    write(folder, "a.json", "x" * 5000)
    write(folder, "b.json", "one\nline\u202e\x00")
    write(folder, "c.json", "\ud800")
    write(folder, "d.json", "anna")
    write(folder, "e.json", "anna\n")
    found = names(board(folder).view())
    assert found[0] == "(no name)"
    assert all(name.startswith("anna · ") for name in found[1:3])
    assert found[1] != found[2]
    assert found[3:] == ["one line", "x" * 40]


def test_ten_thousand_files(folder: Path) -> None:
    for i in range(10_000):
        (folder / f"{i}.json").write_text('{"name": "x", "questions": {}}' if i % 2 else "{")
    place = board(folder)
    began = time.monotonic()
    view = place.view()
    first, began = time.monotonic() - began, time.monotonic()
    again = place.view()
    print(f"10,000 files: {first:.2f} s, and {time.monotonic() - began:.2f} s when nothing is new")
    assert len(view["learners"]) == shared.MOST_LEARNERS
    assert (view["unreadable"], view["left_out"]) == (5000, 4500)
    assert again == view
    assert first < 60


def test_what_is_beyond_the_limits_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(9):
        os.utime(write(folder, f"{i}.json", f"learner {i}"), (NOW, NOW - i))
    size = (folder / "0.json").stat().st_size
    monkeypatch.setattr(shared, "ALL_BYTES", 4 * size)
    view = board(folder).view()
    assert (names(view), view["left_out"]) == ([f"learner {i}" for i in range(4)], 5), "the newest come first"
    monkeypatch.setattr(shared, "MOST_FILES", 3)
    view = board(folder).view()
    assert (len(names(view)), view["left_out"]) == (3, 6)


def test_what_changes_is_read_again_and_what_goes_is_gone(folder: Path) -> None:
    place = board(folder)
    path = write(folder, "a.json", q06_1=tries(points=1))
    assert place.view()["learners"][0]["questions"]["06.1"]["points"] == 1
    write(folder, "b.json", "bert", q06_1=tries(points=3))
    (folder / "b.json").replace(path)
    (learner,) = place.view()["learners"]
    assert (learner["name"], learner["questions"]["06.1"]["points"]) == ("bert", 3)
    path.unlink()
    assert place.view()["learners"] == []


def test_the_busiest_exercise(folder: Path) -> None:
    assert board(folder).view()["busiest"] is None
    write(folder, "a.json", q05_1=tries(tries=0, in_vain=0, first=None, last=None, since=None))
    assert board(folder).view()["busiest"] == "05"
    write(folder, "b.json", q06_1=tries(last=NOW - 5000), q05_1=tries(last=NOW - 6000))
    assert board(folder).view()["busiest"] == "06", "that of the latest try"
    write(folder, "c.json", q05_1=tries(last=NOW - 60))
    assert board(folder).view()["busiest"] == "05", "that of the last quarter of an hour"


def test_a_folder_that_goes_is_said(folder: Path) -> None:
    place = board(folder)
    folder.rmdir()
    assert place.view() == {"trouble": f"{folder} cannot be read: No such file or directory"}
    folder.mkdir()
    assert place.view()["learners"] == []
