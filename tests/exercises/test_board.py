"""`course board`: a class on one page, from a folder in which anybody may have written anything."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_lib.__main__ import main
from course_lib.exercises import board, questions
from course_lib.exercises.board import class_at, is_stuck, read_class
from course_lib.exercises.sharing import Tries
from tests.support.processes import wait_for

NOW = 1_800_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The class's."""
    questions.load()
    made = tmp_path / "class"
    made.mkdir()
    return made


def tries(**changed: Any) -> dict[str, Any]:
    return {"points": 1, "tries": 4, "in_vain": 2, "last": NOW - 60, "since": NOW - 400, **changed}


def write(folder: Path, file: str, name: Any = "anna", **told: Any) -> Path:
    """``q06_1`` stands for the question 06.1."""
    path = folder / file
    numbers = {number[1:].replace("_", "."): of for number, of in told.items()}
    path.write_text(json.dumps({"name": name, "questions": numbers}))
    return path


def names(folder: Path) -> list[str]:
    return sorted(name for name, _ in read_class(folder, NOW)[0])


def test_the_page_shows_who_is_stuck_first_and_the_latest_exercise_first(folder: Path) -> None:
    write(folder, "a.json", "anna", q06_1=tries(points=3), q05_1=tries(last=NOW - 5000), q99_9=tries())
    write(folder, "b.json", "bert")
    write(folder, "c.json", "cleo", q06_1=tries(in_vain=3))
    write(folder, "d.json", "dora", q06_1=tries(tries=0, in_vain=0, last=0, since=0))
    page = class_at(folder, NOW)
    latest, older = page.split("<h2>")[1:]
    assert (latest[:11], older[:11]) == ("Exercise 06", "Exercise 05")
    assert [latest.index(f"<bdi>{name}") for name in ("cleo", "anna", "dora", "bert")] == sorted(
        latest.index(f"<bdi>{name}") for name in ("anna", "bert", "cleo", "dora")
    )
    for words in ("⚠ 1 of 3, stuck for 6 min", "✓ 3 of 3", "the last 1 min ago", "before it was shared", "–"):
        assert words in latest
    assert "99.9" not in page, "one that this course does not have"
    assert page.startswith(f"<p>Learners in {folder} at ")


@pytest.mark.parametrize(
    ("changed", "stuck"),
    [
        ({"in_vain": 3}, True),
        ({"in_vain": 2}, False),
        ({"in_vain": 3, "since": NOW - 299}, False),
        ({"in_vain": 3, "last": NOW - 1201, "since": NOW - 2000}, False),
        ({"in_vain": 3, "last": NOW - 1199, "since": NOW - 2000}, True),
    ],
)
def test_stuck(changed: dict[str, Any], stuck: bool) -> None:
    assert is_stuck(Tries(**tries(**changed)), NOW) is stuck


WRONG = {
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a name that is none": b'{"name": 3, "questions": {}}',
    "no questions": b'{"name": "anna"}',
    "nested": b"[" * 20_000,
    "long": b'{"name": "anna", "questions": {}}' + b" " * 40_000,
    "a number of many digits": b'{"name": "anna", "questions": {"06.1": ' + b"9" * 5_000 + b"}}",
}
IMPOSSIBLE = {
    "more than there is": {"points": 4},
    "huge": {"points": 1e308},
    "not a number": {"points": math.nan},
    "negative": {"points": -1},
    "a list": {"points": []},
    "true": {"points": True},
    "half a try": {"tries": 2.5},
    "too many tries": {"tries": 10**4000, "in_vain": 10**4000},
    "in the future": {"last": NOW + 86400},
    "more fields": {"code": "import os"},
}


