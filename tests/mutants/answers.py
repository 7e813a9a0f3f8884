"""The sources of the answers in the solutions, from which mutants are made."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

SOLUTIONS = Path(__file__).parents[2] / "solutions"
DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)


@dataclass(frozen=True)
class Answer:
    """The answer to one question: the definitions before it, its cell, and the name that is checked."""

    number: str
    before: str
    source: str
    name: str


def answers() -> list[Answer]:
    """Return the answers to all questions, in order."""
    found = []
    for path in sorted(SOLUTIONS.glob("*.ipynb")):
        before: list[str] = []
        last: dict[
            str, tuple[str, str]
        ] = {}  # by exercise id: the definitions before the cell, and the cell itself
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type != "code":
                continue
            name = cell.metadata.get("nbgrader", {}).get("grade_id", "")
            if name.endswith("-answer"):
                last[name.removesuffix("-answer")] = ("\n".join(before), cell.source)
            if asked := re.fullmatch(r'check\("(.+)", (\w+)\)', cell.source):
                found.append(Answer(asked[1], *last[name.removesuffix("-check")], asked[2]))
            else:
                before.append(definitions(cell.source))
    return found


def definitions(source: str) -> str:
    """Return what a cell imports and defines, without the code that tries it out."""
    tree = ast.parse(source)
    tree.body = [
        each
        for each in tree.body
        if isinstance(each, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
    ]
    return ast.unparse(tree)


def made(before: str, source: str, name: str) -> Any:
    """Make the function or class of that name, as in a notebook: cloudpickle sends it by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(before, names)
    tree = ast.parse(source)
    tree.body = [each for each in tree.body if isinstance(each, DEFINES)]
    exec(compile(tree, "answer", "exec"), names)
    return names[name]
