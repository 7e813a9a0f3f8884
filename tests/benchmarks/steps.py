"""Measure what `track` and `log` cost a training loop in each step, beside tqdm.

The loops run in turns, all in the same rank of a `launch`, where recording is on.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Section, Take, interleaved, ratio

CELL = """
import json
from course_lib import launch
from tests.benchmarks.steps import microseconds
print(json.dumps(launch(microseconds, {rounds}, {steps}, nprocs=1, dashboard=False).results[0]))
"""
BATCHES = ", batches of tensors"
Pass = Callable[[Iterable[Any]], Iterable[Any]]


def microseconds(rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure, in a rank, the time per step of each loop; tqdm's, where it is installed."""
    import torch

    from course_lib import log, track

    numbers = range(steps)
    batches = [(torch.zeros(64, 4), torch.zeros(64))] * steps
    passes: dict[str, Pass] = {"bare loop": iter, "track": track}
    if importlib.util.find_spec("tqdm"):
        from tqdm import tqdm

        passes["tqdm"] = functools.partial(tqdm, file=open(os.devnull, "w"))

    def passing(through: Pass, items: Iterable[Any]) -> float:
        begun = time.perf_counter()
        for _ in through(items):
            pass
        return (time.perf_counter() - begun) / steps * 1e6

    def logging() -> float:
        begun = time.perf_counter()
        for _ in numbers:
            log(loss=0.5)
        return (time.perf_counter() - begun) / steps * 1e6

    takes: dict[str, Take] = {name: functools.partial(passing, one, numbers) for name, one in passes.items()}
    takes["log(loss=0.5)"] = logging
    takes |= {name + BATCHES: functools.partial(passing, one, batches) for name, one in passes.items()}
    return interleaved(takes, rounds)


def cost(rounds: int, folder: Path, steps: int) -> Section:
    """Measure `track` and `log` beside the bare loop and tqdm."""
    with Kernel(folder) as kernel:
        taken = kernel.value(CELL.format(rounds=rounds, steps=steps))
    section = Section(f"A step of a loop of {steps:,} (ratio: to tqdm)")
    for name, spent in taken.items():
        beside = taken.get("tqdm" + BATCHES * name.endswith(BATCHES))
        section.add(name, spent, "{:.3f} µs", f"{ratio(spent, beside):.2f}" if beside else "")
    if "tqdm" in taken:
        section.judge("track / tqdm", ratio(taken["track"], taken["tqdm"]), most=2)
    return section
