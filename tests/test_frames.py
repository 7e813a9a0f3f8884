"""Whose line it is."""

from __future__ import annotations

import gc
import json
import sys
import threading

import pytest
import torch

import course_lib
from course_lib import frames


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
