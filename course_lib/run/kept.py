"""The folder of all runs: which is the newest, which are old enough to go."""

from __future__ import annotations

import json
import shutil
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
    try:
        return json.loads((folder / RUN).read_text())["kernel_pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _written(folder: Path) -> float:
    """When its run began or, once it has, ended: a long one is not old because many began after it."""
    try:
        return (folder / RUN).stat().st_mtime
    except OSError:  # another kernel clears, too
        return 0.0


def clear_old() -> None:
    """Remove all but those that began or ended last; never a run that is still at work."""
    for path in sorted(newest_first(), key=_written, reverse=True)[KEPT_RUNS:]:
        try:
            facts = json.loads((path / RUN).read_text())
            if facts["state"] == "running" and psutil.pid_exists(facts["kernel_pid"]):
                continue
        except (OSError, ValueError, KeyError, TypeError):
            pass
        shutil.rmtree(path, ignore_errors=True)
