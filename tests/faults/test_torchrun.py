"""torchrun(): PyTorch's own launcher with the same faults, and with restarts and nodes."""

from __future__ import annotations

import ast
import functools
import re
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from course_lib import RankError, RankTimeout, Run, torchrun
from course_lib.launcher import processes
from tests.support.kernels import PREAMBLE, Kernel
from tests.support.processes import alive, unless_gone, wait_for
from tests.support.programs import (
    ENDS,
    ENOUGH,
    HANGS,
    STATES,
    Jump,
    all_at,
    assert_marked,
    assert_none_left,
    assert_timed_out,
    calling_work,
    lines_of,
    script,
)

quiet_torchrun = functools.partial(torchrun, dashboard=False)


def failing(*args: Any, **kwargs: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        quiet_torchrun(*args, **kwargs)
    assert caught.value.run.state == "failed"
    assert Run.open().error == str(caught.value)
    assert_none_left(caught.value.run)
    return caught.value


# --- a rank ends before its time --------------------------------------------------------------------------


def test_a_rank_raises_while_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import os, pathlib, sys, time
        import torch, torch.distributed as dist
        from course_lib import log
        known = pathlib.Path(os.environ["COURSE_RUN"], "rank-0.where")

        def fails():
            raise ValueError(f"at {time.time()}")  # here

        dist.init_process_group("gloo")
        log(loss=dist.get_rank() + 0.5)
        print("rank", dist.get_rank(), sys.argv)
        if dist.get_rank() == 1:
            while os.system(f"grep -qs all_reduce '{known}'"):  # the file comes and goes
                time.sleep(0.01)
            fails()
        while True:
            dist.all_reduce(torch.ones(1))
        """
    script(tmp_path, source, "train.py")
    monkeypatch.chdir(tmp_path)
    error = failing("train.py", "--lr", 0.5)
    took = time.time() - float(str(error).partition("at ")[2].split()[0])

    print(f"raise to RankError: {took:.2f} s")
    assert took < ENOUGH
    assert error.rank == 1
    assert str(error).startswith("rank 1 raised ValueError: at ")
    assert_marked(str(error), source)
    assert "train.py, line 15, in <module>" in str(error)
    last = str(error).splitlines()[-1]
    assert re.match(
        r"rank 0 (waited in all_reduce|then lost its connection).*train\.py, line 17: dist", last
    ), last
    for rank in range(2):
        np.testing.assert_array_equal(error.run.metrics[rank]["loss"], [rank + 0.5])
        said = f"rank {rank} ['train.py', '--lr', '0.5']\n"
        assert error.run.logs[rank].startswith(said)
        (kept,) = error.run.folder.glob(f"torchrun/node-0/*/attempt_0/{rank}/stdout.log")
        assert kept.read_text() == said
    assert error.run.logs[1].count("Traceback (most recent call last)") == 1
    assert "runpy" not in error.run.logs[1], "the traceback is as without the course around it"


# All ways to end and to hang: test_launch_faults.py


def test_an_exit_code_is_told(tmp_path: Path) -> None:
    source, words = ENDS["os._exit"]
    error = failing(script(tmp_path, calling_work(source)), nproc_per_node=1)
    assert str(error).startswith(f"rank 0 {words}"), str(error)


def test_where_a_rank_was_that_torchrun_ended_at_once(tmp_path: Path) -> None:
    """It had no time to stand still; the agent lets it record where it is before it ends it."""
    source = """
        import os, time
        from pathlib import Path

        there = Path(os.environ["COURSE_RUN"], "there")
        if os.environ["RANK"] == "1":
            there.touch()
            time.sleep(1000)
        while not there.exists():
            pass
        raise ValueError("too early")
        """
    error = failing(script(tmp_path, source), nproc_per_node=2)

    assert str(error).startswith("rank 0 raised ValueError: too early"), str(error)
    where = "rank 1 was at script.py, line 7: time.sleep(1000) when it was asked to end"
    assert str(error).splitlines()[-1] == where


def test_a_rank_is_killed_beside_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left. One that torchrun then ends is not taken for the cause."""
    monkeypatch.setattr(processes.Program, "report_seconds", 0.0)
    source = """
        import os, signal, subprocess, time
        from pathlib import Path
        import torch
        from torch.utils.data import DataLoader

        def stop(number, frame):
            raise KeyboardInterrupt("asked to end")

        beside = subprocess.Popen(["sleep", "1000"])
        there = Path(os.environ["COURSE_RUN"], "there")
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, stop)
            batches = iter(DataLoader(torch.ones(100), num_workers=1))
            next(batches)
            there.touch()
            time.sleep(1000)
        while not there.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
        """
    error = failing(script(tmp_path, source), nproc_per_node=2)

    assert str(error).startswith("rank 0 was killed (SIGKILL)"), str(error)
    assert "rank 1 then raised KeyboardInterrupt: asked to end" in str(error)


# --- ranks that hang --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a rank never calls the collective", "a rank has returned"])
def test_a_timeout_names_the_odd_one_out(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, why, doing = HANGS[how]
    path = script(tmp_path, calling_work(source).lstrip())
    jump = Jump(monkeypatch, lambda: all_at(*lines_of(doing)))
    with pytest.raises(RankTimeout) as caught:
        quiet_torchrun(path, timeout=120)
    took = time.monotonic() - jump.at

    print(f"timeout to RankTimeout: {took:.2f} s")
    assert took < ENOUGH
    assert_timed_out(caught.value, why, doing, path.name)


# --- interrupted, and its kernel or its agent killed --------------------------------------------------------


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A script whose argument says what its ranks do."""
    begin = '\nif __name__ == "__main__":\n    globals()[sys.argv[1]](int(os.environ["RANK"]))\n'
    return script(tmp_path, PREAMBLE + textwrap.dedent(STATES) + begin)


def agents(kernel: Kernel) -> list[Any]:
    return [process for process in kernel.left() if "--torchrun" in unless_gone(process.cmdline, [])]


def family(kernel: Kernel) -> set[int]:
    """The agents and all that they have started."""
    return {process.pid for agent in agents(kernel) for process in (agent, *agent.children(recursive=True))}


def test_interrupts_and_then_the_end_of_the_kernel(states: Path, tmp_path: Path) -> None:
    source = f"""
    from course_lib import torchrun, Run
    for phase in ("start", "deaf"):
        say("now-" + phase)
        try:
            torchrun({str(states)!r}, "deaf", dashboard=False)
        except KeyboardInterrupt as error:
            run = Run.open()
            losses = [metrics["loss"].tolist() for metrics in run.metrics if "loss" in metrics]
            say("caught-" + phase, repr((run.state, type(error).__name__, losses)))
        for path in THERE.glob("*-?"):
            path.unlink()
    say("last")
    torchrun({str(states)!r}, "loader", dashboard=False)
    """
    with Kernel(tmp_path, source) as kernel:
        for phase in ("start", "deaf"):
            kernel.wait_for(f"now-{phase}")
            if phase == "start":
                wait_for(lambda: agents(kernel), what="the agent")
            else:
                kernel.wait_for("deaf-0", "deaf-1")
            started = family(kernel)
            began = time.monotonic()
            kernel.interrupt()
            kernel.wait_for(f"caught-{phase}")
            print(f"interrupt in {phase} to KeyboardInterrupt: {time.monotonic() - began:.2f} s")
            assert time.monotonic() - began < ENOUGH
            assert not started & {process.pid for process in kernel.left()}
            state, kind, losses = ast.literal_eval((kernel.there / f"caught-{phase}").read_text())
            assert (state, kind) == ("stopped", "Stopped")
            assert losses == [[0.5]] * 2 or phase != "deaf", "what was measured is kept"

        kernel.wait_for("last", "loader-0", "loader-1")
        wait_for(lambda: len(kernel.left()) >= 8, what="kernel, agent, two ranks, four workers")
        print(f"SIGKILL of the kernel: everything gone in {kernel.kill()[1]:.2f} s")


def test_the_agent_is_killed_and_then_the_kernel_with_its_group(states: Path, tmp_path: Path) -> None:
    source = (
        STATES
        + f"""
    from course_lib import torchrun, RankError

    def program():
        torchrun({str(states)!r}, "loader", dashboard=False)

    try:
        program()
    except RankError as error:
        say("caught", str(error))
    threading.Thread(target=program).start()
    launch(lambda: loader(int(os.environ["RANK"])), dashboard=False)
    """
    )
    with Kernel(tmp_path, source) as kernel:
        wait_for(lambda: len(family(kernel)) >= 7, what="the agent, two ranks, four workers")
        (agent,) = agents(kernel)
        started = agent.children(recursive=True)
        began = time.monotonic()
        agent.send_signal(signal.SIGKILL)
        kernel.wait_for("caught")
        print(f"SIGKILL of torchrun's agent to RankError: {time.monotonic() - began:.2f} s")
        wait_for(lambda: not any(map(alive, started)), what="its ranks and their workers to be gone")
        print(f"and to the end of all its processes: {time.monotonic() - began:.2f} s")
        assert (kernel.there / "caught").read_text().startswith("the program was killed (SIGKILL)")

        wait_for(lambda: len(family(kernel)) >= 7 and len(kernel.ranks()) >= 6, what="all that they start")
        print(f"SIGKILL of the group: everything gone in {kernel.kill(with_its_group=True)[1]:.2f} s")


# --- restarts and nodes -----------------------------------------------------------------------------------


def test_a_failure_after_a_restart_tells_what_ended_the_attempt_before(tmp_path: Path) -> None:
    source = """
        import os, torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError(f"in attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")  # here
        dist.barrier()
        """
    with pytest.raises(RankError) as caught:
        quiet_torchrun(script(tmp_path, source), max_restarts=1)
    first, *_, last = str(caught.value).splitlines()
    assert first == "rank 1 raised ValueError: in attempt 1"
    before = "before, rank 1 raised ValueError: in attempt 0 ("
    assert last.startswith(f"torchrun had restarted the ranks (restart 1 of 1): {before}")


def test_a_restart_after_a_rank_was_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        import os, socket, subprocess, sys
        import torch, torch.distributed as dist
        from course_lib import Run, log, track

        def is_free(port):
            with socket.socket() as other:
                try:
                    other.bind(("", port))
                except OSError:
                    return False
            return True

        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        print("attempt", attempt, flush=True)
        print("on stderr", attempt, file=sys.stderr)
        print("free:", rank == 0 and is_free(int(os.environ["MASTER_PORT"])))
        dist.init_process_group("gloo")
        for i in track(range(3)):
            log(loss=10 * attempt + i)
        steps, losses = [], []
        while max(steps, default=0) < 3 * (attempt + 1) or len(losses) < 3 * (attempt + 1):
            kept = Run.open(os.environ["COURSE_RUN"]).metrics[rank]
            steps, losses = kept["steps"], kept.get("loss", [])
        dist.all_reduce(torch.ones(1))
        if attempt == 0 and rank == 1:
            subprocess.Popen(["sleep", "1000"])  # which lives on
            os.kill(os.getpid(), 9)
        dist.barrier()
        dist.destroy_process_group()
        """
    run = torchrun(script(tmp_path, source), max_restarts=1)

    assert (run.state, run.restarts) == ("done", 1)
    killed = "rank 1 was killed, or ended itself without an exception"
    told = f"torchrun had restarted the ranks (restart 1 of 1): before, {killed}\n"
    assert told in capfd.readouterr().out
    assert "restart 1 of 1" in run.headline()
    for rank in range(2):
        log = run.logs[rank]
        assert [log.count(f"{kind} {i}\n") for kind in ("attempt", "on stderr") for i in range(2)] == [1] * 4
        assert log.index("attempt 0") < log.index("attempt 1")
        if sys.platform == "linux":  # elsewhere two sockets cannot be bound to one port
            assert log.count("free: False") == 2, "nobody is given the port at which they meet"
        np.testing.assert_array_equal(run.metrics[rank]["loss"], [0, 1, 2, 10, 11, 12])
        steps = run.metrics[rank]["steps"]
        assert steps[-1] == 6
        assert (np.diff(steps) >= 0).all(), "it counts on"
        assert (np.diff(run.metrics[rank]["seconds"]) >= 0).all()
    assert_none_left(run)


def test_two_nodes_and_the_environment_of_their_ranks(tmp_path: Path) -> None:
    source = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor(float(os.environ["RANK"]))
        dist.all_reduce(total)
        print("total", total.item(), flush=True)
        if os.environ["RANK"] == "3":
            raise ValueError("on the second node")  # here
        while True:
            dist.barrier()
        """
    error = failing(script(tmp_path, source), nnodes=2, nproc_per_node=2)

    run = error.run
    assert str(error).startswith("rank 3 raised ValueError: on the second node")
    assert error.rank == 3
    assert_marked(str(error), source)
    for rank in range(3):
        assert f"\nrank {rank} " in str(error)
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [tuple(environment[name] for name in names) for environment in run.environments] == [
        (str(rank), str(rank // 2), str(rank % 2), "4", "2", "127.0.0.1") for rank in range(4)
    ]
    assert len({environment["MASTER_PORT"] for environment in run.environments}) == 1
    for rank in range(4):
        assert run.logs[rank].startswith("total 6.0\n")
    kept = {
        path.relative_to(run.folder).parts[1:2] for path in run.folder.glob("torchrun/*/*/*/*/stdout.log")
    }
    assert kept == {("node-0",), ("node-1",)}
    assert "--nnodes=2" in run.command
