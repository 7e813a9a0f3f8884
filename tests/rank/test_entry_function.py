"""How a rank begins, and how it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course_lib.rank import entry_function
from tests.support.cells import cell, quiet_launch


def test_a_variable_that_the_kernel_has_no_more_is_gone_in_the_rank() -> None:
    with mock.patch.dict(os.environ, {"GONE": "1", "OLD": "1"}):
        kept = {name: value for name, value in os.environ.items() if name != "GONE"}
        entry_function._take_environment(kept | {"OLD": "2"})
        assert dict(os.environ) == kept | {"OLD": "2"}


def test_workers_that_are_not_forked_know_what_a_cell_defines() -> None:
    """By forkserver, as Python 3.14 starts them, and by spawn; and a rank what any worker sends back."""
    source = """
        import concurrent.futures, enum, multiprocessing
        from torch.utils.data import DataLoader, Dataset

        FACTOR = 3

        class Kind(enum.Enum):
            EVEN = 0
            ODD = 1

        class Data(Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, i):
                return Kind(i % 2), FACTOR * i

        def work():
            multiprocessing.set_start_method("forkserver")
            for way in (None, "fork"):
                (batch,) = DataLoader(Data(), 2, num_workers=1, collate_fn=list, multiprocessing_context=way)
                assert batch == [(Kind.EVEN, 0), (Kind.ODD, 3)]
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
                return pool.submit(lambda: FACTOR * Kind.ODD.value).result()
        """
    assert quiet_launch(cell(source).work, nprocs=1, timeout=240).results == [3]


THREADS_FIRST = """
import os, threading
import torch
from course_lib.rank.entry_function import own_autograd

torch.set_num_threads(1)
torch.zeros(1, requires_grad=True).exp().backward()  # so that there is an engine to be replaced


def multiply(meeting):
    x, w = torch.randn(5, 6), torch.randn(6, 6, requires_grad=True)
    meeting.wait()
    x @ w


for _ in range(400):
    if os.fork() == 0:
        own_autograd()
        meeting = threading.Barrier(4)
        threads = [threading.Thread(target=multiply, args=[meeting]) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.night
def test_threads_of_a_forked_process_may_be_the_first_to_use_autograd() -> None:
    """One in a hundred of them was ended by a SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", THREADS_FIRST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def ddps_that_die_after_their_groups(times: int) -> int:
    sys.setswitchinterval(5)  # a thread of gloo waits for Python's lock when DDP lets go of its group
    dist.init_process_group("gloo")
    for _ in range(times):
        group = dist.new_group()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)
        del group, ddp
    dist.destroy_process_group()
    return times


def test_a_ddp_may_die_after_its_group() -> None:
    """Before torch 2.14, each rank that does so may wait for ever: among 30 of these, one does.

    That torch is changed in a program, too: tests/scripts/test_train_imagenet.py, by another change.
    """
    assert quiet_launch(ddps_that_die_after_their_groups, 30, nprocs=2, timeout=60).results == [30, 30]


def test_ddp_takes_forward_sync_buffers_in_every_torch() -> None:
    """The buffers are rank 0's at the start, and each rank's own from then on."""

    def means() -> list[list[float]]:
        dist.init_process_group("gloo")
        found = []
        for options in ({"forward_sync_buffers": False}, {}):
            norm = torch.nn.BatchNorm1d(1, momentum=0.5)
            assert norm.running_mean is not None
            norm.running_mean += dist.get_rank() + 1
            ddp = torch.nn.parallel.DistributedDataParallel(norm, **options)
            found.append([norm.running_mean.item()])
            for _ in range(2):
                ddp(torch.full((2, 1), 9.0 + 4 * dist.get_rank())).sum().backward()
                found[-1].append(norm.running_mean.item())
        return found

    first, second = quiet_launch(means, nprocs=2).results
    assert first == [[1, 5, 7]] * 2
    assert second == [[1, 7, 10], [1, 7, 9]], "without the option, rank 0's before each forward pass"


def test_two_forwards_through_ddp_may_come_before_a_backward_in_every_torch() -> None:
    """The broadcast of batch norm's buffers in the second is not seen by autograd."""

    def gradients() -> list[float]:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        ddp = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        )
        sum(ddp(torch.randn(4, 2)).pow(3).sum() for _ in range(2)).backward()  # type: ignore[union-attr]
        return [round(each.grad.sum().item(), 4) for each in ddp.parameters()]

    first, second = quiet_launch(gradients, nprocs=2).results
    assert first == second
