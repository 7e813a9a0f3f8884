"""What a lesson says is true for other numbers of ranks than the one it is committed with: one by day."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.execute import CORE, DEEPER, errors, read, run, texts

COUNT = re.compile(r"^(RANKS|REPLICAS) = (\d+)\b", re.MULTILINE)
OTHERS = (3, 4)  # ranks: 3 for lessons with even numbers, 4 for the others
IN_SECONDS = {  # run alone: they have limits of some seconds
    "13_when_it_hangs",
    "13_detail_and_wrong_device",
    "13_join_and_uneven",
    "17_many_machines",
}
BY_DAY = "05_collectives"


def cases() -> Iterator[Any]:
    """Yield each lesson with one other number of ranks: odd for some lessons, a power of two for the rest."""
    for path in sorted([*CORE.glob("*.ipynb"), *DEEPER.glob("*.ipynb")]):
        written = COUNT.findall("\n".join(cell.source for cell in read(path).cells))
        if written:
            ranks = OTHERS[int(path.stem[:2]) % 2]
            assert ranks != int(written[0][1]), path.stem
            marks = [] if path.stem == BY_DAY else [pytest.mark.night]
            marks += [pytest.mark.alone] if path.stem in IN_SECONDS else []
            yield pytest.param(path, ranks, id=f"{path.stem} {ranks}", marks=marks)


@pytest.mark.parametrize(("path", "ranks"), list(cases()))
def test_a_lesson_with_another_number_of_ranks(path: Path, ranks: int) -> None:
    committed, notebook = read(path), read(path)
    counted = [cell for cell in notebook.cells if COUNT.search(cell.source)]
    assert len(counted) == 1, "the number stands in one cell"
    counted[0].source = COUNT.sub(rf"\1 = {ranks}", counted[0].source)
    for cells in (committed, notebook):
        cells.cells = [cell for cell in cells.cells if "fixed-ranks" not in cell.metadata.get("tags", [])]
    run(notebook, path.parent)
    compared = 0
    for before, now in zip(committed.cells, notebook.cells, strict=True):
        tags = now.metadata.get("tags", [])
        if now.cell_type == "code":
            assert errors(now) == errors(before), f"in the cell that begins {now.source[:60]!r}"
        if "any-ranks" in tags:
            assert "nbval-check-output" in tags
            assert texts(now) == texts(before)
            compared += 1
    assert compared >= 2, "cells tagged any-ranks"
