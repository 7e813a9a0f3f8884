"""Who is judged when, where, and again: with workers that only say what they are told to."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from course_lib.exercises.grading import batch
from course_lib.exercises.grading.batch import Cores, Task, grade_class
from course_lib.exercises.grading.score import Score
from course_lib.exercises.grading.submissions import Submission
from tests.support.processes import alive, wait_for


class Worker:
    """Scores by a learner's name: what it says at the first and at the second time."""

    SAYS: ClassVar[dict[str, list[Score]]] = {}
    begun: ClassVar[list[tuple[list[str], Cores, float, int]]] = []
    at_work: ClassVar[int] = 0

    def __init__(self, tasks: list[Task], cores: Cores, *given: Any) -> None:
        Worker.at_work += 1
        Worker.begun.append(([task[0].learner for task in tasks], cores, given[-1], Worker.at_work))
        self.tasks, self.cores = tasks, cores
        self._ways = socket.socketpair()
        self._ways[1].send(b"!")
        self.ways = self._ways[:1]

    def scored(self) -> Iterator[tuple[Task, Score]]:
        found = Worker.SAYS[self.tasks[0][0].learner].pop(0)
        yield self.tasks.pop(0), found

    def is_over(self) -> bool:
        return True  # as one that has failed, if there are tasks left

    def end(self) -> None:
        Worker.at_work -= 1
        for way in self._ways:
            way.close()


@pytest.fixture
def _workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "Worker", Worker)
    monkeypatch.setattr(batch, "unprotected", lambda: "")
    monkeypatch.setattr(batch.hardware, "cores", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    Worker.begun.clear()


@pytest.mark.usefixtures("_workers")
def test_who_struck_a_limit_or_has_no_grade_is_judged_once_more_alone(tmp_path: Path) -> None:
    good, bad, struck = Score("06"), Score("06", ["wrong"]), Score("06", ["wrong"], struck=True)
    failed = Score(ungraded="it failed")
    Worker.SAYS = {"anna": [good, bad], "bert": [struck, good], "cleo": [struck, struck]}
    Worker.SAYS |= {"dora": [failed, failed], "emil": [failed, good]}
    for learner in Worker.SAYS:
        (tmp_path / "class" / learner).mkdir(parents=True)
        for number in range(2 if learner == "anna" else 1):
            (tmp_path / "class" / learner / f"06_{number}.ipynb").write_text(f"{learner} {number}")
    report = tmp_path / "class" / "report"  # which is no learner's
    (report / "cache").mkdir(parents=True)  # of a grader that was killed
    graded = grade_class([tmp_path / "class"], report, jobs=2, out=io.StringIO())
    assert not (report / "cache").exists()
    assert [entry.score for entry in graded] == [good, bad, good, struck, failed, good]
    assert not any(Worker.SAYS.values())
    learners = [["anna", "anna"], ["bert"], ["cleo"], ["dora"], ["emil"]]
    assert [found for found, *_ in Worker.begun[:5]] == learners
    first, again = Worker.begun[:6], Worker.begun[6:]
    assert {tuple(cores) for _, cores, *_ in first} == {(1, 3), (5, 7)}, "equal shares"
    assert {patience for *_, patience, _ in first} == {1.0}
    assert again == [([name], [], batch.PATIENCE, 1) for name in ("bert", "cleo", "dora", "emil")]


@pytest.mark.usefixtures("_workers")
@pytest.mark.parametrize(("jobs", "cores"), [(1, [[]]), (2, [[1, 3], [5, 7]]), (3, [[1], [3], [5]])])
def test_the_cores_are_shared_out(jobs: int, cores: list[list[int]]) -> None:
    assert batch._places(jobs) == cores
    assert len(batch._places(99)) == 4, "no more at a time than there are cores"


class Ending:
    """A process whose exit codes are those given, one for each look at it."""

    def __init__(self, pid: int, *codes: int | None) -> None:
        self.pid, self._codes = pid, [*codes]

    @property
    def exitcode(self) -> int | None:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]

    def join(self, _: float) -> None:
        pass


def worker_with(process: Any, way: Any) -> batch.Worker:
    """A worker with one submission to score."""
    worker: Any = object.__new__(batch.Worker)
    worker._process, worker._way, worker._family = process, way, []
    worker._most, worker._until, worker._failed = 60.0, float("inf"), ""
    worker.tasks = [(Submission("anna", Path("06.ipynb")), Path("score.json"))]
    return worker


def test_a_worker_that_ends_between_two_looks_has_failed_at_one_submission() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        worker = worker_with(Ending(1 << 30, None, -9), ours)
        assert (list(worker.scored()), worker.is_over()) == ([], False)
        ((_, found),) = worker.scored()
        assert found.ungraded == "grading it failed (exit code -9)"
        assert worker.is_over()


def test_a_worker_that_takes_too_long_has_its_submission_judged_again() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        worker = worker_with(Ending(1 << 30, None), ours)
        worker._until = 0.5
        ((_, found),) = worker.scored()
        assert found.ungraded == "it was not done after 1 minutes"
        assert worker.is_over()


def test_of_a_worker_that_was_killed_nothing_is_left() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = subprocess.Popen(["setsid", "-w", "sh", "-c", "sleep 600; true"])
    with ours, theirs, process:
        worker = worker_with(Ending(process.pid, None, -9), ours)

        def its() -> list[psutil.Process]:
            return [each for each in psutil.Process(process.pid).children(True) if each.name() == "sleep"]

        (sleeps,) = wait_for(its, what="its child")
        assert list(worker.scored()) == []
        process.kill()
        process.wait()
        assert alive(sleeps)
        worker.end()
        wait_for(lambda: not alive(sleeps), what="its end")
