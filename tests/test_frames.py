"""Whose line it is, and how it is shown."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

import course_lib
from course_lib import frames


def test_a_frame_is_shown_with_its_line_marked() -> None:
    frame = {
        "file": "/elsewhere/train.py",
        "line": 2,
        "function": "step",
        "source": [[1, "def step():"], [2, "    1 / 0"], [3, ""]],
    }
    assert frames.show(frame) == (
        "train.py, line 2, in step\n         1 def step():\n---->    2     1 / 0\n         3\n"
    )


def test_files_are_named_from_the_current_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert frames.label(str(tmp_path / "scripts" / "train.py")) == os.path.join("scripts", "train.py")
    assert frames.label("/elsewhere/train.py") == "train.py"


def test_a_long_line_is_shortened() -> None:
    assert frames.shortened("x" * frames.LINE_LENGTH) == "x" * frames.LINE_LENGTH
    assert frames.shortened("x" * (frames.LINE_LENGTH + 1)) == "x" * frames.LINE_LENGTH + " …"
    frame = {"file": "/a/b.py", "line": 2, "source": [[1, "a"], [2, "  " + "y" * 999 + "  "]]}
    assert frames.line_of(frame) == "b.py, line 2: " + "y" * frames.LINE_LENGTH + " …"
    assert frames.line_of({"file": "/a/b.py", "line": 2, "source": []}) == "b.py, line 2"


def test_whose_a_line_is() -> None:
    assert frames.is_learners("/home/me/train.py")
    assert frames.is_learners("/tmp/ipykernel_7/123.py")
    for module in (json, torch, course_lib, frames):
        assert not frames.is_learners(module.__file__)
    assert not any(map(frames.is_learners, ("<string>", "<frozen os>")))
    assert [frames.is_ours(file) for file in (frames.__file__, json.__file__)] == [True, False]
