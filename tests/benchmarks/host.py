"""Measure the memory that a learner's kernel takes on a server, for the hosts' page, `.binder/README.md`.

The sums are over a kernel and all that it has started (fork server, guard). PSS is what the processes take: a
page that several share is divided among them. USS is only the pages that no other process has. Anonymous is
the part of the PSS that is in no file: Linux can drop a library's pages and read them again, but has to keep
these. With COURSE_LEAN=1, the kernel is lean.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import tempfile
from pathlib import Path

import psutil

from course_lib.hardware import cores, memory
from kernel import Kernel

MIB = 1 << 20
LAUNCHES = """
from course_lib import launch

launch(int, nprocs=2, device="cpu", dashboard=False)
"""


def taken(root: psutil.Process) -> str:
    """Sum what a process, and all that it has started, take now: how many, their threads, MiB of memory."""
    processes = threads = pss = uss = anonymous = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it may just have ended
            used = process.memory_full_info()
            processes += 1
            threads += process.num_threads()  # a pids limit counts these
            pss += getattr(used, "pss", used.uss)  # only Linux reports PSS
            uss += used.uss
            anonymous += anonymous_of(process.pid)
    sizes = "".join(f"  {size / MIB:9,.0f}" for size in (pss, uss, anonymous))
    return f"{processes:9}  {threads:7}{sizes}"


def anonymous_of(pid: int) -> int:
    """Return the bytes of a process's anonymous pages, with its part of shared ones; 0 if not known."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as sizes:
        return sum(int(line.split()[1]) << 10 for line in sizes if line.startswith("Pss_Anon:"))
    return 0


def main() -> None:
    torch = importlib.metadata.version("torch")
    lean = "lean" if os.environ.get("COURSE_LEAN") == "1" else "not lean"
    here = f"{cores()} cores, {memory()[0] / MIB:,.0f} MiB"
    print(f"{here}, torch {torch}, Python {platform.python_version()}; {lean}")
    print(f"{'MiB':44}processes  threads        PSS        USS  anonymous")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Kernel(Path(folder)) as kernel:
        process = psutil.Process(kernel.value("import os; print(os.getpid())"))
        print(f"{'a kernel that has run nothing':44}{taken(process)}")
        kernel.run(LAUNCHES)
        print(f"{'a kernel between two launches':44}{taken(process)}")


if __name__ == "__main__":
    main()
