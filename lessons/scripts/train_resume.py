"""Train a small network on digits, so that a kill costs a few steps and changes no digit (lesson 10).

    python train_resume.py --checkpoint run.pt
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train_resume.py --checkpoint run.pt

Where the checkpoint is there, the training goes on from it: the same command starts and resumes. On a CPU
the losses after a resume are those of a training that nobody killed, to the last digit. (Over gloo, ranks
that torch 2.15 restarts may meet at the store of the attempt before: put
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of torchrun.) To train something of your own, change `ConvNet`
and the line that calls `digits`; whatever else your training keeps from one step to the next (an average of
the weights, a gradient scaler) belongs into `snapshot` and `restore`.
"""

import argparse
import csv
import math
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

# place() picks a device and a backend, track() and log() feed the course's figures where somebody watches;
# the other three are lesson 10's lines for a file that is whole, and is only ever read as data.
from course_lib import (
    CheckpointError,
    digits,
    load_checkpoint,
    load_weights,
    log,
    place,
    save_checkpoint,
    track,
)


class ConvNet(nn.Sequential):
    """Two convolutions, dropout, a dense layer; width 64 is the classic size."""

    def __init__(self, width):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),  # its masks are random, and other ones on each rank
            nn.Linear(2 * width * 7 * 7, 16 * width),
            nn.ReLU(),
            nn.Linear(16 * width, 10),
        )


class ShardFrom(DistributedSampler):
    """This rank's share of the epoch, from the sample `start` on: those before it were trained on already."""

    start = 0

    def __iter__(self):
        return iter(list(super().__iter__())[self.start :])

    def __len__(self):
        return super().__len__() - self.start


# --- what a checkpoint holds --------------------------------------------------------------------------------


