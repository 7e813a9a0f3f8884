"""`course exercises`: generate the exercises from their only source, the solutions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat

SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION$", re.MULTILINE | re.DOTALL)
STUB = ["# YOUR CODE HERE", "..."]  # runs and does nothing; nbgrader_config.py has the same


class ExerciseError(Exception):
    """The source of an exercise is missing or malformed; the message says where."""


def blank(source: Path) -> str:
    """Return the exercise of a notebook with solutions, as the text of a notebook."""
    try:
        notebook = nbformat.read(source, as_version=4)
    except (OSError, ValueError, nbformat.reader.NotJSONError) as error:
        raise ExerciseError(f"{source} cannot be read as a notebook: {error}") from None
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("solution"):
            cell.source = _without_solution(cell, source)
        if marks.get("locked"):
            cell.metadata |= {"deletable": False, "editable": False}
        cell.metadata.pop("execution", None)
        if tags := [tag for tag in cell.metadata.get("tags", []) if not tag.startswith("nbval")]:
            cell.metadata["tags"] = tags
        else:
            cell.metadata.pop("tags", None)
    return nbformat.writes(notebook) + "\n"


def _without_solution(cell: Any, source: Path) -> str:
    if not SOLUTION.search(cell.source):
        raise ExerciseError(f"{source}: the answer {cell.metadata.nbgrader.grade_id!r} marks no solution")
    return SOLUTION.sub(lambda match: "\n".join(match[1] + line for line in STUB), cell.source)


def generate(solutions: Path, exercises: Path, check: bool = False) -> list[Path]:
    """Write the exercises of all solutions and return the paths of those that were out of date.

    With ``check``, write nothing.
    """
    if not solutions.is_dir():
        raise ExerciseError(f"there is no folder {solutions}: run this where the course is checked out")
    wanted = {exercises / path.name: blank(path) for path in sorted(solutions.glob("*.ipynb"))}
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    changed += [path for path in sorted(exercises.glob("*.ipynb")) if path not in wanted]
    if not check:
        exercises.mkdir(exist_ok=True)
        for path in changed:
            if path in wanted:
                path.write_text(wanted[path])
            else:
                path.unlink()
    return changed
