"""Lesson 17 on a laptop without namespaces and Slurm shows what was recorded, and its checks pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.execute import ROOT, read, run
from tests.notebooks.test_rank_counts import errors, texts

LESSON = ROOT / "lessons" / "17_many_machines.ipynb"


def test_lesson_17_without_hosts_and_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    committed, notebook = read(LESSON), read(LESSON)
    monkeypatch.setenv("PATH", str(tmp_path))  # neither ip nor sbatch is found
    run(notebook, LESSON.parent)
    shown = 0
    for before, now in zip(committed.cells, notebook.cells, strict=True):
        if now.cell_type == "code":
            assert errors(now) == []
            if "nbval-check-output" in now.metadata.get("tags", []):
                assert texts(now) == texts(before), now.id
            shown += any("Recorded on" in text for text in texts(now))
    assert shown == sum("here_or_recorded(" in cell.source for cell in notebook.cells)
