"""lessons/scripts/train_torchrun.py, which learners copy: as lesson 08 shows it, alone, and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.execute import CORE, read
from tests.support.warm import ended

SCRIPT = CORE / "scripts" / "train_torchrun.py"
MOST = 40  # lines


def test_lesson_08_shows_the_program_as_it_is() -> None:
    program = SCRIPT.read_text()
    cells = read(CORE / "08_ddp_with_torchrun.ipynb").cells
    assert [cell.id for cell in cells if f"```python\n{program}```" in cell.source] == ["program"]
    assert sum(bool(line.strip()) for line in program.splitlines()) <= MOST


@pytest.mark.usefixtures("digits_are_there")
def test_two_ranks_train_and_one_alone_finds_that_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "digits.pt"
    code, said, errors = ended(SCRIPT, path, ranks=2)
    assert code == 0, errors
    assert "rank 1 of 2, cpu, epochs done: 0" in said
    assert [said.count(f"epoch {epoch}: loss") for epoch in range(1, 6)] == [1, 1, 1, 1, 0]
    assert ended(SCRIPT, path) == (0, "rank 0 of 1, cpu, epochs done: 4\n", "")
    assert [each.name for each in tmp_path.glob("digits*")] == [path.name]
