"""Train a small network on digits, so that a kill costs a few steps and changes no digit (lesson 10).

    python train_resume.py --checkpoint run.pt
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train_resume.py --checkpoint run.pt

The same command starts and resumes. On a CPU the losses after a resume are those of a run that nobody
killed, to the last digit. Asked to end (SIGTERM, which clusters send), it saves first. (With --max-restarts,
put TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of torchrun: ranks that it restarts may meet at the store of
the attempt before.) To train something of your own, change `ConvNet` and the line that calls
`digits`; what else your training keeps from step to step belongs in `snapshot` and `restore`.
"""

import argparse
import math
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

# place() picks a device and a backend, track() and log() feed the course's figures where somebody watches;
# the rest are lesson 10's lines for a file that is whole, and is only ever read as data.
import course_lib


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
            nn.Dropout(0.25),  # its masks are random, and differ from rank to rank
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


def restore(checkpoint, ddp, optimizer, scheduler, sample, device):
    # DDP rebuilds its buckets after its first step. From three ranks on, other buckets add the gradients up
    # in another order, and round differently. So the first step of this DDP must not be one that counts.
    ddp(torch.stack([sample, sample]).to(device)).sum().backward()
    optimizer.zero_grad()
    course_lib.load_weights(ddp, checkpoint["model"])
    # After the scheduler was made: making one may set the learning rate, and loading must have the last word.
    # Both move their tensors to the device of the parameters.
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    set_random_state(checkpoint["random"][dist.get_rank()], device)
    return checkpoint["step"]


def resume(path, settings):
    """The checkpoint, on every rank, where rank 0 sees one; CheckpointError if it is of another run.

    If each rank looked, one might find the file and another not (on a disk of its own), and they would wait
    for each other without a word.
    """
    found = [None, None]
    if dist.get_rank() == 0 and path.exists():
        try:
            found[0] = course_lib.load_checkpoint(path)  # onto the CPU, whatever device it was saved from
        except course_lib.CheckpointError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)  # by pickle, which is safe here: our own rank 0 has written it
    checkpoint, fault = found
    theirs = settings if checkpoint is None else checkpoint.get("settings")
    if not isinstance(theirs, dict) or theirs.keys() != settings.keys():
        fault = f"{path} is a checkpoint, but not one of this program: give another name"
    elif theirs != settings:  # other shards, other steps: neither of the two runs
        name = next(name for name in settings if theirs[name] != settings[name])
        fault = f"{path} is of a training run with {name} {theirs[name]}, and this one has {settings[name]}: "
        fault += "start it as it was, or begin a new one under another name"
    if fault:
        raise course_lib.CheckpointError(fault)
    return checkpoint


