"""Submit, query and cancel Slurm jobs by Slurm's own commands, and count the tasks that Slurm has started.

``sbatch --parsable`` and ``squeue --format`` print plain text, the same in all versions of Slurm, and need no
library. Minutes after its end, Slurm forgets a job; then the exit status that its script left is all we know.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

ANSWER_SECONDS = 100.0  # the commands themselves retry for a minute if the controller is busy
FIELDS = "%T|%N|%V|%S|%e|%r"  # squeue: state, nodes, submit, start and end time; last the reason, free text
WAITING = {"PENDING", "CONFIGURING"}  # no job of ours is requeued
# The states of a job that is over, each with what ended the job, unless its own processes did
ENDINGS = {
    "COMPLETED": "",
    "FAILED": "",
    "CANCELLED": "was cancelled (scancel, by a person or by the cluster)",
    "TIMEOUT": "was ended by Slurm at its time limit (TIMEOUT): ask for more, time=…, or train for less",
    "DEADLINE": "was ended by Slurm at its deadline (DEADLINE)",
    "NODE_FAIL": "was ended by Slurm because one of its nodes failed (NODE_FAIL)",
    "BOOT_FAIL": "was ended by Slurm because one of its nodes could not be started (BOOT_FAIL)",
    "PREEMPTED": "was ended by Slurm to make room for another job (PREEMPTED)",
    "OUT_OF_MEMORY": "needed more memory than it had asked for (OUT_OF_MEMORY): ask for more, mem=…",
    "REVOKED": "was taken over by another cluster (REVOKED)",
    "UNKNOWN": "is over: Slurm has forgotten it, and it has left no exit status: it was ended from outside, "
    "by scancel, a limit or the loss of a node",
}
# Variables of a job that this process may itself run in: a job that it submits must not inherit them.
OF_A_JOB = re.compile(r"(SLURM|SRUN|PMI|PMIX)\w*")
KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}


class SlurmError(RuntimeError):
    """Slurm is not installed here, refused a request, or gave no usable answer."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this instead of the launcher's frames
        return [f"\x1b[31mSlurmError\x1b[0m: {self}"]


class JobStatus(NamedTuple):
    """The state of a job, as Slurm reports it; times are in whole seconds, by the controller's clock."""

    state: str  # Slurm's word: PENDING, RUNNING, COMPLETED…; UNKNOWN if it knows no such job
    reason: str = ""  # why the job waits (Resources, Priority…), or why it ended as it did
    nodes: str = ""  # allocated to the job, such as node[1-2]; empty before that
    queued_seconds: float | None = None  # from submission to start; None if it has not started
    seconds: float | None = None  # from start to end; None if it has not ended

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def over(self) -> bool:
        return self.state in ENDINGS


def check_there() -> None:
    """Raise `SlurmError` if this machine has no Slurm."""
    if shutil.which("sbatch") is None:
        raise SlurmError(
            "there is no sbatch here: slurm() submits to a cluster's Slurm, on a machine from which jobs are "
            "submitted (a login node); torchrun(…, nproc_per_node=…) runs the same script on this machine"
        )


def environment() -> dict[str, str]:
    """Return the variables that a submitted job inherits: all but those of a job that runs this process."""
    return {name: value for name, value in os.environ.items() if name in KEPT or not OF_A_JOB.fullmatch(name)}


def submit(script: Path, options: list[str], given: dict[str, str]) -> int:
    """Submit a job and return its number; raise `SlurmError` with sbatch's reason if it refuses."""
    done = _call(["sbatch", "--parsable", *options, str(script)], environment() | given)
    if done.returncode != 0:
        raise SlurmError(f"sbatch refused the job: {_words(done)} (it is in {script})")
    number = re.search(r"^(\d+)(;.*)?$", done.stdout.strip(), re.MULTILINE)  # job;cluster
    if not number:
        raise SlurmError(f"sbatch gave no number of a job, but {done.stdout.strip()!r:.100}: {_words(done)}")
    return int(number[1])


def ask(job: int) -> JobStatus:
    """Ask Slurm for the state of a job; raise `SlurmError` if it gives no answer that can be read."""
    done = _call(["squeue", f"--jobs={job}", "--noheader", "--states=all", f"--format={FIELDS}"])
    if done.returncode != 0 and "nvalid job id" not in done.stderr:
        raise SlurmError(f"squeue: {_words(done)}")
    text = done.stdout.strip()
    if done.returncode != 0 or not text:
        return JobStatus("UNKNOWN")
    fields = text.splitlines()[0].split("|", 5)
    if len(fields) != 6 or not re.fullmatch(r"[A-Z_]+", fields[0]):
        raise SlurmError(f"Slurm's answer cannot be read: {text!r:.100}")
    state, nodes, *times, reason = fields
    submitted, start, end = map(_seconds_of, times)
    started = state not in WAITING  # until then, the start time is an estimate
    return JobStatus(
        state,
        "" if reason in ("None", "(null)") else reason,
        "" if nodes in ("None assigned", "(null)") else nodes,
        max(0.0, start - submitted) if started and start and submitted else None,
        max(0.0, end - start) if state in ENDINGS and start and end else None,
    )


def _seconds_of(text: str) -> float | None:
    """Convert a time as Slurm's commands print it, such as 2026-11-22T16:02:11, local time, to Unix time."""
    with contextlib.suppress(ValueError):  # N/A, Unknown
        return datetime.fromisoformat(text).timestamp()
    return None


def cancel(job: int) -> None:
    """Remove a job from the queue or end it: SIGTERM, then SIGKILL; raise `SlurmError` if scancel fails."""
    done = _call(["scancel", str(job)])
    if done.returncode != 0:
        raise SlurmError(f"scancel: {_words(done)}")


def tasks_here() -> int:
    """Return how many tasks of this process's job step are on this node; 0 if srun has not started it.

    Slurm counts them by node: ``SLURM_STEP_TASKS_PER_NODE=4(x2),3`` is two nodes with 4 tasks, one with 3.
    """
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * int(nodes or 1)
    node = int(os.environ.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else 0


def _call(command: list[str], given: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    if given is None:  # the learner's own settings would change what is printed
        plain = {name: value for name, value in environment().items() if not name.startswith("SQUEUE_")}
        given = plain | {"SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            command,
            env=given,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            start_new_session=True,  # Ctrl-C is meant for the run, not for this command
        )
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} here") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} gave no answer for {ANSWER_SECONDS:g} s") from None


def _words(done: subprocess.CompletedProcess[str]) -> str:
    """Return a command's last error messages, in one line."""
    lines = [line.partition(": error: ")[2] or line for line in done.stderr.strip().splitlines()]
    return "; ".join(lines[-3:]) or f"exit code {done.returncode}, without a message"
