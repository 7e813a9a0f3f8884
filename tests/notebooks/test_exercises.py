"""An exercise runs from top to bottom as it is handed out, and its solution earns all points.

All share one kernel, reset in between: a kernel and its fork server take a core 10 s to start.
"""

from __future__ import annotations

import nbformat
import pytest

from tests.notebooks.execute import ROOT, errors, read, run, texts

# A learner's half minute may be too short beside many other tests: 14.3 was seen to take 20 s.
PATIENT = """
import importlib

checks = importlib.import_module("course_lib.exercises.check")
checks.LIMIT_SECONDS = checks.ALL_SECONDS = 600.0
"""


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("folder", ["exercises", "solutions"])
def test_they_run(folder: str, half: int) -> None:
    paths = sorted((ROOT / folder).glob("*.ipynb"))[half::2]
    assert len(paths) > 5
    committed = [read(path).cells for path in paths]
    now = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PATIENT)])
    for path in paths:
        now.cells += [nbformat.v4.new_code_cell("%reset -f"), *read(path).cells]
    run(now, ROOT / folder)

    done = iter(now.cells[1:])
    compared = 0
    for path, cells in zip(paths, committed, strict=True):
        next(done)
        for before in cells:
            cell = next(done)
            if cell.cell_type != "code":
                continue
            if before.outputs:  # exercises have none; an error that no tag allows has ended the run
                assert errors(cell) == errors(before), f"{path.name}: {cell.source[:60]!r}"
            if "nbval-check-output" in cell.metadata.get("tags", []):
                assert texts(cell) == texts(before), path.name
                compared += 1
    questions = sum(cell.source.startswith("check(") for cells in committed for cell in cells)
    assert questions > len(paths)
    assert compared >= (questions if folder == "solutions" else 0)