@pytest.mark.parametrize("what", [*WRONG, *IMPOSSIBLE])
def test_a_file_that_is_none_of_ours_is_counted(what: str, folder: Path) -> None:
    write(folder, "good.json", q06_1=tries())
    if what in WRONG:
        (folder / "bad.json").write_bytes(WRONG[what])
    else:
        write(folder, "bad.json", "bad", q06_1=tries(**IMPOSSIBLE[what]))
    assert (names(folder), read_class(folder, NOW)[1]) == (["anna"], 1)
    assert "Files that could not be read as progress: 1." in class_at(folder, NOW)


def test_links_pipes_folders_and_giants_are_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "link.json").symlink_to(write(tmp_path, "outside.json"))
    (folder / "loop.json").symlink_to(folder / "loop.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    with open(folder / "giant.json", "wb") as giant:
        giant.truncate(100 << 20)
    opened = psutil.Process().num_fds()
    assert read_class(folder, NOW) == ([], 6, 0)
    assert psutil.Process().num_fds() == opened
    (folder / "notes.txt").write_text("{")
    assert read_class(folder, NOW)[1] == 6, "no learner's file has this ending"


def test_too_many_files_are_left_out_and_counted(folder: Path) -> None:
    for i in range(board.MOST_FILES + 3):
        write(folder, f"{i}.json")
    learners, _, left_out = read_class(folder, NOW)
    assert (len(learners), left_out) == (board.MOST_FILES, 3)
    assert "left out: 3 or more" in class_at(folder, NOW)
    os.utime(write(folder, "zoe.json", "zoe"), (NOW, NOW))
    assert "zoe" in names(folder), "the newest are read"


def test_a_name_is_a_short_line_of_text(folder: Path) -> None:
    given = ["x" * 5000, "one\nline\u202e\x00", "\ud800", "<script>alert(1)</script>"]
    for i, name in enumerate(given):
        write(folder, f"{i}.json", name, q06_1=tries())
    assert names(folder) == ["(no name)", "<script>alert(1)</script>", "one line", "x" * 40]
    assert "<script" not in class_at(folder, NOW)


# --- the command -------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_leaves_an_older_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "board.html").write_text("older")
    assert main(["board", str(tmp_path / "gone"), "--html", str(tmp_path / "board.html")]) == 2
    assert capsys.readouterr().err.startswith("course board: [Errno 2] No such file or directory: ")
    assert (tmp_path / "board.html").read_text() == "older"


def test_the_page_is_rewritten_until_ctrl_c_and_then_reloads_no_more(folder: Path) -> None:
    page = folder.parent / "board.html"
    command = [sys.executable, "-m", "course_lib", "board", str(folder)]
    with subprocess.Popen(
        command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert str(page) in process.stdout.readline()
        wait_for(lambda: page.exists() and ": 0." in page.read_text(), what="the page")
        assert 'http-equiv="refresh"' in page.read_text()
        write(folder, "a.json", q06_1=tries(last=time.time(), since=0))
        wait_for(lambda: "<bdi>anna" in page.read_text(), what="the learner")
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "course board: ended\n")
    assert "<bdi>anna" in page.read_text()
    assert "refresh" not in page.read_text()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["board.html", "class"]


def test_a_folder_that_goes_for_a_while_leaves_what_was_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only its owner can read the page."""
    path, shown = folder.parent / "board.html", []
    steps = [lambda: folder.rename(folder.parent / "away"), lambda: (folder.parent / "away").rename(folder)]

    def sleep(_: float) -> None:
        shown.append(path.read_text())
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    write(folder, "a.json", q06_1=tries(last=time.time(), since=0))
    monkeypatch.setattr(board.time, "sleep", sleep)
    assert main(["board", str(folder), "--html", str(path)]) == 0
    assert ["Not read since then: [Errno 2]" in page for page in shown] == [False, True, False]
    assert all("<bdi>anna" in page for page in shown)
    assert path.stat().st_mode & 0o077 == 0


def test_the_page_is_not_written_into_the_classs_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["board", "."]) == 2
    assert "board.html has everybody's points" in capsys.readouterr().err
    assert list(folder.iterdir()) == []
