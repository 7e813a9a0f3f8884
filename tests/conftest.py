"""What all tests share: a course folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def course_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test keeps its runs in a folder of its own; the data set is made once for all of them."""
    home = tmp_path / "course-home"
    monkeypatch.setenv("COURSE_HOME", str(home))
    return home
