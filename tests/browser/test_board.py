"""`course board` in a browser: a page that reloads itself, readable by all, in which nothing runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from course_lib import share_progress
from course_lib.exercises import sharing
from course_lib.exercises.sharing import note_try
from tests.support.axe import RULES, violations
from tests.support.lab import fresh_page
from tests.support.needs import require
from tests.support.processes import wait_for

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>"
AXE = {"runOnly": RULES, "rules": {"meta-refresh": {"enabled": False}}}  # to reload itself is its purpose


def tries(monkeypatch: pytest.MonkeyPatch, home: Path, points: float, seconds_ago: float) -> None:
    """Of question 06.2, by the learner who has this course folder."""
    monkeypatch.setenv("COURSE_HOME", str(home))
    now = time.time() - seconds_ago
    with monkeypatch.context() as patched:
        patched.setattr(sharing.time, "time", lambda: now)
        note_try("06.2", points)


def test_a_class_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chromium = require("chromium", "it shows the board")
    folder = tmp_path / "class"
    folder.mkdir()
    for name, points in {HOSTILE: 0, "anna": 5, "bert": 2}.items():
        monkeypatch.setenv("COURSE_HOME", str(tmp_path / str(points)))
        share_progress(folder, name)
        tries(monkeypatch, tmp_path / str(points), points, 900)
    command = [sys.executable, "-m", "course_lib", "board", str(folder)]
    board = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert board.stdout is not None
        board.stdout.readline()
        wait_for((tmp_path / "board.html").exists, what="the page")
        with fresh_page(chromium, tmp_path / "profile") as page:
            _looked_at(page, tmp_path, monkeypatch)
    finally:
        board.send_signal(signal.SIGINT)
        assert board.wait(120) == 0


def _looked_at(page: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    dialogs: list[str] = []
    page.on("request", lambda request: asked.add(request.url))
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.goto(f"file://{place}/board.html")
    page.get_by_text("✓ 5 of 5").wait_for()
    page.get_by_text(HOSTILE, exact=True).wait_for()
    for seconds_ago in (840, 400, 2):
        tries(monkeypatch, place / "2", 2, seconds_ago)
    page.get_by_text("⚠ 2 of 5, stuck for").wait_for()
    assert page.locator("tr").nth(1).locator("th").inner_text() == "bert", "the stuck come first"
    wrong = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        wrong += violations(page, scheme, AXE)
    assert (wrong, dialogs, asked) == ([], [], {f"file://{place}/board.html"})
