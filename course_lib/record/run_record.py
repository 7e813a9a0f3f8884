"""``run.json``: facts about a run that its kernel writes, not its ranks."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from ..files import read_json, write_whole
from ..host.cluster import JobStatus
from ..host.hardware import oom_kills
from ..host.home import home
from .layout import JOB_ENDED, RUN, ranks_seen

LASTING = ("queued", "running")  # states of a run that is not over
MOST_RANKS = 1 << 16  # with more, run.json is damaged
KINDS: dict[str, Any] = {  # types of the values in run.json, where present
    **dict.fromkeys(("name", "state", "error", "nodes", "reason"), str),
    **dict.fromkeys(("world_size", "kernel_pid", "job"), int),
    **dict.fromkeys(("started", "seconds", "submitted", "queued_seconds"), int | float),
}


def folder_of_runs() -> Path:
    return home() / "runs"


def newest_first() -> list[Path]:
    """List the folders of runs, newest first, without those that have no run.json yet."""
    return sorted((path.parent for path in folder_of_runs().glob(f"*/{RUN}")), reverse=True)


class RunRecord:
    """What the run.json in a run's folder says.

    Its ``facts`` are the run's name and world_size, its state, when it began, which kernel watches it, how it
    ended; of a Slurm job also its number, when it was submitted, and what Slurm said last.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder, self.facts = folder, facts

    @classmethod
    def create(cls, name: str, world_size: int, **facts: Any) -> RunRecord:
        """Create the folder of a run that begins now, and that this process watches."""
        runs = folder_of_runs()
        own = {"kernel_pid": os.getpid(), "host": socket.gethostname(), "oom_kills": oom_kills()}
        own |= {"name": name, "world_size": world_size, "state": "running"}
        try:
            runs.mkdir(mode=0o700, exist_ok=True)
            safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:40]
            stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"[:-3]  # milliseconds
            folder = Path(tempfile.mkdtemp(prefix=f"{stamp}_{safe}_", dir=runs))  # mode 0700
            record = cls(folder, own | {"started": time.time()} | facts)
            record.save()
        except OSError as error:
            why = f"no run can be kept: {error.strerror}; set COURSE_HOME to a folder with space"
            raise type(error)(error.errno, why, str(runs)) from None
        return record

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read the record in a run's folder; raise ValueError if it is missing or damaged."""
        facts: dict[str, Any] = {"name": None, "world_size": None} | read_json(folder / RUN)
        wrong = [name for name, kind in KINDS.items() if name in facts and not isinstance(facts[name], kind)]
        if wrong or not 0 <= facts["world_size"] <= MOST_RANKS:
            name = (*wrong, "world_size")[0]
            seen = f"{name} is {facts[name]!r:.40}"
            raise ValueError(f"{folder} holds no whole run: its run.json cannot be read ({seen})")
        return cls(folder, facts)

    def save(self) -> None:
        write_whole(self.folder / RUN, json.dumps(self.facts))

    @property
    def world_size(self) -> int:
        known = self.facts["world_size"]
        if known == 0 or (self.facts.get("program") and self.state == "running"):  # it starts its own ranks
            return ranks_seen(self.folder)
        return known

    @property
    def state(self) -> str:
        return self.facts.get("state", "running")

    @property
    def is_over(self) -> bool:
        return self.state not in LASTING

    @property
    def is_job(self) -> bool:
        """Whether the run is meant for Slurm, already submitted or not."""
        return "submitted" in self.facts

    @property
    def is_watched(self) -> bool:
        """Whether the kernel that watches the run is alive on this machine."""
        return not self.is_elsewhere and psutil.pid_exists(self.facts.get("kernel_pid", -1))

    @property
    def is_elsewhere(self) -> bool:
        """Whether a kernel on another machine watches the run."""
        return self.facts.get("host", socket.gethostname()) != socket.gethostname()

    @property
    def queued_seconds(self) -> float:
        """Seconds in the queue (so far); for a job that has started, whole seconds as Slurm reports them."""
        known = self.facts.get("queued_seconds")
        if known is not None or not self.is_job:
            return known or 0.0
        return time.time() - self.facts["submitted"]

    @property
    def seconds(self) -> float:
        """Seconds from the call, or a job's start, to the end (so far)."""
        return self.facts.get("seconds", self._seconds_so_far())

    def _seconds_so_far(self) -> float:
        so_far = time.time() - self.facts.get("started", math.nan)
        if not self.is_job:
            return so_far
        if not self.facts.get("nodes"):
            return 0.0
        try:  # nobody may have watched its end
            ended = (self.folder / JOB_ENDED).stat().st_mtime - self.facts["started"]
        except OSError:
            ended = self.facts.get("job_seconds")
        return so_far if ended is None else max(0.0, min(so_far, ended))

    def script_exit_code(self) -> int | None:
        """Return the exit code that a job's script wrote at its end; None if it has written none."""
        try:
            return int((self.folder / JOB_ENDED).read_text())
        except (OSError, ValueError):
            return None

    def note(self, **facts: Any) -> None:
        """Add facts, and write the file if they are new."""
        if self.facts != (facts := self.facts | facts):
            self.facts = facts
            self.save()

    def note_job(self, status: JobStatus) -> None:
        """Add what Slurm says about the job of a run that is not over."""
        if self.is_over:
            return
        facts: dict[str, Any] = {"state": "queued" if status.waits else "running", "reason": status.reason}
        facts |= {"job_over": status.over, "job_seconds": status.seconds}
        if status.nodes:
            facts["nodes"] = status.nodes
        if status.queued_seconds is not None and self.facts.get("queued_seconds") is None:
            facts["queued_seconds"] = status.queued_seconds
            facts["started"] = self.facts["submitted"] + status.queued_seconds
        self.note(**facts)

    def take_over(self) -> None:
        """Make this process the one that watches the run."""
        self.facts |= read_json(self.folder / RUN)
        for name in ("error", "seconds"):
            self.facts.pop(name, None)
        self.facts |= {"state": "running", "kernel_pid": os.getpid(), "host": socket.gethostname()}
        self.save()

    def end(self, state: str, error: str = "") -> None:
        self.facts["world_size"] = self.world_size
        if self.is_job:
            self.facts["queued_seconds"] = self.queued_seconds
        self.facts |= {"state": state, "seconds": self._seconds_so_far(), "error": error}
        try:
            self.save()
        except OSError as reason:  # a full disk, a folder that was removed: it has ended all the same
            print(f"course_lib: how this run ended cannot be kept: {reason}", file=sys.stderr)
