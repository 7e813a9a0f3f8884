"""Lesson 04's programs as somebody uses them in a terminal; the lesson itself has the hangs and the port."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks.execute import read
from tests.support.processes import processes_marked

SCRIPTS = Path(__file__).parents[2] / "lessons" / "scripts"
HELLO, WHO = SCRIPTS / "hello_spawn.py", SCRIPTS / "who_am_i.py"
LONG = 240  # seconds; it takes a few


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe that keeps writes apart")
def test_hello_writes_each_line_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    """Where Python does not buffer, print() writes a line's end apart, and another's line comes between."""
    environment = {name: value for name, value in os.environ.items() if name != "COURSE_RUN"}
    environment |= {"TEST_MARK": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    reading, writing = os.pipe2(os.O_DIRECT)  # who reads gets one write at a time
    with open(reading, "rb", buffering=0) as pipe:
        with open(writing, "wb") as end:
            program = subprocess.Popen([sys.executable, str(HELLO)], stdout=end, env=environment)
        writes = list(iter(lambda: pipe.read(4096).decode(), ""))
    assert program.wait(LONG) == 0
    assert sorted(writes) == ["rank 0 of 2: we are all here\n", "rank 1 of 2: we are all here\n"]
    assert processes_marked("TEST_MARK", str(tmp_path)) == []


def test_the_lesson_shows_the_program_as_it_is() -> None:
    code = HELLO.read_text()
    assert sum(bool(line.strip()) for line in code.splitlines()) == 12
    lesson = read(SCRIPTS.parent / "04_processes_and_ranks.ipynb")
    assert any(f"```python\n{code}```" in cell.source for cell in lesson.cells)


def test_without_a_launcher_who_am_i_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="RANK is not set: start this with torchrun"):
        runpy.run_path(str(WHO), run_name="__main__")
