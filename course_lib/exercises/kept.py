"""Measure what an answer keeps in memory, of its forward passes and of the samples that it was given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Held(list):  # type: ignore[type-arg]
    """A list that can be weakly referenced, to see whether anybody still holds it.

    It is here, and not with its question, since a loader's workers pickle it by its module's name.
    """


class _Pass:
    """A forward pass; it lives as long as anything that its graph has saved for the backward pass."""


@dataclass
class _Saved:
    tensor: Tensor
    of: _Pass


def watched(model: nn.Module, size: Callable[[Tensor], int]) -> list[int]:
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
    passes: weakref.WeakKeyDictionary[_Pass, int] = weakref.WeakKeyDictionary()
    begun: list[tuple[saved_tensors_hooks, _Pass]] = []
    kept: list[int] = []

    def begins(*_: Any) -> None:
        this = _Pass()
        # Detached: a graph that keeps its own output would be a reference cycle and outlive its last use.
        hooks = saved_tensors_hooks(lambda each: _Saved(each.detach(), this), lambda saved: saved.tensor)
        hooks.__enter__()
        begun.append((hooks, this))

    def ends(_: nn.Module, __: Any, output: Any) -> None:
        hooks, this = begun.pop()
        hooks.__exit__()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            passes[this] = size(output)
            kept.append(sum(passes.values()))

    model.register_forward_pre_hook(begins)
    model.register_forward_hook(ends, always_call=True)
    return kept
