"""lessons/scripts/train.sbatch, as Slurm would start it on the first node: with a stand-in for srun."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.notebooks.execute import CORE, read

JOB = CORE / "scripts" / "train.sbatch"
SRUN = """#!/bin/bash
echo "$OMP_NUM_THREADS threads: $*"
"""


def test_lesson_17_shows_lines_of_the_job_file() -> None:
    texts = [cell.source for cell in read(CORE / "17_many_machines.ipynb").cells if "#SBATCH" in cell.source]
    first, rest = (set(text.split("```bash\n")[1].split("```")[0].splitlines()) for text in texts)
    assert first | rest <= set(JOB.read_text().splitlines())


@pytest.mark.parametrize(
    ("cores", "gpus", "words", "threads"),
    [
        (16, "2", ["train_ddp.py"], 8),
        (16, "2", ["train_imagenet.py", "--workers", "6", "--amp"], 2),
        (16, "2", ["train_imagenet.py", "--workers=7"], 1),
        (16, "8", ["train_imagenet.py", "--workers", "4"], 1),
        (3, None, ["train_ddp.py", "--epochs", "3"], 1),
    ],
)
def test_a_rank_has_its_share_of_the_cores_less_its_loader_s_workers(
    cores: int, gpus: str | None, words: list[str], threads: int, tmp_path: Path
) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_CPUS_PER_TASK": str(cores), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if gpus:
        job["SLURM_GPUS_ON_NODE"] = gpus
    done = subprocess.run(["bash", JOB, *words], env=job, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{threads} threads: --cpus-per-task={cores} ")
    assert " --kill-on-bad-exit=1 --wait=60 torchrun " in done.stdout, "else a node that is left waits on"
    assert done.stdout.rstrip().endswith(f"--rdzv-endpoint={socket.gethostname()}:20007 {' '.join(words)}")
