"""Whose line it is, and how it is shown."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
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


def test_no_garbage_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 may wait for ever there (issue 106883), which could not be forced here."""
    seen, look = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or look())
    frame = frames.frame_of(threading.get_ident())
    assert frame is not None
    assert frames.frame_of(None) is None
    assert gc.isenabled()
    assert seen == [sys.version_info >= (3, 12)] * 2
    gc.disable()
    try:
        frames.frame_of(None)
        assert not gc.isenabled(), "nor is it switched on where the learner has switched it off"
    finally:
        gc.enable()
