"""The short run, the order of the tests, when none begins, and what is told of those that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import subprocess, sys
import pytest

def test_fails():
    assert 1 + 1 == 3, "it is 2"

@pytest.mark.short
def test_short():
    pass

@pytest.mark.timeout(3)
def test_never_ends():
    subprocess.run([sys.executable, "-c", "import time\\ndef waits_here(): time.sleep(600)\\nwaits_here()"])
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A small course: our plugin, three tests, a notebook of three cells."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "tests").mkdir()
    for name in ("support", "tiers.toml"):
        (tmp_path / "tests" / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "tests" / "test_toy.py").write_text(TESTS)
    code = {"cell_type": "code", "outputs": [], "metadata": {}, "execution_count": 1}
    sources = enumerate(["number = 1", "assert number == 2", "number"])
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {
        "cells": [code | {"id": str(i), "source": source} for i, source in sources],
        **{"metadata": kernel, "nbformat": 4, "nbformat_minor": 5},
    }
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "00_toy.ipynb").write_text(json.dumps(notebook))
    return tmp_path


def run(course: Path, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.tiers", "--nbval-lax", *arguments]
    done = subprocess.run(
        [*command, "lessons", "tests"],
        cwd=course,
        env=os.environ | {"COURSE_FAILURES": ""} | environment,  # failures here are the toy course's
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stdout + done.stderr


def test_failures_are_kept_in_their_own_words_and_run_again_with_the_whole_notebook(course: Path) -> None:
    failures = course / "failures"
    told = run(course, "-n", "2", COURSE_FAILURES=str(failures))
    assert "FAILED tests/test_toy.py::test_fails (call):" in failures.read_text()
    assert "it is 2" in failures.read_text()
    assert "FAILED tests/test_toy.py::test_never_ends (call):" in failures.read_text()
    assert "waits_here (<string>:2)" in told, "py-spy's stack of the process that the test has started"

    told = run(course, "--again", "-k", "not never_ends", "-v")
    assert "2 failed, 2 passed, 2 deselected" in told, "with all three cells"
    assert "test_short" not in told


def test_what_of_the_short_run_would_begin_too_late_is_left_out_and_counted(course: Path) -> None:
    told = run(course, "-m", "short", "-n", "2", COURSE_UNTIL=str(time.time() - 1))
    assert "4 skipped" in told, "what is marked, and all three cells"
    assert "4 tests were left out" in told
