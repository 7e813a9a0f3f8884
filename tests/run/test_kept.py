"""Which runs are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from course_lib import Run
from course_lib.run import kept
from tests.support.cells import quiet_launch
from tests.support.processes import wait_for


def made(name: str, state: str = "done", **facts: Any) -> Run:
    """A run's folder without its ranks."""
    run = Run.create(name, 1, **facts)
    if state != "running":
        run.end(state)
    return run


def test_of_old_runs_the_newest_50_stay_and_those_that_still_run() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running = [made(f"running-{i}", state="running") for i in range(2)]
    abandoned = made("abandoned", state="running", kernel_pid=ended.pid)
    nonsense = [made(f"nonsense-{i}") for i in range(4)]
    for run, content in zip(
        nonsense, ("{", "[]", '{"state": "running", "kernel_pid": 1e300}', ""), strict=True
    ):
        (run.folder / "run.json").write_text(content)
    done = []
    for i in range(55):
        done.append(made(f"done-{i}"))
        wait_for(
            lambda: int(time.time() * 1000) != int(done[-1]._facts["started"] * 1000)
        )  # names sort by ms

    kept.clear_old()

    names_kept = {path.name for path in kept.newest_first()}
    assert kept.KEPT_RUNS == 50
    assert names_kept == {run.folder.name for run in done[-50:] + running}
    assert not abandoned.folder.exists()


def test_a_launch_clears_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_RUNS", 2)
    names = [quiet_launch(os.getpid, nprocs=1).folder.name for _ in range(3)]

    assert [path.name for path in kept.newest_first()] == names[:0:-1]


def test_a_long_run_is_not_old_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel that clears right then would take it from under the one that reads its results."""
    monkeypatch.setattr(kept, "KEPT_RUNS", 2)
    long = made("long", state="running")
    later = [made(f"later-{i}") for i in range(3)]
    for age, run in enumerate(reversed(later), 1):  # times of files may be as coarse as 10 ms
        os.utime(run.folder / "run.json", (time.time() - age, time.time() - age))
    long.end("done")

    kept.clear_old()

    assert [run.folder.exists() for run in (long, *later)] == [True, False, False, True]
