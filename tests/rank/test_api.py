"""`place` on a cluster: which GPU a rank takes, and which backend, by what its launcher says."""

from __future__ import annotations

import os

import pytest

from course_lib import place

# What each task of `srun --nodes=4 --ntasks-per-node=8 python …` finds (seen with Slurm 24), and what the job
# file sets: on the third node, the fourth task.
SRUN = {"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_NODEID": "2", "SLURM_LOCALID": "3"}
SRUN |= {"SLURM_GPUS_ON_NODE": "8", "RANK": "19", "WORLD_SIZE": "32"}
TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "4"}
ONE_TASK = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("visible", "told", "expected"),
    [
        pytest.param(8, SRUN | {"LOCAL_RANK": "3"}, "cuda:3 nccl", id="srun, a GPU for each rank"),
        pytest.param(8, SRUN, "cuda:3 nccl", id="srun, LOCAL_RANK not set"),
        pytest.param(1, SRUN, "cuda:0 nccl", id="--gpus-per-task=1"),
        pytest.param(4, SRUN | {"SLURM_GPUS_ON_NODE": "4"}, "cuda:3 gloo", id="srun, two ranks on each GPU"),
        pytest.param(1, SRUN | {"SLURM_GPUS_ON_NODE": "1"}, "cuda:0 gloo", id="srun, one GPU for all"),
        pytest.param(0, SRUN, "cpu gloo", id="srun, no GPU"),
        pytest.param(2, TORCHRUN | ONE_TASK | {"SLURM_GPUS_ON_NODE": "2"}, "cuda:1 nccl", id="srun torchrun"),
        pytest.param(
            1, TORCHRUN | ONE_TASK | {"SLURM_GPUS_ON_NODE": "8"}, "cuda:0 gloo", id="srun torchrun, one seen"
        ),
        pytest.param(2, TORCHRUN, "cuda:1 nccl", id="torchrun"),
        pytest.param(2, TORCHRUN | {"COURSE_NODES_HERE": "2"}, "cuda:1 gloo", id="two nodes on a machine"),
        pytest.param(4, TORCHRUN | {"COURSE_NODES_HERE": "2"}, "cuda:1 nccl", id="and a GPU for each rank"),
        pytest.param(1, TORCHRUN, "cuda:0 gloo", id="torchrun, one GPU"),
        pytest.param(4, {"LOCAL_RANK": "1", "WORLD_SIZE": "4"}, "cuda:1 nccl", id="by hand, one machine"),
        pytest.param(1, {}, "cuda:0 nccl", id="alone"),
        pytest.param(1, SRUN | {"WORLD_SIZE": None}, "cuda:0 nccl", id="a task alone"),
    ],
)
def test_device_and_backend(
    visible: int, told: dict[str, str | None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "COURSE_NODES", "LOCAL_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in told.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert " ".join(map(str, place())) == expected
