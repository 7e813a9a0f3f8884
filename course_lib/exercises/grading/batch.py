"""`course grade`: score a class's submissions in parallel, in worker processes.

Each learner's submissions have walls, and cores, of their own. If a submission may have lost points because
others used its cores, it is judged again, alone. Each score is saved at once, under a hash of the notebook,
the files beside it, the seed, the limit, the exercises' code and PyTorch's version: an interrupted batch goes
on where it stopped.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing.connection
import os
import shutil
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import psutil
import torch

from ...files import write_whole
from ...host import hardware
from ...kill import kill_families
from ...launcher import forkserver
from ...launcher.forkserver import wait_until_loaded, warm_up, without_main
from ...launcher.guard import protect, release
from . import score, submissions
from .score import Score
from .session import CannotJudge
from .submissions import Submission, Unreadable
from .walls import END_SECONDS, HOUSE, START_SECONDS, Walls, unprotected

MOST_TIMES = 6.0  # times the limit for a start and the cells: the most for one submission
PATIENCE = 4.0  # times each time limit, for a submission that is judged again, alone
KEPT = "submissions"  # the folder of scores, one JSON file each


@dataclass
class Graded:
    """A submission and its score."""

    submission: Submission
    score: Score


Task = tuple[Submission, Path]  # and the file for its score
Cores = list[int]  # for one worker's walls; an empty list stands for all cores
ALONE: list[Cores] = [[]]


def grade_class(
    folders: Sequence[Path],
    report: Path,
    jobs: int = 1,
    seconds: float = 120.0,
    seed: str = "",
    out: TextIO = sys.stderr,
    outputs: Sequence[Path] = (),
) -> list[Graded]:
    """Score all notebooks in the folders, except those whose score is in ``report``.

    ``jobs`` learners are graded at a time, each on an equal share of the cores; no more than there are cores.
    A notebook's cells together may take ``seconds``, and so may each question, up to `check.ALL_SECONDS`.
    Another seed draws other inputs. Files at ``outputs`` are no learner's. `NoSubmissions` is raised if there
    is nothing to grade.
    """
    submitted = submissions.submissions(folders, [report, *outputs])
    if warning := unprotected():
        print(f"course grade: {warning}", file=out)
    (report / KEPT).mkdir(parents=True, exist_ok=True)
    score.answer_names()  # loads the judges before any worker does
    paths = {each: report / KEPT / f"{_key(each, seed, seconds)}.json" for each in submitted}
    scores = {path: kept for path in paths.values() if (kept := _kept(path))}
    if scores:
        print(f"{len(scores)} of {len({*paths.values()})} submissions were graded before", file=out)
    left = {path: submission for submission, path in reversed(paths.items()) if path not in scores}
    by_learner: dict[str, list[Task]] = {}
    for path, submission in reversed(left.items()):
        by_learner.setdefault(submission.learner, []).append((submission, path))
    again: list[list[Task]] = []
    with _nothing_left_in_the_temporary_folder(report):
        for groups, places in ([*by_learner.values()], _places(jobs)), (again, [*ALONE]):
            patience = PATIENCE if groups is again else 1.0
            with contextlib.closing(_scored(groups, places, seed, seconds, patience)) as found_out:
                for task, found in found_out:
                    if groups is not again and (found.struck or found.ungraded):
                        again.append([task])
                        continue
                    scores[task[1]] = found
                    name = "".join(letter if letter.isprintable() else "?" for letter in task[0].learner[:40])
                    print(f"{len(scores)} of {len({*paths.values()})}: {name}", file=out, flush=True)
    return [Graded(submission, scores[path]) for submission, path in paths.items()]


def _key(submission: Submission, seed: str, seconds: float) -> str:
    """Return a hash of the notebook, its name, the files beside it, the seed, the limit and the judges."""
    try:
        text = submissions.content(submission.path, submission.root)
    except Unreadable as why:
        text = str(why).encode()
    beside = submissions.helpers(submission)
    about = text, submission.path.name, beside, seed, seconds, _hash_of_the_judges()
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]


@functools.cache
def _hash_of_the_judges() -> str:
    """Return a hash that changes with the code of the exercises and with PyTorch's version."""
    total = hashlib.sha256(torch.__version__.encode())
    for path in sorted(HOUSE.joinpath("exercises").rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


def _kept(path: Path) -> Score | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return Score.from_json(path.read_text())
    return None


@contextlib.contextmanager
def _nothing_left_in_the_temporary_folder(report: Path) -> Iterator[None]:
    """Keep PyTorch's cache in the report until the end, and load no torchvision, which no judge needs."""
    folder = report.resolve() / "cache"  # if this grader is killed, the next one removes it
    try:
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder), COURSE_LEAN="1"):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _places(jobs: int) -> list[Cores]:
    """Divide the cores among the workers (Linux): otherwise one submission could starve another."""
    jobs = min(jobs, hardware.cores())
    if jobs == 1 or not hasattr(os, "sched_setaffinity"):
        return ALONE * jobs
    cores, each = sorted(os.sched_getaffinity(0)), hardware.cores() // jobs
    return [cores[first : first + each] for first in range(0, jobs * each, each)]


