"""What lesson 18 and its deeper notebooks share: a network of blocks, ways to train it, what a rank holds.

from scripts.sharded import Net, join, train_step  # in a notebook of the folder lessons
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from course_lib import LivePeak, digits, launch

from .common import join as join_group
from .common import wrapped

GLOBAL = 60  # samples a step on all ranks together, where we compare with one device
MIB = 2**20
adam = partial(torch.optim.Adam, lr=0.001, foreach=False)  # one parameter after the other, on a GPU, too


class Block(nn.Module):
    """Inside four times as wide as outside, like the blocks of a transformer."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Many equal blocks, as large models have them, between a first and a last layer."""

    def __init__(self, width, blocks):
        super().__init__()
        self.first = nn.Linear(784, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 10)
        self.recompute = False  # activation checkpointing (lesson 11)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.last(x)


PARAMETERS = sum(each.numel() for each in Net(128, 6).parameters())


def join():
    """Join the group, and return this rank's device: the CPU, unless each rank has a GPU of its own."""
    device = join_group()
    torch.set_num_threads(1)  # a CPU rank is one core
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def shares(steps, size, device, dtype=torch.float32):
    """This rank's part of each global batch of `size` samples: every n-th sample."""
    data, rank, ranks = digits(), dist.get_rank(), dist.get_world_size()
    for i in range(0, steps * size, size):
        mine = slice(i + rank, i + size, ranks)
        images = (data.data[mine] / 255 - 0.16) / 0.29
        yield images.to(device, dtype), data.targets[mine].to(device, copy=True)


def train_step(model, optimizer, images, labels):
    getattr(optimizer, "zero_grad", model.zero_grad)()  # ShardedAdam has none
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def alone(model, device):
    return model, adam(model.parameters())


def with_ddp(model, device, **options):
    ddp = wrapped(model, device, **options)
    return ddp, adam(ddp.parameters())


def mesh_of(*shape):
    """Ranks in a row, or in rows: the last dimension shards, the first of two replicates."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def with_fsdp(model, device, keep=False, mesh=None):
    """FSDP; freed after the forward pass, unless `keep`, are here the model's own layers, too."""
    mesh = mesh or mesh_of(dist.get_world_size())
    for part in (*model.blocks, model):  # from the inside out
        fully_shard(part, mesh=mesh, reshard_after_forward=not keep)
    return model, adam(model.parameters())


def weights_of(model):
    """All weights in one vector, on the CPU; every rank has to call it."""
    whole = [getattr(each, "full_tensor", each.detach)() for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole]).cpu()


def kinds_of(model, optimizer):
    """For `LivePeak`: which of a rank's tensors are what."""
    own = [each.detach() for each in model.parameters()]  # under FSDP: this rank's shards
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer wraps another optimizer
    part = getattr(optimizer, "mine", None)  # ShardedAdam's own copy of its part

    def kinds():
        now = [*model.parameters(), *([] if part is None else [part])]
        return {
            "weights": [*own, part],
            "gathered weights": now,
            "gradients": [each.grad for each in now],
            "Adam's averages": [each for of_one in inner.state.values() for each in of_one.values()],
        }

    return kinds


KINDS = ["weights", "gathered weights", "gradients", "Adam's averages", "collectives' buffers"]
KINDS += ["activations and results in between"]


def measured(ways, batch=128, every_rank=False):
    """The third step of each way: its peak, the most of each kind, what is kept afterwards, and more."""
    device, found = join(), {}
    counts = every_rank or dist.get_rank() == 0  # counting takes longer than training
    for name, way in ways.items():
        torch.manual_seed(0)
        model, optimizer = way(Net(128, 6).to(device), device)
        ((images, labels),) = shares(1, batch * dist.get_world_size(), device)
        live = LivePeak(kinds_of(model, optimizer))
        with live if counts else nullcontext():
            for samples in (2, 2, batch):  # the first two steps make what then stays: a few will do
                live.counting = samples == batch
                train_step(model, optimizer, images[:samples], labels[:samples])
        dist.barrier()  # by then gloo's threads have let go of what they sent
        found[name] = {"peak": live.at_peak, "kept": live.bytes(), "history": live.history}
        found[name] |= {"most": live.most, "largest": live.largest[:8], "collectives": live.collectives}
    return found


def of_rank_0(ways, ranks, **options):
    return launch(measured, ways, nprocs=ranks, dashboard=False, **options).results[0]


def in_mib(found):
    """What `stacked_bars` draws: the MiB of each kind at the peak, by name."""
    return {name: {kind: of["peak"].get(kind, 0) / MIB for kind in KINDS} for name, of in found.items()}


def each_parameter(found):
    """Print the bytes for each parameter that stay between two steps, a column for each kind."""
    kinds = dict.fromkeys(kind for of in found.values() for kind in of["kept"])
    heads = [kind.split(" and ")[0].split()[-1] for kind in kinds]
    print(" " * 22, *(f"{head:>11}" for head in [*heads, "all"]))
    for name, of in found.items():
        sizes = [of["kept"].get(kind, 0) / PARAMETERS for kind in kinds]
        print(f"{name:22}", *(f"{size:11.2f}" for size in [*sizes, sum(sizes)]))


def called(collectives):
    """How often each collective was called, and the bytes of its tensors over those of all weights."""
    totals = {}
    for name, size in collectives:
        calls, whole = totals.get(name, (0, 0))
        totals[name] = calls + 1, whole + size / (4 * PARAMETERS)
    return totals


def trained(ways, steps=5, samples=GLOBAL):
    """All weights after each step of each way: a tensor (steps, weights). In float64, as in lesson 06."""
    device, found = join(), {}
    for name, way in ways.items():
        torch.manual_seed(0)
        model, optimizer = way(Net(32, 2).to(device, torch.float64), device)
        found[name] = []
        for images, labels in shares(steps, samples, device, torch.float64):
            train_step(model, optimizer, images, labels)
            found[name].append(weights_of(model))
    return {name: torch.stack(history) for name, history in found.items()} if dist.get_rank() == 0 else {}


def furthest(ways, ranks):
    """Each way's largest difference from one device, in any weight and step."""
    reference = launch(trained, {"alone": alone}, nprocs=1, dashboard=False).results[0]["alone"]
    found = launch(trained, ways, nprocs=ranks, dashboard=False).results[0]
    return {name: (of - reference).abs().max().item() for name, of in found.items()}
