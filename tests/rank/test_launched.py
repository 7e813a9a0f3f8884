"""When a rank leaves: others may still be joining the group."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.cells import quiet_launch


def nothing(tensor: torch.Tensor) -> None:
    pass


def in_a_group_of_its_own(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, group=dist.new_group([0]))


@pytest.mark.parametrize(
    ("last", "stays"),
    [
        (nothing, True),
        (dist.broadcast, True),
        (dist.reduce, True),
        (in_a_group_of_its_own, True),
        (dist.all_reduce, False),
        (lambda tensor: dist.barrier(), False),
    ],
)
def test_who_met_not_all_the_others_gives_them_time(last: Callable, stays: bool) -> None:
    """The rank is alone here, and is told that there are two."""

    def leaves() -> float:
        import os
        from pathlib import Path

        from course_lib.rank import launched

        launched.JOIN_SECONDS = 0.5
        dist.init_process_group("gloo")
        last(torch.ones(1), 0) if last in (dist.broadcast, dist.reduce) else last(torch.ones(1))
        os.environ["WORLD_SIZE"] = "2"
        job = launched.Job(Path("/nowhere"), 0, b"", {}, 1)
        began = time.monotonic()
        launched._let_the_others_join(job)
        return time.monotonic() - began

    (seconds,) = quiet_launch(leaves, nprocs=1).results

    assert (seconds >= 0.5) == stays, f"{seconds:.3f} s"
