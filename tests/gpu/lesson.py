"""A lesson on this machine, beside what is saved of it: `make gpu` starts it for one lesson after the other.

    python -m tests.gpu.lesson 06 --out FOLDER --seconds-per-cell 120

Nothing of the course is changed. A cell that fails or hangs does not end the lesson. After each cell the
folder has `differs.json`: cells that fail here and not in the saved lesson, or the other way round, and those
tagged `nbval-check-output` that print something else. At the end it has the executed notebook.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

from tests.notebooks.execute import LessonError, errors, find, hide, kernel_in, read

UNSURE = re.compile(
    r"\bnot (?:been )?(?:run|tried)\b|\bon a CPU;|PyTorch's (?:documentation|source)", re.IGNORECASE
)

READ_ON = re.compile(r"\*\*(Where to read|Read) on")


class Watched(NotebookClient):
    """Executes what it can: a cell that takes too long is interrupted, and the next one begins.

    SIGINT ends it at once; nbclient's own handler lets the next cells fail first.
    """

    interrupted = False

    def __init__(self, notebook: nbformat.NotebookNode, seconds: float, folder: Path, **more: Any) -> None:
        super().__init__(
            notebook,
            timeout=seconds,
            interrupt_on_timeout=True,
            allow_errors=True,
            startup_timeout=120,
            on_notebook_start=self.listen,
            **kernel_in(folder),
            **more,
        )

    def listen(self, notebook: nbformat.NotebookNode) -> None:
        task = asyncio.current_task()

        def end() -> None:
            self.interrupted = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, end)


def differs(before: nbformat.NotebookNode, now: nbformat.NotebookNode) -> dict[str, str] | None:
    """What the saved cell says that this one does not; nothing where they agree."""
    wanted, found = errors(before), errors(now)
    if len(found) == 1 and found != wanted and found[0] in ("KeyboardInterrupt", "Stopped"):
        return {"saved": "ends", "here": "took too long, and was interrupted"}
    if wanted != found:
        words = [each.evalue for each in now.outputs if each.output_type == "error"]
        return {
            "saved": f"raises {', '.join(wanted)}" if wanted else "no error",
            "here": f"raises {', '.join(found)}: {' '.join(words)[:400]}" if found else "no error",
        }
    if "nbval-check-output" not in now.metadata.get("tags", []):
        return None
    saved, here = said(before), said(now)
    if saved == here:
        return None
    lines = list(difflib.ndiff(saved, here))
    return {
        "saved": "\n".join(line[2:] for line in lines if line.startswith("- ")),
        "here": "\n".join(line[2:] for line in lines if line.startswith("+ ")),
    }


def said(cell: nbformat.NotebookNode) -> list[str]:
    """The lines that it printed or showed; into how many pieces a kernel cut them is chance."""
    printed = "".join(each.text for each in cell.outputs if each.output_type == "stream")
    shown = [each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return [line for text in (printed, *shown) for line in hide(text).splitlines() if line.strip()]


def doubts(notebook: nbformat.NotebookNode) -> list[dict[str, str]]:
    """The sentences of its texts that were never run: to be read beside the outputs of a GPU."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for paragraph in cell.source.splitlines():
                if READ_ON.match(paragraph):
                    continue
                sentences = re.split(r"(?<=[.!?)])\s+(?=[A-Z(*`])", paragraph)
                found += [
                    {"cell": cell.id, "text": " ".join(sentences[max(at - 1, 0) : at + 1]).strip()}
                    for at, sentence in enumerate(sentences)
                    if UNSURE.search(sentence)
                ]
    return found


def write(path: Path, content: Any) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    new.replace(path)


def executed(path: Path, out: Path, seconds_per_cell: float) -> dict[str, Any]:
    """Execute a lesson; what became of it, which is in the folder after each cell."""
    saved, notebook = read(path), read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    found: dict[str, Any] = {"lesson": path.stem, "cells": cells, "executed": 0, "differs": [], "stopped": ""}
    found["unsure"] = doubts(notebook)

    def note(cell: nbformat.NotebookNode, cell_index: int, **_: Any) -> None:
        found["executed"] += 1
        if difference := differs(saved.cells[cell_index], cell):
            first_line = cell.source.strip().splitlines()[0]
            found["differs"].append({"cell": cell.id, "begins": first_line, **difference})
        write(out / "differs.json", found)

    write(out / "differs.json", found)
    client = Watched(notebook, seconds_per_cell, path.parent, on_cell_executed=note)
    try:
        client.execute()
    except CellTimeoutError:
        found["stopped"] = f"a cell was not done after {seconds_per_cell:g} s and could not be interrupted"
    except (DeadKernelError, asyncio.CancelledError):
        found["stopped"] = "interrupted" if client.interrupted else "its kernel died"
    except Exception as error:  # of Jupyter's machinery, which is not what is tried here
        found["stopped"] = f"{type(error).__name__}: {error}"
    write(out / "differs.json", found)
    nbformat.write(notebook, out / path.name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lesson", help="its number, as in 06, or a notebook's path")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds-per-cell", type=float, default=120)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        found = executed(find(arguments.lesson), arguments.out, arguments.seconds_per_cell)
    except LessonError as error:
        print(f"not executed: {error}")
        return 1
    print(f"{found['executed']} of {found['cells']} cells executed, {len(found['differs'])} differ", end="")
    print(f"; {found['stopped']}" if found["stopped"] else "")
    return int(bool(found["stopped"]))


if __name__ == "__main__":
    sys.exit(main())
