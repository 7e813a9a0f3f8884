"""Count the memory of the tensors that are alive, from their storages (lessons 03 and 18)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch._guards import active_fake_mode  # private, as `_python_dispatch`: torch 2.14
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensors = Iterable[Tensor | None]  # None: a parameter without a gradient
Storage = tuple[int, str, str, tuple[int, ...]]  # its bytes, its kind, the operation that made it, the shape
BUFFERS, REST = "collectives' buffers", "activations and results in between"
COLLECTIVES = {"allreduce": "all_reduce", "allgather": "all_gather"}  # c10d's name, and the public one


class LiveMemory:
    """A ledger of tensors by owner and kind that keeps none of them alive (lesson 03).

    It counts storages, the memory behind tensors: views of one storage count once, under the owner and kind
    that were noted first, until the storage is freed. Tensors that were never noted do not count.

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
        self._noted: WeakKeyDictionary[Any, tuple[Hashable, str]] = WeakKeyDictionary()  # by storage

    def note(self, owner: Hashable, kind: str, tensors: Tensors) -> None:
        """Note that tensors belong to an owner."""
        for storage in _storages(tensors):
            self._noted.setdefault(storage, (owner, kind))

    @contextmanager
    def saving(self, owner: Hashable, kind: str = "activations") -> Iterator[None]:
        """Note every tensor that autograd saves for the backward pass inside the block, in this thread."""

        def keep(tensor: Tensor) -> Tensor:
            self.note(owner, kind, [tensor])
            return tensor.detach()  # otherwise the graph could keep itself alive

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def bytes(self) -> dict[Hashable, dict[str, int]]:
        """Return the bytes of all noted storages that are still alive, by owner and kind."""
        counted: dict[Hashable, dict[str, int]] = {}
        for storage, (owner, kind) in self._noted.items():
            kinds = counted.setdefault(owner, {})
            kinds[kind] = kinds.get(kind, 0) + storage.nbytes()
        return counted


class LivePeak(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive inside the block, after each operation (lesson 18).

    It counts each storage once, at its present size (FSDP empties and fills storages). It does not see the
    memory that an operation uses internally, or that the allocator or a backend holds. It slows small
    operations down: do not time code inside the block.

    ``kinds()`` returns the tensors of each kind; it is called after each operation. A storage in two kinds
    counts for the first. One in no kind counts as "collectives' buffers" if a collective has had it, else as
    "activations and results in between". Of a DTensor, this rank's part counts.

    Set ``counting`` to False for steps that only make what stays, such as a model: their tensors count later,
    but none of the figures below includes the steps themselves. This saves most of the time.

    - ``history``: the bytes after each operation.
    - ``at_peak``: the bytes by kind, at the first moment when most were alive. They may differ a little from
      run to run: a backend's threads free what they have sent some time later.
    - ``most``: the most bytes of each kind, whenever that was.
    - ``largest``: the storages at the peak, the largest first: bytes, kind, operation that made it, shape.
    - ``collectives``: those that this rank called, with the bytes of the whole tensor, as in nccl-tests.

    Examples
    --------
    >>> with LivePeak(lambda: {"weights": model.parameters()}) as live:
    ...     model(x).sum().backward()
    >>> live.at_peak
    {'weights': 4096, 'activations and results in between': 65536}
    """

    def __init__(self, kinds: Callable[[], Mapping[str, Tensors]] = dict) -> None:
        super().__init__()
        self._kinds = kinds
        self._made: WeakKeyDictionary[Any, tuple[str, tuple[int, ...]]] = WeakKeyDictionary()  # by storage
        self._sent: WeakSet[Any] = WeakSet()  # storages that a collective has had
        self.counting = True
        self.history: list[int] = []
        self.at_peak: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.largest: list[Storage] = []
        self.collectives: list[tuple[str, int]] = []

    def __enter__(self) -> LivePeak:
        self._fake = active_fake_mode()
        self._note("made before", [list(tensors) for tensors in self._kinds().values()])
        return super().__enter__()

    def bytes(self) -> dict[str, int]:
        """Return the bytes that are alive now, by kind."""
        return self._look()[0]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # it comes again, on this rank's part
        result = operation(*args, **kwargs or {})
        if active_fake_mode() is self._fake:  # else DTensor is only working out a shape
            if operation.namespace in ("c10d", "_c10d_functional"):
                self._note_collective(operation, args)
            self._note("made before", [args, kwargs])
            self._note(str(operation).rsplit(".", 1)[0], result)
            if self.counting:
                self._count()
        return result

    def _note(self, operation: str, values: Any) -> None:
        for tensor in _tensors(values):
            for storage in _storages([tensor]):
                self._made.setdefault(storage, (operation, tuple(tensor.shape)))

    def _note_collective(self, operation: Any, args: tuple[Any, ...]) -> None:
        self._sent.update(_storages(_tensors(args)))
        size = max((sum(each.nbytes for each in _tensors(of_one)) for of_one in args), default=0)
        name = operation.__name__.split(".")[0].strip("_").removesuffix("_base").removesuffix("_into_tensor")
        if self.counting and name not in ("barrier", "wait_tensor"):
            self.collectives.append((COLLECTIVES.get(name, name), size))

    def _count(self) -> None:
        by_kind, storages = self._look()
        total = sum(by_kind.values())
        self.history.append(total)
        self.most |= {kind: max(size, self.most.get(kind, 0)) for kind, size in by_kind.items()}
        if total > sum(self.at_peak.values()):
            self.at_peak, self.largest = by_kind, sorted(storages, key=lambda each: (-each[0], each[1:]))

    def _look(self) -> tuple[dict[str, int], list[Storage]]:
        """Return the bytes that are alive now, by kind, and the storages that hold them."""
        kinds = self._kinds()
        kind_of = dict.fromkeys(self._sent, BUFFERS)
        for kind, tensors in reversed(list(kinds.items())):  # so the first kind of a storage wins
            kind_of |= dict.fromkeys(_storages(tensors), kind)
        storages: list[Storage] = [
            (size, kind_of.get(storage, REST), *made)
            for storage, made in self._made.items()
            if (size := storage.nbytes())
        ]
        by_kind = dict.fromkeys([*kinds, BUFFERS, REST], 0)
        for size, kind, *_ in storages:
            by_kind[kind] += size
        return {kind: size for kind, size in by_kind.items() if size}, storages


def _storages(tensors: Tensors) -> Iterator[Any]:
    """Yield the storage of each tensor that has memory; of a DTensor, this rank's."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "meta":
            yield getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]
