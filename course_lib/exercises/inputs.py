"""Make random inputs for judges: seeds, tensors, models, folders and machines of several kinds.

A judge draws seeds and sizes and sends them to the ranks as plain data; both sides build the same inputs from
them. Many kinds of inputs expose an answer that is right for one kind only, or that remembers its last call.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

OTHER_DISK = Path("/dev/shm")  # on Linux, another file system than that of temporary files
BIG = 2**60  # above it, float64 has one in 256 of the whole numbers


def seeds(rng: random.Random, count: int) -> list[int]:
    """Draw seeds for generators, all of them different."""
    return rng.sample(range(2**31), count)


# --- tensors ----------------------------------------------------------------------------------------------


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Make a tensor of bools or real numbers, which a smaller dtype would not preserve."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator) > 0
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    values = torch.randint(0, min(torch.iinfo(dtype).max, 2**53), shape, generator=generator)
    return values + BIG if dtype == torch.int64 else values.to(dtype)


# --- models -----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two linear layers that share their weight: one parameter with two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second_ = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.second_.weight = self.first.weight
        self.register_buffer("offset", torch.zeros(width), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.second_(self.first(x).tanh() + self.offset)


def network(
    kind: int, values: int, inputs: int = 4, outputs: int = 2, frozen: bool = True, norm: bool = True
) -> nn.Module:
    """Build a float64 model with what models outside the lessons have.

    It is nested three deep and has a shared parameter, layers without bias, underscores in its names, a layer
    in another mode than the rest, and both persistent and non-persistent buffers.

    Parameters
    ----------
    kind
        A seed for its form: the widths, and which layer is frozen.
    values
        A seed for its numbers.
    frozen
        Freeze one layer: training leaves it as it is.
    norm
        Add batch norm: its buffers change in each forward pass, and a whole batch gives other numbers than
        its parts.
    """
    rng = random.Random(kind)
    wide, narrow = rng.sample(range(3, 8), 2)
    inner: list[tuple[str, nn.Module]] = [("tied_", Tied(wide)), ("out", nn.Linear(wide, narrow, bias=False))]
    if norm:
        inner.append(("norm", nn.BatchNorm1d(narrow)))
    layers = dict(inner)
    body = nn.Sequential(OrderedDict(act=nn.Tanh(), inner_layers=nn.Sequential(OrderedDict(inner))))
    first, drop = nn.Linear(inputs, wide), nn.Dropout(0.5)
    model = nn.Sequential(OrderedDict(first=first, body=body, drop=drop, head=nn.Linear(narrow, outputs)))
    model.double()
    drop.eval()  # as if somebody had left it so
    generator = torch.Generator().manual_seed(values)
    with torch.no_grad():
        for numbers in itertools.chain(model.parameters(), model.buffers()):
            if numbers.dtype == torch.int64:
                numbers.fill_(values % 1000)
            else:
                numbers.copy_(torch.randn(numbers.shape, generator=generator, dtype=torch.float64) / 2)
                if norm and numbers is layers["norm"].running_var:
                    numbers.abs_().add_(0.5)
    if frozen:
        rng.choice([first, layers["out"]]).requires_grad_(False)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the numbers of several tensors in a flat one, without a graph."""
    return torch.cat([tensor.flatten().detach() for tensor in tensors])


def gradients_of(model: nn.Module) -> Tensor | None:
    """Return all gradients of a model in a flat tensor; None if a parameter has none."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return flat(gradients) if len(gradients) == len(parameters) else None


# --- the machine ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Provide an empty folder, if possible on another file system than temporary files have."""
    other = OTHER_DISK if os.access(OTHER_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="course-", dir=other, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def machine(gpus: int, environment: dict[str, str] | None = None, cores: int = 7) -> Iterator[None]:
    """Simulate a machine with these numbers of GPUs and cores, and with these environment variables."""
    with (
        mock.patch.dict(os.environ, environment or {}),
        mock.patch("os.cpu_count", return_value=cores),
        mock.patch("os.sched_getaffinity", return_value=set(range(cores)), create=True),
        mock.patch("torch.cuda.device_count", return_value=gpus),
        mock.patch("torch.cuda.is_available", return_value=gpus > 0),
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.accelerator.is_available", return_value=gpus > 0),
        mock.patch("torch.accelerator.device_count", return_value=gpus),
    ):
        yield


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Give this rank an RNG state and text hashes of its own, like those of a process started separately.

    Ranks are forked from one process, from which they would inherit the same.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    with mock.patch("builtins.hash", partial(hash_of_process, hash, seed)):
        yield


def hash_of_process(plain: Callable[[Any], int], seed: int, value: Any) -> int:
    """Hash as in a separate process: text hashes differ between processes, but not between forked ranks."""
    parts = value if isinstance(value, tuple) else (value,)
    return plain((seed, value)) if any(isinstance(part, str | bytes) for part in parts) else plain(value)
