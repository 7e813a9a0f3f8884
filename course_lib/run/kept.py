"""The folder of all runs: which is the newest, which are old enough to go."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import psutil

from ..home import home
from ..run_folder import RUN

KEPT_RUNS = 50


def folder_of_runs() -> Path:
    return home() / "runs"


def newest_first() -> list[Path]:
    """The folders of runs; one that is half made is none."""
    try:
        return sorted((path for path in folder_of_runs().iterdir() if (path / RUN).exists()), reverse=True)
    except OSError:
        return []


def kernel_of(folder: Path) -> int | None:
    """The pid of the kernel that made it."""
    return _kernel_and_state(folder)[0]


def _kernel_and_state(folder: Path) -> tuple[int | None, str | None]:
    """The pid of the kernel that made a run, and the run's state; None and None where its file is broken."""
    try:
        facts = json.loads((folder / RUN).read_text())
        return facts["kernel_pid"], facts["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _lives(pid: int | None) -> bool:
    try:
        return pid is not None and psutil.pid_exists(pid)
    except (TypeError, OverflowError):  # no pid at all stands in a broken file
        return False


def _written(folder: Path) -> float:
    """When its run began or, once it has, ended: a long one is not old because many began after it."""
    try:
        return (folder / RUN).stat().st_mtime
    except OSError:  # another kernel clears, too
        return 0.0


def clear_old() -> None:
    """Remove old runs: of each living kernel all but the last `KEPT_RUNS`, and so of all others together.

    So a kernel that launches much takes no run from a notebook beside it. One at work is never removed.
    """
    kept: Counter[int | None] = Counter()
    for path in sorted(newest_first(), key=_written, reverse=True):
        kernel, state = _kernel_and_state(path)
        if not _lives(kernel):
            kernel = None
        kept[kernel] += 1
        at_work = kernel is not None and state == "running"
        if kept[kernel] > KEPT_RUNS and not at_work:
            shutil.rmtree(path, ignore_errors=True)
