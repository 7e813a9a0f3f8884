"""The folder of all runs: which is the newest, which are old enough to go."""

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
LONGEST = 30 * 86_400.0  # seconds that a job of Slurm, or a run of another machine, may be at work
# What stands in run.json; more ranks than these, and it is damaged.
KINDS = {"state": str, "error": str, "started": int | float, "seconds": int | float}
KINDS |= {"job": int, "submitted": int | float, "queued_seconds": int | float, "nodes": str, "reason": str}
MOST_RANKS = 1 << 16
# What `facts_of` raises for a file that is not there, or damaged
UNREADABLE = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)


def folder_of_runs() -> Path:
    return home() / "runs"


def newest_first() -> list[Path]:
    """The folders of runs; one that is half made is none."""
    try:
        return sorted((path for path in folder_of_runs().iterdir() if (path / RUN).exists()), reverse=True)
    except OSError:
        return []


def facts_of(folder: Path) -> dict[str, Any]:
    """What stands in a run's run.json.

    Raises
    ------
    OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError
        It is not there, or damaged.
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
    """Whether the kernel that made a run is at work, on this machine."""
    return facts.get("host", socket.gethostname()) == socket.gethostname() and _lives(facts.get("kernel_pid"))


def kernel_of(folder: Path) -> int | None:
    """The pid of the kernel that made it."""
    return _facts(folder).get("kernel_pid")


def _facts(folder: Path) -> dict[str, Any]:
    """What stands in its file, unchecked; nothing where that is broken."""
    try:
        facts = json.loads((folder / RUN).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


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

    So a kernel that launches much takes no run from a notebook beside it. One at work is never removed, nor a
    job that outlives its kernel, nor what another machine may be at work on, which shares this disk.
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