@record  # when a rank raises, torchrun's report shows its traceback
def train(args):
    device, backend = course_lib.place()
    # A GPU may else add up in any order. Before the group is joined: NCCL reads it as it starts.
    torch.use_deterministic_algorithms(device.type == "cuda")
    # torchrun says all that is needed. Nobody has started us? Then a group of one: nothing below has to ask.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(args.threads)  # a fixed number: on a CPU it decides how sums are rounded

    names = ("samples", "batch_size", "epochs", "lr", "width", "seed", "threads")
    settings = {name: getattr(args, name) for name in names} | {"ranks": world_size, "device": device.type}
    checkpoint = resume(args.checkpoint, settings)

    data = Subset(course_lib.digits(), range(args.samples))
    sampler = ShardFrom(data, seed=args.seed)  # the order is a function of seed and epoch
    # When a loop begins, the loader draws a number to seed its workers. From a generator of its own: a resume
    # in the middle of an epoch begins one loop more, and the CPU's (on a CPU: dropout's) must not notice.
    of_loader = torch.Generator()
    loader = DataLoader(data, args.batch_size, sampler=sampler, generator=of_loader)
    steps_per_epoch = len(loader)

    torch.manual_seed(args.seed)  # the same model on every rank
    ddp = DDP(ConvNet(args.width).to(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps_per_epoch)
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # from here on, each rank draws its own
        seed(hash((args.seed, rank)) % 2**32)  # not seed + rank: rank 1's would be rank 0's of the next seed
    step = 0
    if checkpoint is not None:
        step = restore(checkpoint, ddp, optimizer, scheduler, data[0][0], device)
        if rank == 0:
            print(f"resumed after step {step} from {args.checkpoint.name}", flush=True)
    history = open_history(args.history, step) if rank == 0 and args.history else None
    end = []  # not a threading.Event: its set() takes a lock, and a second signal in there waits for ever
    signal.signal(signal.SIGTERM, lambda *_: end.append(True))

    for epoch in range(step // steps_per_epoch, args.epochs):
        sampler.set_epoch(epoch)
        sampler.start = step % steps_per_epoch * args.batch_size
        # Workers that augment draw different numbers on each rank, in each epoch, and after a resume. (Here
        # are none. Add them as train_ddp.py does, or SIGTERM ends them before their rank has saved.)
        of_loader.manual_seed(hash((args.seed, rank, epoch, sampler.start)) % 2**63)
        for images, labels in course_lib.track(loader):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            # Each rank knows its own loss alone, and whether it was asked to end: all end, or none.
            told = torch.stack([loss.detach(), loss.new_tensor(float(len(end)))])
            dist.all_reduce(told)
            loss, asked = told[0] / world_size, told[1].item() > 0
            if not math.isfinite(loss.item()):  # on all ranks alike; the last checkpoint stays as it is
                raise FloatingPointError(f"the loss of step {step} is {loss.item()}: try a lower --lr")
            course_lib.log(loss=loss)
            if history:
                history.write(f"{step},{loss.item()!r}\n")  # !r: all digits
                history.flush()  # what has been handed to the system survives a kill of this process
            last = step == args.epochs * steps_per_epoch
            if step % args.save_every == 0 or last or asked:  # rank 0 writes, the others wait
                state = snapshot(ddp, optimizer, scheduler, step, device, settings)
                course_lib.save_checkpoint(args.checkpoint, state)
            if asked and not last:
                sys.exit(128 + signal.SIGTERM)  # not 0: the training is not done
    if rank == 0:
        print(f"done: {step} steps on {world_size} rank{'s' if world_size > 1 else ''}", flush=True)
    del ddp  # before torch 2.14 a DDP that outlives its group may hang (gloo)
    dist.destroy_process_group()


def open_history(path, step):
    """The file of losses, a line a step; cut back to the checkpoint's step: the later ones come again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    part = path.with_name(path.name + ".part")
    part.write_text("".join(lines[:step]))
    os.replace(part, path)
    return open(path, "a")


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="PATH", help="resumed from, and written to")
    add("--save-every", type=int, default=50, help="steps from one to the next")
    add("--history", type=Path, metavar="PATH", help="a CSV of all steps' losses")
    add("--samples", type=int, default=18_000, help="of the training digits, at most")
    add("--epochs", type=int, default=3, help="times through them")
    add("--batch-size", type=int, default=64, help="samples a step, on each rank")
    add("--lr", type=float, default=0.0005 if torch.cuda.is_available() else 0.002, help="Adam's, the first")
    add("--width", type=int, default=64 if torch.cuda.is_available() else 8, help="of the first layer")
    add("--threads", type=int, default=1, help="of each rank, on a CPU")
    add("--seed", type=int, default=1, help="of weights, order and dropout")
    args = parser.parse_args()
    for name in ("save-every", "samples", "epochs", "batch-size", "width", "threads", "seed"):
        most = {"samples": 18_000, "seed": 2**31}.get(name, 10**9)
        if not 1 <= (given := getattr(args, name.replace("-", "_"))) <= most:
            parser.error(f"argument --{name}: it is a whole number from 1 to {most:,}, not {given:,}")
    if not 0 < args.lr < math.inf:
        parser.error(f"argument --lr: it is a number above 0, not {args.lr:g}")
    for path in filter(None, (args.checkpoint, args.history)):
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            parser.error(f"{str(path)!r} must be a file, in a folder that is there and can be written")
    return args


if __name__ == "__main__":
    try:
        train(parse_arguments())
    except (course_lib.CheckpointError, FloatingPointError) as error:
        sys.exit(f"stopped: {error}" if os.environ.get("RANK", "0") == "0" else 1)  # one tells
    except KeyboardInterrupt:
        sys.exit("stopped")
