"""The four basic faults, on real ranks: one raises, one is killed, an interrupt, the kernel is killed."""

from __future__ import annotations

import ast
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib import RankError, log, track
from tests.support.cells import quiet_launch
from tests.support.kernels import Kernel
from tests.support.needs import missing
from tests.support.processes import alive, unless_gone, wait_for
from tests.support.programs import ENOUGH, STATES, assert_none_left, running

# --- a rank raises, a rank is killed ----------------------------------------------------------------------


def test_a_rank_raises_while_the_others_wait() -> None:
    def work() -> None:
        dist.init_process_group("gloo")
        for step in track(range(7)):
            log(loss=step)
            if step == 5 and dist.get_rank() == 1:
                raise ValueError(f"at {time.time()}")
        dist.all_reduce(torch.ones(1))

    quiet_launch(os.getpid)  # warm from here on
    with pytest.raises(RankError) as caught:
        quiet_launch(work)
    took = time.time() - float(str(caught.value).partition("at ")[2].split()[0])

    print(f"raise to RankError: {took:.2f} s")
    assert took < ENOUGH
    assert caught.value.rank == 1
    kept = caught.value.run.metrics[1]
    np.testing.assert_array_equal(kept["loss"], np.arange(6))
    assert kept["steps"][-1] == 5, "what was logged just before is kept"
    assert_none_left(caught.value.run)


def test_the_system_kills_a_rank_for_want_of_memory() -> None:
    """In a cgroup of its own, which holds less than the rank wants."""
    version_1, version_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    group, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (version_2, "memory.max")
    group /= f"course-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(200 << 20))
    except OSError as error:
        missing(f"no cgroup can be made here: {error}")

    def work() -> None:
        if os.environ["RANK"] == "1":
            (group / "cgroup.procs").write_text(str(os.getpid()))
            _ = b"x" * (1 << 30)
        time.sleep(60)

    try:
        with pytest.raises(RankError) as caught:
            quiet_launch(work)
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    first = str(caught.value).splitlines()[0]
    assert first.startswith(
        "rank 1 was killed (SIGKILL) because memory ran out, the machine's or that of a container's limit; "
        "take fewer ranks"
    )
    assert_none_left(caught.value.run)


def test_the_fork_server_dies_under_the_ranks() -> None:
    (server,) = set(quiet_launch(os.getppid).results)

    def kill() -> None:
        wait_for(lambda: (run := running()) and all(len(metrics["seconds"]) > 5 for metrics in run.metrics))
        os.kill(server, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RankError) as caught:
        quiet_launch(time.sleep, 60)
    thread.join()
    pids = [caught.value.run.facts(rank)["pid"] for rank in range(2)]
    wait_for(lambda: not any(map(alive, pids)), what="the ranks to end with their server")
    assert quiet_launch(os.getppid).results[0] != server


def test_the_system_has_no_room_for_so_many_ranks(tmp_path: Path) -> None:
    """As under a limit on processes: the fork server may fork three times, once for a look, for two ranks."""
    (tmp_path / "three_forks.py").write_text(
        """
import errno, os

def fork(real=os.fork, left=["look", "rank 0", "rank 1"]):
    if not left:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    left.pop()
    return real()

os.fork = fork
"""
    )
    source = """
        from course_lib import launch

        os.environ |= {"COURSE_PRELOAD": "three_forks", "COURSE_LEAN": "1"}
        try:
            launch(time.sleep, 60, nprocs=4, dashboard=False)
        except RuntimeError as error:
            say("told", str(error))
        del os.environ["COURSE_PRELOAD"]
        assert launch(os.getpid, nprocs=4, dashboard=False).results
        say("goes on")
    """
    with Kernel(tmp_path, source) as kernel:
        kernel.wait_for("goes on")
        assert "for 4 ranks could not all be started" in (kernel.there / "told").read_text()
        wait_for(lambda: not kernel.ranks(), what="no rank to be left")


# --- interrupt, and the end of the kernel ------------------------------------------------------------------

NAMES = ["python_code", "rendezvous", "all_reduce", "loader", "lock", "child", "deaf", "teardown", "at_exit"]


