"""How a report words a line of code, and a failure."""

from __future__ import annotations

import os
from typing import Any

import pytest

from course_lib.report import words


def test_a_frame_is_shown_with_its_line_marked() -> None:
    frame = {
        "file": "/elsewhere/train.py",
        "line": 2,
        "function": "step",
        "source": [[1, "def step():"], [2, "    1 / 0"], [3, ""]],
    }
    assert words.show(frame) == (
        "train.py, line 2, in step\n         1 def step():\n---->    2     1 / 0\n         3\n"
    )


def test_files_are_named_from_the_current_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words.label(str(tmp_path / "scripts" / "train.py")) == os.path.join("scripts", "train.py")
    assert words.label("/elsewhere/train.py") == "train.py"


def test_a_long_line_is_shortened() -> None:
    assert words.shortened("x" * words.LINE_LENGTH) == "x" * words.LINE_LENGTH
    assert words.shortened("x" * (words.LINE_LENGTH + 1)) == "x" * words.LINE_LENGTH + " …"
    frame = {"file": "/a/b.py", "line": 2, "source": [[1, "a"], [2, "  " + "y" * 999 + "  "]]}
    assert words.line_of(frame) == "b.py, line 2: " + "y" * words.LINE_LENGTH + " …"
    assert words.line_of({"file": "/a/b.py", "line": 2, "source": []}) == "b.py, line 2"
