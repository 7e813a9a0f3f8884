"""`course grade`: judges a class's submissions side by side, each in a process of its own.

A result is kept as soon as it is there, under what it depends on: the notebook's bytes, the seed, the limit
and the course's own judges. So a batch that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from ...launcher.forkserver import METHOD, wait_until_loaded, warm_up, without_main
from ...launcher.guard import end_families, protect, release
from ...run_folder import write_whole
from . import judge, submissions
from .judge import Result
from .submissions import Submission, Unreadable
from .walls import HOUSE, open_without

MOST_SECONDS = 1800.0  # for one submission, whatever it does
KEPT = "submissions"  # the folder of results, a JSON file each
BAR_WIDTH = 24


@dataclass
class Graded:
    """A submission and what came of it."""

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
    """Grade all notebooks in the folders; what is graded already is not graded again.

    Parameters
    ----------
    report
        A folder, where each result is kept.
    jobs
        How many submissions are graded at the same time.
    seconds
        For a notebook's cells, and again for each question.
    seed
        Another one draws other inputs.

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
    running: dict[Any, tuple[Submission, Path, float]] = {}
    failed: dict[Path, Result] = {}  # not kept: another time it may do
    try:
        while left or running:
            while left and len(running) < jobs:
                path, each = left.pop(0)
                running[_start(each, path, seed, seconds)] = each, path, time.monotonic() + MOST_SECONDS
            multiprocessing.connection.wait([process.sentinel for process in running], 1.0)
            for process, (each, path, until) in list(running.items()):
                if process.exitcode is None and time.monotonic() < until:
                    continue
                code = process.exitcode
                _end(process)
                del running[process]
                if _kept(path) is None:
                    why = (
                        "it was not done in time" if code is None else f"grading it failed (exit code {code})"
                    )
                    words = f"{why}: look at it yourself"
                    failed[path] = {"exercise": None, "trouble": [words], "questions": {}}
                bar.step(each.learner)
    finally:
        for process in running:
            _end(process)
        bar.close()
    return [Graded(each, _kept(path) or failed[path]) for each, path in kept.items()]


def _key(each: Submission, seed: str, seconds: float) -> str:
    """What a result depends on, in a name for a file."""
    try:
        text = submissions.content(each.path)
    except Unreadable as why:
        text = str(why).encode()
    about = json.dumps([hashlib.sha256(text).hexdigest(), each.path.name, seed, seconds, _of_the_judges()])
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def _of_the_judges() -> str:
    """Another one when a judge, or PyTorch, is another one."""
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


def _start(each: Submission, path: Path, seed: str, seconds: float) -> Any:
    """A fresh process that judges one submission: a judge has torch's dice and defaults for itself."""
    warm_up()
    wait_until_loaded(_never)
    context = multiprocessing.get_context(METHOD)
    process = context.Process(target=_judge, args=(str(each.path), str(path), seed, seconds))
    with without_main():
        process.start()
    protect([process.pid])
    return process


class _Never:
    @staticmethod
    def is_set() -> bool:
        return False


_never: Any = _Never()


def _judge(path: str, result: str, seed: str, seconds: float) -> None:
    os.setsid()  # Ctrl-C is for the batch, which ends this
    torch.set_num_threads(1)
    found = judge.main(path, Path(path).name, seed, seconds)
    write_whole(Path(result), json.dumps(found, indent=1))


def _end(process: Any) -> None:
    """Of a judge and all behind its walls."""
    import psutil

    if process.exitcode is None:
        with contextlib.suppress(psutil.Error):
            end_families([psutil.Process(process.pid)])
    process.join(10)
    release([process.pid])


class Bar:
    """Progress in one line of a terminal; a line for each submission elsewhere."""

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
