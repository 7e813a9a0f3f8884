"""Measure the bandwidth of an all_reduce within a node and between nodes (lesson 17).

On each node, with an address of the first one that all can reach:

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 bandwidth.py

Under srun alone, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each task; the rest Slurm says.
Rank 0 prints a line for each measurement, as JSON: the ranks that took part, the bytes S that each of them
held, the seconds of the slowest rank (in the fastest round: other programs can only add), and the bytes that
node 0 sent to others meanwhile, as its network cards count them (what a GPU sends by RDMA, they do not see).
It needs PyTorch alone.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

try:
    from course_lib import place
except ImportError:  # this file alone measures all the same

    def place():
        if not torch.cuda.is_available():
            return torch.device("cpu"), "gloo"
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # cuda:0 if it sees no other
        torch.cuda.set_device(device)
        return device, "nccl"


def sent():
    """Bytes that this node's cards have sent so far, but for what stayed inside; not what RDMA sends."""
    try:
        rows = Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:  # not Linux
        return 0
    cards = {card.strip(): int(counts.split()[8]) for card, counts in (row.split(":", 1) for row in rows)}
    cards.pop("lo", None)
    # what passes a bridge, a bond or a VLAN is counted there and at the card beneath, which is a device
    real = [card for card in cards if Path("/sys/class/net", card, "device").exists()]
    return sum(cards[card] for card in real or cards)


def ranks_per_node(world_size):
    """As torchrun says, or Slurm, to a task of srun: "8(x4)" is four nodes with eight."""
    slurm = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    told = os.environ.get("LOCAL_WORLD_SIZE", slurm.partition("(")[0])
    if not told.isdecimal() or int(told) < 1 or world_size % int(told):
        sys.exit(
            f"every node must have the same number of ranks, and say it in LOCAL_WORLD_SIZE; "
            f"there are {world_size} ranks, and {told or slurm or 'nothing'!r} is said"
        )
    return int(told)


def flat(tensor, group):
    """One all_reduce; over gloo that is one ring, in the order of the ranks' numbers."""
    dist.all_reduce(tensor, group=group)


def two_levels(tensor, node, heads):
    """Add up within each node, then among one rank of each, then tell the others in the node."""
    first = dist.get_process_group_ranks(node)[0]
    dist.reduce(tensor, first, group=node)
    if dist.get_rank() == first:
        dist.all_reduce(tensor, group=heads)
    dist.broadcast(tensor, first, group=node)


def measure(name, work, ranks, size, rounds, device):
    """Time `work` on those ranks, while the others wait; rank 0 prints what came out."""
    seconds = []
    for attempt in range(rounds + 1):
        tensor = torch.full((size // 4,), float(dist.get_rank()), device=device)
        before = sent()
        dist.barrier()
        begin = time.perf_counter()
        if dist.get_rank() in ranks:
            work(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - begin
            assert tensor[-1] == sum(ranks), (name, tensor[-1])  # takes time, and waits for a GPU once more
        else:
            took = 0.0
        slowest = torch.tensor([took], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if attempt:  # the first one makes connections
            seconds.append(slowest.item())
    if dist.get_rank() == 0:
        told = {"what": name, "ranks": len(ranks), "bytes": size, "seconds": min(seconds)}
        print(json.dumps(told | {"sent": sent() - before}), flush=True)


def main(args):
    device, backend = place()
    store, rank, world_size = next(dist.rendezvous("env://"))  # as torchrun has told us

    def join(name, rank):
        own = dist.PrefixStore(name, store)  # two groups, one after the other, in one store
        device_id = device if backend == "nccl" else None
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, device_id=device_id)

    join("in order", rank)
    per_node = ranks_per_node(world_size)
    everyone, first_of_node = list(range(world_size)), list(range(0, world_size, per_node))
    heads = dist.new_group(first_of_node)
    nodes = [dist.new_group(everyone[first : first + per_node]) for first in first_of_node]  # on every rank
    mine, mates = nodes[rank // per_node], everyone[:per_node]  # node 0 is measured

    def one_ring(name, size):
        measure(name, lambda tensor: flat(tensor, None), everyone, size, args.rounds, device)

    for size in args.sizes:
        measure("within a node", lambda tensor: flat(tensor, mine), mates, size, args.rounds, device)
        measure("between nodes", lambda tensor: flat(tensor, heads), first_of_node, size, args.rounds, device)
        one_ring("all, one ring", size)
    levels = partial(two_levels, node=mine, heads=heads)
    measure("all, two levels", levels, everyone, args.sizes[-1], args.rounds, device)
    dist.destroy_process_group()
    # The same ring, but numbered round robin: neighbours in the ring never sit on the same node.
    node, local = divmod(rank, per_node)
    join("round robin", local * (world_size // per_node) + node)
    one_ring("all, round robin", args.sizes[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4**k for k in range(5, 13)], help="bytes")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement; the first does not count")
    args = parser.parse_args()
    if min(args.sizes) < 4:
        parser.error(f"argument --sizes: from 4 bytes on, one number; not {min(args.sizes)}")
    main(args)
