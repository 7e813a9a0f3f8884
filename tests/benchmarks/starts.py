"""Measure how long two ranks take from the cell, or the command, to a checked result; and more ranks."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kernel import HERE, RANKS, TORCHRUN, Kernel, environment, output_of
from peers import Peers
from rounds import Take, interleaved, ratio
from table import Section

WORK = (HERE / "work.py").read_text()  # run as a cell: the functions of a notebook are in no module
LAUNCH = "check(launch(work, nprocs={0}).results, {0})"
LAUNCH_CELL = "\n".join(["from course_lib import launch", WORK, LAUNCH.format(RANKS)])  # the lessons' order
NOTEBOOK_LAUNCHER = """
port = loopback_store().port  # one that is free
notebook_launcher(leave, ({folder!r},), num_processes={ranks}, use_port=str(port))
check(collect({folder!r}))
"""
START_ENGINES = """
import ipyparallel
from work import check, loopback_store, work_as
cluster = ipyparallel.Cluster(n={ranks})
client = cluster.start_and_connect_sync()
"""
ASK_ENGINES = """
store = loopback_store()
replies = [client[i].apply_async(work_as, i, {ranks}, store.port) for i in range({ranks})]
check([reply.get() for reply in replies])
"""


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


@contextlib.contextmanager
def accelerate(folder: Path, peers: Peers) -> Iterator[Take]:
    results = folder / "accelerate"
    results.mkdir()
    cell = NOTEBOOK_LAUNCHER.format(folder=str(results), ranks=RANKS)
    with Kernel(folder, peers.python) as kernel:
        kernel.run("\n".join([WORK, "from accelerate import notebook_launcher", cell]))
        yield lambda: kernel.value(timed(cell))


@contextlib.contextmanager
def ipyparallel(folder: Path, peers: Peers, notes: list[str]) -> Iterator[Take]:
    ask = ASK_ENGINES.format(ranks=RANKS)
    with Kernel(folder, peers.python) as kernel:
        try:
            seconds = kernel.value(timed(START_ENGINES.format(ranks=RANKS) + ask))
            notes.append(f"ipyparallel's engines took {seconds:.1f} s to start, load torch and work once")
            yield lambda: kernel.value(timed(ask))
        finally:  # the engines would outlive the kernel
            kernel.run("cluster.stop_cluster_sync()")


def from_cell_to_result(rounds: int, folder: Path, peers: Peers) -> Section:
    """Measure every way to start two ranks, beside the floor."""
    least, warm, first, by_torchrun = "bare fork (the floor)", "launch, warm", "launch, first", "torchrun"
    notes: list[str] = []
    ways = {
        least: floor(folder),
        warm: warm_launch(folder),
        first: first_launch(folder),
        by_torchrun: script(folder, *TORCHRUN, str(HERE / "by_torchrun.py")),
        "script with mp.spawn": script(folder, sys.executable, str(HERE / "by_spawn.py")),
    }
    if "accelerate" in peers.there:
        ways["notebook_launcher"] = accelerate(folder, peers)
    fresh = list(ways)[3:]  # the ways besides launch that start fresh processes
    if "ipyparallel" in peers.there:
        ways["ipyparallel"] = ipyparallel(folder, peers, notes)
    with contextlib.ExitStack() as stack:
        takes = {name: stack.enter_context(way) for name, way in ways.items()}
        taken = interleaved(takes, rounds)
    section = Section("Two ranks, from the cell to the result (ratio: to the floor)")
    for name, seconds in taken.items():
        section.add(name, seconds, "{:.3f} s", f"{ratio(seconds, taken[least]):.2f}")
    fastest = min(fresh, key=lambda name: statistics.median(taken[name]))
    section.judge(f"warm launch / {fastest}", ratio(taken[warm], taken[fastest]), most=1)
    section.judge("warm launch / the floor", ratio(taken[warm], taken[least]), most=1.15)
    section.judge("warm launch / torchrun", ratio(taken[warm], taken[by_torchrun]), most=1 / 30)
    section.judge("first launch / torchrun", ratio(taken[first], taken[by_torchrun]), most=1)
    for note in notes:
        section.remark(note)
    return section


def by_ranks(rounds: int, folder: Path, most: int) -> Section:
    """Measure a warm `launch` of 1, 2, 4, … ranks."""
    with Kernel(folder) as kernel:
        kernel.run(LAUNCH_CELL)
        counts = [2**i for i in range(most.bit_length())]
        takes = {n: lambda n=n: kernel.value(timed(LAUNCH.format(n))) for n in counts}
        taken = interleaved(takes, rounds)
    section = Section("Warm launch of more ranks (ratio: to one rank)")
    for n, seconds in taken.items():
        section.add(f"{n} rank{'s' if n > 1 else ''}", seconds, "{:.3f} s", f"{ratio(seconds, taken[1]):.2f}")
    return section
