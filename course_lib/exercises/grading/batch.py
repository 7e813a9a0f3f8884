"""`course grade`: score a class's submissions in parallel, in worker processes.

A score is kept as soon as it is known, under a hash of the notebook, the seed, the limit, the code of the
exercises and PyTorch's version. So an interrupted batch goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing.connection
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from ...files import write_whole
from ...kill import kill_families
from ...launcher.forkserver import METHOD, wait_until_loaded, warm_up, without_main
from ...launcher.guard import protect, release
from . import score, submissions
from .score import Score
from .submissions import Submission, Unreadable
from .walls import END_SECONDS, HOUSE, Walls, unprotected

MOST_SECONDS = 1800.0  # for one submission, whatever it does
KEPT = "submissions"  # the folder of scores, one JSON file each


@dataclass
class Graded:
    """A submission and its score."""

    submission: Submission
    score: Score


def grade_class(
    folders: Sequence[Path],
    report: Path,
    jobs: int = 1,
    seconds: float = 120.0,
    seed: str = "",
    out: TextIO = sys.stderr,
) -> list[Graded]:
    """Score all notebooks in the folders, ``jobs`` at a time, but for those whose score is in ``report``.

    A notebook's cells together may take ``seconds``, and each question as many, up to `check.ALL_SECONDS`.
    Another seed draws other inputs. `NoSubmissions` is raised if there is nothing to grade.
    """
    submitted = submissions.submissions(folders)
    if warning := unprotected():
        print(f"course grade: {warning}", file=out)
    (report / KEPT).mkdir(parents=True, exist_ok=True)
    score.answer_names()  # loads the judges, before workers do
    paths = {notebook: report / KEPT / f"{_key(notebook, seed, seconds)}.json" for notebook in submitted}
    scores = {path: kept for path in paths.values() if (kept := _kept(path))}
    left = {path: submission for submission, path in reversed(paths.items()) if path not in scores}
    count = len({*paths.values()})
    if scores:
        print(f"{len(scores)} of {count} submissions were graded before", file=out)
    workers: list[Worker] = []
    try:
        while left or workers:
            while left and len(workers) < jobs:
                workers.append(Worker(seed, seconds))
                workers[-1].take(*left.popitem())
            multiprocessing.connection.wait([way for worker in workers for way in worker.ways], 1.0)
            for worker in [worker for worker in workers if not worker.is_busy()]:
                kept = _kept(worker.path)
                # A failure is not kept: another time it may succeed
                scores[worker.path] = kept or Score(trouble=[f"{worker.failure()}: look at it yourself"])
                _show(len(scores), count, worker.submission.learner, out)
                if left and kept:
                    worker.take(*left.popitem())
                else:
                    worker.end()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.end()
        print(end="\n" * out.isatty(), file=out)
    return [Graded(submission, scores[path]) for submission, path in paths.items()]


def _key(submission: Submission, seed: str, seconds: float) -> str:
    """Return a hash of the notebook, its name, the seed, the limit and the judges, to name a score's file."""
    try:
        text = submissions.content(submission.path)
    except Unreadable as why:
        text = str(why).encode()
    about = text, submission.path.name, seed, seconds, _hash_of_the_judges()
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


class Worker:
    """A process that scores one submission after the other, all in the same sandbox."""

    def __init__(self, seed: str, seconds: float) -> None:
        warm_up()
        wait_until_loaded(threading.Event())
        context: Any = multiprocessing.get_context(METHOD)
        self._way, its = context.Pipe()
        self._process: Any = context.Process(target=_work, args=(its, seed, seconds))
        with without_main():
            self._process.start()
        its.close()
        protect([self._process.pid])
        self.ways = (self._way, self._process.sentinel)

    def take(self, path: Path, submission: Submission) -> None:
        """Give the worker its next submission; the score goes to the file at ``path``."""
        self.path, self.submission = path, submission
        self._until = time.monotonic() + MOST_SECONDS
        with contextlib.suppress(OSError, EOFError):  # the worker has ended: `is_busy` sees it
            if self._way.poll():
                self._way.recv()  # the "done" of the one before
            self._way.send((submission.path, path))

    def is_busy(self) -> bool:
        """Return whether it is still at work on its submission, and in time."""
        return self._process.exitcode is None and not self._way.poll() and time.monotonic() < self._until

    def failure(self) -> str:
        """Say why there is no score."""
        self._process.join(END_SECONDS if self._way.poll() else 0)  # it may be ending
        code = self._process.exitcode
        return "it was not done in time" if code is None else f"grading it failed (exit code {code})"

    def end(self) -> None:
        """End the worker and everything in its sandbox."""
        is_idle = self._process.exitcode is None and self._way.poll()
        self._way.close()
        self._process.join(END_SECONDS if is_idle else 0)  # an idle one tidies up
        if self._process.exitcode is None:
            with contextlib.suppress(psutil.Error):
                kill_families([psutil.Process(self._process.pid)])
            self._process.join(END_SECONDS)
        release([self._process.pid])


def _work(way: Any, seed: str, seconds: float) -> None:
    os.setsid()  # Ctrl-C is for the batch, which ends this
    torch.set_num_threads(1)
    with Walls() as walls, contextlib.suppress(EOFError):
        while True:
            path, kept = way.recv()
            write_whole(kept, score.score_file(path, seed, seconds, walls).to_json())
            way.send("done")


def _show(done: int, count: int, learner: str, out: TextIO) -> None:
    """Show the progress: a bar on one line of a terminal; elsewhere a line for each submission."""
    name = "".join(letter if letter.isprintable() else "?" for letter in learner[:40])
    if out.isatty():
        bar = ("█" * (24 * done // count)).ljust(24, "░")
        print(f"\r{bar} {done} of {count} {name:40}", end="", file=out, flush=True)
    else:
        print(f"{done} of {count}: {name}", file=out, flush=True)
