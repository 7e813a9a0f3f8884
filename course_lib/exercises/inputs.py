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
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

OTHER_DISK = Path("/dev/shm")  # on Linux, another file system than that of temporary files
LAYOUTS = ("plain", "turned", "every second", "a part")
BIG = 2**60  # above it, float64 has one in 256 of the whole numbers


def seeds(rng: random.Random, count: int) -> list[int]:
    """Draw seeds for generators, all of them different."""
    return rng.sample(range(2**31), count)


# --- tensors ----------------------------------------------------------------------------------------------


def tensor(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, layout: str = "plain"
) -> Tensor:
    """Make a tensor of any dtype, with numbers that a smaller dtype would not preserve.

    Parameters
    ----------
    seed
        The same seed gives the same numbers in every layout.
    shape
        The tensor's shape; ``()`` and sizes of 0 are allowed.
    layout
        Its layout in memory, one of `LAYOUTS`: in "turned" the first axis varies fastest, "every second" has
        gaps, and "a part" begins in the middle of its storage.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        values = torch.randint(0, 2, shape, generator=generator) > 0
    elif dtype.is_floating_point or dtype.is_complex:
        real = torch.complex128 if dtype.is_complex else torch.float64
        values = torch.randn(shape, generator=generator, dtype=real).to(dtype)
    else:
        values = torch.randint(0, min(torch.iinfo(dtype).max, 2**53), shape, generator=generator)
        values = values + BIG if dtype == torch.int64 else values.to(dtype)
    return with_layout(values, layout)


def with_layout(values: Tensor, layout: str) -> Tensor:
    """Return the same numbers in the same shape, in another memory layout."""
    if layout == "plain" or values.dim() == 0:
        return values
    if layout == "turned":
        return values.movedim(0, -1).contiguous().movedim(-1, 0)
    length = len(values)
    rows = values.new_zeros((2 * length + 2, *values.shape[1:]))
    part = rows[: 2 * length : 2] if layout == "every second" else rows[1 : length + 1]
    part.copy_(values)
    return part


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


def settings(model: nn.Module) -> dict[str, bool]:
    """Return, by name, the mode of each module, and whether each parameter is trained."""
    modes = {f"{name or 'the model'}.training": module.training for name, module in model.named_modules()}
    trained = {f"{name}.requires_grad": each.requires_grad for name, each in model.named_parameters()}
    return modes | trained


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


PLAIN_SET = set  # which `own_order_of_sets` replaces


class _WhatIsASet(type):
    """Has ``isinstance(…, set)`` hold for plain sets, too, such as those in braces."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, PLAIN_SET) if cls is OwnOrder else type.__instancecheck__(cls, value)


class OwnOrder(set[Any], metaclass=_WhatIsASet):
    """A set that gives texts in an order of this rank's own; sets in braces stay plain."""

    seed: ClassVar[int] = 0

    def __iter__(self) -> Iterator[Any]:
        items = list(PLAIN_SET.__iter__(self))
        if any(isinstance(each, str) for each in items):  # numbers have one order everywhere
            items.sort(key=lambda each: hash((self.seed, each)))
        return iter(items)

    def __reduce__(self) -> Any:
        return _a_set, (list(self),)


def _a_set(items: list[Any]) -> Any:
    return set(items)  # with an order of its own where it arrives


def _in_own_order(method: Any, *given: Any) -> Any:
    made = method(*given)
    return made if made is NotImplemented else OwnOrder(made)


OwnOrder.__name__ = OwnOrder.__qualname__ = "set"
OPERATORS = [f"__{right}{name}__" for name in ("or", "and", "sub", "xor") for right in ("", "r")]
for _name in (*OPERATORS, "union", "intersection", "difference", "symmetric_difference", "copy"):
    setattr(OwnOrder, _name, partialmethod(partial(_in_own_order, getattr(PLAIN_SET, _name))))


@contextlib.contextmanager
def own_order_of_sets(seed: int) -> Iterator[None]:
    """Have ``set(…)`` give texts in an order of this rank's own, like a process started separately."""
    OwnOrder.seed = seed
    with mock.patch("builtins.set", OwnOrder):
        yield
