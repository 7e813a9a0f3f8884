"""What people answer in exercise 08, wrong and right (see `answers`)."""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.exercises.answers import right, wrong

ON_CPU = "on the CPU it gives a DistributedDataParallel that averages the model's gradients"
ON_GPU = "on a GPU, device_ids names that GPU"


@wrong("08.1", ON_GPU, hint="an error")
def gpus_alone(model, device):
    return DDP(model, device_ids=[device.index], output_device=device.index)


@wrong("08.1", hint="no DDP")
def forgets_to_return(model, device):
    DDP(model)


@wrong("08.1", ON_GPU, hint="another model")
def a_model_of_its_own(model, device):
    return DDP(nn.Linear(4, 3).double(), device_ids=[device.index] if device.type == "cuda" else None)


@wrong("08.1", ON_CPU, hint="DDP must be called all the same.")
def by_its_name(model, device):
    return DDP(model, device_ids=None if device == torch.device("cpu") else [device.number])


@wrong("08.1", ON_CPU, hint="no GPU")
def never_names_one(model, device):
    return DDP(model)


@wrong("08.1", ON_CPU, hint="no GPU")
def no_ids_for_gpu_0(model, device):
    return DDP(model, device_ids=[device.index] if device.index else None)


@wrong("08.1", ON_CPU, hint="another GPU")
def by_local_rank(model, device):
    local_rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
    return DDP(model, [local_rank] if device.type == "cuda" else None)


class Wrapped(DDP):
    """As people do it to reach the model's own methods."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


@right("08.1")
def of_a_class_of_its_own(model, device):
    return Wrapped(model.to(device), device_ids=[device] if device.type == "cuda" else None)


@right("08.1")
def by_where_the_weights_are(model, device):
    there = next(model.parameters())
    if not there.is_cuda:
        return DDP(model)
    torch.cuda.set_device(device)
    return DDP(model, [there.get_device()], output_device=device, bucket_cap_mb=1)


GOES_ON = "a second start resumes after the last completed epoch"
SAME = "and ends with the weights of an uninterrupted run"
ONE = "rank 0 alone writes"
WHOLE = "a kill in the middle of a save leaves a checkpoint to resume from"


def restore(model, optimizer, path) -> int:
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def whole(model, optimizer, epoch) -> dict:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}


def keep(state, path) -> None:
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)


@wrong("08.2", hint="starts over")
def as_it_was_in_2021(model, optimizer, run_epoch, epochs, path):
    for epoch in range(epochs):
        run_epoch(epoch)
        torch.save(model.state_dict(), path)
        dist.barrier()


@wrong("08.2", hint="nobody")
def saves_nothing(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)


@wrong("08.2", ONE, hint="another epoch")
def one_epoch_twice(model, optimizer, run_epoch, epochs, path):
    for epoch in range(max(0, restore(model, optimizer, path) - 1), epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)


@wrong("08.2", ONE, hint="not saved")
def every_second_epoch(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        if epoch % 2 or epoch == epochs - 1:
            keep(whole(model, optimizer, epoch), path)


@wrong("08.2", ONE, hint="not saved")
def under_another_name(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, f"{path}.ckpt"), epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), f"{path}.ckpt")


@wrong("08.2", ONE, hint="no end")
def once_more_when_complete(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path) % epochs, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)


@wrong("08.2", GOES_ON, ONE, WHOLE, hint="the optimizer")
def without_the_optimizer(model, optimizer, run_epoch, epochs, path):
    as_it_is = optimizer.state_dict()
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch) | {"optimizer": as_it_is}, path)


@wrong("08.2", GOES_ON, ONE, WHOLE, hint="the model")
def the_epoch_alone(model, optimizer, run_epoch, epochs, path):
    begin = torch.load(path)["epoch"] + 1 if os.path.exists(path) else 0
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        keep(whole(model, optimizer, epoch), path)


@wrong("08.2", GOES_ON, SAME, WHOLE, hint="several")
def every_rank_writes(model, optimizer, run_epoch, epochs, path):
    begin = restore(model, optimizer, path)
    dist.barrier()
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        part = f"{path}.{dist.get_rank()}"
        torch.save(whole(model, optimizer, epoch), part)
        os.replace(part, path)


@wrong("08.2", GOES_ON, SAME, ONE, hint="half a file")
def straight_to_its_name(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            torch.save(whole(model, optimizer, epoch), path)


@wrong("08.2", GOES_ON, SAME, ONE, hint="two steps")
def removes_the_old_one_first(model, optimizer, run_epoch, epochs, path):
    for epoch in range(restore(model, optimizer, path), epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            torch.save(whole(model, optimizer, epoch), f"{path}.new")
            Path(path).unlink(missing_ok=True)
            os.rename(f"{path}.new", path)


@right("08.2")
def rank_0_reads(model, optimizer, run_epoch, epochs, path):
    found = [None]
    if dist.get_rank() == 0 and os.path.exists(path):
        found = [torch.load(path, weights_only=False)]
    dist.broadcast_object_list(found, src=0)
    begin = 0
    if found[0]:
        begin, weights, momentum = found[0]
        model.load_state_dict(weights)
        optimizer.load_state_dict(momentum)
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            part = Path(path).with_suffix(".tmp")
            with open(part, "wb") as file:
                torch.save((epoch + 1, model.state_dict(), optimizer.state_dict()), file)
            part.rename(path)
        dist.barrier()


@right("08.2")
def as_bytes(model, optimizer, run_epoch, epochs, path):
    begin = restore(model, optimizer, path)
    for epoch in range(begin, epochs):
        run_epoch(epoch)
        if dist.get_rank() == 0:
            buffer = io.BytesIO()
            torch.save(whole(model, optimizer, epoch), buffer)
            Path(path + "~").write_bytes(buffer.getvalue())
            os.replace(path + "~", path)
