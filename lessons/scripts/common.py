"""What many lessons need and one explains: how a rank joins (04), how DDP wraps (06), a model, its batches.

from scripts.common import ConvNet, batches, join, wrapped  # in a notebook of the folder lessons
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from course_lib import digits, place


def join():
    """Join the group, and return this rank's device (lesson 04)."""
    device, backend = place()
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    dist.barrier()  # so that no rank leaves while another is still connecting to it
    return device


def wrapped(model, device, **options):
    """The model in DDP, on its rank's device (lesson 06)."""
    return DDP(model, device_ids=[device.index] if device.type == "cuda" else None, **options)


class ConvNet(nn.Sequential):
    """A small network for the digits (lesson 02), without dropout."""

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


def batches(count, device, dtype=torch.float64):
    """The first batches of 64 digits, the same in every process. Float64: a real difference shows."""
    torch.set_num_threads(1)  # a CPU rank is one core, in every run that is compared
    for _, (images, labels) in zip(range(count), DataLoader(digits(), batch_size=64), strict=False):
        yield images.to(device, dtype), labels.to(device)
