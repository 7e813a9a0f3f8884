"""lessons/scripts/train_torchrun.py, which learners copy: as lesson 08 shows it, alone, and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.notebooks.execute import CORE, read

SCRIPT = CORE / "scripts" / "train_torchrun.py"
MOST = 40  # lines


def test_lesson_08_shows_the_program_as_it_is() -> None:
    program = SCRIPT.read_text()
    cells = read(CORE / "08_ddp_with_torchrun.ipynb").cells
    assert [cell.id for cell in cells if f"```python\n{program}```" in cell.source] == ["program"]
    assert sum(bool(line.strip()) for line in program.splitlines()) <= MOST


def started(*words: Any) -> str:
    told = {name: value for name, value in os.environ.items() if name not in ("RANK", "COURSE_RUN")}
    command = [sys.executable, *map(str, words)]
    environment = told | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_train_and_one_alone_finds_that_all_is_done(tmp_path: Path) -> None:
    path = tmp_path / "digits.pt"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    said = started(*torchrun, SCRIPT, path)
    assert "rank 1 of 2, cpu, epochs done: 0" in said
    assert [said.count(f"epoch {epoch}: loss") for epoch in range(1, 6)] == [1, 1, 1, 1, 0]
    assert started(SCRIPT, path) == "rank 0 of 1, cpu, epochs done: 4\n"
    assert [each.name for each in tmp_path.glob("digits*")] == [path.name]
