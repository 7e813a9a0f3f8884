"""Which runs are kept."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from course_lib import Run
from course_lib.launcher import retention
from course_lib.record.run_record import newest_first
from tests.support.cells import quiet_launch
from tests.support.processes import wait_for

_opened: list[str] | None = None  # paths, while somebody counts them


def _note_what_is_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event in ("open", "os.listdir", "os.scandir"):
        _opened.append(str(arguments[0]))


sys.addaudithook(_note_what_is_opened)


def made(name: str, state: str = "done", **facts: Any) -> Run:
    """A run's folder without its ranks."""
    run = Run.create(name, 1, **facts)
    if state != "running":
        run.record.end(state)
    return run


def one_after_the_other(runs: Sequence[Run]) -> None:
    """Let them have ended in this order: times of files may be as coarse as 10 ms."""
    for age, run in enumerate(reversed(runs)):
        os.utime(run.folder / "run.json", (time.time() - age, time.time() - age))


def test_of_old_runs_the_newest_stay_and_those_that_still_run(
    nobody: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert retention.KEPT_RUNS == 50
    monkeypatch.setattr(retention, "KEPT_RUNS", 3)
    running = [made(f"running-{i}", state="running") for i in range(2)]
    abandoned = made("abandoned", state="running", kernel_pid=nobody)
    nonsense = [made(f"nonsense-{i}") for i in range(4)]
    done = [made(f"done-{i}") for i in range(5)]
    for run, content in zip(
        nonsense, ("{", "[]", '{"state": "running", "kernel_pid": 1e300}', ""), strict=True
    ):
        (run.folder / "run.json").write_text(content)
    one_after_the_other([*running, abandoned, *nonsense, *done])

    retention.clear_old_runs()

    names_kept = {path.name for path in newest_first()}
    assert names_kept == {run.folder.name for run in done[-3:] + running + nonsense[-3:]}


def test_every_tenth_launch_clears_them_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert retention.EVERY == 10
    monkeypatch.setattr(retention, "KEPT_RUNS", 1)
    monkeypatch.setattr(retention, "EVERY", 3)
    monkeypatch.setattr(retention, "_runs", itertools.count())
    kept = []
    for number in range(4):
        newest = quiet_launch(os.getpid, nprocs=1).folder
        if number == 3:
            wait_for(lambda newest=newest: newest_first() == [newest], what="the clearing")  # type: ignore[misc]
        kept.append(len(newest_first()))
    assert kept == [1, 2, 3, 1]


def test_a_launch_opens_no_file_of_other_runs(course_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    global _opened
    monkeypatch.setattr(retention, "_runs", itertools.count(1))
    quiet_launch(int, nprocs=1)  # starts what all launches share
    for number in range(60):
        made(f"kept-{number}")
    for thread in threading.enumerate():
        if thread.name == "course-retention":  # of an earlier test
            thread.join()
    _opened = []
    try:
        run = quiet_launch(int, nprocs=2)
    finally:
        opened, _opened = _opened, None
    others = [path for path in opened if not path.startswith(str(run.folder))]
    assert [path for path in others if path.startswith(str(course_home))] == []
    assert len(others) <= 20, others


def test_a_long_run_is_not_old_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel that clears right then would take it from under the one that reads its results."""
    monkeypatch.setattr(retention, "KEPT_RUNS", 2)
    long = made("long", state="running")
    later = [made(f"later-{i}") for i in range(3)]
    for age, run in enumerate(reversed(later), 1):  # times of files may be as coarse as 10 ms
        os.utime(run.folder / "run.json", (time.time() - age, time.time() - age))
    long.record.end("done")

    retention.clear_old_runs()

    assert [run.folder.exists() for run in (long, *later)] == [True, False, False, True]


def test_a_kernel_takes_no_run_from_another_that_lives(nobody: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 08 lost a run of its own while three other notebooks launched beside it."""
    monkeypatch.setattr(retention, "KEPT_RUNS", 2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as kernel:
        runs = [made(f"beside-{i}", kernel_pid=kernel.pid) for i in range(3)]
        runs += [made(f"own-{i}") for i in range(3)]
        one_after_the_other(runs)
        retention.clear_old_runs()
        assert [run.folder.exists() for run in runs] == [False, True, True] * 2
        kernel.communicate(b"\n")

    runs.append(made("of a third that has ended, too", kernel_pid=nobody))
    retention.clear_old_runs()
    assert [run.folder.exists() for run in runs] == [False, False, True, False, True, True, True]


def test_what_may_still_be_at_work_is_kept(nobody: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KEPT_RUNS", 1)
    of_a_job = {"job": 12, "submitted": time.time() - 100, "kernel_pid": nobody}
    job = made("job", "running", **of_a_job)
    ended = made("ended", "done", **of_a_job)
    elsewhere = Run.create("of another machine", 1, kernel_pid=nobody, host=socket.gethostname() + "2")
    forgotten = made("forgotten", "running", **of_a_job)
    newest = Run.create("newest", 1, kernel_pid=nobody, state="done")
    month = time.time() - retention.LONGEST - 60
    os.utime(forgotten.folder / "run.json", (month, month))
    one_after_the_other([job, ended, elsewhere, newest])
    retention.clear_old_runs()
    assert [run.folder.exists() for run in (job, elsewhere, newest)] == [True] * 3
    assert [run.folder.exists() for run in (ended, forgotten)] == [False] * 2
