"""Measure the memory that a learner's kernel takes on a server, for the hosts' page, `.binder/README.md`.

The sums are over a kernel and all that it has started (fork server, guard). Anonymous memory is in no file:
Linux has to keep it, while it can read a library's pages again. With COURSE_LEAN=1, the kernel is lean.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import tempfile
from pathlib import Path

import psutil

from course_lib.host.hardware import cores, memory
from tests.benchmarks.kernel import Kernel

MIB = 1 << 20
LAUNCHES = """
from course_lib import launch

launch(int, nprocs=2, device="cpu", dashboard=False)
"""


def taken(root: psutil.Process) -> str:
    """Sum what a process, and all that it has started, take now: their threads, MiB of anonymous memory."""
    threads = anonymous = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):  # it may just have ended
            threads += process.num_threads()  # a pids limit counts these
            sizes = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            anonymous += sum(int(line.split()[1]) << 10 for line in sizes if line.startswith("Pss_Anon:"))
    return f"{threads:7}  {anonymous / MIB:14,.0f}"


def main() -> None:
    here = f"{cores()} cores, {memory()[0] / MIB:,.0f} MiB"
    print(f"{here}, torch {importlib.metadata.version('torch')}, Python {platform.python_version()}")
    print(f"{'':44}threads  anonymous, MiB")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Kernel(Path(folder)) as kernel:
        process = psutil.Process(kernel.value("import os; print(os.getpid())"))
        print(f"{'a kernel that has run nothing':44}{taken(process)}")
        kernel.run(LAUNCHES)
        print(f"{'a kernel between two launches':44}{taken(process)}")


if __name__ == "__main__":
    main()
