"""What several tests share: a course folder of their own, and what to do where a tool is missing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pytest


def require(tool: str, reason: str) -> str:
    """The path of a program; without it the test is skipped, or fails where all of them are promised."""
    path = shutil.which(tool)
    if path is None:
        missing(f"{tool} is not installed: {reason}")
    return path


def missing(reason: str) -> NoReturn:
    """Skip a test for want of something; or fail, where all that tests need is promised."""
    if os.environ.get("COURSE_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason} (COURSE_REQUIRE_ALL=1 promises it)")
    pytest.skip(reason)


def wait_for(condition: Callable[[], object], seconds: float = 60, what: str = "the condition") -> object:
    """Wait until a condition holds and return its value; a generous limit, never a fixed time."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {seconds} s in vain for {what}")
        time.sleep(0.02)
    return value


def processes_marked(variable: str, value: str) -> list[psutil.Process]:
    """Living processes that have a variable in the environment they were started with."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(variable) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def course_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test keeps its runs in a folder of its own; the data set is made once for all of them."""
    home = tmp_path / "course-home"
    monkeypatch.setenv("COURSE_HOME", str(home))
    return home
