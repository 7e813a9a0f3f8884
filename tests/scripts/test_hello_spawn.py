"""Lesson 04's programs as somebody uses them in a terminal; the lesson itself has the hangs and the port."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.execute import read
from tests.support.processes import processes_marked

SCRIPTS = Path(__file__).parents[2] / "lessons" / "scripts"
HELLO, WHO = SCRIPTS / "hello_spawn.py", SCRIPTS / "who_am_i.py"
LONG = 240  # seconds; it takes a few


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a terminal, with a mark by which what is left behind can be found."""
    marked = {name: value for name, value in os.environ.items() if name != "COURSE_RUN"}
    marked |= {"TEST_MARK": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    yield marked
    for each in processes_marked("TEST_MARK", str(tmp_path)):
        each.kill()


def terminal(environment: dict[str, str], *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment)


def none_left(environment: dict[str, str]) -> bool:
    return not processes_marked("TEST_MARK", environment["TEST_MARK"])


def test_hello_in_a_terminal(environment: dict[str, str]) -> None:
    done = terminal(environment, HELLO)
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == ["rank 0 of 2: we are all here", "rank 1 of 2: we are all here"]
    assert none_left(environment)


def test_the_lesson_shows_the_program_as_it_is() -> None:
    code = HELLO.read_text()
    assert sum(bool(line.strip()) for line in code.splitlines()) == 12
    lesson = read(SCRIPTS.parent / "04_processes_and_ranks.ipynb")
    assert any(f"```python\n{code}```" in cell.source for cell in lesson.cells)


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe that keeps writes apart")
def test_a_line_of_a_rank_is_one_write(environment: dict[str, str]) -> None:
    """Where Python does not buffer, print() writes a line's end apart, and another's line comes between."""
    reading, writing = os.pipe2(os.O_DIRECT)  # who reads gets one write at a time
    unbuffered = environment | {"PYTHONUNBUFFERED": "1"}
    with open(reading, "rb", buffering=0) as pipe:
        with open(writing, "wb") as end:
            program = subprocess.Popen([sys.executable, str(HELLO)], stdout=end, env=unbuffered)
        writes = list(iter(lambda: pipe.read(4096).decode(), ""))
    assert program.wait(LONG) == 0
    assert sorted(each for each in writes if "we are all here" in each) == [
        "rank 0 of 2: we are all here\n",
        "rank 1 of 2: we are all here\n",
    ]


# --- who_am_i.py ------------------------------------------------------------------------------------------


def test_without_a_launcher_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="RANK is not set: start this with torchrun"):
        runpy.run_path(str(WHO), run_name="__main__")
