"""What `why` changes in a trial's ranks: batches come without their loader, or DDP does not synchronize."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ClassVar

from ..run_folder import REPEATED_BATCHES, TRIAL
from .counters import MAPPINGS
from .recorder import note

MOST_KEPT = 4  # batches of a loader
SYNCHRONIZED = 2  # first passes of a DDP


class RepeatedBatches:
    """The first batches of a loader, again and again, as many in each pass as the loader has.

    A loader without a length never ends its pass. Loops at one place over loaders of one length share the
    batches: many programs make a new loader for each epoch.
    """

    _kept: ClassVar[dict[Hashable, list[Any]]] = {}

    def __init__(self, loader: Iterable[Any], place: Hashable) -> None:
        self._loader, self._place = loader, place

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        try:
            length: int | None = len(self)
        except TypeError:
            length = None
        data = id(getattr(self._loader, "dataset", None))
        batches, given = self._kept.setdefault((self._place, data, length), []), 0
        if not batches:
            for batch in itertools.islice(self._loader, MOST_KEPT):
                batches.append(_copy(batch))
                given += 1
                yield batch
        rest = itertools.count(given) if length is None else range(given, length)
        if batches:
            yield from (_copy(batches[i % len(batches)]) for i in rest)


def _copy(batch: Any) -> Any:
    """Copy a batch's containers, from which programs take things out, but not its tensors."""
    if isinstance(batch, MAPPINGS):
        return type(batch)({key: _copy(value) for key, value in batch.items()})
    return [_copy(part) for part in batch] if type(batch) is list else batch


def batches_of(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the loader or, in a trial without a loader's cost, its first batches again and again.

    Numbers of steps are no batches, and pass. The loop's place in the program is where `track` was called,
    two frames up.
    """
    trial, workers = os.environ.get(TRIAL), getattr(loader, "num_workers", 0)
    if trial and workers:  # what they have ready when the first step ends is not measured: it costs no time
        note(queued_batches=workers * getattr(loader, "prefetch_factor", 0))
    if trial != REPEATED_BATCHES or isinstance(loader, range):
        return loader
    frame = sys._getframe(2)
    return RepeatedBatches(loader, (frame.f_code, frame.f_lasti))


def never_synchronize(was_made: Callable[[], None]) -> None:
    """Switch DDP's gradient synchronization off in this process; ``was_made()`` is called once.

    DDP reads the switch, which its ``no_sync()`` sets too, in each forward pass. The first passes synchronize
    all the same: with ``static_graph``, DDP learns its graph in them.
    """
    from torch.nn.parallel import DistributedDataParallel

    passes: dict[int, int] = {}  # by the id of a DDP

    def count(ddp: Any, *_: Any) -> None:
        passes[id(ddp)] += 1

    def switch(ddp: Any) -> bool:
        return passes.get(id(ddp), 0) <= SYNCHRONIZED

    def set_switch(ddp: Any, value: bool) -> None:
        if id(ddp) not in passes:
            passes[id(ddp)] = 0
            ddp.register_forward_pre_hook(count)
            was_made()

    DistributedDataParallel.require_backward_grad_sync = property(switch, set_switch)  # type: ignore[assignment]
