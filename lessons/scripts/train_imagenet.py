"""Train a ResNet on a folder of JPEGs with DDP, on ranks that somebody else starts (lesson 15).

    torchrun --standalone --nproc-per-node=2 train_imagenet.py --arch resnet8 --size 48 --epochs 6
    torchrun --standalone --nproc-per-node=8 train_imagenet.py --data /data/imagenet \
        --arch resnet50 --epochs 90 --batch-size 128 --workers 8 --amp --checkpoint resnet50.pt

--data is laid out like ImageNet: train/CLASS/*.JPEG and val/CLASS/*.JPEG. Without it, the course's pictures.
With --checkpoint it goes on after the last whole epoch, or where SIGTERM ended it. (gloo: see train_ddp.py.)
"""

import argparse
import atexit
import math
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.transforms import v2

try:  # the course's pictures, and its figures: track() and log() do nothing where nobody watches
    from course_lib import log, pictures, place, track
except ImportError:  # this file alone trains all the same, on --data

    def place():
        if not torch.cuda.is_available():
            return torch.device("cpu"), "gloo"
        local_rank = int(os.environ.get("LOCAL_RANK", 0))  # where each rank sees its own GPU alone: cuda:0
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device, "nccl"

    pictures, track, log = None, iter, dict  # the last two change nothing

standard = v2.Normalize([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])  # by ImageNet's pixels


def resnet8(num_classes):
    """Three of a ResNet-18's four stages, and half of their blocks: for a CPU."""
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=num_classes)
    model.layer4, model.fc = torch.nn.Identity(), torch.nn.Linear(256, num_classes)
    return model


def decode(path, least):
    """A picture from the disk; a JPEG comes out at 1/2, 1/4 or 1/8 where that leaves `least` pixels."""
    with Image.open(path) as image:
        image.draft("RGB", (least, least))
        return image.convert("RGB")


class Samples:
    """Paths and classes in two tensors, which all workers of a rank share.

    Each worker would have a list of its own in the end, and an array, too, where workers are not forked.
    """

    def __init__(self, samples):
        paths = [os.fsencode(path) for path, _ in samples]
        longest = max(map(len, paths))
        packed = bytearray(b"".join(path.ljust(longest, b"\0") for path in paths))
        self.paths = torch.frombuffer(packed, dtype=torch.uint8).view(len(paths), longest)
        self.labels = torch.tensor([label for _, label in samples])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return os.fsdecode(bytes(self.paths[i].tolist()).rstrip(b"\0")), self.labels[i].item()


class Packed(ImageFolder):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.imgs = self.samples = Samples(self.samples)
        self.targets = self.samples.labels


class Pictures(Dataset):
    """Training pictures, by (epoch, number), and held-out ones, by number: the same workers make both.

    Each crop has random numbers of its own, by seed, epoch and picture: whoever draws it, and whenever.
    """

    def __init__(self, data, held_out, seed):
        self.data, self.held_out, self.seed = data, held_out, seed

    def __getitem__(self, key):  # workers that persist have copies: what they are asked for tells the epoch
        if isinstance(key, int):
            return self.held_out[key]
        with torch.random.fork_rng(devices=[]):  # without workers, the rank's own generator goes on as before
            # The CPU's alone: torch.manual_seed would seed the GPU's, too, for each picture.
            torch.default_generator.manual_seed(hash((self.seed, *key)) % 2**63)
            return self.data[key[1]]


def in_batches(keys, size, drop_last=False):
    return [keys[i : i + size] for i in range(0, len(keys) - (size - 1) * drop_last, size)]


def my_part(count):
    """Each picture belongs to one rank: a DistributedSampler would repeat some, for equal numbers."""
    return range(dist.get_rank(), count, dist.get_world_size())


def evaluate(model, batches, args, device):
    """Top-1 and top-5 over the parts of all ranks."""
    counts = torch.zeros(3, dtype=torch.int64, device=device)  # right at once, among the best 5, evaluated
    model.eval()
    with torch.no_grad():
        for images, labels in batches:
            with torch.autocast(device.type, args.half, enabled=args.amp):
                scores = model(standard(images.to(device).float()))
            hits = scores.topk(min(5, scores.shape[1])).indices == labels.to(device)[:, None]
            counts += torch.stack([hits[:, 0].sum(), hits.sum(), counts.new_tensor(len(labels))])
    model.train()
    dist.all_reduce(counts)  # counts, not shares: the ranks' parts differ
    return [hits / counts[2].item() for hits in counts[:2].tolist()]


