"""Train a small network on digits with DDP, on ranks that somebody else starts (lesson 08).

    python train_ddp.py                                          alone, a group of one
    torchrun --standalone --nproc-per-node=2 train_ddp.py        two ranks on this machine
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train_ddp.py --checkpoint digits.pt

With --checkpoint it can be killed at any time: started again, by you or by torchrun, it goes on after the
last epoch that was completed. (Over gloo, ranks that torch 2.15 restarts may meet at the store of the attempt
before: put TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of torchrun.) To train something of your own, change
`ConvNet` and the two lines that call `digits`. The rest stays.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

# Not needed for training: place() picks a device and a backend, track() and log() feed the course's figures
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
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # right, judged
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


def progress(batches, total, what):
    """Pass the batches through; rank 0 shows how far it is, in a line that is written anew.

    To the terminal alone: in a file every version of the line would stay.
    """
    shown = -1 if dist.get_rank() == 0 and sys.stderr.isatty() else 100
    for step, batch in enumerate(batches, start=1):
        yield batch
        if (percent := 100 * step // total) > shown:
            shown = percent
            bar = "#" * (percent // 4)
            print(f"\r{what} [{bar:<25}] {step}/{total}", end="", file=sys.stderr, flush=True)
            if step == total:
                print("\r\033[K", end="", file=sys.stderr, flush=True)  # the bar goes, the results come


def save(path, epoch, width, model, optimizer):
    """Write the checkpoint. One rank does it: all have the same weights and the same optimizer state."""
    state = {
        "epoch": epoch,
        "width": width,
        # Of the module inside the wrapper: its names carry no "module." and load into a plain ConvNet.
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    # First beside the target, then renamed: a kill leaves the old file or the new one, never half.
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    os.replace(part, path)


def load(path, width):
    """The checkpoint, its tensors on the CPU; SystemExit says in one line why it cannot be used."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs none of its code
        if state["width"] != width:
            sys.exit(f"{path} is of a network of width {state['width']}; add --width {state['width']}")
        return {name: state[name] for name in ("epoch", "model", "optimizer")}
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        sys.exit(f"{path} is no checkpoint of this program: {type(error).__name__}: {reason:.100}")


def resume(args):
    """What to go on from, the same on every rank, or None.

    Rank 0 looks and tells the others: ranks that looked for themselves might see different files, start with
    different epochs, and hang.
    """
    path = args.checkpoint if args.checkpoint and args.checkpoint.exists() else args.resume
    found = [None, True]  # the checkpoint, and whether all is well
    if dist.get_rank() == 0 and path is not None:
        try:
            found[0] = load(path, args.width)
        except SystemExit as error:
            print(error, file=sys.stderr, flush=True)
            found[1] = False
    dist.broadcast_object_list(found, src=0)
    state, well = found
    if not well:
        sys.exit(1)
    return state


def train(args):
    """What every rank runs. Nothing in here knows who started the processes."""
    device, backend = place()
    if "RANK" in os.environ:
        dist.init_process_group(backend)  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    else:  # nobody launched us: a group of one, which meets itself
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    data = digits()
    sampler = DistributedSampler(data, seed=args.seed)  # this rank's share of every epoch, shuffled
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = ConvNet(args.width).to(device)
    # device_ids names the rank's one GPU; for a model on the CPU it must be None.
    ddp = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    # An optimizer on every rank: the same averaged gradients on the same weights make the same step.
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)

    done = 0  # epochs
    if state := resume(args):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]
        if rank == 0:
            print(f"{done} of {args.epochs} epochs were done already", flush=True)

    for epoch in range(done + 1, args.epochs + 1):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
        started = time.perf_counter()
        total = torch.zeros(2, device=device)  # sum of the samples' losses, samples
        for images, labels in progress(track(loader), len(loader), f"epoch {epoch}"):
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
        # Without the wrapper: nothing is averaged here, and ranks may have different numbers of batches.
        accuracy = evaluate(model, device)
        log(accuracy=accuracy)
        if rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.3f}, held-out accuracy {accuracy:.1%}, "
                f"{samples / seconds:,.0f} samples/s on {world_size} rank{'s' if world_size > 1 else ''}",
                flush=True,
            )
            if args.checkpoint is not None:
                save(args.checkpoint, epoch, args.width, model, optimizer)
    dist.barrier()  # no rank ends before the last checkpoint is there
    dist.destroy_process_group()


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


def file_to_read(text):
    path = Path(text).absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Train a small network on digits with DDP; start it alone or by torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    width = 64 if torch.cuda.device_count() else 8
    parser.add_argument("--epochs", type=whole_number, default=3, help="times through the training digits")
    parser.add_argument("--batch-size", type=whole_number, default=64, help="samples a step, on each rank")
    parser.add_argument("--lr", type=rate, default=0.002, help="Adam's learning rate")
    parser.add_argument("--width", type=whole_number, default=width, help="of the first layer")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order")
    parser.add_argument(
        "--checkpoint",
        type=file_to_write,
        metavar="PATH",
        help="written after every epoch; where it is there already, the training goes on from it",
    )
    parser.add_argument(
        "--resume",
        type=file_to_read,
        metavar="PATH",
        help="another checkpoint to go on from; it must be there",
    )
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
