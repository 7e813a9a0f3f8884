"""What the tests on a GPU share: where they run, and how much of the GPU's memory is in use."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.cells import quiet_launch
from tests.support.processes import wait_for

MIB = 1 << 20
SLACK = 64 * MIB  # the driver's own use moves by a few MiB; a rank's CUDA context takes hundreds
START_SECONDS = 100  # torch's first import and a first CUDA context, from a cold disk
FREE_SECONDS = 30  # until the driver has the memory of processes that ended

# A skip also where COURSE_REQUIRE_ALL=1 promises every tool: no CI machine has a GPU.
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU on this machine"),
]

# A rank that hangs on the GPU ends with a report of where it was.
gpu_launch = functools.partial(quiet_launch, timeout=START_SECONDS)


def used_bytes() -> int:
    """Bytes in use on the whole first GPU, by whatever process, as NVML counts them."""
    return torch.cuda.device_memory_used(0)


def wait_until_free_again(before: int, what: str) -> None:
    """Until no more of the GPU's memory is in use than before."""
    wait_for(lambda: used_bytes() <= before + SLACK, FREE_SECONDS, f"the GPU's memory after {what}")
