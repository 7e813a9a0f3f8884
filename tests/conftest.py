"""Fixtures for all tests: a course folder for each, and the digits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Let Ctrl-C end what the tests start; a shell makes background jobs (`make test &`) ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def course_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own folder for runs, which does not exist yet."""
    home = tmp_path / "course-home"
    monkeypatch.setenv("COURSE_HOME", str(home))
    return home


@pytest.fixture
def digits_are_there(course_home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Link the digits into the course folder; they are made once for all tests that use them."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "data"
    shared.mkdir(exist_ok=True)
    course_home.mkdir(mode=0o700)
    (course_home / "data").symlink_to(shared)
