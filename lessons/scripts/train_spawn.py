"""Train a small network on digits with DDP, on ranks that this program starts itself (lesson 06).

    python lessons/scripts/train_spawn.py --epochs 3
    python lessons/scripts/train_spawn.py --nprocs 4 --batch-size 32 --save digits.pt

One rank for each GPU, or two CPU processes where there is none. To train something of your own, change
`ConvNet` and the two lines that call `digits`. The rest stays.
"""

import argparse
import math
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

# place() picks a device and a backend, track() and log() feed the course's figures
# and do nothing where nobody watches.
from course_lib import digits, log, place, track


class ConvNet(nn.Sequential):
    """Two convolutions and a dense layer; width 64 is the classic size."""

    def __init__(self, width):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 16 * width),
            nn.ReLU(),
            nn.Linear(16 * width, 10),
        )


def evaluate(model, device):
    """Accuracy on the held-out digits, the same number on every rank."""
    data = digits(train=False)
    # Every digit on exactly one rank. A DistributedSampler would repeat some to make the shards equally long.
    mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # right, all
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(mine, batch_size=500):
            right = model(images.to(device)).argmax(dim=1) == labels.to(device)
            counts[0] += right.sum()
            counts[1] += len(labels)
    model.train()
    # Add up counts, not accuracies: the mean of the ranks' accuracies is wrong when the shards differ.
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def train(args):
    """What every rank runs. Nothing in here knows who started the processes."""
    device, backend = place()
    # Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. With NCCL each rank says which GPU is its own.
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # On a CPU the ranks share the cores; without this each would take them all.
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))

    data = digits()
    sampler = DistributedSampler(data, seed=args.seed)  # this rank's share of every epoch, shuffled
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    # device_ids names the rank's one GPU; for a model on the CPU it must be None.
    ddp = DDP(ConvNet(args.width).to(device), device_ids=[device.index] if device.type == "cuda" else None)
    # From here on each rank draws random numbers of its own, or all would have the same dropout masks. (By
    # seed + rank, rank 1 would draw what rank 0 draws with the next seed.)
    torch.manual_seed(hash((args.seed, rank)) % 2**63)
    # An optimizer on every rank: the same averaged gradients on the same weights make the same step.
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
        started = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of the samples' losses, samples
        for images, labels in track(loader):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over the ranks in here
            optimizer.step()
            loss = loss.detach()
            total += torch.stack([loss * len(labels), loss.new_tensor(len(labels))])
            log(loss=loss)
        # Each rank knows the loss of its own shard alone; what is printed is the mean over all samples.
        dist.all_reduce(total)
        loss, samples = (total[0] / total[1]).item(), total[1].item()
        seconds = time.perf_counter() - started
        # Through .module: nothing is averaged here, and ranks may have different numbers of batches.
        accuracy = evaluate(ddp.module, device)
        log(accuracy=accuracy)
        if rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.3f}, held-out accuracy {accuracy:.1%}, "
                f"{samples / seconds:,.0f} samples/s on {world_size} rank{'s' * (world_size > 1)}",
                flush=True,
            )

    if args.save is not None:
        if rank == 0:  # all ranks have the same weights, so one of them writes
            # Of the module inside the wrapper: its names carry no "module." and load into a plain ConvNet.
            # First beside the target, then renamed: nobody ever finds half a file.
            part = args.save.with_name(args.save.name + ".part")
            torch.save({"width": args.width, "model": ddp.module.state_dict()}, part)
            os.replace(part, args.save)
        dist.barrier()  # no rank goes on before the file is there
    del ddp  # before torch 2.14 a DDP that outlives its group may hang (gloo)
    dist.destroy_process_group()


# --- what torchrun would do for us --------------------------------------------------------------------------


def worker(rank, world_size, port, args):
    """One process. mp.spawn passes the rank as the first argument; the rest we have to set ourselves."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),  # one machine: the rank on this machine is the rank
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # The store is there already, in the parent, as torchrun's is: rank 0 must not open one of its own.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if sys.platform in ("linux", "darwin"):  # the ranks talk over this machine's loopback, not its network
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    train(args)


def open_store():
    """The key-value store through which the ranks find each other, and its port.

    Port 0 lets the system choose one that is free; a number in the program would collide with the next
    training run on this machine. And only 127.0.0.1: a TCPStore left to itself listens to the whole network.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def main():
    args = parse_arguments()
    store, port = open_store()
    try:
        # nprocs must be the group's world size, or the ranks wait for one that never comes.
        mp.spawn(worker, args=(args.nprocs, port, args), nprocs=args.nprocs)
    except KeyboardInterrupt:
        sys.exit("stopped")
    del store  # it had to live as long as the ranks


# --- arguments ----------------------------------------------------------------------------------------------


def whole_number(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is a whole number from 1 on, not {text!r}")
    return int(text)


def rate(text):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"it is a number above 0, not {text!r}")
    return number


def file_to_write(text):
    path = Path(text).absolute()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"it is the name of a file, and {text!r} is a folder")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder of {text!r} is not there or cannot be written")
    return path


def parse_arguments():
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(
        description="Train a small network on digits with DDP on ranks started by mp.spawn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=whole_number, default=3, help="times through the training digits")
    parser.add_argument("--nprocs", type=whole_number, default=gpus or 2, help="ranks, one process each")
    parser.add_argument("--batch-size", type=whole_number, default=64, help="samples a step, on each rank")
    parser.add_argument("--lr", type=rate, default=0.0005 if gpus else 0.002, help="Adam's learning rate")
    parser.add_argument("--width", type=whole_number, default=64 if gpus else 8, help="of the first layer")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first weights, the order and each rank's random numbers"
    )
    parser.add_argument("--save", type=file_to_write, metavar="PATH", help="where the trained weights go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
