"""Train a small network on digits with DDP, on ranks that somebody else starts (lesson 08).

    python train_ddp.py                                          alone, a group of one
    torchrun --standalone --nproc-per-node=2 train_ddp.py        two ranks on this machine
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train_ddp.py --checkpoint digits.pt

With --checkpoint, started again, by you or by torchrun, it goes on after the last epoch that was completed,
or where it was when it was asked to end (SIGTERM, which clusters send). On another number of ranks, too: a
step keeps its samples. It needs PyTorch alone. (With --max-restarts, put TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
in front of torchrun: ranks that it restarts may meet at the store of the attempt before.) To train something
of your own, change `ConvNet` and `digits`. The rest stays.
"""

import argparse
import atexit
import io
import math
import os
import signal
import sys
import time
import zlib
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

try:  # the course's digits, and its figures: track() and log() do nothing where nobody watches
    from course_lib import digits, log, place, track
except ImportError:  # this file alone trains all the same

    def place():
        if not torch.cuda.is_available():
            return torch.device("cpu"), "gloo"
        local_rank = int(os.environ.get("LOCAL_RANK", 0))  # where each rank sees its own GPU alone: cuda:0
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device, "nccl"

    def digits(train=True):
        """Ten fixed patterns in noise take the digits' place."""
        chance = torch.Generator().manual_seed(int(train))
        labels = torch.randint(10, (18_000 if train else 2_000,), generator=chance)
        patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(2))
        return TensorDataset(patterns[labels] + torch.randn(len(labels), 1, 28, 28, generator=chance), labels)

    def track(batches, total):
        return batches

    log = dict  # it changes nothing, either


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
    # Every digit on one rank. A DistributedSampler would repeat some to make the shards equally long.
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


def deaf(worker):
    """For the loader's workers. SIGTERM goes to all processes of a rank; it needs them until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def start_workers(loader):
    """Fork them before the first collective, and let them load nothing yet.

    In Python 3.11, a process that forks while a gloo thread ends a collective may leave a worker that hangs.
    """
    sampler, loader.batch_sampler.sampler = loader.batch_sampler.sampler, ()
    iter(loader)
    loader.batch_sampler.sampler = sampler


def end_workers():
    """At the end of a rank that failed: Python would send SIGTERM to its deaf workers, and wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # to the loader, a worker's death would be an error
    for worker in torch.multiprocessing.active_children():
        worker.kill()


def resume(path, width, device):
    """What to go on from, or None; SystemExit says in one line why the file cannot be used.

    All look whether there is a file, and compare: ranks that each looked for themselves might find different
    things, start with different epochs, and hang. If one rank lacks the file or cannot read it, none goes on;
    nor if one reads another, like an old copy on its machine's own disk: the weights would stay different.
    """
    there = torch.tensor(int(path is not None and path.exists()), device=device)
    dist.all_reduce(there)
    if not there:
        return None
    state, checksum, fault = None, 0, ""
    try:
        content = path.read_bytes()
        checksum = zlib.crc32(content)
        # As data: none of its code runs.
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if state["width"] != width:
            fault = f"is of a network of width {state['width']}; add --width {state['width']}"
        elif (together := state["global_batch"]) % (ranks := dist.get_world_size()):
            fault = f"takes {together} samples a step, which {ranks} ranks cannot share evenly: start fewer"
        state = {name: state[name] for name in ("epoch", "samples", "global_batch", "model", "optimizer")}
    except FileNotFoundError:
        fault = "is not there, but on other ranks it is: copy it to all machines, or use a shared folder"
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        fault = fault or f"is no checkpoint of this program: {type(error).__name__}: {reason:.100}"
    of_rank_0 = torch.tensor(checksum, device=device)
    dist.broadcast(of_rank_0, src=0)
    if checksum and of_rank_0 != checksum:
        fault = "is not the same file on every rank: copy the newest to all machines, or use a shared folder"
    faults = torch.tensor(int(fault != ""), device=device)
    dist.all_reduce(faults)
    if faults:
        one_tells = fault and (dist.get_rank() == 0 or faults < dist.get_world_size())
        sys.exit(f"{path} {fault}" if one_tells else 1)
    return state


def sixteen_bits(device):
    """bfloat16; float16 if a rank's GPU has no bfloat16 in hardware (before Ampere: T4, V100)."""
    lacks = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    lacking = torch.tensor(int(lacks), device=device)
    dist.all_reduce(lacking)  # all take the same type: a loss scaled on some ranks alone spoils the average
    if lacking and dist.get_rank() == 0:
        print("a GPU has no bfloat16 in hardware: float16 instead, with a scaled loss", flush=True)
    return torch.float16 if lacking else torch.bfloat16


