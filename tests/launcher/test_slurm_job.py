"""A job of Slurm, read from its run's folder and watched again, until its end. Slurm is a stand-in."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import numpy as np
import pytest

from course_lib import RankError, Run, slurm
from course_lib.host import cluster
from course_lib.host.cluster import JobStatus, SlurmError
from course_lib.launcher import slurm_job
from course_lib.record.layout import JOB_ENDED, PROGRAM, TICK, RankFiles

QUEUED = JobStatus("PENDING", "Resources")
AT_WORK = JobStatus("RUNNING", "", "node[1-2]", 40.0)
DONE = JobStatus("COMPLETED", "", "node[1-2]", 40.0, 7.0)
KNOWN = r"; known when its kernel ended: slurm\(run\) watches it again"


@pytest.fixture
def slurm_says(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What it answers, one after the other, and the last from then on."""
    says: list[Any] = []

    def ask(job: int) -> JobStatus:
        assert job == 12
        answer = says.pop(0) if len(says) > 1 else says[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster, "check_there", lambda: None)
    monkeypatch.setattr(cluster, "ask", ask)
    monkeypatch.setattr(slurm_job, "ASK_AT_LEAST", 0.01)
    monkeypatch.setattr(slurm_job, "SETTLE_SECONDS", 0.5)
    return says


def submitted(nobody: int, **facts: Any) -> Run:
    """A job of a kernel that is gone, submitted 100 s ago."""
    then = time.time() - 100
    known = {"job": 12, "submitted": then, "started": then, "kernel_pid": nobody, "max_restarts": 0}
    run = Run.create("train.py", 2, **{"state": "queued", **known, **facts})
    return Run.open(run.folder)


def test_from_the_queue_to_its_end(nobody: int, slurm_says: list[Any]) -> None:
    slurm_says += [SlurmError("no answer"), QUEUED, AT_WORK, DONE]
    run = slurm(submitted(nobody), dashboard=False)
    assert (run.state, run.error, run.nodes) == ("done", "", "node[1-2]")
    assert run.seconds == 7.0, "as Slurm says: nobody saw its end"
    again = Run.open(run.folder)
    assert again.headline() == "train.py: 2 ranks, done, 7.0 s (before that 40 s in the queue)"
    assert json.loads((run.folder / "run.json").read_text())["state"] == "done"


def test_it_stands_as_its_kernel_last_knew_it(nobody: int) -> None:
    """No attribute asks Slurm, and none writes."""
    run = submitted(nobody)
    before = (run.folder / "run.json").read_bytes()
    assert (run.state, run.error, run.nodes, run.reason, run.seconds) == ("queued", "", "", "", 0.0)
    assert run.queued_seconds > 99
    assert re.fullmatch(rf"<Run .* waits in the queue, 1\d\d s{KNOWN}>", repr(run))
    assert "waits in the queue" in run._repr_html_()
    assert run.results == [None, None]
    assert (run.folder / "run.json").read_bytes() == before

    run.record.note_job(QUEUED)
    run = Run.open(run.folder)
    assert (run.state, run.reason, run.seconds, run.nodes) == ("queued", "Resources", 0.0, "")
    assert re.fullmatch(r"job 12 waits in the queue, 1\d\d s \(Resources\)", run.waits())

    run.record.note_job(AT_WORK)
    run = Run.open(run.folder)
    assert (run.state, run.queued_seconds, run.nodes, run.reason) == ("running", 40.0, "node[1-2]", "")
    assert 60 <= run.seconds < 100
    assert run.duration().endswith(" s (before that 40 s in the queue)")
    assert run.waits() == ""
    assert re.search(rf"running, .* in the queue\){KNOWN}$", run.headline())


@pytest.mark.parametrize(
    ("status", "exit_code", "report"),
    [
        (JobStatus("FAILED"), "3\n", "the job ended with exit code 3"),
        (JobStatus("FAILED"), None, "the job failed before its script could write into the run's folder"),
        (JobStatus("CANCELLED"), None, "the job was cancelled (scancel, by a person or by the cluster)"),
        (JobStatus("UNKNOWN"), "0\n", ""),
        (JobStatus("UNKNOWN"), "3\n", "the job ended with exit code 3"),
        (JobStatus("UNKNOWN"), None, "the job is over: Slurm has forgotten it"),
        (JobStatus("UNKNOWN"), "", "the job is over: Slurm has forgotten it"),
        (JobStatus("TIMEOUT"), "143", "the job was ended by Slurm at its time limit (TIMEOUT)"),
    ],
)
def test_how_it_ended(
    status: JobStatus, exit_code: str | None, report: str, nobody: int, slurm_says: list[Any]
) -> None:
    run = submitted(nobody, state="running")
    if exit_code is not None:
        (run.folder / JOB_ENDED).write_text(exit_code)
    slurm_says.append(status)
    if not report:
        assert slurm(run, dashboard=False).state == "done"
        return
    with pytest.raises(RankError) as caught:
        slurm(run, dashboard=False)
    assert str(caught.value).startswith(report)
    assert Run.open(run.folder).error == str(caught.value)


def test_the_rank_that_failed_is_named(nobody: int, slurm_says: list[Any]) -> None:
    run = submitted(nobody, state="running")
    (run.folder / JOB_ENDED).write_text("1\n")
    failure = {"type": "ValueError", "message": "boom\nmore", "frames": [], "time": 0}
    RankFiles(run.folder, 1).failure.write_text(json.dumps(failure))
    RankFiles(run.folder, 1).facts.write_text(json.dumps({"environment": {"SLURMD_NODENAME": "node2"}}))
    slurm_says.append(JobStatus("FAILED", "NonZeroExitCode", "node[1-2]", 1.0, 2.0))
    with pytest.raises(RankError, match=r"^rank 1 on node2 raised ValueError: boom\n"):
        slurm(run, dashboard=False)
    assert (run.who(0), run.who(1), run.who(PROGRAM)) == ("rank 0", "rank 1 on node2", "the job")
    assert [row["node"] for row in run.table()] == ["–", "node2"]


def test_a_clock_that_goes_otherwise_on_a_node(nobody: int) -> None:
    """How long a rank stands still is told by its own node's clock."""
    run = submitted(nobody, state="running")
    assert run.clock(0) == pytest.approx(time.time(), abs=5), "nothing is known of it"
    RankFiles(run.folder, 0).facts.write_text(json.dumps({"launched": 1000.0}))
    row = np.zeros((1, len(TICK)))
    row[0, 0] = 25.0
    row.tofile(RankFiles(run.folder, 0).ticks)
    assert run.clock(0) == 1025.0