def random_state(device):
    """Where each random generator of this rank stands, in tensors, numbers and tuples."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),  # an array would need code to be loaded
    }


def set_random_state(state, device):
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def snapshot(ddp, optimizer, scheduler, step, device, settings):
    """All that the next step depends on. Every rank calls it: each has random generators of its own."""
    random_states = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, random_state(device))
    return {
        "settings": settings,
        "step": step,  # steps done; epoch and position in it follow from it
        "model": ddp.module.state_dict(),  # of the module inside: its names carry no "module."
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": random_states,  # by rank
    }


def restore(checkpoint, ddp, optimizer, scheduler, loss_of_nothing, device):
    # DDP lays its gradients out anew after its first step. From three ranks on, another layout adds them up
    # in another order, and rounds otherwise. So the first step of this DDP shall not be one that counts.
    for _ in range(2):
        loss_of_nothing(ddp).backward()
    optimizer.zero_grad()
    load_weights(ddp, checkpoint["model"])
    # After the scheduler was made: making it sets the optimizer's learning rate, and loading must have the
    # last word. Both move their tensors to the device of the parameters.
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    set_random_state(checkpoint["random"][dist.get_rank()], device)
    return checkpoint["step"]


def read(path, settings):
    """The checkpoint, where there is one and it is of this training."""
    if not path.exists():
        return None
    checkpoint = load_checkpoint(path)  # onto the CPU: tensors of rank 0's GPU would all land there again
    theirs = checkpoint.get("settings")
    if not isinstance(theirs, dict) or theirs.keys() != settings.keys():
        raise CheckpointError(f"{path} is a checkpoint, but not one of this program: give another name")
    for name, ours in settings.items():
        if theirs[name] != ours:
            # Another number of ranks has other shards and other random generators, another batch size other
            # steps: what came out would be a training that neither of the two had begun.
            raise CheckpointError(
                f"{path} is of a training with {name} {theirs[name]}, and this one has {ours}: "
                "start it as it was, or begin a new one under another name"
            )
    return checkpoint


# --- the training -------------------------------------------------------------------------------------------


def train(args):
    device, backend = place()
    if "RANK" in os.environ:  # torchrun has started us, and says all that is needed
        dist.init_process_group(backend)
    else:  # alone: a group of one, so that nothing below has to ask
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A fixed number of threads: on a CPU their number decides how sums are rounded.
    torch.set_num_threads(args.threads)

    settings = {
        name: getattr(args, name)
        for name in ("samples", "batch_size", "epochs", "lr", "width", "seed", "threads")
    }
    settings |= {"ranks": world_size, "device": device.type}
    checkpoint = read(args.checkpoint, settings)

    data = Subset(digits(), range(args.samples))
    sampler = ShardFrom(data, seed=args.seed)  # the order is a function of seed and epoch
    # The loader draws a number each time a loop begins. From a generator of its own, or a resume in the
    # middle of an epoch, which begins one loop more, would move the generator that dropout draws from.
    loader = DataLoader(data, args.batch_size, sampler=sampler, generator=torch.Generator())
    steps_per_epoch = len(loader)

    torch.manual_seed(args.seed)  # the same model on every rank
    ddp = DDP(ConvNet(args.width).to(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps_per_epoch)
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # and from here on dice of its own on each
        seed(args.seed + 1 + rank)
    step = 0
    if checkpoint is not None:
        nothing = torch.zeros(2, 1, 28, 28, device=device)
        step = restore(checkpoint, ddp, optimizer, scheduler, lambda ddp: ddp(nothing).sum(), device)
        if rank == 0:
            print(f"resumed after step {step} from {args.checkpoint.name}", flush=True)
    history = open_history(args.history, step) if rank == 0 and args.history else None

    for epoch in range(step // steps_per_epoch, args.epochs):
        sampler.set_epoch(epoch)
        sampler.start = step % steps_per_epoch * args.batch_size
        for images, labels in track(loader):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            loss = loss.detach()
            dist.all_reduce(loss)  # each rank knows its own loss alone
            log(loss=loss / world_size)
            if history:
                csv.writer(history).writerow([step, repr(loss.item() / world_size)])  # repr: all digits
                history.flush()  # what has been handed to the system survives a kill of this process
            if step % args.save_every == 0 or step == args.epochs * steps_per_epoch:
                state = snapshot(ddp, optimizer, scheduler, step, device, settings)
                save_checkpoint(args.checkpoint, state)  # rank 0 writes, the others wait
    if rank == 0:
        print(f"done: {step} steps on {world_size} rank{'s' if world_size > 1 else ''}", flush=True)
    dist.destroy_process_group()


def open_history(path, step):
    """The file of losses, to write on; cut back to the checkpoint's step, since the later ones come again."""
    rows = []
    if step and path.exists():
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if len(row) == 2 and row[0].isdecimal()]
    part = path.with_name(path.name + ".part")
    with open(part, "w", newline="") as file:
        csv.writer(file).writerows(row for row in rows if int(row[0]) <= step)
    os.replace(part, path)
    return open(path, "a", newline="")


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
    parser = argparse.ArgumentParser(
        description="Train a small network on digits; resume from the checkpoint where it is there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint", type=file_to_write, required=True, metavar="PATH", help="resumed from, and written to"
    )
    parser.add_argument("--save-every", type=whole_number, default=50, help="steps from one to the next")
    parser.add_argument("--history", type=file_to_write, metavar="PATH", help="a CSV of all steps' losses")
    parser.add_argument(
        "--samples", type=whole_number, default=18_000, help="of the training digits, at most"
    )
    parser.add_argument("--epochs", type=whole_number, default=3, help="times through them")
    parser.add_argument("--batch-size", type=whole_number, default=64, help="samples a step, on each rank")
    parser.add_argument("--lr", type=rate, default=0.002, help="Adam's learning rate, the first")
    parser.add_argument(
        "--width",
        type=whole_number,
        default=64 if torch.cuda.is_available() else 8,
        help="of the first layer",
    )
    parser.add_argument("--threads", type=whole_number, default=1, help="of each rank, on a CPU")
    parser.add_argument("--seed", type=whole_number, default=1, help="of weights, order and dropout")
    args = parser.parse_args()
    if args.samples > 18_000:
        parser.error(f"argument --samples: there are 18,000 training digits, not {args.samples:,}")
    if args.seed > 2**31:
        parser.error(f"argument --seed: it is at most 2**31, not {args.seed:,}")
    return args


if __name__ == "__main__":
    try:
        train(parse_arguments())
    except CheckpointError as error:
        sys.exit(f"stopped: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
