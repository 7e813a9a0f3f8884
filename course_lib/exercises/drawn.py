"""What judges draw: worlds, tensors, models, folders and machines of more than one kind.

A judge draws seeds and sizes, which are plain data and cross to the ranks; both sides make the same of them.
So an answer that is right for one kind alone, or that remembers its last call, shows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from ..by_value import dumps, loads
from .asking import Finding

OTHER_DISK = Path("/dev/shm")  # another file system than that of temporary files, on Linux
LAYOUTS = ("plain", "turned", "every second", "a part")
BIG = 2**60  # from here on float64 holds one whole number of 256


def seeds(rng: random.Random, count: int) -> list[int]:
    """For a generator each; no two are alike."""
    return rng.sample(range(2**31), count)


def with_two_numbers(
    rng: random.Random, judge: Callable[[int], Iterator[Finding]], first: Sequence[int] = (2, 3, 4, 5)
) -> list[Finding]:
    """What a judge finds with two numbers of ranks: one that is written into an answer would be right once.

    All is judged before any of it counts, since an answer may fail, or hang, with the second number alone.
    What is wrong with both is shown as it is with the first of them, which is one of ``first``. They are not
    2 and 3: two steps that somebody wrote out do for both.
    """
    one = rng.choice(first)
    other = rng.choice([each for each in range(2, 6) if each != one and max(each, one) > 3])
    return [found for ranks in (one, other) for found in judge(ranks)]


# --- tensors ----------------------------------------------------------------------------------------------


def tensor(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, layout: str = "plain"
) -> Tensor:
    """A tensor of any type, whose numbers do not survive a smaller one.

    Parameters
    ----------
    seed
        The same one gives the same numbers in every layout.
    shape
        Of what is returned; ``()`` and sizes of 0 are shapes, too.
    layout
        How it lies in memory, one of `LAYOUTS`: "turned" runs along the first axis first, "every second" has
        gaps, "a part" begins in the midst of its storage.
    """
    dice = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        values = torch.randint(0, 2, shape, generator=dice) > 0
    elif dtype.is_floating_point or dtype.is_complex:
        real = torch.complex128 if dtype.is_complex else torch.float64
        values = torch.randn(shape, generator=dice, dtype=real).to(dtype)
    else:
        values = torch.randint(0, min(torch.iinfo(dtype).max, 2**53), shape, generator=dice)
        values = values + BIG if dtype == torch.int64 else values.to(dtype)
    return laid_out(values, layout)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same numbers in the same shape, in other places of memory."""
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
    """One linear layer that is used twice, by one parameter with two names."""

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
    """A model as they are met outside of lessons, in float64.

    It is nested three deep and has shared parameters, a layer without bias, underscores in its names, a layer
    in another mode than the rest, and buffers that are saved and some that are not.

    Parameters
    ----------
    kind
        A seed for its form: widths, which layer is frozen.
    values
        A seed for its numbers.
    frozen
        With a layer that takes no part in the training.
    norm
        With batch norm, whose buffers change in each forward pass; then a whole batch gives other numbers
        than its parts do.
    """
    dice = random.Random(kind)
    wide, narrow = dice.sample(range(3, 8), 2)
    inner: list[tuple[str, nn.Module]] = [("tied_", Tied(wide)), ("out", nn.Linear(wide, narrow, bias=False))]
    if norm:
        inner.append(("norm", nn.BatchNorm1d(narrow)))
    body = nn.Sequential(OrderedDict(act=nn.Tanh(), inner_layers=nn.Sequential(OrderedDict(inner))))
    first = nn.Linear(inputs, wide)
    model = nn.Sequential(
        OrderedDict(first=first, body=body, drop=nn.Dropout(0.5), head=nn.Linear(narrow, outputs))
    )
    model.double()
    model.drop.eval()  # as somebody left it
    generator = torch.Generator().manual_seed(values)
    with torch.no_grad():
        for each in itertools.chain(model.parameters(), model.buffers()):
            if each.dtype == torch.int64:
                each.fill_(values % 1000)
            else:
                each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float64) / 2)
                if norm and each is model.body.inner_layers.norm.running_var:
                    each.abs_().add_(0.5)
    if frozen:
        dice.choice([first, model.body.inner_layers.out]).requires_grad_(False)
    return model


def everything(model: nn.Module) -> OrderedDict[str, Tensor]:
    """All parameters and buffers of a model by name, those that are not saved too; each once."""
    return OrderedDict(itertools.chain(model.named_parameters(), model.named_buffers()))


# --- the machine ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, where there is such a thing on another file system than temporary files."""
    other = OTHER_DISK if os.access(OTHER_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="course-", dir=other, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def machine(gpus: int, environment: dict[str, str] | None = None, cores: int = 7) -> Iterator[None]:
    """For what asks how many GPUs and cores there are, and what stands in its environment."""
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
def apart(seed: int) -> Iterator[None]:
    """As in a process of its own: with its own dice, and its own hash of a text.

    Ranks are forked from one process, and would have these in common by chance.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    with mock.patch("builtins.hash", partial(hash_of_its_own, hash, seed)):
        yield


def hash_of_its_own(plain: Callable[[Any], int], seed: int, value: Any) -> int:
    """A text's hash is another in each process; but ranks are forked from one, and have one for all."""
    parts = value if isinstance(value, tuple) else (value,)
    return plain((seed, value)) if any(isinstance(each, str | bytes) for each in parts) else plain(value)


def restarted(answer: Any, times: int) -> list[Any]:
    """An answer so many times, each as a new process would have it: it remembers no call of another one."""
    kept = dumps(answer)
    return [loads(kept) for _ in range(times)]
