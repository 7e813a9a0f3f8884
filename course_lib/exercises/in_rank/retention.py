"""Measure how much of its forward passes an answer keeps in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _ForwardPass:
    """A forward pass; it lives as long as any tensor that its graph has saved for the backward pass."""


@dataclass
class _Saved:
    tensor: Tensor
    of: _ForwardPass


def watch_retention(model: nn.Module, size: Callable[[Tensor], int]) -> list[int]:
    """Watch a model permanently; return a list that grows with each forward pass that builds a graph.

    Each entry is the total size of all passes whose tensors are kept at that time: that pass, and earlier
    passes whose graphs are not freed yet. A backward pass frees its graph unless told to retain it.

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
        # Detached: a graph that keeps its own output is a reference cycle, which outlives its last use.
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
