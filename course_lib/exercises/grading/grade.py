"""`course grade`: judge a class's submissions in parallel, in worker processes.

A result is kept as soon as it is known, under all that it depends on: the notebook, the seed, the limit, the
course's own judges and PyTorch. So an interrupted batch goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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

from ...launcher.forkserver import METHOD, wait_until_loaded, warm_up, without_main
from ...launcher.guard import end_families, protect, release
from ...run_folder import write_whole
from . import judge, submissions
from .judge import Result
from .submissions import Submission, Unreadable
from .walls import END_SECONDS, HOUSE, Walls, open_without

MOST_SECONDS = 1800.0  # for one submission, whatever it does
KEPT = "submissions"  # the folder of results, one JSON file each
BAR_WIDTH = 24


@dataclass
class Graded:
    """A submission and its result."""

    submission: Submission
    result: Result

    @property
    def points(self) -> float:
        return sum(each["points"] for each in self.result["questions"].values())

    @property
    def most(self) -> float:
        return sum(each["most"] for each in self.result["questions"].values())


def grade(
    folders: Sequence[Path],
    report: Path,
    jobs: int = 1,
    seconds: float = 120.0,
    seed: str = "",
    out: TextIO = sys.stderr,
) -> list[Graded]:
    """Grade all notebooks in the folders; those that are graded already are not graded again.

    Parameters
    ----------
    report
        The folder in which each result is kept.
    jobs
        How many submissions are graded at the same time.
    seconds
        The limit for a notebook's cells, and again for each question.
    seed
        Another seed draws other inputs.

    Raises
    ------
    NoSubmissions
        There is nothing to grade.
    """
    handed_in = submissions.submissions(folders)
    if warning := open_without():
        print(f"course grade: {warning}", file=out)
    (report / KEPT).mkdir(parents=True, exist_ok=True)
    judge.forms()
    kept = {each: report / KEPT / f"{_key(each, seed, seconds)}.json" for each in handed_in}
    left = list({path: each for each, path in reversed(kept.items()) if _kept(path) is None}.items())[::-1]
    bar = Bar(len(set(kept.values())), len(set(kept.values())) - len(left), out)
    judges: list[Judge] = []
    failed: dict[Path, Result] = {}  # not kept: another time they may succeed
    try:
        while left or judges:
            while left and len(judges) < jobs:
                judges.append(Judge(seed, seconds))
                judges[-1].take(*left.pop(0))
            multiprocessing.connection.wait([way for each in judges for way in each.ways], 1.0)
            for at_work in [each for each in judges if not each.is_busy()]:
                if _kept(at_work.path) is None:
                    words = f"{at_work.failure()}: look at it yourself"
                    failed[at_work.path] = {"exercise": None, "trouble": [words], "questions": {}}
                bar.step(at_work.submission.learner)
                if left and at_work.path not in failed:
                    at_work.take(*left.pop(0))
                else:
                    at_work.end()
                    judges.remove(at_work)
    finally:
        for each in judges:
            each.end()
        bar.close()
    return [Graded(each, _kept(path) or failed[path]) for each, path in kept.items()]


def _key(each: Submission, seed: str, seconds: float) -> str:
    """Return a hash of all that a result depends on, to name its file."""
    try:
        text = submissions.content(each.path)
    except Unreadable as why:
        text = str(why).encode()
    about = json.dumps([hashlib.sha256(text).hexdigest(), each.path.name, seed, seconds, _of_the_judges()])
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def _of_the_judges() -> str:
    """Return a hash that changes with the code of the exercises and with PyTorch's version."""
    if not _judges:
        found = hashlib.sha256(torch.__version__.encode())
        for path in sorted(HOUSE.joinpath("exercises").rglob("*.py")):
            found.update(path.read_bytes())
        _judges.append(found.hexdigest())
    return _judges[0]


_judges: list[str] = []


def _kept(path: Path) -> Result | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


class Judge:
    """A worker process that judges one submission after the other, all in the same sandbox."""

    def __init__(self, seed: str, seconds: float) -> None:
        warm_up()
        wait_until_loaded(threading.Event())
        context = multiprocessing.get_context(METHOD)
        self._way, its = context.Pipe()
        self._process: Any = context.Process(target=_judge, args=(its, seed, seconds))
        with without_main():
            self._process.start()
        its.close()
        protect([self._process.pid])
        self.ways = (self._way, self._process.sentinel)

    def take(self, path: Path, submission: Submission) -> None:
        """Give the worker its next submission; the result goes to the file at ``path``."""
        self.path, self.submission = path, submission
        self._until = time.monotonic() + MOST_SECONDS
        with contextlib.suppress(OSError, EOFError):  # the worker has ended: `is_busy` sees it
            if self._way.poll():
                self._way.recv()  # the "done" of the one before
            self._way.send((str(submission.path), str(path)))

    def is_busy(self) -> bool:
        """Return whether it is still at work on its submission, and in time."""
        return self._process.exitcode is None and not self._way.poll() and time.monotonic() < self._until

    def failure(self) -> str:
        """Say why there is no result."""
        if self._way.poll():  # it is ending
            self._process.join(END_SECONDS)
        code = self._process.exitcode
        return "it was not done in time" if code is None else f"grading it failed (exit code {code})"

    def end(self) -> None:
        """End the worker and everything in its sandbox."""
        is_idle = self._process.exitcode is None and self._way.poll()
        self._way.close()
        self._process.join(END_SECONDS if is_idle else 0)  # an idle one tidies up
        if self._process.exitcode is None:
            with contextlib.suppress(psutil.Error):
                end_families([psutil.Process(self._process.pid)])
            self._process.join(END_SECONDS)
        release([self._process.pid])


def _judge(way: Any, seed: str, seconds: float) -> None:
    os.setsid()  # Ctrl-C is for the batch, which ends this
    torch.set_num_threads(1)
    with Walls() as walls, contextlib.suppress(EOFError):
        while True:
            path, result = way.recv()
            found = judge.main(path, Path(path).name, seed, seconds, walls)
            write_whole(Path(result), json.dumps(found, indent=1))
            way.send("done")


class Bar:
    """A progress bar on one line of a terminal; elsewhere a line for each submission."""

    def __init__(self, count: int, done: int, out: TextIO) -> None:
        self._count, self._done, self._out = count, done, out
        self._lively = out.isatty()
        if done:
            print(f"{done} of {count} submissions were graded before", file=out)
        self._show("")

    def step(self, name: str) -> None:
        self._done += 1
        self._show("".join(c if c.isprintable() else "?" for c in name[:40]))

    def close(self) -> None:
        if self._lively:
            print(file=self._out)

    def _show(self, name: str) -> None:
        if self._lively:
            full = BAR_WIDTH * self._done // max(1, self._count)
            bar = "█" * full + "░" * (BAR_WIDTH - full)
            print(f"\r{bar} {self._done} of {self._count} {name:40}", end="", file=self._out, flush=True)
        elif name:
            print(f"{self._done} of {self._count}: {name}", file=self._out, flush=True)
