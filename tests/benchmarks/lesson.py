"""Lesson 06's training, from the lesson's cells; as a program for torchrun, it has no instrumentation.

torchrun --standalone --nproc-per-node=2 lesson.py EPOCHS
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "lessons" / "06_ddp_with_spawn.ipynb"
PARTS = ("class ConvNet", "def evaluate", "def train(")  # how the cells of the training begin
IMPORT = ("import ", "from ")
BATCH_SIZE, WIDTH = 64, 8
LEFT_OUT = 10  # steps at the start of each epoch, not measured

Pass = Callable[[Iterable[Any]], Iterable[Any]]


def samples_per_second(epochs: int, track: Pass, log: Callable[..., None]) -> float:
    """Train as one rank with this ``track`` and ``log``; return the throughput of the loops alone."""
    passes: list[list[float]] = []

    def watched(loader: Iterable[Any]) -> Iterator[Any]:
        passes.append([])
        for batch in track(loader):
            yield batch
            passes[-1].append(time.perf_counter())

    _training(watched, log)(epochs, BATCH_SIZE, WIDTH)
    ends = [steps[LEFT_OUT:] for steps in passes]
    samples = BATCH_SIZE * sum(len(steps) - 1 for steps in ends)
    return samples / sum(steps[-1] - steps[0] for steps in ends)


def _training(track: Pass, log: Callable[..., None]) -> Callable[..., Any]:
    """Return the lesson's own ``train``, defined by its cells."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    names: dict[str, Any] = {"__name__": "lesson"}
    imports = [line for source in sources[:2] for line in source.splitlines() if line.startswith(IMPORT)]
    exec("\n".join(imports), names)
    names |= {"track": track, "log": log}
    for part in PARTS:
        (source,) = [text for text in sources if text.startswith(part)]
        exec(source, names)
    return names["train"]


def main() -> None:
    rate = samples_per_second(int(sys.argv[1]), iter, lambda **values: None)
    if os.environ["RANK"] == "0":
        print(rate, flush=True)
    os._exit(0)  # about one normal exit in twelve aborts here ("terminate called…"), after the measurement


if __name__ == "__main__":
    main()