def loss_of(scores, labels):
    """GoogLeNet and Inception give the scores of auxiliary classifiers, too, while they train."""
    scores, *auxiliary = scores if isinstance(scores, tuple) else (scores,)
    losses = [F.cross_entropy(each, labels, label_smoothing=0.1) for each in (scores, *auxiliary)]
    return losses[0] + 0.3 * sum(losses[1:])


def average_statistics(model):
    """The mean over the ranks of batch norm's running statistics: each rank has kept its own (lesson 12)."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def deaf(worker):
    """For the loader's workers. SIGTERM goes to all processes of a rank; it needs them until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_workers():
    """At the end of a rank that failed: Python would send SIGTERM to its deaf workers, and wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # to the loader, a worker's death would be an error
    for worker in torch.multiprocessing.active_children():
        worker.kill()


def resume(path, of):
    """What to go on from, the same on every rank, or None: rank 0 looks, reads, and tells the others."""
    found = [None, ""]
    if dist.get_rank() == 0 and path is not None and path.exists():
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)  # runs none of its code
            found = [state, "" if state["of"] == of else f"is of {state['of']}, and this run is of {of}"]
        except Exception as error:
            found[1] = f"is no checkpoint of this program: {error!r:.100}"
    dist.broadcast_object_list(found, src=0)  # by pickle, which is safe here: our own rank 0 has written it
    if found[1]:
        sys.exit(f"{path} {found[1]}" if dist.get_rank() == 0 else 1)
    return found[0]


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
    device, backend = place()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, **alone)
    rank, world_size, on_gpu = dist.get_rank(), dist.get_world_size(), device.type == "cuda"

    folder = args.data or pictures()
    read = partial(decode, least=2 * args.size if args.shrink else 10**6)
    crop = [v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    center = [v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), v2.PILToTensor()]
    data = Packed(folder / "train", v2.Compose(crop), loader=read)
    held_out = Packed(folder / "val", v2.Compose(center), loader=read)
    sampler = DistributedSampler(data, seed=args.seed)
    # Without the last, shorter batch: batch norm cannot take the spread of a single picture.
    steps = len(sampler) // args.batch_size
    batches = []  # of keys: what the loader gives next
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0, "worker_init_fn": deaf}
    options |= {"batch_sampler": batches, "pin_memory": on_gpu}
    # Not forked from this process: NCCL is not made for that, and a process that forks while a thread of gloo
    # ends a collective may leave a worker that hangs. Nor from a fork server: SIGTERM would end that, too.
    options["multiprocessing_context"] = "spawn" if args.workers else None
    loader = DataLoader(Pictures(data, held_out, args.seed), **options)
    atexit.register(end_workers)
    iter(loader)  # the workers start now, with nothing to load: each takes seconds
    if held_out.classes != data.classes or not steps:
        sys.exit(f"{folder}: other classes in val, or no full batch for each rank" if rank == 0 else 1)

    torch.manual_seed(args.seed)
    make = resnet8 if args.arch == "resnet8" else partial(get_model, args.arch)
    layout = torch.channels_last if on_gpu else None  # as convolutions like it best there
    model = make(num_classes=len(data.classes)).to(device, memory_format=layout)
    # No traffic in forward: batch norm's running statistics are averaged where they are needed.
    ddp = DDP(model, device_ids=[device.index] if on_gpu else None, forward_sync_buffers=False)
    peak = args.lr * args.batch_size * world_size / 256  # in proportion to the global batch (lesson 11)
    optimizer = torch.optim.SGD(ddp.parameters(), peak, momentum=0.9, weight_decay=1e-4)
    args.half = sixteen_bits(device) if args.amp else None
    scaler = torch.amp.GradScaler(device.type, enabled=args.half == torch.float16)  # else it changes nothing

    done, seen = 0, 0  # epochs, and pictures of the next one, over all ranks
    of = {"arch": args.arch, "classes": len(data.classes)}
    if state := resume(args.checkpoint, of):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if state.get("scaler"):
            scaler.load_state_dict(state["scaler"])
        done, seen = state["epoch"], state["seen"]
        if rank == 0:
            print(f"done already: {done} epochs, and {seen:,} pictures of the next", flush=True)
    torch.manual_seed(hash((args.seed, rank, done, seen)) % 2**63)  # from here on each rank draws its own
    end = []  # not a threading.Event: its set() takes a lock, and a second signal in there waits for ever
    if args.checkpoint is not None:
        signal.signal(signal.SIGTERM, lambda *_: end.append(True))

    def save(epoch, seen):
        """Rank 0 writes; a kill leaves the old file or the new one, never half."""
        if rank == 0 and args.checkpoint is not None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scaler": scaler.state_dict(), "of": of, "epoch": epoch, "seen": seen}
            torch.save(state, part := f"{args.checkpoint}.part")
            os.replace(part, args.checkpoint)
        dist.barrier()  # no rank goes on before the checkpoint is there

    for epoch in range(done + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        first, seen = seen // (args.batch_size * world_size), 0  # steps that were done before a restart
        mine = in_batches([(epoch, i) for i in sampler], args.batch_size, drop_last=True)
        batches[:] = mine[first:]  # what was trained on already is not decoded again
        total = torch.zeros((), device=device)  # of the losses; all batches are equally long
        waited, began = 0.0, (ready := time.perf_counter())
        for step, (images, labels) in enumerate(track(loader), first):
            waited += time.perf_counter() - ready
            if args.checkpoint is not None and step % 5 == 0:
                dist.all_reduce(asked := torch.tensor(len(end), device=device), dist.ReduceOp.MAX)
                if asked.item():  # all end, or none: the signal may have reached one
                    average_statistics(model)
                    save(epoch - 1, step * args.batch_size * world_size)
                    sys.exit(128 + signal.SIGTERM)  # not 0: the run is not done
            at = (epoch - 1 + (step + 1) / steps) / args.epochs  # of the way: a warm-up, a cosine down to 0
            optimizer.param_groups[0]["lr"] = peak * min(1, 18 * at) * (1 + math.cos(math.pi * at)) / 2
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, args.half, enabled=args.amp):
                loss = loss_of(ddp(standard(images.float())), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # DDP averages the gradients over the ranks in here
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
            log(loss=loss.detach())
            ready = time.perf_counter()
        dist.all_reduce(total)
        made = max(1, steps - first) * world_size  # steps of all ranks
        loss, seconds = total.item() / made, time.perf_counter() - began
        share = waited / seconds  # a slow loader makes the *other* ranks wait less: look at all of them
        dist.all_reduce(shares := torch.tensor([share, -share], device=device), dist.ReduceOp.MAX)
        average_statistics(model)
        batches[:] = in_batches(my_part(len(held_out)), args.batch_size)
        top1, top5 = evaluate(model, loader, args, device)
        log(top1=top1, top5=top5)
        if rank == 0:
            speed = f"{made * args.batch_size / seconds:,.0f} pictures/s, "
            speed += f"{-shares[1]:.0%} to {shares[0]:.0%} waiting, by rank"
            print(f"epoch {epoch}: loss {loss:.3f}, top-1 {top1:.1%}, top-5 {top5:.1%}; {speed}", flush=True)
        save(epoch, 0)
    del ddp  # before torch 2.14 a DDP that outlives its group may hang (gloo)
    dist.destroy_process_group()


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", required=pictures is None, help="has train/CLASS and val/CLASS")
    add("--arch", default="resnet18", help="resnet8, or one of torchvision's classifiers")
    add("--epochs", type=int, default=90, help="times through the training pictures")
    add("--batch-size", type=int, default=32, help="pictures a step, on each rank")
    add("--lr", type=float, default=0.1, help="SGD's highest learning rate, for a global batch of 256")
    add("--size", type=int, default=224, help="pixels that the network sees, each way")
    add("--shrink", action="store_true", help="decode large JPEGs at 1/2, 1/4 or 1/8 of their size")
    add("--workers", type=int, default=0, help="processes that decode, for each rank")
    add(
        "--amp",
        action="store_true",
        help="mixed precision: compute in bfloat16 where it serves; float16 before Ampere",
    )
    add("--seed", type=int, default=0, help="of the first weights, the order and the crops")
    add("--checkpoint", type=Path, metavar="PATH", help="go on from it where it is there; write it")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "batch-size": 2, "size": 8, "workers": 0, "lr": 1e-9}.items():
        if not least <= (given := getattr(args, name.replace("-", "_"))) < math.inf:
            parser.error(f"argument --{name}: it is a number from {least:g} on, not {given:g}")
    if args.data and not all(any((args.data / split).glob("*/")) for split in ("train", "val")):
        parser.error(f"argument --data: {str(args.data)!r} must have train and val, with a folder a class")
    if (path := args.checkpoint) and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        parser.error(f"{str(path)!r} must be a file, in a folder that is there and can be written")
    return args


if __name__ == "__main__":
    train(parse_arguments())
