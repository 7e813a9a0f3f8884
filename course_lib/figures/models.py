"""Pictures for `play`: each applies a rule of the course to the values of the picture's sliders."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .charts import stacked_bars
from .shards import shard_map
from .style import Picture, figure_with_margins, ink_on, rank_color, styled, without_lines
from .timeline import Bar, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIB, MIB, GIB = 2**10, 2**20, 2**30


def sampler_map(
    samples: int = 13,
    ranks: int = 3,
    epochs: int = 2,
    shuffle: bool = True,
    drop_last: bool = False,
    set_epoch: str = "all",
) -> Picture:
    """Draw which rank sees which sample, from the indices of torch's own `DistributedSampler` (lesson 07).

    There is room for 40 samples, 8 ranks and 24 epochs. `shuffle` and `drop_last` are the sampler's options.
    Who calls ``sampler.set_epoch(epoch)`` before each epoch: ``"all"``, ``"rank 0"`` or ``"nobody"``.
    """
    from torch.utils.data import DistributedSampler

    callers = {"all": range(ranks), "rank 0": range(1), "nobody": range(0)}[set_epoch]
    seen: list[list[list[int]]] = []  # by rank, by epoch
    for rank in range(ranks):
        data: Any = range(samples)  # a sampler asks for its length alone
        sampler: Any = DistributedSampler(data, ranks, rank, shuffle=shuffle, drop_last=drop_last)
        seen.append([])
        for epoch in range(epochs):
            if rank in callers:
                sampler.set_epoch(epoch)
            seen[rank].append(list(sampler))
    counts = [Counter(index for mine in seen for index in mine[epoch]) for epoch in range(epochs)]
    twice = sum(count > 1 for epoch in counts for count in epoch.values())
    missed = sum(samples - len(epoch) for epoch in counts)
    title = f"In {epochs} epoch{'s' * (epochs > 1)} {twice} samples seen more than once, {missed} by nobody"
    return shard_map(seen, samples, title)


# α in seconds and bytes/s of all_reduces, as others measured them. α is the time of the smallest; bytes/s are
# nccl-tests' bus bandwidth for the largest, where an all_reduce over n ranks counts 2(n − 1)/n of its bytes.
LINKS = {
    "PCIe": (24e-6, 41e9),  # 8 RTX PRO 6000, PCIe 5 with P2P: voipmonitor/rtx6kpro, May 2026
    "NVLink": (19e-6, 482e9),  # 8 H200, NVLink 4 with NVLS: S. Bekman, ml-engineering, October 2026
    # 3 nodes of 8 A100, 4 × HDR: nccl-tests issue 119; α of 4 nodes of 8 B200 over EFA: ml-engineering, too
    "InfiniBand": (98e-6, 96e9),
}


def message_cost(
    link: str = "this machine", kib: float = 1024, alpha_us: float = 750, gb_per_s: float = 1.1
) -> Picture:
    """Draw the time of a message against its size over four links, with a star on one link (lesson 09).

    `link` is ``"this machine"``, ``"PCIe"``, ``"NVLink"`` or ``"InfiniBand"``. `alpha_us` and `gb_per_s` (10⁹
    bytes) are this machine's latency and bandwidth, by default those of two CPU ranks with gloo.
    """
    links = {"this machine": (1e-6 * alpha_us, 1e9 * gb_per_s), **LINKS}
    chosen, took = kib * KIB, message_seconds(kib * KIB, *links[link])
    sizes, times = [2**power for power in range(6, 31)], [10**power for power in range(-5, 2)]
    title = f"{_size(chosen)} over {link}: {_time(took)}, {links[link][0] / took:.0%} of it latency"
    figure, axes = figure_with_margins(7.2, 3.6, left=0.94, top=0.29, bottom=0.83)
    with styled():
        for name, costs in links.items():
            look = {"linewidth": 3} if name == link else {"linestyle": (0, (2, 2)), "linewidth": 1.5}
            axes.plot(sizes, [message_seconds(size, *costs) for size in sizes], label=name, **look)
        axes.plot(chosen, took, "*", color="black", markersize=13, zorder=4, label="your message")
        axes.set(title=title, xlabel="size of the message", ylabel="time", ylim=(1e-5, 10), yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::4], list(map(_size, sizes[::4])))
        axes.set_yticks(times, list(map(_time, times)))
        axes.minorticks_off()
        figure.legend(loc="lower center", ncols=5, columnspacing=1.2)
    words = "; ".join(f"{name}: {_time(message_seconds(chosen, *costs))}" for name, costs in links.items())
    return Picture(figure, f"{title}. Time against size, both logarithmic. {_size(chosen)} over {words}.")


def message_seconds(size: float, alpha: float, bandwidth: float) -> float:
    """Return α + S/β′ in seconds, of `size` bytes at `bandwidth` bytes/s (β′ = 1/β; Hockney 1994)."""
    return alpha + size / bandwidth


def _size(size: float) -> str:
    units = (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")
    scale, unit = next(each for each in units if size >= each[0])
    return f"{size / scale:g} {unit}"


def _time(seconds: float) -> str:
    scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{scale * seconds:.3g} {unit}"


# ResNet-50 in float32 on a V100: 25.6 million parameters, 97 ms a step of 32 pictures (pytorch,
# benchmarks/distributed/ddp, torch 1.4), of which a third is counted as forward
GRADIENTS_MIB, FORWARD_MS, BACKWARD_MS = 98, 32, 65
STEP_ALPHA = 14e-6  # seconds a step of the ring between nodes: NCCL's own model of a network (lesson 14)


def step_timeline(bucket_mib: float = 25, gbit_per_s: float = 10, ranks: int = 8) -> Picture:
    """Draw a step of ResNet-50 under DDP: how much of the all_reduces `backward` hides (lesson 14).

    `gbit_per_s` is the bandwidth of the link between neighbours in the ring, 10⁹ bits/s.
    """
    begin, done = FORWARD_MS / 1e3, (FORWARD_MS + BACKWARD_MS) / 1e3
    sent = bucket_spans(bucket_mib * MIB, 1e9 / 8 * gbit_per_s, ranks, GRADIENTS_MIB * MIB, begin, done)
    bars: list[Bar] = [("computes", "forward", 0.0, begin), ("computes", "backward", begin, done)]
    hidden = [("sends", "hidden", start, min(end, done)) for start, end in sent if start < done]
    exposed = [("sends", "exposed", max(start, done), end) for start, end in sent if end > done]
    left, behind = (sum(end - start for *_, start, end in part) for part in (exposed, hidden))
    title = f"{1e3 * left:.3g} ms exposed, {1e3 * behind:.3g} ms hidden: "
    title += f"{bucket_mib:g} MiB a bucket, {gbit_per_s:g} Gbit/s, {ranks} rank{'s' * (ranks > 1)}"
    picture = timeline([*bars, *hidden, *exposed], title, first=("forward", "backward", "hidden", "exposed"))
    picture.alt = (
        f"{title}. Forward takes {FORWARD_MS} ms, backward {BACKWARD_MS} ms; "
        f"{len(sent)} all_reduces, the last ends at {1e3 * max([done, *(end for _, end in sent)]):.0f} ms."
    )
    return picture


def bucket_spans(
    bucket: float, bandwidth: float, ranks: int, gradients: float, begin: float, end: float
) -> list[tuple[float, float]]:
    """Return when each bucket's all_reduce begins and ends, in seconds (lessons 14 and 19).

    `backward` computes the gradients, in bytes, evenly from `begin` to `end`. A bucket leaves when it is full
    and the one before has arrived. Round a ring it takes 2(n − 1) α + 2(n − 1)/n · S / bandwidth (bytes and
    bytes/s; Patarasuk and Yuan 2009). All buckets have one size, although DDP's first one is smaller.
    """
    spans, full, free = [], 0.0, begin
    while ranks > 1 and full < gradients:
        size = min(bucket, gradients - full)
        full += size
        start = max(free, begin + (end - begin) * full / gradients)
        free = start + 2 * (ranks - 1) * STEP_ALPHA + 2 * (ranks - 1) / ranks * size / bandwidth
        spans.append((start, free))
    return spans


BYTES = {"float32": (4, 4, 0), "bf16 mixed": (2, 2, 4)}  # a parameter: weight, gradient, float32 copy
STATES = {"Adam": 8, "SGD, momentum": 4, "SGD": 0}
SHARDED = {"DDP": (), "ZeRO-1": ("optimizer",), "FSDP": ("weights", "gradients", "optimizer")}


def memory_use(
    parameters_millions: float = 340,
    ranks: int = 8,
    optimizer: str = "Adam",
    precision: str = "float32",
    sharding: str = "DDP",
    activations_mib_per_sample: float = 2000,
    batch: int = 8,
    gpu_gib: float = 24,
) -> Picture:
    """Draw the memory that training needs on each GPU, beside the GPU's own (lessons 02 and 18).

    The default is BERT-large with 512 tokens; its activations are the memory that Hugging Face transformers'
    documentation (January 2022) measured, minus 16 bytes a parameter.

    The optimizer is ``"Adam"``, ``"SGD"`` or ``"SGD, momentum"``, the precision ``"float32"`` or
    ``"bf16 mixed"``, the sharding ``"DDP"``, ``"ZeRO-1"`` or ``"FSDP"``. The batch is that of one rank.

    In float32 with Adam, a parameter takes 4 + 4 + 8 = 16 bytes. In bf16 mixed it takes 2 + 2 + 12, with 4 of
    the 12 for a float32 copy (ZeRO, Rajbhandari et al. 2020, section 3.1); ``torch.autocast`` keeps float32
    weights and gradients instead. Activations, given in float32, are halved in bf16. ZeRO-1 divides the
    optimizer's part by the ranks, FSDP all three. DDP's buckets, FSDP's gathered layer and CUDA are left out.
    """
    weight, gradient, copy = BYTES[precision]
    each = {"weights": weight, "gradients": gradient, "optimizer": copy + STATES[optimizer]}
    shares = {name: ranks if name in SHARDED[sharding] else 1 for name in each}
    parts = {name: 1e6 * parameters_millions * size / shares[name] / GIB for name, size in each.items()}
    parts["activations"] = activations_mib_per_sample / 1024 * batch * weight / 4
    free = gpu_gib - sum(parts.values())
    verdict = f"Fits, with {free:,.1f} GiB to spare" if free >= 0 else f"Does not fit, by {-free:,.1f} GiB"
    bars = {"a rank needs": parts, "its GPU has": {"the GPU": gpu_gib}}
    title = f"{verdict}: {parameters_millions:,g} million parameters, {sharding if ranks > 1 else 'one GPU'}"
    return stacked_bars(bars, title, "memory, GiB")


def rank_grid(nodes: int = 2, gpus: int = 4) -> Picture:
    """Draw the ranks of a job: a row for each node, a column for each local rank (lessons 04 and 08).

    Below it are the command for each node, and the variables that torchrun sets for the last rank. There is
    room for 8 nodes of 8 GPUs.
    """
    world = nodes * gpus
    ranks = [[str(node * gpus + local) for local in range(gpus)] for node in range(nodes)]
    title = f"World size {world}: rank = node · {gpus} + local rank"
    last = f"the last rank: RANK={world - 1}  LOCAL_RANK={gpus - 1}  WORLD_SIZE={world}"
    command = [f"torchrun --standalone --nproc-per-node={gpus} train.py"]
    if nodes > 1:
        command = [f"torchrun --nnodes={nodes} --nproc-per-node={gpus}"]
        command += ["--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT train.py"]
    height = 1.6 + 0.4 * nodes
    figure, axes = figure_with_margins(6.4, height, left=0.77, top=0.32, bottom=1.2, right=0.07)
    with styled():
        _boxes(axes, ranks, [f"node {node}" for node in range(nodes)], list(map(str, range(gpus))))
        axes.set(xlim=(0, gpus), ylim=(nodes, 0), title=title, xlabel="local rank (the GPU on its node)")
        below = {"family": "monospace", "size": 8, "va": "bottom", "linespacing": 1.5}
        figure.text(0.01, 0.08 / height, " \\\n    ".join(command) + f"\n{last}", **below)
    words = "; ".join(f"node {node}: ranks {', '.join(row)}" for node, row in enumerate(ranks))
    return Picture(figure, f"{title}. {words}. {' '.join(command)}. In {last}.")


def global_batch(batch_size: int = 48, ranks: int = 8, pieces: int = 1) -> Picture:
    """Draw one step of the optimizer: a row for each rank, a box for each piece, one all_reduce (lesson 11).

    An epoch has 17,280 samples. The learning rate is 0.004 for a global batch of 48, and k times that for k
    times as many samples. There is room for 16 ranks with 8 pieces.
    """
    from matplotlib.patches import Rectangle

    size = batch_size * ranks * pieces
    steps = 17_280 // size
    title = f"Global batch {size:,}: {steps:,} steps, {steps * (ranks > 1):,} all_reduces, "
    title += f"learning rate {0.004 * size / 48:.3g}"
    figure, axes = figure_with_margins(7.2, 0.8 + 0.28 * ranks, left=0.72, top=0.3, bottom=0.3, right=0.07)
    with styled():
        rows, columns = [f"rank {i}" for i in range(ranks)], [f"piece {i + 1}" for i in range(pieces)]
        _boxes(axes, [[str(batch_size)] * pieces] * ranks, rows, columns)
        edge = 0.06 * pieces
        if ranks > 1:
            axes.add_patch(Rectangle((pieces + edge / 4, 0.1), edge, ranks - 0.2, color="#888888"))
            axes.text(pieces + 1.5 * edge, ranks / 2, "all_reduce", va="center")
        axes.set(xlim=(0, pieces + 4.5 * edge), ylim=(ranks, 0), title=title)
    return Picture(figure, f"{title}. Ranks: {ranks}; pieces on each: {pieces}, of {batch_size} samples.")


def _boxes(axes: Axes, texts: list[list[str]], rows: list[str], columns: list[str]) -> None:
    """Draw rows of boxes of size 1, each with a text; a row has a rank's colour."""
    for y, row in enumerate(texts):
        places = [(x + 0.03, 0.94) for x in range(len(row))]
        axes.broken_barh(places, (y + 0.08, 0.84), color=rank_color(y))
        for x, text in enumerate(row):
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink_on(y))
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    without_lines(axes)