def _scored(
    groups: list[list[Task]], places: list[Cores], seed: str, seconds: float, patience: float
) -> Generator[tuple[Task, Score]]:
    """Score groups of submissions, each behind walls of its own, one group in each place at a time."""
    workers: list[Worker] = []
    try:
        while groups or workers:
            while groups and places:
                workers.append(Worker(groups.pop(0), places.pop(0), seed, seconds, patience))
            multiprocessing.connection.wait([way for worker in workers for way in worker.ways], 1.0)
            for worker in [*workers]:
                yield from worker.scored()
                if worker.is_over():
                    worker.end()
                    workers.remove(worker)
                    places.append(worker.cores)
                    groups += [worker.tasks] if worker.tasks else []  # after the one at which it failed
    finally:
        for worker in workers:
            worker.end()


class Worker:
    """A process that scores some submissions, one after the other, behind walls of their own."""

    def __init__(self, tasks: list[Task], cores: Cores, seed: str, seconds: float, patience: float) -> None:
        warm_up()
        wait_until_loaded(threading.Event())
        self.tasks, self.cores = tasks, cores  # tasks: those without a score
        context: Any = multiprocessing.get_context(forkserver.METHOD)
        self._way, end = context.Pipe(duplex=False)
        self._process: Any = context.Process(target=_work, args=(end, tasks, cores, seed, seconds, patience))
        with without_main():
            self._process.start()
        end.close()
        protect([self._process.pid])
        self.ways = (self._way, self._process.sentinel)
        self._most = MOST_TIMES * (START_SECONDS + seconds) * patience
        self._until = time.monotonic() + self._most
        self._failed = ""  # why
        self._family: list[psutil.Process] = []

    def scored(self) -> Iterator[tuple[Task, Score]]:
        """Yield the submissions that have a score by now, and the one at which the worker failed, if any."""
        has_ended = self._process.exitcode is not None
        with contextlib.suppress(psutil.Error):  # once it has ended, it is no longer their parent
            self._family = psutil.Process(self._process.pid).children(recursive=True) or self._family
        with contextlib.suppress(OSError, EOFError):
            while self.tasks and self._way.poll():
                found = self._way.recv()
                self._until = time.monotonic() + self._most
                yield self.tasks.pop(0), found
        if has_ended:
            self._failed = f"grading it failed (exit code {self._process.exitcode})"
        elif time.monotonic() > self._until:
            self._failed = f"it was not done after {self._most / 60:.0f} minutes"
        if self.tasks and self._failed:
            yield self.tasks.pop(0), Score(ungraded=self._failed)

    def is_over(self) -> bool:
        """Return whether it has ended, or is to be ended."""
        return not self.tasks or bool(self._failed)

    def end(self) -> None:
        """End the worker and everything behind its walls."""
        self._process.join(0 if self.tasks or self._failed else END_SECONDS)  # after the last, it tidies up
        if self._process.exitcode is None:
            with contextlib.suppress(psutil.Error):
                self._family = [psutil.Process(self._process.pid)]
        kill_families(self._family)
        self._process.join(END_SECONDS)
        self._way.close()
        release([self._process.pid])


def _work(way: Any, tasks: list[Task], cores: Cores, seed: str, seconds: float, patience: float) -> None:
    os.setsid()  # Ctrl-C is for the batch, which ends this
    torch.set_num_threads(1)
    with Walls(cores, patience) as walls:
        for submission, path in tasks:
            try:
                found = score.score_submission(submission, seed, seconds, walls)
                if not found.struck or patience > 1:  # else it is judged again
                    write_whole(path, found.to_json())
            except CannotJudge as why:
                found = Score(ungraded=f"it could not be judged: {why}")
            way.send(found)
