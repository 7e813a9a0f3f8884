"""What an answer keeps in memory: of its forward passes, and of the samples that it was given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Held(list):  # type: ignore[type-arg]
    """A list of which a weak reference can say whether somebody holds it still.

    It is here, and not with its question, since a loader's workers send it by its module's name.
    """


class _Pass:
    """A forward pass: all that its graph keeps for the backward holds it."""


@dataclass
class _Saved:
    tensor: Tensor
    of: _Pass


def watched(model: nn.Module, size: Callable[[Tensor], int]) -> list[int]:
    """Watch a model for good: the list grows in each forward pass that builds a graph.

    By the sizes, together, of all passes whose tensors are kept then: that pass, and those whose graphs
    nobody has used up. A backward pass uses a graph up, unless it is told to retain it.

    Parameters
    ----------
    model
        Whose calls are the passes; also those of a wrapper around it.
    size
        Of a pass, by its output.
    """
    passes: weakref.WeakKeyDictionary[_Pass, int] = weakref.WeakKeyDictionary()
    begun: list[tuple[saved_tensors_hooks, _Pass]] = []
    kept: list[int] = []

    def begins(*_: Any) -> None:
        this = _Pass()
        # Detached: a graph that keeps its own output would be a circle, and stay when nobody wants it.
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