def test_interrupts_and_then_the_end_of_the_kernel_whatever_the_ranks_do(tmp_path: Path) -> None:
    source = (
        STATES
        + """
    from course_lib.launcher import watch
    watch.LINGER_SECONDS = 600  # also for ranks that have returned
    launch(os.getpid, dashboard=False)
    say("warm")
    for state in states:
        try:
            launch(lambda: state(int(os.environ["RANK"])), dashboard=False)
        except KeyboardInterrupt as error:
            run = Run.open()
            say("caught-" + state.__name__, repr((run.state, type(error).__name__, str(error), run.error,
                [metrics["loss"].tolist() for metrics in run.metrics if "loss" in metrics], run.results)))

    for path in THERE.glob("*-?"):
        path.unlink()
    say("all at once", str(launch(lambda: 1, dashboard=False).results))
    for state in states:
        run_it = lambda state=state: state(int(os.environ["RANK"]))
        threading.Thread(target=launch, args=(run_it,), kwargs={"dashboard": False}).start()
    while True:  # and some that are just starting
        launch(time.sleep, 0, dashboard=False)
        say("round")
    """
    )
    with Kernel(tmp_path, source) as kernel:
        kernel.wait_for("warm")
        for i, name in enumerate(NAMES):
            kernel.wait_for(f"{name}-0", f"{name}-1")
            interrupted(kernel, name, only_the_kernel=bool(i % 2))

        kernel.wait_for("all at once")
        assert (kernel.there / "all at once").read_text() == "[1, 1]"
        kernel.wait_for(*(f"{name}-{rank}" for name in NAMES for rank in range(2)), "round")
        # each launch has two ranks; one has four workers besides, one has two children
        wait_for(lambda: len(kernel.ranks()) >= 2 * len(NAMES) + 4 + 2, what="all that they start")
        ranks, everything = kernel.kill()
        print(f"SIGKILL of the kernel: ranks gone in {ranks:.2f} s, everything in {everything:.2f} s")


def interrupted(kernel: Kernel, name: str, only_the_kernel: bool) -> None:
    started = {process.pid for process in kernel.ranks()}
    assert len(started) >= 2, "the test does not see the ranks"
    began = time.monotonic()
    if only_the_kernel:
        kernel.process.send_signal(signal.SIGINT)
    else:
        kernel.interrupt()
    kernel.wait_for(f"caught-{name}")
    took = time.monotonic() - began
    print(f"interrupt in {name} to KeyboardInterrupt: {took:.2f} s")
    assert took < ENOUGH
    assert not started & {process.pid for process in kernel.ranks()}
    told = (kernel.there / f"caught-{name}").read_text()
    state, kind, text, error, losses, results = ast.literal_eval(told)
    assert (state, kind) == ("stopped", "Stopped")
    assert text.startswith("stopped after ")
    assert error == text
    if name not in ("rendezvous", "all_reduce", "loader", "lock"):
        assert losses == [[0.5], [0.5]], "what was measured is kept"
    assert results == ["done" if name == "at_exit" else None] * 2


def test_an_interrupt_of_the_first_launch_while_torch_still_loads(tmp_path: Path) -> None:
    source = """
    from course_lib import launch, Run
    say("starting")
    try:
        launch(time.sleep, 60, dashboard=False)
    except BaseException as error:
        say("caught", type(error).__name__ + " " + Run.open().state)
    say("second", str(launch(lambda: 1, dashboard=False).results))
    """
    with Kernel(tmp_path, source) as kernel:
        kernel.wait_for("starting")
        wait_for(lambda: list((tmp_path / "course-home/runs").glob("*/run.json")))
        wait_for(
            lambda: any(
                "forkserver" in " ".join(unless_gone(process.cmdline, [])) for process in kernel.left()
            )
        )
        began = time.monotonic()
        kernel.interrupt()
        kernel.wait_for("caught")
        print(f"interrupt of a first launch: {time.monotonic() - began:.2f} s")
        assert (kernel.there / "caught").read_text() == "Stopped stopped"
        kernel.wait_for("second")
        assert (kernel.there / "second").read_text() == "[1, 1]"
        assert kernel.process.wait(60) == 0
        assert kernel.log.read_text() == ""
