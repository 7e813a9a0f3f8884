"""What all tests share: a course folder of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Ctrl-C ends what the tests start, though a shell makes its background jobs (`make test &`) deaf."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def course_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test keeps its runs in a folder of its own, which is not there yet."""
    home = tmp_path / "course-home"
    monkeypatch.setenv("COURSE_HOME", str(home))
    return home


@pytest.fixture
def digits_are_there(course_home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the course's folder; they are made once for all tests that want them."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "data"
    shared.mkdir(exist_ok=True)
    course_home.mkdir(mode=0o700)
    (course_home / "data").symlink_to(shared)
