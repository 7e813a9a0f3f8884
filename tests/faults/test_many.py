"""Many at once: kernels and launches, far more than the machine has cores."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import time
from pathlib import Path

import psutil
import pytest
import torch

from course_lib.host.hardware import memory
from course_lib.launcher import guard
from tests.support.cells import quiet_launch
from tests.support.kernels import Kernel
from tests.support.processes import wait_for

pytestmark = pytest.mark.alone
KERNELS = int(os.environ.get("COURSE_KERNELS", "8"))  # a classroom of thirty is in `make bench`
MIB = 1 << 20
# A kernel's own, its fork server with torch (and torchvision), and two ranks: with a CUDA build of torch.
LEAN_BYTES, KERNEL_BYTES = 560 * MIB, 720 * MIB

LAUNCHES = """
    import json, torch, torch.distributed as dist
    from course_lib import launch

    def total(value):
        dist.init_process_group("gloo")
        reduced = torch.tensor(float(value))
        dist.all_reduce(reduced)
        dist.destroy_process_group()
        return reduced.item()

    def launches(name, count):
        say("at " + name)
        while not (THERE.parent.parent / name).exists():
            time.sleep(0.01)
        runs = [launch(total, i, dashboard=False) for i in range(count)]
        say(name, json.dumps([[run.results for run in runs], runs[0].seconds]))

    launches("cold", 1)
    launches("warm", 3)
    """


def test_many_kernels_launch_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own fork server, store and guard; they share the course's folder."""
    free = memory()[1]
    if 0.8 * free < KERNELS * KERNEL_BYTES:  # as .binder/README.md says
        monkeypatch.setenv("COURSE_LEAN", "1")
    count = min(KERNELS, int(0.8 * free / LEAN_BYTES))  # other tests may be at work on this machine
    if count < 2:
        pytest.skip(f"{free / MIB:,.0f} MiB of free memory are not enough for two kernels")
    for i in range(count):
        (tmp_path / str(i)).mkdir()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        kernels = [stack.enter_context(Kernel(tmp_path / str(i), LAUNCHES)) for i in range(count)]
        for name, expected in (("cold", [[0.0, 0.0]]), ("warm", [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]])):
            for kernel in kernels:
                kernel.wait_for(f"at {name}", seconds=600)
            started = time.monotonic()
            (tmp_path / name).touch()
            for kernel in kernels:
                kernel.wait_for(name, seconds=600)
            said = [json.loads((kernel.there / name).read_text()) for kernel in kernels]
            assert [results for results, _ in said] == [expected] * count
            seconds = sorted(seconds for _, seconds in said)
            print(
                f"{count} kernels, {name}: a launch took {seconds[0]:.1f} to {seconds[-1]:.1f} s, "
                f"all {time.monotonic() - started:.1f} s; "
                f"memory {(free - memory()[1]) / MIB:,.0f} MiB"
            )
        for kernel in kernels:
            assert kernel.process.wait(60) == 0
            assert kernel.log.read_text() == ""
        wait_for(lambda: not any(kernel.left() for kernel in kernels), what="all processes to be gone")
    print(f"{count} kernels: {time.monotonic() - began:.1f} s from the first to the end of the last")


def test_large_results_that_are_dropped_leave_nothing_in_the_kernel() -> None:
    """Nor do large arguments. Files and threads: tests/launcher/test_launch.py."""

    def launched() -> None:
        run = quiet_launch(torch.add, torch.zeros(5 * MIB), 1)  # 20 MiB to and from each of two ranks
        assert [result.sum() for result in run.results] == [5 * MIB] * 2

    def memory_and_children() -> tuple[int, int]:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # what the C library keeps for later is no leak
            ctypes.CDLL(None).malloc_trim(0)
        me = psutil.Process()
        return me.memory_full_info().uss // MIB, len(me.children(recursive=True))

    launched()
    before, server = memory_and_children(), set(guard._guarded)
    for _ in range(20):
        launched()
    after = memory_and_children()

    print(f"20 launches of 2 x 20 MiB: {before} MiB and children before, {after} after")
    assert after[0] - before[0] < 2 * 20, "not even one run's, of 800 MiB that went through"
    assert after[1] <= before[1]
    assert guard._guarded <= server, "numbers of ranks that ended, which are other processes' by now"
