"""lessons/scripts/train.sbatch, as Slurm would start it on the first node: with a stand-in for srun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "lessons" / "scripts" / "train.sbatch"
SRUN = """#!/bin/bash
echo "$OMP_NUM_THREADS threads: $*"
"""
SCONTROL = """#!/bin/bash
[ "$2" = hostnames ] && echo node1 || echo "   NodeAddr=10.0.0.1 NodeHostName=node1"
"""


@pytest.mark.parametrize(
    ("cores", "gpus", "words", "threads"),
    [
        (16, "2", ["train_ddp.py"], 8),
        (16, "2", ["train_imagenet.py", "--workers", "6", "--amp"], 2),
        (16, "2", ["train_imagenet.py", "--workers=7"], 1),
        (16, "8", ["train_imagenet.py", "--workers", "4"], 1),
        (3, None, ["train_ddp.py", "--epochs", "3"], 2),
    ],
)
def test_a_rank_has_its_share_of_the_cores_less_its_loader_s_workers(
    cores: int, gpus: str | None, words: list[str], threads: int, tmp_path: Path
) -> None:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_CPUS_PER_TASK": str(cores), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_JOB_NODELIST": "node[1-2]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if gpus:
        job["SLURM_GPUS_ON_NODE"] = gpus
    done = subprocess.run(["bash", JOB, *words], env=job, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{threads} threads: --cpus-per-task={cores} ")
    assert done.stdout.rstrip().endswith(f"--rdzv-endpoint=10.0.0.1:20007 {' '.join(words)}")
