"""What `why` changes in a trial's ranks: batches come without their loader, or DDP does not synchronize."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ..record.layout import REPEATED_BATCHES, TRIAL
from .counters import MAPPINGS, length_of

MOST_KEPT = 4  # batches of a loader
_kept: dict[Any, list[Any]] = {}  # the first batches, by the place of the loop and the loader's length


def batches_of(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the loader or, in a trial without a loader's cost, its first batches again and again.

    They are as many as it has, or endless without a length. Loops at one place, where `track` was called two
    frames up, share them if their loaders are of equal length: many programs make a loader for each epoch.
    A range stays as it is: it holds numbers of steps, no batches.
    """
    if os.environ.get(TRIAL) != REPEATED_BATCHES or isinstance(loader, range):
        return loader
    frame, length = sys._getframe(2), length_of(loader)
    batches = _kept.setdefault((frame.f_code, frame.f_lasti, length), [])
    if not batches:
        batches += itertools.islice(loader, MOST_KEPT)
    return map(_copy, itertools.islice(itertools.cycle(batches), length))


def _copy(batch: Any) -> Any:
    """Copy a batch's containers, since programs take things out of them; keep its tensors."""
    if isinstance(batch, MAPPINGS):
        return type(batch)({key: _copy(value) for key, value in batch.items()})
    return [_copy(part) for part in batch] if type(batch) is list else batch


def never_synchronize(was_made: Callable[[], None]) -> None:
    """Switch DDP's gradient synchronization off in this process; ``was_made()`` is called for each DDP.

    DDP reads the switch in each forward pass; ``no_sync()`` sets it, too. A DDP with ``static_graph`` raises
    RuntimeError: it would have to synchronize in the first passes.
    """
    from torch.nn.parallel import DistributedDataParallel

    switch = property(lambda ddp: False, lambda ddp, value: was_made())
    DistributedDataParallel.require_backward_grad_sync = switch  # type: ignore[assignment]
