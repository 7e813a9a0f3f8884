"""What Slurm's commands answer, and how that is read. (With a real Slurm: tests/launcher/test_slurm.py.)"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from course_lib.host import cluster

Commands = Callable[..., Path]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Puts programs on the PATH, each a script of the shell; all others of Slurm's are not there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    really = cluster.shutil.which
    monkeypatch.setattr(
        cluster.shutil,
        "which",
        lambda name: really(name, path=str(folder)) if name[0] == "s" else really(name),
    )

    def put(**scripts: str) -> Path:
        for name in ("sbatch", "squeue", "scancel"):
            script = scripts.get(name, f"echo {name} is not asked for here >&2; exit 99")
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        return folder

    return put


def test_a_job_is_submitted(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(sbatch=f'printf "%s\\n" "$@" >{tmp_path}/words; env >{tmp_path}/env; echo "1234;main"')
    inherited = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SLURM_CLUSTERS": "main", "SRUN_DEBUG": "3"}
    for name, value in {**inherited, "PMI_RANK": "0", "SBATCH_ACCOUNT": "me", "OWN": "x"}.items():
        monkeypatch.setenv(name, value)

    assert cluster.submit(tmp_path / "job.sbatch", ["--output=o"], {"COURSE_RUN": "/r"}) == 1234
    assert (tmp_path / "words").read_text().split() == ["--parsable", "--output=o", f"{tmp_path}/job.sbatch"]
    told = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    wanted = {
        "SLURM_CONF": "/c",
        "SLURM_CLUSTERS": "main",
        "SBATCH_ACCOUNT": "me",
        "OWN": "x",
        "COURSE_RUN": "/r",
    }
    assert told | wanted == told
    assert not {"SLURM_JOB_ID", "SRUN_DEBUG", "PMI_RANK"} & set(told), "the job that this process may be in"


@pytest.mark.parametrize(
    ("sbatch", "words"),
    [
        (
            "echo 'sbatch: error: invalid partition specified: x' >&2; "
            "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1",
            "sbatch refused the job: invalid partition specified: x; Batch job submission failed: Invalid "
            "partition name specified (it is in /j)",
        ),
        ("exit 3", "sbatch refused the job: exit code 3, without a message (it is in /j)"),
        ("echo welcome", "sbatch gave no number of a job, but 'welcome': exit code 0, without a message"),
        ("printf '\\377'", "sbatch gave no number of a job, but '\ufffd': exit code 0, without a message"),
    ],
)
def test_what_sbatch_says_is_told(sbatch: str, words: str, commands: Commands) -> None:
    commands(sbatch=sbatch)
    with pytest.raises(cluster.SlurmError) as caught:
        cluster.submit(Path("/j"), [], {})
    assert str(caught.value) == words


WAITS = "PENDING||2026-11-22T16:02:11|N/A|N/A|Nodes required for job are DOWN | or so"
GUESSED = "PENDING||2026-11-22T16:02:11|2026-11-22T17:02:11|2026-11-22T18:02:11|Resources"
RUNS = "RUNNING|node[1-2]|2026-11-22T16:02:11|2026-11-22T16:02:15|2026-11-22T17:02:11|None"
FAILED = "FAILED|node[1-2]|2026-11-22T16:02:11|2026-11-22T16:02:15|2026-11-22T16:02:40|NonZeroExitCode"
NEVER_BEGAN = "CANCELLED||2026-11-22T16:02:11|2026-11-22T16:02:17|2026-11-22T16:02:17|JobHeldUser"


@pytest.mark.parametrize(
    ("line", "expected", "waits", "over"),
    [
        (WAITS, ("PENDING", "Nodes required for job are DOWN | or so", "", None, None), True, False),
        (GUESSED, ("PENDING", "Resources", "", None, None), True, False),
        (RUNS, ("RUNNING", "", "node[1-2]", 4.0, None), False, False),
        (FAILED, ("FAILED", "NonZeroExitCode", "node[1-2]", 4.0, 25.0), False, True),
        (NEVER_BEGAN, ("CANCELLED", "JobHeldUser", "", 6.0, 0.0), False, True),
        ("COMPLETING|n|x|y|z|None", ("COMPLETING", "", "n", None, None), False, False),
    ],
)
def test_how_a_job_stands(line: str, expected: tuple, waits: bool, over: bool, commands: Commands) -> None:
    commands(squeue=f"echo '{line}'")
    status = cluster.ask(12)
    assert tuple(status) == expected
    assert (status.waits, status.over) == (waits, over)


def test_the_learners_own_settings_change_no_answer(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    commands(squeue=f'[ -z "$SQUEUE_PARTITION" ] && [ $SLURM_TIME_FORMAT = standard ] && echo "{RUNS}"')
    assert cluster.ask(12).state == "RUNNING"


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def test_a_job_that_the_queue_has_forgotten(commands: Commands) -> None:
    for squeue in (FORGOTTEN, ":"):
        commands(squeue=squeue)
        assert cluster.ask(12) == cluster.JobStatus("UNKNOWN")


@pytest.mark.parametrize(
    ("squeue", "words"),
    [
        ("echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm"),
        ("echo Welcome to the cluster", "Slurm's answer cannot be read: 'Welcome to the cluster'"),
        ("echo '|||||'", re.escape("Slurm's answer cannot be read: '|||||'")),
        ("exec sleep 60", "squeue gave no answer for 0.2 s"),
    ],
)
def test_no_answer_is_no_state(
    squeue: str, words: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.2 if "sleep" in squeue else 100.0)
    commands(squeue=squeue)
    with pytest.raises(cluster.SlurmError, match=words):
        cluster.ask(12)


def test_cancelled(commands: Commands, tmp_path: Path) -> None:
    commands(scancel=f"echo $@ >{tmp_path}/cancelled")
    cluster.cancel(12)
    assert (tmp_path / "cancelled").read_text() == "12\n"
    commands(scancel="echo 'scancel: error: Access/permission denied' >&2; exit 1")
    with pytest.raises(cluster.SlurmError, match="scancel: Access/permission denied"):
        cluster.cancel(12)


def test_ctrl_c_does_not_reach_them(commands: Commands) -> None:
    commands(squeue=f"[ $(ps -o pgid= -p $$) != {os.getpgrp()} ] && echo '{RUNS}'")
    assert cluster.ask(12).state == "RUNNING"


@pytest.mark.parametrize(
    ("counts", "node", "expected"),
    [
        ("8(x4)", "3", 8),
        ("3,2(x2)", "2", 2),
        ("12", None, 12),
        ("4(x2)", "2", 0),
        (None, "0", 0),
    ],
)
def test_tasks_of_a_step_on_this_node(
    counts: str | None, node: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert cluster.tasks_here() == expected
