"""Measure the memory that a learner takes on a server: the table of the hosts' page, `.binder/README.md`.

    make host                                     all of it
    make host ARGS="--kernels 8 --only idle 06"   some of it

The sums are over a kernel and all that it has started (fork server, guard, ranks); a peak is taken when
the PSS is largest. PSS is what the processes take: a page that several share is divided among them. USS is
only the pages that no other process has. Anonymous is the part of the PSS that is in no file: Linux can drop
a library's pages and read them again, but has to keep these. With COURSE_LEAN=1, the kernels are lean.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from course_lib.hardware import cores, memory
from kernel import ROOT, Kernel, environment

MIB = 1 << 20
SECONDS = 0.2  # between two samples, at least; a sample takes some milliseconds per process
SHARE = 0.7  # of the free memory, for the kernels that run together
LAUNCHES = """
from course_lib import launch

launch(int, nprocs=2, device="cpu", dashboard=False)
"""


@dataclass
class Taken:
    """What processes take at one moment: how many they are, their threads, and bytes of memory."""

    processes: int = 0
    threads: int = 0  # a pids limit counts these
    pss: int = 0
    uss: int = 0
    anonymous: int = 0

    def __str__(self) -> str:
        sizes = (self.pss, self.uss, self.anonymous)
        return f"{self.processes:9}  {self.threads:7}" + "".join(f"  {size / MIB:9,.0f}" for size in sizes)


def taken(roots: Sequence[psutil.Process]) -> Taken:
    """Sum what processes, and all that they have started, take now."""
    now = Taken()
    for root in roots:
        with contextlib.suppress(psutil.Error):
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it may just have ended
                    used = process.memory_full_info()
                    now.processes += 1
                    now.threads += process.num_threads()
                    now.pss += getattr(used, "pss", used.uss)  # only Linux reports PSS
                    now.uss += used.uss
                    now.anonymous += anonymous(process.pid)
    return now


def anonymous(pid: int) -> int:
    """Return the bytes of a process's anonymous pages, with its part of shared ones; 0 if not known."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as sizes:
        return sum(int(line.split()[1]) << 10 for line in sizes if line.startswith("Pss_Anon:"))
    return 0


@contextlib.contextmanager
def peak(roots: Sequence[psutil.Process]) -> Iterator[Taken]:
    """Sample repeatedly while the block runs; what this yields is updated to the sample with most PSS."""
    largest, ended = Taken(), threading.Event()

    def look() -> None:
        over, cost = False, 0.0
        while not over:
            over = ended.wait(max(SECONDS, 4 * cost))  # sampling must not become the load
            began = time.monotonic()
            now = taken(roots)
            cost = time.monotonic() - began
            if now.pss > largest.pss:
                vars(largest).update(vars(now))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield largest
    finally:
        ended.set()
        watcher.join()


def cells_of(lesson: str) -> list[tuple[str, bool]]:
    """Return the code cells of a lesson, and whether each is meant to fail."""
    (path,) = (ROOT / "lessons").glob(f"{lesson}_*.ipynb")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [("".join(c["source"]), "raises-exception" in c["metadata"].get("tags", [])) for c in cells]


def run_lesson(kernel: Kernel, lesson: str) -> float:
    """Run a lesson from first to last cell, like a learner pressing Shift + Enter; return the seconds."""
    began = time.monotonic()
    kernel.run(f"import os; os.chdir({str(ROOT / 'lessons')!r})")
    for source, fails in cells_of(lesson):
        with contextlib.suppress(*[RuntimeError] if fails else []):
            kernel.run(source)
    return time.monotonic() - began


def process_of(kernel: Kernel) -> psutil.Process:
    return psutil.Process(kernel.value("import os; print(os.getpid())"))


# --- the rows ---------------------------------------------------------------------------------------------


def server(folder: Path) -> None:
    """Show what JupyterLab's server takes before a browser connects."""
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--notebook-dir={folder}"]
    options += ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    runtime = folder / "runtime"
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        env=environment(folder) | {"JUPYTER_RUNTIME_DIR": str(runtime)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError, StopIteration, ValueError):
                told = json.loads(next(runtime.glob("jpserver-*.json")).read_text())
                with urllib.request.urlopen(f"{told['url']}api?token={told['token']}", timeout=10):
                    break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("JupyterLab does not answer")
            time.sleep(0.1)
        show("JupyterLab's server, without a kernel", taken([psutil.Process(process.pid)]))
    finally:
        process.terminate()
        process.wait()


def idle(folder: Path) -> None:
    """Show what a kernel takes before it does anything, and after a launch."""
    with Kernel(folder) as kernel:
        its = [process_of(kernel)]
        show("a kernel that has run nothing", taken(its))
        kernel.run(LAUNCHES)
        show("a kernel between two launches", taken(its))


def alone(lesson: str) -> Callable[[Path], Taken]:
    """Return a function that shows what a lesson takes in one kernel."""

    def row(folder: Path) -> Taken:
        with Kernel(folder) as kernel:
            its = [process_of(kernel)]
            with peak(its) as largest:
                seconds = run_lesson(kernel, lesson)
            show(f"lesson {lesson}, at its peak", largest, seconds)
            show(f"lesson {lesson}, after its last cell", taken(its))
            return largest

    return row


def together(count: int, lesson: str, folder: Path, one: Taken) -> None:
    """Show what kernels take that run a lesson at once: ``count`` of them, or as many as fit into memory."""
    fit = int(SHARE * memory()[1] / (one.anonymous or one.pss))
    if fit < count:
        print(f"Memory for {count} kernels is not free; these are {fit}.")
        count = fit
    if count < 2:
        return
    for i in range(count):
        (folder / str(i)).mkdir()
    with contextlib.ExitStack() as stack:
        kernels = [stack.enter_context(Kernel(folder / str(i))) for i in range(count)]
        its = [process_of(kernel) for kernel in kernels]
        show(f"{count} kernels that have run nothing", taken(its))
        with peak(its) as largest, ThreadPoolExecutor(count) as pool:
            seconds = list(pool.map(run_lesson, kernels, [lesson] * count))
        show(f"{count} at once in lesson {lesson}, at their peak", largest, max(seconds))
        show(f"{count} after their last cell", taken(its))


def show(what: str, took: Taken, seconds: float | None = None) -> None:
    print(f"{what:44}{took}" + ("" if seconds is None else f"  {seconds:6.0f} s"), flush=True)


PARTS = ["server", "idle", "00", "06", "together"]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a learner takes of a server's memory, in MiB.")
    parser.add_argument("--kernels", type=int, default=30, help="of the part `together`")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    asked = parser.parse_args()
    torch = importlib.metadata.version("torch")
    lean = "lean" if os.environ.get("COURSE_LEAN") == "1" else "not lean"
    here = f"{cores()} cores, {memory()[0] / MIB:,.0f} MiB"
    print(f"{here}, torch {torch}, Python {platform.python_version()}; {lean}")
    print(f"{'MiB':44}processes  threads        PSS        USS  anonymous    took")
    rows: dict[str, Callable[[Path], object]] = {
        "server": server,
        "idle": idle,
        "00": alone("00"),
        "06": alone("06"),
        "together": lambda folder: together(asked.kernels, "00", folder, found["00"]),
    }
    found: dict[str, object] = {}
    for name in PARTS:
        if name in asked.only or (name == "00" and "together" in asked.only):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                found[name] = rows[name](Path(folder))


if __name__ == "__main__":
    main()
