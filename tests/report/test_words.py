"""How a report words a line of code, and a failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from course_lib.record.trace import LINE_LENGTH, shortened
from course_lib.report import words
from course_lib.report.facts import Failure, Related


def test_files_are_named_from_the_current_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words.label(str(tmp_path / "scripts" / "train.py")) == os.path.join("scripts", "train.py")
    assert words.label("/elsewhere/train.py") == "train.py"


def test_a_long_line_keeps_its_beginning_and_its_end() -> None:
    line = "a" * LINE_LENGTH
    assert shortened(line) == line
    assert shortened(f"{line}bbb") == "a" * 200 + " [… 3 characters …] " + "a" * 197 + "bbb"
    frame = {"file": "/a/b.py", "line": 2, "source": [[1, "a"], [2, "  " + "y" * 1400 + "  "]]}
    assert words.line_of(frame) == f"b.py, line 2: {'y' * 200} [… 1,000 characters …] {'y' * 200}"
    assert words.line_of({"file": "/a/b.py", "line": 2, "source": []}) == "b.py, line 2"


REENTRANT = "Expected to mark a variable ready only once. " + "a" * 400 + " reentrant backward " + "b" * 500
TWO = "[… 2 lines …]"
LONG = "the beginning" + "-" * 100_000 + "the end"


def said(message: str, *causes: str) -> list[str]:
    """What a report says of a rank that raised this, without the path at the end."""
    related = [Related("from", cause, []) for cause in causes]
    failure = Failure(0, "raised", 0.0, exception="RuntimeError", message=message, related=related)
    lines = words._failure_text(failure, Path("/runs/x")).splitlines()
    rest = "[all of it is in /runs/x/rank-0.failure.json]"
    return [line for line in lines if line != rest] + ["+"] * (lines[-1] == rest)


@pytest.mark.parametrize(
    ("message", "causes", "lines"),
    [
        ("", (), ["raised RuntimeError"]),
        (REENTRANT, (), [f"raised RuntimeError: {REENTRANT}"]),
        ("\n".join("abcdefghijkl"), (), ["raised RuntimeError: a", *"bcdefghijkl"]),
        (
            "\n".join("abcdefghijklmn"),
            (),
            ["raised RuntimeError: a", *"bcdef", TWO, *"ijklmn", "+"],
        ),
        ("no", ("ValueError: a\nb",), ["raised RuntimeError: no", "from ValueError: a", "b"]),
        (
            "no",
            ("ValueError: a\nb\nc", "KeyError: d"),
            ["raised RuntimeError: no", "from ValueError: a", "[… 1 line …]", "c", "from KeyError: d", "+"],
        ),
    ],
)
def test_a_message_is_whole_or_says_where_it_is(message: str, causes: Any, lines: list[str]) -> None:
    assert said(message, *causes) == lines


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    for text in (said(LONG)[0], said("no", f"ValueError: {LONG}")[1]):
        assert "the beginning---" in text
        assert text.endswith("---the end")
        assert len(text) < 1300
    assert said(LONG)[1:] == said("no", LONG)[2:] == ["+"]