@record  # when a rank raises, torchrun's report shows its traceback
def train(args):
    """What every rank runs. Nothing in here knows who started the processes."""
    device, backend = place()
    # torchrun has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Nobody has? Then a group of one.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # With NCCL, each rank says which GPU is its own; barrier() would have to guess.
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    data = digits()
    sampler = DistributedSampler(data, seed=args.seed)  # this rank's share of every epoch, shuffled
    on_gpu = device.type == "cuda"  # from pinned memory, a batch is copied while the GPU computes
    workers = {"num_workers": args.workers, "persistent_workers": args.workers > 0, "worker_init_fn": deaf}
    # The workers' random numbers: others on each rank, and after a restart from a checkpoint.
    kept = args.checkpoint.stat().st_mtime_ns if args.checkpoint and args.checkpoint.is_file() else 0
    workers["generator"] = torch.Generator().manual_seed(hash((args.seed, rank, kept)) % 2**63)
    loader = DataLoader(data, args.batch_size, sampler=sampler, pin_memory=on_gpu, **workers)
    atexit.register(end_workers)
    start_workers(loader)

    torch.manual_seed(args.seed)
    model = ConvNet(args.width).to(device)
    # device_ids names the rank's one GPU; for a model on the CPU it must be None.
    ddp = DDP(model, device_ids=[device.index] if on_gpu else None)
    # An optimizer on every rank: the same averaged gradients on the same weights make the same step.
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    half = sixteen_bits(device) if args.bf16 else None
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)  # else it changes nothing

    done, seen = 0, 0  # epochs, and samples of the next one
    global_batch = args.batch_size * world_size  # samples a step, on all ranks together
    if state := resume(args.checkpoint, args.width, device):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, seen, global_batch = state["epoch"], state["samples"], state["global_batch"]
        # With another global batch, or other samples in it, this would be another training run.
        loader.batch_sampler.batch_size = each = global_batch // world_size
        if rank == 0:
            more = f", and {seen:,} samples of the next" if seen else ""
            print(f"{done} of {args.epochs} epochs were done already{more}", flush=True)
            if each != args.batch_size:
                print(f"a step takes {global_batch} samples as before: {each} on each rank", flush=True)
    end = []  # not a threading.Event: its set() takes a lock, and a second signal in there waits for ever
    if args.checkpoint is not None:
        signal.signal(signal.SIGTERM, lambda *_: end.append(True))

    def save(epoch, samples):
        """Rank 0 writes: all have the same weights and the same optimizer state."""
        if rank == 0 and args.checkpoint is not None:
            # Of the module inside the wrapper: its names carry no "module." and load into a plain ConvNet.
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            # First beside the target, then renamed: a kill leaves the old file or the new one, never half.
            part = args.checkpoint.with_name(args.checkpoint.name + ".part")
            state |= {"epoch": epoch, "samples": samples, "global_batch": global_batch, "width": args.width}
            torch.save(state, part)
            os.replace(part, args.checkpoint)
        dist.barrier()  # no rank goes on before the checkpoint is there

    for epoch in range(done + 1, args.epochs + 1):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
        # Others on each rank, in each epoch and after a restart: dropout must not repeat its masks.
        torch.manual_seed(hash((args.seed, rank, epoch, seen)) % 2**63)
        skip = seen // global_batch  # steps
        started = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of the samples' losses, samples
        rest = islice(loader, skip, None)  # what was trained on before is loaded, and left out
        for step, (images, labels) in enumerate(track(rest, len(loader) - skip), skip):
            if args.checkpoint is not None and step % 10 == 0:
                asked = torch.tensor(len(end), device=device)
                dist.all_reduce(asked, dist.ReduceOp.MAX)  # all end, or none: the signal may have reached one
                if asked.item():
                    save(epoch - 1, step * global_batch)
                    sys.exit(128 + signal.SIGTERM)  # not 0: the training is not done
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, half, enabled=args.bf16):
                loss = F.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # DDP averages the gradients over the ranks in here
            if args.clip is not None:  # after the averaging: the same norm on every rank
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            loss = loss.detach()
            total += torch.stack([loss * len(labels), loss.new_tensor(len(labels))])
            log(loss=loss)
            if rank == 0 and sys.stderr.isatty():  # only in a terminal: what comes next is written over it
                print(f"epoch {epoch}: step {step + 1}/{len(loader)}", end="\r", file=sys.stderr, flush=True)
        seen = 0
        # Each rank knows the loss of its own shard alone; what is printed is the mean over all samples.
        dist.all_reduce(total)
        loss, samples = (total[0] / total[1]).item(), total[1].item()
        seconds = time.perf_counter() - started
        # Without the wrapper: nothing is averaged here, and ranks may have different numbers of batches.
        accuracy = evaluate(model, device)
        log(accuracy=accuracy)
        if rank == 0:
            speed = f"{samples / seconds:,.0f} samples/s on {world_size} rank{'s' if world_size > 1 else ''}"
            print(f"epoch {epoch}: loss {loss:.3f}, held-out accuracy {accuracy:.1%}, {speed}", flush=True)
        save(epoch, 0)
    del ddp  # before torch 2.14 a DDP that outlives its group may hang (gloo)
    dist.destroy_process_group()


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=3, help="times through the training digits")
    add("--batch-size", type=int, default=64, help="samples a step, on each rank; a restart keeps their sum")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    add("--lr", type=float, default=0.0005 if gpus else 0.002, help="Adam's learning rate")
    add("--width", type=int, default=64 if gpus else 8, help="of the first layer")
    add("--seed", type=int, default=0, help="of the first weights, the order and each rank's random numbers")
    add("--workers", type=int, default=0, help="processes that load batches, for each rank")
    add(
        "--bf16",
        action="store_true",
        help="mixed precision: compute in bfloat16 where it serves; float16 before Ampere",
    )
    add("--clip", type=float, help="a gradient of a greater norm is scaled down to this")
    add("--checkpoint", type=Path, metavar="PATH", help="go on from it where it is there; write it")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "batch-size": 1, "width": 1, "workers": 0}.items():
        if (given := getattr(args, name.replace("-", "_"))) < least:
            parser.error(f"argument --{name}: it is a whole number from {least} on, not {given}")
    for name in ("lr", "clip"):
        if (given := getattr(args, name)) is not None and not 0 < given < math.inf:
            parser.error(f"argument --{name}: it is a number above 0, not {given:g}")
    if (path := args.checkpoint) and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        parser.error(f"{str(path)!r} must be a file, in a folder that is there and can be written")
    return args


if __name__ == "__main__":
    train(parse_arguments())
