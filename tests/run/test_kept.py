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


def made(name: str, state: str = "done", **facts: Any) -> Run:
    """A run's folder without its ranks."""
    run = Run.create(name, 1, **facts)
    if state != "running":
        run.end(state)
    return run


def test_of_old_runs_the_newest_stay_and_those_that_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept.KEPT_RUNS == 50
    monkeypatch.setattr(kept, "KEPT_RUNS", 3)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running = [made(f"running-{i}", state="running") for i in range(2)]
    abandoned = made("abandoned", state="running", kernel_pid=ended.pid)
    nonsense = [made(f"nonsense-{i}") for i in range(4)]
    done = [made(f"done-{i}") for i in range(5)]
    for run, content in zip(
        nonsense, ("{", "[]", '{"state": "running", "kernel_pid": 1e300}', ""), strict=True
    ):
        (run.folder / "run.json").write_text(content)
    for age, run in enumerate(reversed([*running, abandoned, *nonsense, *done])):
        os.utime(run.folder / "run.json", (time.time() - age, time.time() - age))

    kept.clear_old()

    names_kept = {path.name for path in kept.newest_first()}
    assert names_kept == {run.folder.name for run in done[-3:] + running + nonsense[-3:]}


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


def test_a_kernel_takes_no_run_from_another_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 08 lost a run of its own while three other notebooks launched beside it."""
    monkeypatch.setattr(kept, "KEPT_RUNS", 2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as kernel:
        runs = [made(f"beside-{i}", kernel_pid=kernel.pid) for i in range(3)]
        runs += [made(f"own-{i}") for i in range(3)]
        for age, run in enumerate(reversed(runs)):  # times of files may be as coarse as 10 ms
            os.utime(run.folder / "run.json", (time.time() - age, time.time() - age))
        kept.clear_old()
        assert [run.folder.exists() for run in runs] == [False, True, True] * 2
        kernel.communicate(b"\n")

    another = subprocess.Popen([sys.executable, "-c", ""])
    another.wait()
    runs.append(made("of a third that has ended, too", kernel_pid=another.pid))
    kept.clear_old()
    assert [run.folder.exists() for run in runs] == [False, False, True, False, True, True, True]
