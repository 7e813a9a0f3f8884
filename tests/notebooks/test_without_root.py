"""Lessons 17 and 20 without namespaces and Slurm show what was recorded, and their checks pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.execute import ROOT, read, run
from tests.notebooks.test_rank_counts import errors, texts


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("17_many_machines", marks=pytest.mark.night),
        pytest.param("deeper/17_cables", marks=pytest.mark.night),
        pytest.param("deeper/17_lost_nodes", marks=pytest.mark.night),
        pytest.param("deeper/17_slurm_and_kubernetes", marks=pytest.mark.night),
        "deeper/20_torchft",
    ],
)
def test_a_lesson_without_hosts_and_without_slurm(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = ROOT / "lessons" / f"{name}.ipynb"
    committed, notebook = read(path), read(path)
    monkeypatch.setenv("PATH", str(tmp_path))  # neither ip nor sbatch is found
    run(notebook, path.parent)
    shown = 0
    for before, now in zip(committed.cells, notebook.cells, strict=True):
        if now.cell_type == "code":
            assert errors(now) == []
            if "nbval-check-output" in now.metadata.get("tags", []):
                assert texts(now) == texts(before), now.id
            shown += any("Recorded on" in text for text in texts(now))
    assert shown == sum("here_or_recorded(" in cell.source for cell in notebook.cells)
