"""The figures that `play` drives: their arithmetic by hand, their words, what they refuse; they are whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from course_lib import (
    global_batch,
    loader_timeline,
    memory_use,
    message_cost,
    rank_grid,
    sampler_map,
    step_timeline,
)
from course_lib.figures.models import GIB, MIB, message_seconds
from course_lib.figures.style import Picture
from tests.support.pictures import is_whole, overlapping


def seen(picture: Any, epochs: int) -> list[list[set[int]]]:
    """Return the samples of each rank, by epoch, as the numbers in the cells say."""
    lines = {line.get_label(): line.get_xydata() for line in picture.figure.axes[0].lines}
    ranks = [lines[name] for name in sorted(lines) if name.startswith("rank")]
    return [[{int(x) for x, y in cells if int(y) == epoch} for epoch in range(epochs)] for cells in ranks]


def test_who_sees_which_sample() -> None:
    padded = sampler_map(5, 2, 1, shuffle=False)
    assert seen(padded, 1) == [[{0, 2, 4}], [{1, 3, 0}]]  # every second; the first again, to have six
    assert seen(sampler_map(5, 2, 1, shuffle=False, drop_last=True), 1) == [[{0, 2}], [{1, 3}]]


def test_who_calls_set_epoch_decides_what_changes() -> None:
    told = {who: seen(sampler_map(12, 2, set_epoch=who), 2) for who in ("all", "rank 0", "nobody")}
    first, second = told["all"]
    assert first[0] != first[1]
    assert first[1] | second[1] == set(range(12))
    assert [mine[0] == mine[1] for mine in told["nobody"]] == [True, True]
    assert told["rank 0"] == [first, told["nobody"][1]]
    assert sampler_map(12, 2, set_epoch="nobody").alt.startswith(
        "In 2 epochs 0 samples seen more than once, 0 by nobody. 12 samples, 2 ranks. Epoch 0, 1: the ranks"
    )
    assert sampler_map(5, 2, 1, shuffle=False).alt.startswith(
        "In 1 epoch 1 samples seen more than once, 0 by"
    )


def test_a_message_costs_latency_and_bytes() -> None:
    assert message_seconds(2e9, 1e-3, 4e9) == pytest.approx(0.501)
    half = message_cost(kib=1000, alpha_us=1024, gb_per_s=1)  # 1,024,000 bytes at 1 GB/s: 1.024 ms
    assert half.alt.startswith("1000 KiB over this machine: 2.05 ms, 50% of it latency.")
    assert "PCIe: 49 µs; NVLink: 21.1 µs; InfiniBand: 109 µs." in half.alt


def test_a_bucket_leaves_when_it_is_full_and_the_link_is_free() -> None:
    # two buckets, each 1.75 · 49 MiB / 0.125 GB/s + 14 · 14 µs = 719.5 ms; the first leaves after 64.5 ms
    picture = step_timeline(49, 1, 8)
    assert picture.alt.startswith("1.41e+03 ms exposed, 32.5 ms hidden: 49 MiB a bucket, 1 Gbit/s, 8 ranks.")
    assert picture.alt.endswith("2 all_reduces, the last ends at 1504 ms.")
    # the last one has what is left: 38 MiB
    assert step_timeline(60, 100, 8).alt.startswith("5.77 ms exposed, 9 ms hidden: 60 MiB a bucket")


def test_what_backward_hides_and_what_not() -> None:
    # two buckets, each 1.75 · 49 MiB / 12.5 GB/s + 14 · 14 µs = 7.39 ms; the first leaves in mid-backward
    assert step_timeline(49, 100, 8).alt == (
        "7.39 ms exposed, 7.39 ms hidden: 49 MiB a bucket, 100 Gbit/s, 8 ranks. "
        "Forward takes 32 ms, backward 65 ms; 2 all_reduces, the last ends at 104 ms."
    )
    assert step_timeline(ranks=1).alt.startswith(
        "0 ms exposed, 0 ms hidden: 25 MiB a bucket, 10 Gbit/s, 1 rank."
    )


@pytest.mark.parametrize(
    ("options", "each"),
    [
        (("Adam", "float32", "DDP"), (4, 4, 8)),
        (("SGD", "float32", "DDP"), (4, 4, 0)),
        (("SGD, momentum", "float32", "DDP"), (4, 4, 4)),
        (("Adam", "bf16 mixed", "DDP"), (2, 2, 12)),
        (("SGD", "bf16 mixed", "DDP"), (2, 2, 4)),
        (("Adam", "float32", "ZeRO-1"), (4, 4, 2)),
        (("Adam", "bf16 mixed", "FSDP"), (0.5, 0.5, 3)),
    ],
)
def test_bytes_of_a_parameter_on_one_of_four_ranks(
    options: tuple[str, str, str], each: tuple[float, float, float]
) -> None:
    weights, gradients, optimizer = each
    activations = 1 if "bf16" in options[1] else 2
    picture = memory_use(GIB / 1e6, 4, *options, activations_mib_per_sample=1024, batch=2)
    assert (
        f"(weights {weights:.1f}, gradients {gradients:.1f}, optimizer {optimizer:.1f}, "
        f"activations {activations:.1f})"
    ) in picture.alt


def test_it_fits_or_not() -> None:
    model = {"parameters_millions": GIB / 1e6, "activations_mib_per_sample": 512, "batch": 4}  # 16 + 2 GiB
    assert memory_use(**model, gpu_gib=24).alt.startswith("Fits, with 6.0 GiB to spare: 1,073.74 million")
    assert memory_use(**model, gpu_gib=16).alt.startswith("Does not fit, by 2.0 GiB")
    assert "a rank needs: 4.0 (weights 0.5, gradients 0.5, optimizer 1.0, activations 2.0)" in (
        memory_use(**model, ranks=8, sharding="FSDP").alt
    )
    assert MIB * 1024 == GIB


def test_a_rank_is_counted_node_by_node() -> None:
    assert rank_grid(2, 3).alt == (
        "World size 6: rank = node · 3 + local rank. node 0: ranks 0, 1, 2; node 1: ranks 3, 4, 5. "
        "torchrun --nnodes=2 --nproc-per-node=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT train.py. "
        "In the last rank: RANK=5  LOCAL_RANK=2  WORLD_SIZE=6."
    )
    assert "torchrun --standalone --nproc-per-node=4 train.py" in rank_grid(1).alt


def test_a_step_uses_batch_times_ranks_times_pieces() -> None:
    assert global_batch(48, 1, 2).alt.startswith("Global batch 96: 180 steps, 0 all_reduces, ")
    assert global_batch(24, 4, 2).alt == (
        "Global batch 192: 90 steps, 90 all_reduces, learning rate 0.016. "
        "Ranks: 4; pieces on each: 2, of 24 samples."
    )


def when(picture: Any, phase: str) -> list[tuple[float, float]]:
    """Return the first four bars of a phase, in seconds: where each begins and ends."""
    (bars,) = (each for each in picture.figure.axes[0].containers if each.get_label() == phase)
    return [(round(bar.get_x(), 9), round(bar.get_x() + bar.get_width(), 9)) for bar in bars][:4]


def test_a_step_waits_for_the_worker_whose_turn_it_is() -> None:
    computes = [when(loader_timeline(workers, 3000, 2000), "computes") for workers in (0, 1, 2)]
    starts = [[start for start, _ in bars] for bars in computes]
    assert starts == [[3, 8, 13, 18], [3, 6, 9, 12], [3, 5, 7, 9]]
    assert loader_timeline(2, 100, 40).alt == (
        "2 workers: a step takes 50 ms, and the GPU waits for 20% of it. "
        "A batch takes 100 ms to load, the rest of a step 40 ms."
    )
    assert loader_timeline(0, 100, 25).alt.startswith(
        "No workers: a step takes 125 ms, and the GPU waits for 80"
    )


def test_a_worker_is_at_most_two_batches_ahead() -> None:
    picture = loader_timeline(1, 1000, 5000)
    assert when(picture, "loads a batch") == [(0, 1), (1, 2), (2, 3), (6, 7)]
    assert when(picture, "computes") == [(1, 6), (6, 11), (11, 16), (16, 21)]


@pytest.mark.parametrize(
    "figure",
    [
        sampler_map,
        partial(sampler_map, 40, 8, 4, set_epoch="rank 0"),
        partial(sampler_map, 1, 8, 1, drop_last=True),
        message_cost,
        partial(message_cost, "InfiniBand", 2**20),
        step_timeline,
        partial(step_timeline, 1, 400, 64),
        partial(step_timeline, 5, 1, 8),
        partial(step_timeline, ranks=1),
        memory_use,
        partial(memory_use, 100_000, 64, "SGD, momentum", "bf16 mixed", "ZeRO-1", 0, 1, 80),
        rank_grid,
        partial(rank_grid, 8, 8),
        partial(rank_grid, 1, 1),
        global_batch,
        partial(global_batch, 1024, 16, 8),
        partial(global_batch, ranks=1),
        loader_timeline,
        partial(loader_timeline, 0),
        partial(loader_timeline, 16, 400, 10),
    ],
)
def test_nothing_overlaps_and_nothing_is_cut(figure: Callable[[], Picture]) -> None:
    picture = figure()
    assert re.search("[a-z]", picture.alt)
    assert picture.png().startswith(b"\x89PNG")
    assert overlapping(picture.figure) == []
    assert is_whole(picture.figure)
