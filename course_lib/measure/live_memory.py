"""Count the memory of the tensors that are alive, by owner and kind, from their storages (lesson 03)."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class LiveMemory:
    """A ledger of tensors by owner and kind that keeps none of them alive (lesson 03).

    It counts the storage behind a tensor, the memory itself: views of one storage count once, under the owner
    and kind that were noted first. A storage that has been freed no longer counts. What was never noted
    (temporaries inside an operation, caches, Python itself) is not included.

    Examples
    --------
    >>> memory = LiveMemory()
    >>> memory.note("device 0", "parameters", model.parameters())
    >>> with memory.saving("device 0"):
    ...     output = model(x)
    >>> memory.bytes()
    {'device 0': {'parameters': 4096, 'activations': 65536}}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # replicas call `note` from threads of their own
        self._noted: dict[int, tuple[Any, int, Hashable, str]] = {}  # by storage: weak reference, bytes, …

    def note(self, owner: Hashable, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Note that tensors belong to an owner; None is skipped (a parameter without a gradient).

        Raises
        ------
        TypeError
            This is no collection of tensors with a storage each (a sparse tensor has none of its own).
        ValueError
            A tensor is on the device "meta" and holds no memory.
        """
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        if isinstance(tensors, torch.Tensor):
            raise TypeError("note takes a list of tensors, and this is one tensor: put it in [ ]")
        for tensor in tensors:
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"note takes tensors; this is {tensor!r:.60}, a {type(tensor).__name__}")
            if tensor.layout != torch.strided:
                raise TypeError(f"a tensor with the layout {tensor.layout} has no storage: note its parts")
            if tensor.device.type == "meta":
                raise ValueError("a tensor on the device 'meta' holds no memory: there is nothing to count")
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # while this exists, no other storage has its address
            with self._lock:
                known = self._noted.get(reference.cdata)
                if known is None or known[0].expired():
                    self._noted[reference.cdata] = (reference, storage.nbytes(), owner, kind)

    @contextmanager
    def saving(self, owner: Hashable, kind: str = "activations") -> Iterator[None]:
        """Note every tensor that autograd saves for the backward pass inside the block, in this thread.

        Uses ``torch.autograd.graph.saved_tensors_hooks``. What was noted before (a layer's weight, which is
        saved, too) keeps its owner and kind.
        """
        from torch.autograd.graph import saved_tensors_hooks

        def keep(tensor: Tensor) -> Tensor:
            self.note(owner, kind, [tensor])
            return tensor.detach()  # attached, it would make the graph keep itself alive

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def bytes(self) -> dict[Hashable, dict[str, int]]:
        """Return the bytes of all noted storages that are still alive, by owner and kind."""
        counted: dict[Hashable, dict[str, int]] = {}
        with self._lock:
            for address, (reference, size, owner, kind) in list(self._noted.items()):
                if reference.expired():
                    del self._noted[address]
                    continue
                kinds = counted.setdefault(owner, {})
                kinds[kind] = kinds.get(kind, 0) + size
        return counted
