"""Retention of runs: delete the folders of old ones."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ..record.layout import RUN
from ..record.run_record import RunRecord, newest_first

KEPT_RUNS = 50
LONGEST = 30 * 86_400.0  # seconds that a Slurm job, or a run of another machine, may take
EVERY = 10  # runs of this process from one clearing to the next
_runs = itertools.count()


def clear_now_and_then() -> None:
    """After the first run of this process and every tenth one, clear old runs in a thread: no run waits."""
    if next(_runs) % EVERY == 0:
        with contextlib.suppress(RuntimeError):  # the system has no room for a thread
            threading.Thread(target=clear_old_runs, name="course-retention").start()


def clear_old_runs() -> None:
    """Delete old runs: keep the last `KEPT_RUNS` of each living kernel, and as many of all others together.

    So a kernel with many launches does not delete another notebook's runs. A run that is not over is kept
    while its kernel lives; a Slurm job, or a run of another machine that shares this disk, for `LONGEST`.
    """
    kept: Counter[Any] = Counter()
    for folder in sorted(newest_first(), key=_written, reverse=True):
        try:
            record = RunRecord.read(folder)
        except ValueError:
            record = RunRecord(folder, {"state": "damaged"})
        kernel = record.facts["kernel_pid"] if record.is_watched else None
        kept[kernel] += 1
        young = time.time() - _written(folder) < LONGEST
        may_run = kernel is not None or (young and (record.is_elsewhere or record.is_job))
        if kept[kernel] > KEPT_RUNS and (record.is_over or not may_run):
            shutil.rmtree(folder, ignore_errors=True)


def _written(folder: Path) -> float:
    """Return when run.json was last written: a long run is not old just because many began after it."""
    try:
        return (folder / RUN).stat().st_mtime
    except OSError:  # another kernel has just deleted it
        return 0.0
