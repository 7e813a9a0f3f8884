"""Manage the folder of all runs: find the newest, delete the old ones."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from ..home import home
from ..run_folder import RUN

KEPT_RUNS = 50
LASTING = ("queued", "running")  # states of a run that is not over
LONGEST = 30 * 86_400.0  # seconds that a Slurm job, or a run of another machine, may take
# The types of the values in run.json; with more ranks than MOST_RANKS, the file is damaged
KINDS = {"state": str, "error": str, "started": int | float, "seconds": int | float}
KINDS |= {"job": int, "submitted": int | float, "queued_seconds": int | float, "nodes": str, "reason": str}
MOST_RANKS = 1 << 16
# What `facts_of` raises for a file that is not there, or damaged
UNREADABLE = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)


def folder_of_runs() -> Path:
    return home() / "runs"


def newest_first() -> list[Path]:
    """List the folders of runs, newest first, without those that have no run.json yet."""
    try:
        return sorted((path for path in folder_of_runs().iterdir() if (path / RUN).exists()), reverse=True)
    except OSError:
        return []


def facts_of(folder: Path) -> dict[str, Any]:
    """Read a run's run.json.

    Raises
    ------
    OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError
        The file is missing or damaged.
    """
    facts = json.loads((folder / RUN).read_text())
    facts |= {"name": str(facts["name"]), "world_size": int(facts["world_size"])}
    for name, kind in KINDS.items():
        if name in facts and not isinstance(facts[name], kind):
            raise TypeError(f"{name} is {facts[name]!r:.40}")
    if not 0 <= facts["world_size"] <= MOST_RANKS:
        raise ValueError(f"world_size is {facts['world_size']}")
    return facts


def is_watched(facts: dict[str, Any]) -> bool:
    """Return whether the kernel that made a run is alive on this machine."""
    return facts.get("host", socket.gethostname()) == socket.gethostname() and _lives(facts.get("kernel_pid"))


def kernel_of(folder: Path) -> int | None:
    """Return the pid of the kernel that made a run."""
    return _facts(folder).get("kernel_pid")


def _facts(folder: Path) -> dict[str, Any]:
    """Read a run's run.json, unchecked; empty if the file is broken."""
    try:
        facts = json.loads((folder / RUN).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _lives(pid: int | None) -> bool:
    try:
        return pid is not None and psutil.pid_exists(pid)
    except (TypeError, OverflowError):  # a broken file has something else than a pid
        return False


def _written(folder: Path) -> float:
    """Return when run.json was last written: a long run is not old just because many began after it."""
    try:
        return (folder / RUN).stat().st_mtime
    except OSError:  # another kernel has just deleted it
        return 0.0


def clear_old() -> None:
    """Delete old runs: keep the last `KEPT_RUNS` of each living kernel, and as many of all others together.

    So a kernel with many launches does not delete the runs of a notebook beside it. A running run is never
    deleted, nor a job that outlives its kernel, nor what another machine that shares this disk may still run.
    """
    kept: Counter[Any] = Counter()
    here = socket.gethostname()
    for path in sorted(newest_first(), key=_written, reverse=True):
        facts = _facts(path)
        lasts = facts.get("state") in LASTING
        young = time.time() - _written(path) < LONGEST
        elsewhere = facts.get("host", here) != here
        kernel = facts.get("kernel_pid") if is_watched(facts) else None
        kept[kernel] += 1
        at_work = lasts and (kernel is not None or (young and (elsewhere or "submitted" in facts)))
        if kept[kernel] > KEPT_RUNS and not at_work:
            shutil.rmtree(path, ignore_errors=True)
