"""Measure how long two ranks take from the cell, or the command, to a checked result."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kernel import HERE, RANKS, TORCHRUN, Kernel, environment, output_of
from table import Section, Take, interleaved, ratio

WORK = (HERE / "work.py").read_text()  # run as a cell: the functions of a notebook are in no module
LAUNCH = "check(launch(work, nprocs={0}).results, {0})"
LAUNCH_CELL = "\n".join(["from course_lib import launch", WORK, LAUNCH.format(RANKS)])  # the lessons' order


def timed(code: str) -> str:
    """Return a cell that prints the seconds that its code took."""
    return f"import time\nbegun = time.perf_counter()\n{code}\nprint(time.perf_counter() - begun)"


@contextlib.contextmanager
def floor(folder: Path) -> Iterator[Take]:
    command = [sys.executable, str(HERE / "by_fork.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(folder), text=True, bufsize=1, **pipes) as process:

        def take() -> float:
            process.stdin.write("\n")
            return float(process.stdout.readline())

        take()  # waits until torch is loaded
        yield take
        process.stdin.close()


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
def script(folder: Path, *command: str) -> Iterator[Take]:
    from work import check, collect  # loads torch, which no other measurement needs in this process

    results = folder / Path(command[-1]).stem
    results.mkdir()

    def take() -> float:
        begun = time.perf_counter()
        output_of([*command, str(results)], folder)
        check(collect(str(results)))
        return time.perf_counter() - begun

    yield take


def from_cell_to_result(rounds: int, folder: Path) -> Section:
    """Measure every way to start two ranks, beside the floor."""
    least, warm, first, by_torchrun = "bare fork (the floor)", "launch, warm", "launch, first", "torchrun"
    ways = {
        least: floor(folder),
        warm: warm_launch(folder),
        first: first_launch(folder),
        by_torchrun: script(folder, *TORCHRUN, str(HERE / "by_torchrun.py")),
    }
    with contextlib.ExitStack() as stack:
        takes = {name: stack.enter_context(way) for name, way in ways.items()}
        taken = interleaved(takes, rounds)
    section = Section("Two ranks, from the cell to the result (ratio: to the floor)")
    for name, seconds in taken.items():
        section.add(name, seconds, "{:.3f} s", f"{ratio(seconds, taken[least]):.2f}")
    section.judge("warm launch / the floor", ratio(taken[warm], taken[least]), most=1.15)
    section.judge("warm launch / torchrun", ratio(taken[warm], taken[by_torchrun]), most=1 / 30)
    section.judge("first launch / torchrun", ratio(taken[first], taken[by_torchrun]), most=1)
    return section
