"""Measure how long two ranks take from the cell, or the command, to a checked result."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.kernel import HERE, RANKS, TORCHRUN, Kernel, environment
from tests.benchmarks.table import Section, Take, interleaved, ratio

WORK = (HERE / "work.py").read_text()  # run as a cell: the functions of a notebook are in no module
LAUNCH = "check(launch(work, nprocs={0}).results, {0})"
LAUNCH_CELL = "\n".join(["from course_lib import launch", WORK, LAUNCH.format(RANKS)])  # the lessons' order


def timed(code: str) -> str:
    """Return a cell that prints the seconds that its code took."""
    return f"import time\nbegun = time.perf_counter()\n{code}\nprint(time.perf_counter() - begun)"


@contextlib.contextmanager
def warm_launch(folder: Path) -> Iterator[Take]:
    with Kernel(folder) as kernel:
        kernel.run(LAUNCH_CELL)
        yield lambda: kernel.value(timed(LAUNCH.format(RANKS)))


@contextlib.contextmanager
def first_launch(folder: Path) -> Iterator[Take]:
    def take() -> float:
        with Kernel(folder) as kernel:
            return kernel.value(timed(LAUNCH_CELL))

    yield take


@contextlib.contextmanager
def torchrun(folder: Path) -> Iterator[Take]:
    from tests.benchmarks.work import check, collect  # loads torch

    results, command = folder / "results", [*TORCHRUN, HERE / "by_torchrun.py"]
    results.mkdir()

    def take() -> float:
        begun = time.perf_counter()
        subprocess.run([*command, results], env=environment(folder), check=True)
        check(collect(str(results)))
        return time.perf_counter() - begun

    yield take


def from_cell_to_result(rounds: int, folder: Path) -> Section:
    """Measure every way to start two ranks."""
    ways = {"launch, warm": warm_launch, "launch, first": first_launch, "torchrun": torchrun}
    with contextlib.ExitStack() as stack:
        takes = {name: stack.enter_context(way(folder)) for name, way in ways.items()}
        taken = interleaved(takes, rounds)
    section = Section("Two ranks, from the cell to the result (ratio: to torchrun)")
    for name, seconds in taken.items():
        section.add(name, seconds, "{:.3f} s", f"{ratio(seconds, taken['torchrun']):.2f}")
    for name, most in (("launch, warm", 1 / 30), ("launch, first", 1)):
        section.judge(f"{name} / torchrun", ratio(taken[name], taken["torchrun"]), most=most)
    return section
