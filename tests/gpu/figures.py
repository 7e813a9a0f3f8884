"""The figures of a GPU that lessons show: each is made by its lesson's own cells, without Jupyter.

    python -m tests.gpu.figures 01_transfer_bandwidth

The numbers and the picture go into `lessons/recorded/gpu`. `make gpu` starts it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import platform
import sys
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LESSONS = ROOT / "lessons"


@dataclass(frozen=True)
class Figure:
    """Which cells of its lesson make it, and where its numbers are then.

    A cell is named by its id; ``"id: name other"`` takes from it only what binds these names. The value of
    the last cell is the picture. ``numbers`` is evaluated after it.
    """

    cells: tuple[str, ...]
    numbers: str


FIGURES = {
    "01_transfer_bandwidth": Figure(
        ("import", "device", "synchronize", "fastest", "ways", "measure", "bandwidth"),
        "{'KiB': sizes, 'seconds': seconds}",
    ),
    "03_data_parallel_memory": Figure(
        ("l03-c01", "l03-c02", "devices", "l03-c52"),
        "{'live bytes': {name: {kind: round(mib * 2**20) for kind, mib in held.items() if mib} "
        "for name, held in counts.items()}, "
        "'torch.cuda.max_memory_allocated': [torch.cuda.max_memory_allocated(i) for i in range(gpus)]}",
    ),
    "09_backend_table": Figure(
        ("library", "imports", "l09-calls-1", "l09-calls-2", "l09-ask", "l09-measure-table"), "table"
    ),
}


def cells_of(lesson: str, *cells: str) -> list[tuple[str, ast.Module]]:
    """Return cells of a lesson (as "02") as trees, each with a file name under which its lines are found.

    They are those of its core, or of the deeper notebook that has them all.
    """
    for path in [*LESSONS.glob(f"{lesson}_*.ipynb"), *LESSONS.glob(f"deeper/{lesson}_*.ipynb")]:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        sources = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}
        if {asked.partition(": ")[0] for asked in cells} <= sources.keys():
            break
    found = []
    for asked in cells:
        ident, _, names = asked.partition(": ")
        filename, source = f"<{path.name}, cell {ident}>", sources[ident]
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        tree = ast.parse(source, filename)
        if names:
            tree.body = [node for node in tree.body if bound_by(node) & set(names.split())]
        if missing := set(names.split()) - set().union(*map(bound_by, tree.body)):
            raise LookupError(f"cell {ident!r} of {path.name} does not bind {sorted(missing)}")
        found.append((filename, tree))
    return found


def bound_by(node: ast.stmt) -> set[str]:
    """Return the names that a statement at the top of a cell gives a value."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).split(".")[0] for each in node.names}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and type(each.ctx) is ast.Store}


def executed(filename: str, tree: ast.Module, names: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last line, as a notebook shows it."""
    body, last = tree.body, None
    if body and isinstance(body[-1], ast.Expr):
        body, last = body[:-1], ast.Expression(body[-1].value)
    exec(compile(ast.Module(body, []), filename, "exec"), names)
    return eval(compile(last, filename, "eval"), names) if last else None


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a figure's picture and its numbers."""
    figure = FIGURES[name]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells_of(name[:2], *figure.cells):
        names["picture"] = executed(*cell, names)
    return names["picture"], plain(eval(figure.numbers, names))


def plain(value: Any) -> Any:
    """Return the same as JSON knows it: dicts with strings, lists, numbers."""
    if isinstance(value, dict):
        return {str(key).replace("\n", " "): plain(each) for key, each in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return value.tolist() if hasattr(value, "tolist") else [plain(each) for each in value]


def facts() -> dict[str, Any]:
    """Return the machine and the versions, as a record names them; without a GPU, "" for its name."""
    import pynvml
    import torch

    gpus, driver = torch.cuda.device_count(), "not told"
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    return {
        "device": torch.cuda.get_device_name(0) if gpus else "",
        "gpus": gpus,
        "driver": driver,
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "course": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        "date": date.today().isoformat(),
    }


def main(name: str) -> None:
    """Make a figure, and write its record."""
    sys.path.insert(0, str(LESSONS))
    os.chdir(LESSONS)
    from scripts.helpers import GPU_RECORDS, GpuFigure

    picture, numbers = made(name)
    print(json.dumps(numbers))  # whatever becomes of the record
    record = {"figure": name, "alt": picture.alt, "numbers": numbers} | facts()
    GpuFigure(record, picture.png()).write(GPU_RECORDS / f"{name}.json")
    print(f"recorded: {picture.alt}")


if __name__ == "__main__":
    main(sys.argv[1])
