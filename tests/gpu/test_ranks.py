"""Ranks on a GPU: one of its own over NCCL, several on one over gloo, and a kernel that uses CUDA itself."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib import RankError, launch, place
from tests.gpu.gpus import START_SECONDS, gpu_launch, on_a_gpu
from tests.support.kernels import Kernel

pytestmark = on_a_gpu
GPUS = torch.cuda.device_count()


def data(ranks: int) -> torch.Tensor:
    """A batch with three samples for each rank."""
    return torch.linspace(-1, 1, 3 * ranks * 4).reshape(3 * ranks, 4)


def one_ddp_step(tidy: bool) -> dict[str, Any]:
    """All-reduce, and a step of DDP, on the device and the backend that place() gives.

    Before torch 2.14, destroy_process_group() over gloo may wait for ever.
    """
    device, backend = place()
    drawn = torch.cuda.initial_seed(), float(torch.rand((), device=device))
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(total)

    torch.manual_seed(rank)  # each rank begins with other weights: DDP has to send rank 0's
    model = DistributedDataParallel(torch.nn.Linear(4, 2).to(device), device_ids=[device])
    model(data(ranks)[rank::ranks].to(device)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if tidy:
        dist.destroy_process_group()
    return {
        "place": (str(device), backend),
        "current": (torch.cuda.current_device(), total.get_device()),
        "total": total.unique().tolist(),
        "weight": model.module.weight.detach().cpu(),
        "drawn": drawn,
    }


def weight_after_one_step(ranks: int) -> torch.Tensor:
    """The same step in one process, on the CPU."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model(data(ranks)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.weight.detach()


# Destroyed, left to the end; one rank for each GPU; ranks that share a GPU; ranks that go round the GPUs
@pytest.mark.parametrize(
    ("nprocs", "tidy"), [(1, True), (1, False), (None, False), (GPUS + 1, False), (2 * GPUS + 1, False)]
)
def test_ranks_train_as_one_process_does(
    nprocs: int | None, tidy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launch(one_ddp_step, tidy, nprocs=nprocs, timeout=START_SECONDS)

    ranks = nprocs or GPUS
    backend = "nccl" if ranks <= GPUS else "gloo"
    shared = f"{ranks} ranks share {GPUS} GPU{'s' if GPUS > 1 else ''}, over gloo"
    assert (shared in capsys.readouterr().out.splitlines()[:1]) == (backend == "gloo")
    assert (run.state, len(run.results)) == ("done", ranks)
    for rank, result in enumerate(run.results):
        gpu = rank % GPUS
        assert result["place"] == (f"cuda:{gpu}", backend)
        assert (run.facts(rank)["device"], run.facts(rank)["backend"]) == result["place"]
        assert result["current"] == (gpu, gpu)
        assert result["total"] == [ranks * (ranks + 1) / 2]
        torch.testing.assert_close(result["weight"], weight_after_one_step(ranks))
        assert torch.equal(result["weight"], run.results[0]["weight"])
    again = gpu_launch(one_ddp_step, tidy, nprocs=nprocs).results
    drawn = [result["drawn"] for result in (*run.results, *again)]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [2 * ranks] * 2, "seeds differ"


def test_a_report_can_tell_which_collective_of_nccl_is_under_way() -> None:
    def work() -> tuple[dict[str, Any], dict[str, Any]]:
        from course_lib.rank.standstill import flight

        device, backend = place()
        dist.init_process_group(backend, device_id=device)
        x = torch.ones(3, device=device)
        dist.all_reduce(x)
        x.sum().item()
        torch.cuda._sleep(4_000_000_000)  # the next ones wait behind this for a second or more
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        under_way = flight()
        x.sum().item()
        until = time.monotonic() + 20  # NCCL's watchdog looks now and then
        while (over := flight())["pending"] and time.monotonic() < until:
            time.sleep(0.05)
        return under_way, over

    under_way, over = gpu_launch(work, nprocs=1).results[0]
    assert [each["name"] for each in under_way["pending"]] == ["all_reduce", "broadcast"]
    assert {each["group"] for each in under_way["pending"]} == {"0 over nccl"}
    assert over["pending"] == []
    assert over["called"] == under_way["called"]


def test_nccls_refusal_of_two_ranks_on_one_gpu_is_explained() -> None:
    def work() -> None:
        device, _ = place()
        dist.init_process_group("nccl")  # since torch 2.15 it fails here, before at the first collective
        dist.all_reduce(torch.ones(1, device=device))

    with pytest.raises(RankError) as caught:
        gpu_launch(work, nprocs=GPUS + 1)

    text = str(caught.value)
    print(text)
    assert re.match(rf"rank {caught.value.rank} raised \S+: .*NCCL", text)
    assert "Duplicate GPU detected" in text or "Multiple Ranks are using the same GPU" in text
    assert ", in work\n" in text
    assert 'dist.init_process_group("nccl")' in text
    assert "NCCL takes one rank for each GPU" in text
    assert "use gloo. place()" in text


def test_the_cpu_on_request() -> None:
    def work() -> tuple[Any, ...]:
        device, backend = place()
        dist.init_process_group(backend)
        total = torch.ones(3, device=device)
        dist.all_reduce(total)
        seen = torch.cuda.is_available(), torch.cuda.device_count(), os.environ["CUDA_VISIBLE_DEVICES"]
        return str(device), backend, total.tolist(), *seen

    run = gpu_launch(work, nprocs=2, device="cpu")
    assert run.results == [("cpu", "gloo", [2.0] * 3, False, 0, "")] * 2
    assert "reserved_bytes" not in run.metrics[0]


# The context is made and used before course_lib is there, so the fork server starts from a CUDA process.
CUDA_FIRST = """
    import torch
    mine = torch.arange(1 << 20, device="cuda")
    assert int(mine.sum()) == (1 << 19) * ((1 << 20) - 1)
    held = torch.cuda.memory_allocated()

    import torch.distributed as dist
    from course_lib import launch, place
    from torch.utils.data import DataLoader, TensorDataset

    def work():
        device, backend = place()
        dist.init_process_group(backend)
        loader = DataLoader(TensorDataset(torch.ones(64)), batch_size=16, num_workers=2, pin_memory=True)
        total = sum(batch.to(device, non_blocking=True).sum() for (batch,) in loader)
        dist.all_reduce(total)
        return str(device), total.item()

    results = [launch(work, nprocs=ranks, dashboard=False, timeout=200).results for ranks in (1, 2, 1)]
    same = torch.equal(mine.cpu(), torch.arange(1 << 20)) and torch.cuda.memory_allocated() == held
    say("done", repr((results, same, int((mine + 1).max()))))
    """


def test_cuda_in_use_in_the_kernel_before(tmp_path: Path) -> None:
    with Kernel(tmp_path, CUDA_FIRST) as kernel:
        kernel.wait_for("done", seconds=START_SECONDS)
        results, same, largest = eval((kernel.there / "done").read_text())
        assert kernel.process.wait(60) == 0

    other = f"cuda:{1 % GPUS}"
    assert results == [[("cuda:0", 64.0)], [("cuda:0", 128.0), (other, 128.0)], [("cuda:0", 64.0)]]
    assert same, "the kernel's own tensors and memory are what they were"
    assert largest == 1 << 20
