"""A run that is a job of Slurm, read from its folder: where it stands, how it ended. Slurm is a stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from course_lib import Run, cluster
from course_lib.cluster import JobStatus, SlurmError
from course_lib.run_folder import JOB_ENDED, PROGRAM, TICK, RankFiles
from course_lib.run_record import RunRecord

QUEUED = JobStatus("PENDING", "Resources")
AT_WORK = JobStatus("RUNNING", "", "node[1-2]", 40.0)
DONE = JobStatus("COMPLETED", "", "node[1-2]", 40.0, 7.0)
ASKED = r"; known when Slurm was last asked: run\.refresh\(\) asks again"


@pytest.fixture
def nobody() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def slurm_says(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What it answers from now on: the last of a list."""
    says: list[Any] = [SlurmError("no answer")]

    def ask(job: int) -> JobStatus:
        assert job == 12
        if isinstance(says[-1], Exception):
            raise says[-1]
        return says[-1]

    monkeypatch.setattr(cluster, "ask", ask)
    return says


def submitted(nobody: int, **facts: Any) -> Run:
    """A job of a kernel that is gone, submitted 100 s ago."""
    then = time.time() - 100
    known = {"job": 12, "submitted": then, "started": then, "kernel_pid": nobody, "max_restarts": 0}
    run = Run.create("train.py", 2, **{"state": "queued", **known, **facts})
    return Run.open(run.folder)


def test_from_the_queue_to_its_end(nobody: int, slurm_says: list[Any]) -> None:
    run = submitted(nobody)
    with pytest.raises(SlurmError, match="no answer"):
        run.refresh()
    assert run.state == "queued", "it is what it was"
    assert re.fullmatch(r"job 12 waits in the queue, 1\d\d s", run.waits())
    slurm_says.append(QUEUED)
    assert run.reason == "", "nobody has asked"
    run.refresh()
    assert (run.state, run.reason, run.seconds, run.nodes) == ("queued", "Resources", 0.0, "")
    assert re.fullmatch(
        rf"train\.py: 2 ranks, job 12 waits in the queue, 1\d\d s \(Resources\){ASKED}", run.headline()
    )
    assert run.results == [None, None]

    slurm_says.append(AT_WORK)
    run.refresh()
    assert (run.state, run.queued_seconds, run.nodes, run.reason) == ("running", 40.0, "node[1-2]", "")
    assert 60 <= run.seconds < 100
    assert run.duration().endswith(" s (before that 40 s in the queue)")
    assert run.waits() == ""

    slurm_says.append(DONE)
    assert run.refresh() is run
    assert (run.state, run.error) == ("done", "")
    assert run.seconds == 7.0, "as Slurm says: nobody saw its end"
    slurm_says.append(SlurmError("must not be asked"))
    again = Run.open(run.folder).refresh()
    assert again.headline() == "train.py: 2 ranks, done, 7.0 s (before that 40 s in the queue)"
    assert json.loads((run.folder / "run.json").read_text())["state"] == "done"


def test_while_its_kernel_lives_that_one_asks(slurm_says: list[Any]) -> None:
    run = submitted(os.getpid())
    slurm_says.append(DONE)
    assert run.refresh().state == "queued"
    there = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(there | {"state": "done", "seconds": 5.0}))
    assert run.state == "queued", "nobody has looked"
    run.refresh()
    assert (run.state, run.seconds) == ("done", 5.0), "what it wrote is read"


def test_what_is_known_is_told_without_asking(nobody: int, slurm_says: list[Any]) -> None:
    """Slurm may take 100 s to answer: no attribute waits for it, and none writes."""
    run = submitted(nobody)
    before = (run.folder / "run.json").read_bytes()
    slurm_says.append(AssertionError("it was asked"))
    assert (run.state, run.error, run.nodes) == ("queued", "", "")
    assert run.queued_seconds > 99
    assert run.seconds == 0.0
    assert re.fullmatch(rf"<Run .* waits in the queue, 1\d\d s{ASKED}>", repr(run))
    assert "waits in the queue" in run._repr_html_()
    assert (run.folder / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("status", "exit_code", "state", "error"),
    [
        (JobStatus("FAILED"), "3\n", "failed", "the job ended with exit code 3"),
        (JobStatus("FAILED"), None, "failed", "the job ended with exit code 1"),
        (
            JobStatus("CANCELLED"),
            None,
            "failed",
            "the job was cancelled (scancel, by a person or by the cluster)",
        ),
        (JobStatus("UNKNOWN"), "0\n", "done", ""),
        (JobStatus("UNKNOWN"), "3\n", "failed", "the job ended with exit code 3"),
        (JobStatus("UNKNOWN"), None, "failed", "the job is over: Slurm has forgotten it"),
        (JobStatus("UNKNOWN"), "", "failed", "the job is over: Slurm has forgotten it"),
        (JobStatus("TIMEOUT"), "143", "failed", "the job was ended by Slurm at its time limit (TIMEOUT)"),
    ],
)
def test_how_it_ended(
    status: JobStatus, exit_code: str | None, state: str, error: str, nobody: int, slurm_says: list[Any]
) -> None:
    run = submitted(nobody)
    if exit_code is not None:
        (run.folder / JOB_ENDED).write_text(exit_code)
    slurm_says.append(status)
    assert run.refresh().state == state
    assert run.error.startswith(error)
    assert bool(run.error) == bool(error)


def test_the_rank_that_failed_is_named(nobody: int, slurm_says: list[Any]) -> None:
    run = submitted(nobody, state="running")
    failure = {"type": "ValueError", "message": "boom\nmore", "frames": [], "time": 0, "causes": []}
    RankFiles(run.folder, 1).failure.write_text(json.dumps(failure))
    RankFiles(run.folder, 1).facts.write_text(json.dumps({"environment": {"SLURMD_NODENAME": "node2"}}))
    slurm_says.append(JobStatus("FAILED", "NonZeroExitCode", "node[1-2]", 1.0, 2.0))
    assert run.refresh().error == "rank 1 on node2 raised ValueError: boom"
    assert (run.who(0), run.who(1), run.who(PROGRAM)) == ("rank 0", "rank 1 on node2", "the job")
    assert [row["node"] for row in run.table()] == ["–", "node2"]


def test_the_folder_of_somebody_else(
    nobody: int, slurm_says: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(nobody)
    slurm_says.append(DONE)
    monkeypatch.setattr(RunRecord, "save", lambda _: (_ for _ in ()).throw(PermissionError()))
    assert (run.refresh().state, run.error) == ("done", "")
    assert Run.open(run.folder).state == "queued", "nothing could be written"


def test_a_clock_that_goes_otherwise_on_a_node(nobody: int) -> None:
    """How long a rank stands still is told by its own node's clock."""
    run = submitted(nobody, state="running")
    assert run.clock(0) == pytest.approx(time.time(), abs=5), "nothing is known of it"
    RankFiles(run.folder, 0).facts.write_text(json.dumps({"launched": 1000.0}))
    row = np.zeros((1, len(TICK)))
    row[0, 0] = 25.0
    row.tofile(RankFiles(run.folder, 0).ticks)
    assert run.clock(0) == 1025.0
