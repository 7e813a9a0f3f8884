"""What the fork server loads once, so that each rank has it from its first millisecond."""

import contextlib

import torch
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

from . import entry, rank  # noqa: F401

with contextlib.suppress(Exception):  # only some lessons need it, and a rank would say what is wrong with it
    import torchvision  # noqa: F401
