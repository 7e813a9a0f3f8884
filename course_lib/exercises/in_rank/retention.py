"""Measure what an answer keeps in memory: of forward passes, of samples that it was given, in all tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class TrackedList(list):
    """A list that can be weakly referenced, to see whether anybody still holds it.

    It is here, and not with its question, since a loader's workers pickle it by its module's name.
    """


class _ForwardPass:
    """A forward pass; it lives as long as anything that its graph has saved for the backward pass."""


@dataclass
class _Saved:
    tensor: Tensor
    of: _ForwardPass


def watch_retention(model: nn.Module, size: Callable[[Tensor], int]) -> list[int]:
    """Watch a model permanently; return a list that grows with each forward pass that builds a graph.

    Each entry is the total size of all passes whose tensors are kept at that time: that pass, and earlier
    ones with graphs not yet freed. A backward pass frees its graph unless it is told to retain it.

    Parameters
    ----------
    model
        The model; its calls are the passes, also when a wrapper makes them.
    size
        Gives the size of a pass from its output.
    """
    passes: weakref.WeakKeyDictionary[_ForwardPass, int] = weakref.WeakKeyDictionary()
    begun: list[tuple[saved_tensors_hooks, _ForwardPass]] = []
    retained: list[int] = []

    def begins(*_: Any) -> None:
        this = _ForwardPass()
        # Detached: a graph that keeps its own output would be a reference cycle and outlive its last use.
        hooks = saved_tensors_hooks(lambda tensor: _Saved(tensor.detach(), this), lambda saved: saved.tensor)
        hooks.__enter__()
        begun.append((hooks, this))

    def ends(_: nn.Module, __: Any, output: Any) -> None:
        hooks, this = begun.pop()
        hooks.__exit__()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            passes[this] = size(output)
            retained.append(sum(passes.values()))

    model.register_forward_pre_hook(begins)
    model.register_forward_hook(ends, always_call=True)
    return retained


def live_bytes() -> int:
    """Return the bytes of all CPU tensors that this process holds; a storage with several views counts once.

    What only C++ holds is not seen: a tensor that a graph has saved, say. Gradients are.
    """
    gc.collect()
    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor):  # isinstance would ask objects that pose as others
            continue
        for tensor in (each, each.grad if each.is_leaf else None):
            if tensor is not None and tensor.layout == torch.strided and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
