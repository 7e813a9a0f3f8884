"""Count the bytes of all tensors that are alive while code runs, operation by operation (lesson 18)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..private_names import active_fake_mode, dispatch_mode, local_part

if TYPE_CHECKING:
    from torch import Tensor

Kinds = Callable[[], Mapping[str, "Iterable[Tensor | None]"]]
Storage = tuple[int, str, str, tuple[int, ...]]  # its bytes, its kind, the operation that made it, the shape
BUFFERS, REST = "collectives' buffers", "activations and results in between"
COLLECTIVES = {"allreduce": "all_reduce", "allgather": "all_gather"}  # c10d's name, and the public one


class LivePeak:
    """Counts the bytes of the tensors that are alive inside the block, after each operation (lesson 18).

    It counts storages, the memory itself, each once, at the size that they have at that moment (FSDP empties
    and fills them). Of what an operation uses for itself it sees nothing, nor of the memory that the
    allocator or a backend holds. It slows small operations down: do not time what runs inside.

    Parameters
    ----------
    kinds : callable, optional
        Returns the tensors of each kind; it is called after each operation. A storage that is in two kinds
        counts for the first. Of the others, those that a collective has had count as "collectives' buffers",
        and what is left as "activations and results in between". A DTensor counts with this rank's part.

    Attributes
    ----------
    counting : bool
        Set it to False for steps that only make what then stays: what they make is known later, and none of
        the figures below includes them. It saves most of the time.
    history : list of int
        The bytes after each operation.
    at_peak : dict
        The bytes by kind, at the first moment when most were alive. Of several moments that are almost equal
        another may be it next time: a backend's threads free what they have sent when they get to it.
    most : dict
        The most bytes of each kind, each at a moment of its own.
    largest : list of (int, str, str, tuple)
        Then: the bytes of each storage, its kind, the operation that made it, the shape; the largest first.
    collectives : list of (str, int)
        Each collective that this rank called, and the bytes of the whole tensor, as nccl-tests counts them.

    Examples
    --------
    >>> with LivePeak(lambda: {"weights": model.parameters()}) as live:
    ...     model(x).sum().backward()
    >>> live.at_peak
    {'weights': 4096, 'activations and results in between': 65536}
    """

    def __init__(self, kinds: Kinds = dict) -> None:
        self._kinds = kinds
        self._alive: dict[int, tuple[weakref.ref[Any], str, tuple[int, ...]]] = {}
        self._buffers: dict[int, weakref.ref[Any]] = {}
        self.counting = True
        self.history: list[int] = []
        self.at_peak: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.collectives: list[tuple[str, int]] = []
        self._peak = 0
        self._at_peak: list[Storage] = []

    def __enter__(self) -> LivePeak:
        self._fake = active_fake_mode()
        self._note("made before", [each for tensors in self._kinds().values() for each in tensors])
        self._mode = dispatch_mode(self._call)
        self._mode.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._mode.__exit__(*failure)

    def bytes(self) -> dict[str, int]:
        """Return the bytes that are alive now, by kind."""
        return self._look()[0]

    @property
    def largest(self) -> list[Storage]:
        return sorted(self._at_peak, key=lambda each: (-each[0], each[1:3], math.prod(each[3])))

    def _call(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        if active_fake_mode() is self._fake:  # else DTensor is only working out a shape
            if operation.namespace in ("c10d", "_c10d_functional"):
                self._sent(operation, args)
            self._note("made before", [args, kwargs])
            self._note(str(operation).rsplit(".", 1)[0], result)
            if self.counting:
                self._count()
        return result

    def _sent(self, operation: Any, args: tuple[Any, ...]) -> None:
        of_each = [_tensors(each) for each in args]
        for tensor in (each for tensors in of_each for each in tensors):
            storage = tensor.untyped_storage()
            self._buffers[id(storage)] = weakref.ref(storage)
        size = max((sum(each.nbytes for each in tensors) for tensors in of_each), default=0)
        name = operation.__name__.split(".")[0].strip("_").removesuffix("_base").removesuffix("_into_tensor")
        if self.counting and name not in ("barrier", "wait_tensor"):
            self.collectives.append((COLLECTIVES.get(name, name), size))

    def _note(self, operation: str, values: Any) -> None:
        for tensor in _tensors(values):
            if tensor.device.type == "meta":
                continue
            storage = local_part(tensor).untyped_storage()
            known = self._alive.get(id(storage))
            if known is None or known[0]() is not storage:
                self._alive[id(storage)] = weakref.ref(storage), operation, tuple(tensor.shape)

    def _count(self) -> None:
        by_kind, storages = self._look()
        total = sum(by_kind.values())
        self.history.append(total)
        for kind, size in by_kind.items():
            self.most[kind] = max(size, self.most.get(kind, 0))
        if total > self._peak:
            self._peak, self.at_peak, self._at_peak = total, by_kind, storages

    def _look(self) -> tuple[dict[str, int], list[Storage]]:
        """Return the bytes that are alive now, by kind, and the storages that hold them."""
        kinds = self._kinds()
        kind_of: dict[int, str] = {}  # of each storage, by its id: the first kind that has it
        for kind, tensors in kinds.items():
            for tensor in tensors:
                if tensor is not None:
                    kind_of.setdefault(id(local_part(tensor).untyped_storage()), kind)
        by_kind, storages = dict.fromkeys([*kinds, BUFFERS, REST], 0), []
        for storage, operation, shape in self._living():
            if size := storage.nbytes():
                kind = kind_of.get(id(storage)) or self._other(storage)
                by_kind[kind] += size
                storages.append((size, kind, operation, shape))
        return {kind: size for kind, size in by_kind.items() if size}, storages

    def _living(self) -> Iterator[tuple[Any, str, tuple[int, ...]]]:
        for address, (reference, operation, shape) in list(self._alive.items()):
            if (storage := reference()) is None:
                del self._alive[address]
            else:
                yield storage, operation, shape

    def _other(self, storage: Any) -> str:
        buffer = self._buffers.get(id(storage))
        return BUFFERS if buffer is not None and buffer() is storage else REST


def _tensors(values: Any) -> list[Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
