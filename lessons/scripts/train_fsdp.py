"""Train with FSDP: a rank keeps a shard of the weights, the gradients and Adam's state (lesson 18).

    python train_fsdp.py                                         alone
    torchrun --standalone --nproc-per-node=2 train_fsdp.py       two ranks, on GPUs if there are enough

Started again, it goes on from its last checkpoint, on another number of ranks, too. To train something of
your own, change `Block`, `model` and `batch`.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, SAMPLES, CHECKPOINTS = 30, 240, Path("fsdp-checkpoints")  # samples a step, on all ranks together


class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def batch(step, rank, ranks):
    chance = torch.Generator().manual_seed(step)  # the same samples on every rank: each takes its share
    labels = torch.randint(10, (SAMPLES,), generator=chance)
    samples = torch.eye(10, 64)[labels] + 0.2 * torch.randn(SAMPLES, 64, generator=chance)
    return samples[rank::ranks], labels[rank::ranks]


def main():
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    )
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpu else "cpu")  # a GPU for each rank
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None, **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same on every rank: FSDP sends no weights at the start, as DDP does
    blocks = [Block(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))  # on the CPU: fully_shard moves it, part by part
    mesh = init_device_mesh(device.type, (ranks,))
    for part in (*blocks, model):  # from the inside out: what one call has is gathered together
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # after fully_shard, which makes new parameters
    start = max((int(each.parent.name) for each in CHECKPOINTS.glob("*/.metadata")), default=0)
    if start:  # .metadata is what a save writes last
        state = get_state_dict(model, optimizer)  # the shards that this rank holds now: load fills them
        dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=CHECKPOINTS / str(start))
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    for step in range(start, start + STEPS):
        samples, labels = batch(step, rank, ranks)
        loss = nn.functional.cross_entropy(model(samples.to(device)), labels.to(device))
        optimizer.zero_grad()  # of the optimizer, which has the shards
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by one norm of all ranks' shards
        optimizer.step()
    weights, averages = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": averages}, checkpoint_id=CHECKPOINTS / str(start + STEPS))
    loss = loss.detach()
    dist.all_reduce(loss)  # each rank knows the loss of its own share alone
    if rank == 0:
        print(f"after step {start + STEPS}: loss {loss.item() / ranks:.4f}, ranks: {ranks}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
