"""Live tensors: storages counted once, under their first owner, while they live; the peak of operations."""

from __future__ import annotations

import threading

import torch
from torch import nn

from course_lib import LiveMemory, LivePeak, launch
from course_lib.measure.live_memory import BUFFERS, REST

KIB = 1024


def block(kib: int = 1) -> torch.Tensor:
    return torch.zeros(kib * KIB, dtype=torch.uint8)


def test_bytes_by_owner_and_kind() -> None:
    memory, a, b, c = LiveMemory(), block(1), block(2), block(4)
    memory.note("device 0", "parameters", [a, b])
    memory.note("device 0", "gradients", [None, c, torch.zeros(9, device="meta")])
    memory.note("device 1", "parameters", iter([block(8)]))  # freed at once
    assert memory.bytes() == {"device 0": {"parameters": 3 * KIB, "gradients": 4 * KIB}}
    memory.note("device 1", "activations", [a, *c.chunk(4)])
    assert list(memory.bytes()) == ["device 0"], "a storage belongs to who noted it first, with its views"


def test_what_is_freed_counts_no_longer_and_its_address_may_serve_another() -> None:
    memory, kept = LiveMemory(), block()
    memory.note(0, "kept", [kept])
    for _ in range(100):  # the allocator hands the same memory out again and again
        passing = block()
        memory.note(1, "passing", [passing])
        assert memory.bytes() == {0: {"kept": KIB}, 1: {"passing": KIB}}
        del passing
        assert memory.bytes() == {0: {"kept": KIB}}


def test_a_view_keeps_the_storage_alive() -> None:
    memory, whole = LiveMemory(), block(4)
    memory.note(0, "batch", [whole])
    part = whole[:1]
    del whole
    assert memory.bytes() == {0: {"batch": 4 * KIB}}
    del part
    assert memory.bytes() == {}


def test_activations_are_what_backward_needs_and_live_until_then() -> None:
    memory, model = LiveMemory(), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    memory.note(0, "parameters", model.parameters())
    with memory.saving(0):
        loss = model(x).sum()
    parameters = (8 * 16 + 16 + 16 * 4 + 4) * 8
    hidden = 5 * 16 * 8  # tanh's output, which the second layer saves as well
    batch = 5 * 8 * 8  # the first layer's input
    assert memory.bytes() == {0: {"parameters": parameters, "activations": hidden + batch}}
    found = torch.autograd.grad(loss, list(model.parameters()))
    kept = {"parameters": parameters, "activations": batch}
    assert memory.bytes() == {0: kept}, "x is alive, hidden is not"
    for one, other in zip(found, torch.autograd.grad(model(x).sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_each_thread_notes_for_its_own_owner() -> None:
    memory, kept, together = LiveMemory(), list[torch.Tensor](), threading.Barrier(2)

    def forward(rows: int) -> None:
        x = torch.randn(rows, 64, requires_grad=True)
        with memory.saving(rows):
            together.wait(60)
            kept.append(x.exp())  # which saves its result
            together.wait(60)

    threads = [threading.Thread(target=forward, args=[rows]) for rows in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.bytes() == {rows: {"activations": rows * 64 * 4} for rows in (1, 2)}


def test_a_result_that_is_freed_counts_for_the_peak() -> None:
    kept = torch.zeros(KIB // 4)
    with LivePeak(lambda: {"kept": [kept]}) as live:
        (kept + 1).mul_(2)  # two operations; the sum is gone afterwards
        kept.add_(1)
    assert live.at_peak == {"kept": KIB, REST: KIB}
    assert live.bytes() == {"kept": KIB}
    assert live.history == [2 * KIB, 2 * KIB, KIB]


def test_views_count_once_and_what_existed_before_counts_when_it_is_used() -> None:
    before = torch.zeros(KIB)
    with LivePeak() as live:
        parts = before.chunk(4)
        parts[0].add_(1)
    assert sum(live.at_peak.values()) == 4 * KIB


def test_the_first_kind_has_a_storage_and_none_is_skipped() -> None:
    weight = torch.zeros(KIB)
    with LivePeak(lambda: {"a": [None, weight], "b": [weight[:1]]}) as live:
        weight.add_(1)
    assert live.at_peak == {"a": 4 * KIB}


def test_steps_that_do_not_count_leave_only_what_they_made() -> None:
    with LivePeak() as live:
        live.counting = False
        kept = torch.zeros(KIB)
        torch.zeros(2 * KIB)
        live.counting = True
        torch.zeros(1)
    assert live.history == [kept.nbytes + 4]
    assert [made for _, _, made, _ in live.largest] == ["aten.zeros", "aten.zeros"]


def test_the_largest_are_named_by_what_made_them() -> None:
    x = torch.ones(8, 4)
    with LivePeak() as live:
        x.t().contiguous()
    assert [each[0] for each in live.largest] == [128, 128]
    assert {each[2] for each in live.largest} == {"made before", "aten.clone"}


def test_collectives_have_a_name_and_the_bytes_of_the_whole_tensor() -> None:
    def work() -> tuple[list[tuple[str, int]], dict[str, int]]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        whole, part = torch.ones(KIB), torch.empty(KIB // 2)
        with LivePeak() as live:
            dist.all_reduce(whole)
            dist.reduce_scatter(part, list(whole.chunk(2)))
            dist.all_gather(list(whole.chunk(2)), part)
            dist.broadcast(part, 0)
            dist.barrier()
        return live.collectives, live.bytes()

    calls, alive = launch(work, nprocs=2, device="cpu", dashboard=False).results[0]
    sizes = [4 * KIB, 4 * KIB, 4 * KIB, 2 * KIB]
    assert calls == list(zip(["all_reduce", "reduce_scatter", "all_gather", "broadcast"], sizes, strict=True))
    assert alive[BUFFERS] >= 6 * KIB


def test_a_dtensor_counts_with_its_part() -> None:
    def work() -> dict[str, int]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        model = nn.Linear(16, 16, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        shards = list(model.parameters())
        with LivePeak(lambda: {"shards": shards, "gathered": model.parameters()}) as live:
            with torch.no_grad():
                model(torch.ones(1, 16))
            model.reshard()
        dist.barrier()
        return {"peak": live.at_peak["gathered"], **live.bytes()}

    found = launch(work, nprocs=2, device="cpu", dashboard=False).results[0]
    assert found["peak"] == 1024
    assert found["shards"] == 512
    assert "gathered" not in found


def test_the_most_of_each_kind_is_of_a_moment_of_its_own() -> None:
    """When `b` is at its most, `a` has gone."""
    held: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    with LivePeak(lambda: held) as live:
        for kind, size in (("a", KIB), ("b", 2 * KIB)):
            held[kind].append(torch.zeros(size))
            held[kind][0].add_(1)
            held[kind].clear()
    assert (live.most["a"], live.most["b"]) == (4 * KIB, 8 * KIB)