def loader_timeline(workers: int = 1, load_ms: float = 150, rest_ms: float = 60) -> Picture:
    """Draw one GPU and the workers of its loader, and when the GPU waits for a batch (lesson 15).

    The workers, at most 16, take turns to load whole batches, each at most two ahead, as in a `DataLoader`.
    Without workers, the rank loads between two steps. Loading a batch takes a process `load_ms`; the rest of
    a step takes `rest_ms`.
    """
    load, rest = load_ms / 1e3, rest_ms / 1e3
    row = "worker {}" if workers else "the rank"
    bars: list[Bar] = []
    loaded, taken = [0.0] * workers, [0.0] * 2 * workers  # by batch, when; as if there were some before
    done = 0.0
    for batch in range(max(8, 2 * workers)):
        begin = max(loaded[-workers], taken[-2 * workers]) if workers else done
        loaded.append(begin + load)
        taken.append(max(loaded[-1], done))
        bars += [("GPU", "waits", done, taken[-1])] if taken[-1] > done else []
        done = taken[-1] + rest
        bars.append(("GPU", "computes", taken[-1], done))
        bars.append((row.format(batch % max(1, workers)), "loads a batch", begin, loaded[-1]))
    step = max(rest, load / workers) if workers else load + rest
    title = f"{workers or 'No'} worker{'s' * (workers != 1)}: a step takes {1e3 * step:.0f} ms, "
    title += f"and the GPU waits for {1 - rest / step:.0%} of it"
    picture = timeline(bars, title, first=("computes", "waits", "loads a batch"))
    picture.alt = f"{title}. A batch takes {load_ms:g} ms to load, the rest of a step {rest_ms:g} ms."
    return picture
