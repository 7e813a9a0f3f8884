"""course_lib.host.home: where the course keeps its files, and what a folder that will not do gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from course_lib.host.home import CourseHomeError, home

pytestmark = pytest.mark.short


def test_without_the_variable_it_is_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COURSE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home().is_relative_to(tmp_path)
    assert home().name == "multi-gpu-course"


def test_it_is_absolute_and_knows_the_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("here", "~/here"):
        monkeypatch.setenv("COURSE_HOME", value)
        assert home() == tmp_path / "here"


@pytest.mark.parametrize("folder", ["{}/file/home", "{}/file", "/proc/no/home", "~no-such-user-here/home"])
def test_a_folder_that_cannot_be_made(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    folder = folder.format(tmp_path)
    monkeypatch.setenv("COURSE_HOME", folder)
    with pytest.raises(CourseHomeError) as caught:
        home()
    assert folder in str(caught.value)
    assert str(caught.value).endswith("set COURSE_HOME to a folder you can write")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the system's answer is what is replaced here."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == tmp_path and mode & os.W_OK))
    with pytest.raises(CourseHomeError, match="you may not write there"):
        home()
