"""A run that is a job of Slurm: how it stands in the queue, and how it ended while nobody watched."""

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
    """What `Run` knows as a job; ``_facts`` is what stands in its run.json."""

    folder: Path
    _facts: dict[str, Any]
    watched: bool  # a launcher in this process writes down how it stands
    _read_again: Callable[[], None]

    @property
    def job(self) -> int | None:
        """Its number in Slurm's queue; None for a run that is no job."""
        return self._facts.get("job")

    @property
    def nodes(self) -> str:
        """The nodes that Slurm gave to it, as ``node[1-2]``; empty before, and for a run that is no job."""
        return self._facts.get("nodes", "")

    @property
    def reason(self) -> str:
        """Why it waits in the queue, in Slurm's words: ``"Resources"``, ``"Priority"``…"""
        return self._facts.get("reason", "") if self._facts.get("state") == "queued" else ""

    @property
    def queued_seconds(self) -> float:
        """How long it waited in the queue (so far): of a job that began, in whole seconds, as Slurm says."""
        known = self._facts.get("queued_seconds")
        if known is not None or not self.is_job:
            return known or 0.0
        return time.time() - self._facts["submitted"]

    @property
    def is_job(self) -> bool:
        """Whether it was meant for Slurm, submitted by now or not."""
        return "submitted" in self._facts

    def node_of(self, rank: int | str) -> str:
        """The node of a rank, by Slurm's name for it; empty where it has not said so, and for no job."""
        told = Trace(self.folder, rank).facts().get("environment") if self.is_job else None
        return str(told.get("SLURMD_NODENAME", "")) if isinstance(told, dict) else ""

    def who(self, rank: int | str) -> str:
        """``"rank 2"``, ``"rank 2 on node2"``, ``"the program"``, ``"the job"``."""
        if rank == PROGRAM:
            return "the job" if self.is_job else "the program"
        node = self.node_of(rank)
        return f"rank {rank} on {node}" if node else f"rank {rank}"

    def clock(self, rank: int) -> float:
        """``time.time()`` of the machine that a rank is on: of another's node when it last wrote a figure."""
        if not self.is_job:
            return time.time()
        trace = Trace(self.folder, rank)
        latest, launched = trace.latest_second(), trace.facts().get("launched")
        known = latest is not None and isinstance(launched, int | float)
        return launched + latest if known else time.time()

    def lives(self, rank: int) -> bool:
        """Whether a rank that has said which process it is is at work still; of a job, whether the job is."""
        if self.is_job:
            return self._facts.get("job_state") not in cluster.ENDINGS
        try:
            return psutil.Process(self.facts(rank)["pid"]).status() != psutil.STATUS_ZOMBIE
        except (KeyError, psutil.Error):
            return False

    def duration(self) -> str:
        """How long it took, or takes, in words: ``"5.1 s"``, ``"5.1 s (before that 12 s in the queue)"``."""
        if not self.is_job:
            return f"{self.seconds:.1f} s"
        if not self.nodes:
            return f"{self.queued_seconds:.0f} s in the queue"
        return f"{self.seconds:.1f} s (before that {self.queued_seconds:.0f} s in the queue)"

    def waits(self) -> str:
        """Where it stands in the queue, in words; empty where it does not wait."""
        if self.state != "queued":
            return ""
        job = "submitting" if self.job is None else f"job {self.job} waits in the queue"
        return f"{job}, {self.queued_seconds:.0f} s" + (f" ({self.reason})" if self.reason else "")

    @property
    def may_restart(self) -> bool:
        """Whether torchrun was told to start ranks anew that have failed."""
        return self._facts.get("max_restarts", 0) > 0

    # --- written by the launcher, or by refresh() when no launcher is left -------------------------------

    def note_job(self, standing: cluster.Standing | None = None, **facts: Any) -> None:
        """Keep how it stands; what has not changed is not written again."""
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
        """From now on this process watches it, and writes down how it stands."""
        self.watched = True
        self._read_again()
        for name in ("error", "seconds"):
            self._facts.pop(name, None)
        self._facts |= {"state": "running", "kernel_pid": os.getpid(), "host": socket.gethostname()}
        self._save()

    def _ask(self, job: int) -> None:
        """Ask Slurm how it stands, and keep the answer: no launcher is left that does."""
        standing = cluster.ask(job)
        with contextlib.suppress(OSError):  # it is somebody else's folder, or the disk is full
            self.note_job(standing)
        if standing.over:
            code = exit_status(self.folder)
            well = standing.state == "COMPLETED" or (standing.state == "UNKNOWN" and code == 0)
            error = "" if well else self._how_it_ended(standing, code)
            self.end("done" if well else "failed", error)

    def _of_a_job(self, so_far: float) -> float:
        """How long it was at work, by seconds since its start: nobody may have watched its end."""
        if not self._facts.get("nodes"):
            return 0.0
        try:
            ended = (self.folder / JOB_ENDED).stat().st_mtime - self._facts["started"]
        except OSError:
            ended = self._facts.get("job_seconds")
        return so_far if ended is None else max(0.0, min(so_far, ended))

    def _how_it_ended(self, standing: cluster.Standing, code: int | None) -> str:
        """In short; `rejoin` gives the report with the lines of the script."""
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
    """What the job's script wrote down at its end; None where it has not come there."""
    try:
        return int((folder / JOB_ENDED).read_text())
    except (OSError, ValueError):
        return None
