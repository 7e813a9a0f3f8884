"""What a lesson and its exercise look like, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.execute import ROOT, read

LINES = 25  # of a code cell, at most
NOTEBOOKS = sorted([*(ROOT / "lessons").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_cell_is_short(path: Path) -> None:
    code = {cell.id: cell.source.splitlines() for cell in read(path).cells if cell.cell_type == "code"}
    assert code
    assert {name: len(lines) for name, lines in code.items() if len(lines) > LINES} == {}
