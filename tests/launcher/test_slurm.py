"""slurm() on a real Slurm of two nodes: a run, faults on one of the nodes, the queue, a kernel that dies.

Where a test needs no torch in its ranks, they do without: a job starts two torchruns, which load it anyway.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from course_lib import RankError, RankTimeout, Run, slurm
from course_lib.report.failed import Stopped
from tests.support.kernels import Kernel
from tests.support.needs import missing
from tests.support.processes import wait_for
from tests.support.programs import Jump, all_at, assert_marked, assert_none_left, script, timeless

sys.path.insert(0, str(Path(__file__).parents[2] / "lessons" / "scripts"))
import slurm_here

quiet_slurm = functools.partial(slurm, dashboard=False, nodes=2, nproc_per_node=1)


@pytest.fixture(scope="module")
def here() -> Iterator[slurm_here.SlurmHere]:
    if reason := slurm_here.missing():
        missing(reason)
    started = slurm_here.SlurmHere()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def folder(here: slurm_here.SlurmHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one, of a name that a shell must not take apart."""
    for name, value in here.environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    print(said("sinfo", "--list-reasons"))  # why Slurm itself has drained a node


def said(*command: Any) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def state_of(job: int | None) -> str:
    """Slurm's own word for it."""
    return said("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


def when(condition: Callable[[Run], object], act: Callable[[Run], object]) -> threading.Thread:
    """Do something as soon as the newest run is so."""

    def so() -> Run | None:
        try:
            run = Run.open()
        except (FileNotFoundError, ValueError):
            return None
        return run if condition(run) else None

    thread = threading.Thread(target=lambda: act(wait_for(so, what="the run")))  # type: ignore[arg-type]
    thread.start()
    return thread


def waits(run: Run) -> bool:
    return run.job is not None and run.state == "queued"


def at_work(run: Run) -> bool:
    """Whether both ranks have come to their sleep."""
    return run.state == "running" and all("here" in log for log in run.logs) and bool(run.nodes)


SLEEPS = """
    import time
    print("here", flush=True)
    time.sleep(600)  # here
    """


def failing(kind: type[RankError], *args: Any, **kwargs: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        quiet_slurm(*args, **kwargs)
    assert type(caught.value) is kind
    run = caught.value.run
    assert (run.state, Run.open().error) == ("failed", str(caught.value))
    assert state_of(run.job) not in ("PENDING", "RUNNING", "COMPLETING"), "it is gone"
    assert_none_left(run)
    return caught.value


# --- a run ------------------------------------------------------------------------------------------------


def test_a_run_on_two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the script that was submitted, submitted once more by hand."""
    monkeypatch.setenv("OF_THE_LEARNER", "kept")
    source = """
        import os, sys
        import torch, torch.distributed as dist
        from course_lib import log, place, track

        dist.init_process_group(place()[1])
        total = torch.ones(1) * dist.get_rank()
        dist.all_reduce(total)
        for _ in track([torch.zeros(5)] * 4):
            log(loss=dist.get_rank() + 0.5)
        print("rank", dist.get_rank(), sys.argv, total.item(), os.environ["OF_THE_LEARNER"])
        dist.destroy_process_group()
        """
    script(folder, source, "a train.py")
    run = quiet_slurm("a train.py", "--lr", 0.5, time=5, comment="it's 3 o'clock", setup="echo set up")

    assert (run.state, run.name, run.world_size, run.nodes) == ("done", "a train.py", 2, "node[1-2]")
    assert run.queued_seconds >= 0
    assert 0 < run.seconds < 120
    assert re.fullmatch(
        r"a train\.py: 2 ranks, done, \d+\.\d s \(before that \d+ s in the queue\)", run.headline()
    )
    told = run.environments
    assert (
        {each["SLURMD_NODENAME"] for each in told} == {"node1", "node2"} == {run.node_of(r) for r in (0, 1)}
    )
    assert [row["node"] for row in run.table()] == [each["SLURMD_NODENAME"] for each in told]
    assert [row["samples"] for row in run.table()] == ["20", "20"]
    for rank in range(2):
        expected = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": str(rank)}
        assert told[rank] | expected == told[rank]
        assert run.logs[rank] == f"rank {rank} ['a train.py', '--lr', '0.5'] 1.0 kept\n"
        np.testing.assert_array_equal(run.metrics[rank]["loss"], [rank + 0.5] * 4)
    assert run.output.startswith("set up\n")
    job = said("scontrol", "show", "job", run.job)
    assert "Comment=it's 3 o'clock " in job
    assert "TimeLimit=00:05:00" in job
    assert f"WorkDir={folder}\n" in job
    assert Run.open(run.folder).headline() == run.headline()

    said(*run.command.split(" ", 1)[:1], "--wait", "--output=by-hand.txt", run.folder / "job.sbatch")
    by_hand = (folder / "by-hand.txt").read_text()
    assert "set up" in by_hand
    for rank in range(2):
        assert f"rank {rank} ['a train.py', '--lr', '0.5'] 1.0 kept\n" in by_hand


# --- faults -----------------------------------------------------------------------------------------------


def test_a_rank_raises_on_the_second_node(folder: Path) -> None:
    source = """
        import os, time
        if os.environ["SLURMD_NODENAME"] == "node2":
            while not os.path.exists("there"):
                time.sleep(0.05)
            raise ValueError("boom")  # here
        print("here", flush=True)
        open("there", "w").close()
        time.sleep(600)
        """
    error = failing(RankError, script(folder, source), timeout=300)

    other = 1 - error.rank
    assert str(error).startswith(f"rank {error.rank} on node2 raised ValueError: boom\n")
    assert_marked(str(error), source)
    last = str(error).splitlines()[-1]
    assert re.match(rf"rank {other} on node1 (was at .*script\.py, line 8: time\.sleep|had ended)", last), (
        last
    )
    assert error.run.logs[error.rank].count("Traceback (most recent call last)") == 1
    assert "srun: error: node2" in error.run.output, "what Slurm says of it"


def test_not_done_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are asked where they are through the folder: their process numbers are another machine's."""
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("signalled") if number else kill(pid, 0))
    jump = Jump(monkeypatch, lambda: all_at(3, 3))
    error = failing(RankTimeout, script(folder, SLEEPS), timeout=120)

    assert jump.at
    head, blank, *lines = timeless(str(error)).splitlines()
    assert (head, blank) == ("not done after 120 s: ranks 0, 1 were in time.sleep(600)", "")
    for rank, line in enumerate(lines):
        node = error.run.node_of(rank)
        assert re.match(rf"rank {rank} on {node} was at .*script\.py, line 3: time\.sleep\(600\)", line)
    assert state_of(error.run.job) == "CANCELLED"


def test_a_node_is_lost(folder: Path) -> None:
    down = ["scontrol", "update", "nodename=node2", "state=down", "reason=test"]
    act = when(at_work, lambda _: said(*down))
    error = failing(RankError, script(folder, SLEEPS))
    act.join()
    words = "was ended by Slurm because one of its nodes failed (NODE_FAIL): node2"
    assert str(error).splitlines()[0] == f"the job (on node[1-2]) {words}"
    # the slurmd of node2 lives, so that it comes back by itself
    wait_for(lambda: said("sinfo", "-hNo", "%t").split() == ["idle"] * 2, what="the nodes to be idle")


@pytest.mark.parametrize("where", ["at work", "in the queue"])
def test_interrupted(where: str, folder: Path) -> None:
    ready, nodes = (at_work, 2) if where == "at work" else (waits, 3)
    act = when(ready, lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped) as caught:
        quiet_slurm(script(folder, SLEEPS), nodes=nodes)
    act.join()
    run = caught.value.run
    assert run.state == Run.open().state == "stopped"
    assert_none_left(run)
    assert state_of(run.job) == "CANCELLED"
    in_queue = r"stopped after \d+ s in the queue; no rank is left"
    expected = (
        in_queue if nodes == 3 else r"stopped after \d+\.\d s \(before that \d+ s in the queue\); no rank"
    )
    assert re.match(expected, str(caught.value))
    assert (run.seconds == 0) == (nodes == 3)


# --- the queue --------------------------------------------------------------------------------------------


def test_a_drained_node_is_waited_for(folder: Path) -> None:
    said("scontrol", "update", "nodename=node2", "state=drain", "reason=disk broken")

    def drained(run: Run) -> bool:
        return waits(run) and "DRAINED" in run.reason

    act = when(drained, lambda _: said("scontrol", "update", "nodename=node2", "state=resume"))
    run = quiet_slurm(script(folder, "print('done')"))
    act.join()
    assert list(run.logs) == ["done\n", "done\n"], "also of a script that calls nothing of the course's"
    assert run.state == "done"
    assert run.queued_seconds >= 1


# --- without a kernel -------------------------------------------------------------------------------------


def test_a_kernel_that_dies_leaves_the_job_to_slurm(folder: Path) -> None:
    source = """
        import os, time
        from course_lib import log
        log(loss=1.5)
        while not os.path.exists("go"):
            time.sleep(0.05)
        if os.environ["SLURMD_NODENAME"] == "node2":
            raise ValueError("boom")  # here
        """
    script(folder, source)
    start = "from course_lib import slurm; slurm('script.py', nodes=2, nproc_per_node=1, dashboard=False)"
    (folder / "kernel").mkdir()
    with Kernel(folder / "kernel", f"os.chdir({str(folder)!r})\n{start}") as kernel:
        wait_for(
            lambda: (
                kernel.process.poll() is None
                and list(Path(folder).glob("../course-home/runs/*/rank-1.points"))
            )
        )
        kernel.process.kill()
        kernel.process.wait()
        run = Run.open()
        assert state_of(run.job) == "RUNNING"
        again = threading.Timer(1, (folder / "go").touch)
        again.start()
        with pytest.raises(RankError) as caught:
            slurm(run, dashboard=False)
        again.join()
    report = str(caught.value)
    assert re.match(r"rank [01] on node2 raised ValueError: boom\n", report)
    assert_marked(report, source)
    assert (Run.open().state, Run.open().error) == ("failed", report)
    seconds = run.seconds

    with pytest.raises(RankError) as caught:
        slurm(Run.open(), dashboard=False)
    assert str(caught.value).splitlines()[0] == report.splitlines()[0], "after its end, too"
    assert caught.value.run.seconds == pytest.approx(seconds, abs=1)
    assert caught.value.run.folder == run.folder
