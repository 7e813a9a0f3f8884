"""What lesson 10 and its deeper notebooks train: a small network with dropout, and batches for a resume.

from scripts.resuming import build, training_batches  # in a notebook of the folder lessons
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from course_lib import digits, place

from .common import ConvNet, join, wrapped

STEPS, PER_EPOCH = 40, 20
GLOBAL = 60  # samples a step, on all ranks together


def join_exactly():
    """Join the group, unless this rank has, so that equal runs give equal numbers. Returns its device."""
    if dist.is_initialized():
        return place()[0]
    torch.set_num_threads(1)  # on a CPU their number decides how sums are rounded
    torch.use_deterministic_algorithms(place()[0].type == "cuda")  # a GPU may else add up in any order
    return join()


def network():
    """The digits' network with dropout, which draws random numbers in every step."""
    model = ConvNet(8)
    model.insert(7, nn.Dropout(0.25))  # after Flatten
    return model


def build(device, dry_steps=1):
    """A new DDP model, its optimizer, and a scheduler: a cosine from 0.004 down to 0 in all STEPS."""
    torch.manual_seed(0)  # the same model on every rank
    ddp = wrapped(network().to(device), device)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.004)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    # DDP rebuilds its buckets after its first backward. Let that be one that does not count: on three ranks
    # or more, other buckets round differently (deeper/10_fewer_ranks).
    for _ in range(dry_steps):
        ddp(torch.zeros(2, 1, 28, 28, device=device)).sum().backward()
    optimizer.zero_grad()
    torch.manual_seed(1 + dist.get_rank())  # and different dropout masks
    return ddp, optimizer, scheduler


def training_batches(epoch, skip):
    """This rank's batches of an epoch, without the first `skip`: the epoch's number fixes their order."""
    data = Subset(digits(), range(PER_EPOCH * GLOBAL))
    sampler = DistributedSampler(data)
    sampler.set_epoch(epoch)
    each = GLOBAL // dist.get_world_size()  # a rank's part of the global batch
    mine = list(sampler)[skip * each :]  # what this rank has not seen yet
    # A loader draws one number when a loop over it begins. From a generator of its own: a resume within an
    # epoch begins one loop more, and would shift what is drawn from the CPU's generator.
    of_loader = torch.Generator().manual_seed(hash((dist.get_rank(), epoch, skip)) % 2**63)
    return DataLoader(Subset(data, mine), batch_size=each, generator=of_loader)


def record(step, loss):
    """The loss over all ranks; rank 0 prints it, all digits: what is printed survives a kill."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)  # each rank knows only its own loss
    mean = loss.item() / dist.get_world_size()
    if dist.get_rank() == 0:
        print(step, mean, flush=True)
    return mean


def printed(run):
    """The losses by step that rank 0 of a run has printed."""
    lines = [line.split() for line in run.logs[0].splitlines()]
    return {int(line[0]): float(line[1]) for line in lines if len(line) == 2 and line[0].isdecimal()}


def rng_state(device):
    """Where this rank's random number generators are: the CPU's, and its GPU's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_rng_state(state, device):
    of_cpu, of_gpu = state
    torch.set_rng_state(of_cpu)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu, device)
