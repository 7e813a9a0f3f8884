"""What a rank did and when, off the profiler: of real ranks, and of events as a GPU's would be."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import overlap, profiled
from course_lib.measure.profiled import Span, spans_of
from tests.support.cells import quiet_launch

LAYERS = 4


def a_step() -> tuple[list[Span], float, float]:
    dist.init_process_group("gloo")
    layers = nn.Sequential(*[nn.Linear(30, 30, bias=False) for _ in range(LAYERS)])
    model = DistributedDataParallel(layers, bucket_cap_mb=0.001)
    for _ in range(2):
        model(torch.ones(1, 30)).sum().backward()
    dist.barrier()
    begin = time.time()
    with profiled() as spans:
        model(torch.ones(1, 30)).sum().backward()
    end = time.time()
    dist.barrier()
    return spans, begin, end


def test_buckets_are_sent_and_the_ranks_have_one_clock() -> None:
    """That `backward` computes meanwhile: lesson 14."""
    ranks = quiet_launch(a_step, nprocs=2).results
    for spans, begin, end in ranks:
        assert all(begin <= span.start <= span.end <= end for span in spans)
        sends = [span for span in spans if span.kind == "sends"]
        assert [span.what for span in sends] == [f"all_reduce {i + 1}" for i in range(LAYERS)]
        assert "computes" in {span.kind for span in spans}
    (first, *_), (second, *_) = ([s for s in spans if s.kind == "sends"] for spans, *_ in ranks)
    assert first.start < second.end
    assert second.start < first.end, "an all_reduce is under way on both at once"


def event(name: str, start: float, end: float, thread: int = 1, **more: Any) -> Any:
    """In milliseconds."""
    given = {"device_type": "DeviceType.CPU", "is_user_annotation": False} | more
    stretch = SimpleNamespace(start=1e3 * start, end=1e3 * end)
    return SimpleNamespace(name=name, time_range=stretch, thread=thread, **given)


def label(name: str, start: float, end: float) -> Any:
    return event(name, start, end, is_user_annotation=True)


def kernel(name: str, start: float, end: float) -> Any:
    return event(name, start, end, thread=7, device_type="DeviceType.CUDA")


def read(*events: Any) -> list[tuple[Any, ...]]:
    """Spans in milliseconds."""
    return [
        (span.kind, span.what, round(1e3 * span.start, 6), round(1e3 * span.end, 6), span.lane)
        for span in spans_of(events, began=0.0)
    ]


def test_operations_compute_and_what_sends_or_labels_does_not() -> None:
    spans = read(
        label("DistributedDataParallel.forward", 0, 12),
        event("aten::mm", 10, 20),
        event("aten::copy_", 12, 15),
        event("aten::mm", 20.05, 30),
        event("c10d::allreduce_", 20, 40),
        event("torch.distributed.ddp.reducer::copy_bucket_to_grad", 30, 50),
        event("aten::add_", 45, 46),
    )
    assert spans == [("computes", "operations", 10, 30, 0), ("computes", "operations", 45, 46, 0)]


def test_collectives_that_overlap_have_lanes_of_their_own() -> None:
    carried = [(10, 20), (12, 30), (21, 25), (31, 32)]
    spans = read(*[event("gloo:all_reduce", *each, thread=2, is_user_annotation=True) for each in carried])
    assert [(what, lane) for _, what, _, _, lane in spans] == [
        ("all_reduce 1", 0),
        ("all_reduce 2", 1),
        ("all_reduce 3", 0),
        ("all_reduce 4", 0),
    ]


def test_where_a_gpu_computes_its_kernels_count() -> None:
    spans = read(
        label("backward", 0, 5),
        event("aten::mm", 0, 5),
        label("nccl:all_reduce", 4, 5),
        kernel("ampere_sgemm_128x64_nn", 10, 20),
        kernel("vectorized_elementwise_kernel", 20.01, 30),
        kernel("Memcpy DtoH (Device -> Pinned)", 35, 40),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 25, 45),
    )
    assert spans == [("computes", "kernels", 10, 30, 0), ("sends", "all_reduce 1", 25, 45, 0)]


@pytest.mark.parametrize(
    ("computes", "sends", "share"),
    [
        ([(0, 10)], [(5, 15)], 0.5),
        ([(0, 10)], [(6, 9), (8, 12)], 4 / 6),
        ([(0, 4), (2, 6), (8, 9)], [(3, 9)], 4 / 6),
        ([], [(2, 3)], 0.0),
    ],
)
def test_overlap_is_a_share_of_the_time_of_sending(computes: Any, sends: Any, share: float) -> None:
    spans = [Span("computes", "forward", *each) for each in computes]
    spans += [Span("sends", "all_reduce 1", *each) for each in sends]
    assert overlap(spans) == pytest.approx(share)


def test_without_a_collective_there_is_no_overlap() -> None:
    with pytest.raises(ValueError, match="no collective"):
        overlap([Span("computes", "forward", 0, 1)])
