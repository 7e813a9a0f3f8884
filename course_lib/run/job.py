"""The part of a run that is about Slurm: its state in the queue, and how it ended while nobody watched."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from .. import cluster
from ..run_folder import JOB_ENDED, PROGRAM, RankFiles
from .kept import LASTING
from .trace import Trace


class JobFacts:
    """What `Run` knows about its Slurm job; ``_facts`` is the content of its run.json."""

    folder: Path
    _facts: dict[str, Any]
    watched: bool  # a launcher in this process records its state
    _read_again: Callable[[], None]

    @property
    def job(self) -> int | None:
        """The number of the job in Slurm's queue; None if there is no job."""
        return self._facts.get("job")

    @property
    def nodes(self) -> str:
        """The nodes that Slurm allocated, such as ``node[1-2]``; empty before that and without a job."""
        return self._facts.get("nodes", "")

    @property
    def reason(self) -> str:
        """Why the job waits in the queue, in Slurm's words: ``"Resources"``, ``"Priority"``…"""
        return self._facts.get("reason", "") if self._facts.get("state") == "queued" else ""

    @property
    def queued_seconds(self) -> float:
        """Seconds in the queue (so far); for a job that has started, whole seconds as Slurm reports them."""
        known = self._facts.get("queued_seconds")
        if known is not None or not self.is_job:
            return known or 0.0
        return time.time() - self._facts["submitted"]

    @property
    def is_job(self) -> bool:
        """Whether the run is meant for Slurm, already submitted or not."""
        return "submitted" in self._facts

    def node_of(self, rank: int | str) -> str:
        """Return Slurm's name for the node of a rank; empty without a job, or if the rank has not told it."""
        told = Trace(self.folder, rank).facts().get("environment") if self.is_job else None
        return str(told.get("SLURMD_NODENAME", "")) if isinstance(told, dict) else ""

    def who(self, rank: int | str) -> str:
        """Name a rank: ``"rank 2"``, ``"rank 2 on node2"``, ``"the program"``, ``"the job"``."""
        if rank == PROGRAM:
            return "the job" if self.is_job else "the program"
        node = self.node_of(rank)
        return f"rank {rank} on {node}" if node else f"rank {rank}"

    def clock(self, rank: int) -> float:
        """Return ``time.time()`` on a rank's machine; in a job, the time of the rank's last tick."""
        if not self.is_job:
            return time.time()
        trace = Trace(self.folder, rank)
        latest, launched = trace.latest_second(), trace.facts().get("launched")
        known = latest is not None and isinstance(launched, int | float)
        return launched + latest if known else time.time()

    def lives(self, rank: int) -> bool:
        """Return whether the process that a rank has reported still runs; for a job, whether the job does."""
        if self.is_job:
            return self._facts.get("job_state") not in cluster.ENDINGS
        try:
            return psutil.Process(self.facts(rank)["pid"]).status() != psutil.STATUS_ZOMBIE
        except (KeyError, psutil.Error):
            return False

    def duration(self) -> str:
        """Say how long the run took (so far): ``"5.1 s"``, ``"5.1 s (before that 12 s in the queue)"``."""
        if not self.is_job:
            return f"{self.seconds:.1f} s"
        if not self.nodes:
            return f"{self.queued_seconds:.0f} s in the queue"
        return f"{self.seconds:.1f} s (before that {self.queued_seconds:.0f} s in the queue)"

    def waits(self) -> str:
        """Say for how long, and why, the job has waited in the queue; empty if it does not wait."""
        if self.state != "queued":
            return ""
        job = "submitting" if self.job is None else f"job {self.job} waits in the queue"
        return f"{job}, {self.queued_seconds:.0f} s" + (f" ({self.reason})" if self.reason else "")

    @property
    def may_restart(self) -> bool:
        """Whether torchrun was told to restart ranks that fail."""
        return self._facts.get("max_restarts", 0) > 0

    # --- written by the launcher, or by refresh() when no launcher is left -------------------------------

    def note_job(self, standing: cluster.Standing | None = None, **facts: Any) -> None:
        """Record the state of the job, and write run.json only if something has changed."""
        known = dict(self._facts)
        if standing is not None and self._facts.get("state") in LASTING:
            facts |= {"state": "queued" if standing.waits else "running", "reason": standing.reason}
            facts |= {"job_state": standing.state, "job_seconds": standing.seconds}
            if standing.nodes:
                facts["nodes"] = standing.nodes
            began = standing.queued_seconds is not None
            if began and self._facts.get("queued_seconds") is None:
                facts["queued_seconds"] = standing.queued_seconds
                facts["started"] = self._facts["submitted"] + standing.queued_seconds
        self._facts |= facts
        if self._facts != known:
            self._save()

    def take_over(self) -> None:
        """Make this process the one that watches the run and records its state."""
        self.watched = True
        self._read_again()
        for name in ("error", "seconds"):
            self._facts.pop(name, None)
        self._facts |= {"state": "running", "kernel_pid": os.getpid(), "host": socket.gethostname()}
        self._save()

    def _ask(self, job: int) -> None:
        """Ask Slurm for the state of the job, and record it: no launcher is left to do that."""
        standing = cluster.ask(job)
        with contextlib.suppress(OSError):  # the folder is somebody else's, or the disk is full
            self.note_job(standing)
        if standing.over:
            code = exit_status(self.folder)
            well = standing.state == "COMPLETED" or (standing.state == "UNKNOWN" and code == 0)
            error = "" if well else self._how_it_ended(standing, code)
            self.end("done" if well else "failed", error)

    def _of_a_job(self, so_far: float) -> float:
        """Return how long the job ran, at most ``so_far`` seconds: perhaps nobody watched its end."""
        if not self._facts.get("nodes"):
            return 0.0
        try:
            ended = (self.folder / JOB_ENDED).stat().st_mtime - self._facts["started"]
        except OSError:
            ended = self._facts.get("job_seconds")
        return so_far if ended is None else max(0.0, min(so_far, ended))

    def _how_it_ended(self, standing: cluster.Standing, code: int | None) -> str:
        """Say briefly how the job failed; `rejoin` gives the report with the lines of the script."""
        for rank in range(self.world_size):
            try:
                record = json.loads(RankFiles(self.folder, rank).failure.read_text())
                if record["type"]:
                    first = (record["message"].splitlines() or [""])[0]
                    return f"{self.who(rank)} raised {record['type']}: {first}"
            except (OSError, ValueError, KeyError, TypeError):
                continue
        if standing.ended_by_slurm and not (standing.state == "UNKNOWN" and code is not None):
            return f"the job {standing.ended_by_slurm}"
        return f"the job ended with exit code {1 if code is None else code}"


def exit_status(folder: Path) -> int | None:
    """Return the exit status that the job's script wrote at its end; None if it did not get there."""
    try:
        return int((folder / JOB_ENDED).read_text())
    except (OSError, ValueError):
        return None
