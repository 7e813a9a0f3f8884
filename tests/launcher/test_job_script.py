"""slurm(): the script that it submits. (That this runs: test_slurm.py; what it refuses: test_scripts.py.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from course_lib import Run, slurm
from course_lib.host import cluster
from course_lib.launcher import job_script
from course_lib.launcher import slurm as of_slurm


def test_without_slurm_it_names_torchrun(
    script: str, course_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(cluster.SlurmError, match=r"torchrun\(…, nproc_per_node=…\) runs the same script"):
        slurm(script, nodes=2)
    assert not (course_home / "runs").exists(), "no run is left"


def test_what_was_no_job_is_not_watched_again() -> None:
    with pytest.raises(ValueError, match=r"train was not submitted to Slurm: only a run of slurm\(\) goes"):
        slurm(Run.create("train", 2))


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """What sbatch would have been given: options and environment."""
    seen: list[Any] = []
    monkeypatch.setattr(cluster, "check_there", lambda: None)
    monkeypatch.setattr(cluster, "submit", lambda _, options, given: seen.append((options, given)) or 7)
    monkeypatch.setattr(of_slurm, "SlurmJob", lambda _, submit: submit())
    monkeypatch.setattr(of_slurm, "watch", lambda run, start, timeout, view: start(None) and run)
    return seen


EXPECTED = """\
#!/bin/bash
#SBATCH --job-name='a script.py'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
#SBATCH --chdir=HERE
#SBATCH --partition=gpu
#SBATCH --time=1:00:00
#SBATCH --exclusive
#SBATCH --cpus-per-task=9
#SBATCH --exclude=n1,n2
module load cuda
source 'my env'/activate

# This script runs on the job's first node. There the torchruns of all nodes meet, at a port of the job's own.
endpoint=$(hostname):$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"

torchrun=(PYTHON -m torch.distributed.run)
program=('a script.py' 3 'da ta' --lr=0.1)
if [[ -n ${COURSE_RUN:-} ]]; then  # by slurm(), which reads what is noted there; by hand it is not set
"""
SRUN = """\
srun --kill-on-bad-exit=1 --cpus-per-task=9 "${torchrun[@]}" \\
    --nnodes=2 --nproc-per-node=4 --max-restarts=3 \\
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID" \\
    "${program[@]}"
"""


def test_the_script_is_one_to_read(script: str, submitted: list[Any], tmp_path: Path) -> None:
    run = slurm(
        script,
        3,
        Path("da ta"),
        "--lr=0.1",
        nodes=2,
        nproc_per_node=4,
        max_restarts=3,
        setup=["module load cuda", "source 'my env'/activate"],
        partition="gpu",
        time="1:00:00",
        exclusive=True,
        account=None,
        cpus_per_task=9,
        exclude=["n1", "n2"],
    )
    text = (run.folder / "job.sbatch").read_text()
    start = EXPECTED.replace("HERE", str(tmp_path)).replace("PYTHON", sys.executable)
    assert text[: len(start)] == start
    assert text.endswith(SRUN)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert run.command == f"sbatch {run.folder}/job.sbatch"
    assert (run.name, run.world_size, run.state) == (script, 8, "queued")
    ((options, given),) = submitted
    assert options == [f"--output={run.folder}/rank-program.log", "--export=ALL"]
    assert given["COURSE_RUN"] == str(run.folder)
    assert "GLOO_SOCKET_IFNAME" not in given, "the loopback address reaches no other node"


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 2),
        ({"gpus_per_node": "a100:8"}, 8),
        ({"gres": "gpu:3"}, 3),
        ({"gres": ["craynetwork:1", "gpu:h100:6"]}, 6),
        ({"gres": "shard:2"}, 2),
    ],
)
def test_as_many_ranks_as_gpus_are_asked_for(
    options: dict[str, Any], ranks: int, script: str, submitted: list[Any]
) -> None:
    assert slurm(script, nodes=3, **options).world_size == 3 * ranks
    assert job_script.gpus_of_a_node(options) == (None if options in ({}, {"gres": "shard:2"}) else ranks)
