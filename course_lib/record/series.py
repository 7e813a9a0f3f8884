"""Write a rank's series of numbers to the run's folder: ticks, logged values, arrivals, fingerprints.

A full disk ends the writing, never the training.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..files import lines_of
from .layout import TICK, RankFiles


class Series:
    """The files of a rank's series, as `layout` describes them."""

    def __init__(self, files: RankFiles, launched: float) -> None:
        self._paths, self._rank, self._launched = files, files.rank, launched
        self.last_tick = _last_tick(files)  # of an earlier attempt, if torchrun has restarted this rank
        self._names, self._tensors = (
            {name: number for number, name in enumerate(lines_of(path))}  # of an earlier attempt
            for path in (files.names, files.tensors)
        )
        self._pending: deque[tuple[int, float, int, Any]] = deque()
        self._writing = threading.RLock()  # held while writing, never while waiting for the GPU
        self._reading = threading.RLock()  # one thread at a time reads the values, in order
        self._files: dict[str, Any] | None = {}  # opened when something is written

    def append(self, kind: str, values: Iterable[float]) -> None:
        """Append rows, one after the other, to the file of a kind in `layout.ROWS`."""
        self._write(kind, array("d", values).tobytes())

    def point(self, name: str, value: Any, samples: int) -> None:
        """Append a logged value; one on a GPU is read in `flush`.

        Raise ValueError if it is not one number, or if the run's own figures have this name.
        """
        numel = getattr(value, "numel", None)
        if numel is not None and numel() != 1:
            raise ValueError(
                f"log({name}=…) takes one number, and got a tensor of shape {tuple(value.shape)}; "
                f"log its mean, or one entry of it"
            )
        if getattr(value, "is_cuda", False):
            import torch

            event = torch.cuda.Event()
            value = (value.detach().clone(), event)  # a later step may overwrite the original
            event.record()
        else:
            try:
                value = float(value if numel is None else value.item())
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"log({name}=…) takes one number, and got {value!r:.80}") from None
        if name not in self._names and name in TICK:
            raise ValueError(f"log({name}=…): the run's own figures have this name; choose another")
        number = self._number(name, self._names, "names")
        self._pending.append((number, time.time() - self._launched, samples, value))

    def fingerprints(self, place: tuple[int, int, int], values: dict[str, int]) -> None:
        """Append the fingerprints of one place (attempt, pass, step), given by tensor name."""
        rows = array("d")
        for name, value in values.items():
            rows.extend((*place, self._number(name, self._tensors, "tensors"), value))
        self.append("fingerprints", rows)

    def _number(self, name: str, known: dict[str, int], kind: str) -> int:
        """Return the number of a name's line in a file; append the name if it is new."""
        if name not in known:
            with self._writing:
                if name not in known:
                    line = name.replace("\n", " ").replace("\r", " ")
                    self._write(kind, line.encode(errors="replace") + b"\n")
                    known[name] = len(known)
        return known[name]

    def flush(self) -> bool:
        """Write pending values, up to the first that a GPU still computes; return whether any are left."""
        if not self._reading.acquire(blocking=False):
            return True
        try:
            rows = array("d")
            for _ in range(len(self._pending)):  # one at a time: the training loop appends meanwhile
                value = self._pending[0][-1]
                if isinstance(value, tuple):
                    tensor, event = value
                    if not event.query():
                        break
                    value = on_cpu(tensor).item()
                rows.extend((*self._pending.popleft()[:-1], value))
            if rows:
                self.append("points", rows)
            return bool(self._pending)
        finally:
            self._reading.release()

    def close(self) -> None:
        for file in (self._files or {}).values():
            file.close()
        self._files = None

    def _write(self, kind: str, data: bytes) -> None:
        with self._writing:
            try:
                if self._files is not None:
                    if kind not in self._files:
                        self._files[kind] = open(getattr(self._paths, kind), "ab", buffering=0)
                    self._files[kind].write(data)
            except OSError as error:
                self._files = None
                with contextlib.suppress(OSError):  # the output may be on the same disk
                    print(f"course_lib: the figures of rank {self._rank} end here: {error}", file=sys.stderr)


def on_cpu(tensor: Any) -> Any:
    """Copy a computed tensor to the CPU, without waiting for later work on the GPU."""
    if not tensor.is_cuda:
        return tensor
    import torch

    with torch.cuda.stream(torch.cuda.Stream(tensor.device)):
        return tensor.cpu()


def _last_tick(files: RankFiles) -> dict[str, float] | None:
    """Return the last whole tick in the file, and cut off what follows it."""
    size = 8 * len(TICK)
    with contextlib.suppress(OSError):  # there is no earlier attempt
        ticks = files.ticks.read_bytes()
        whole = len(ticks) // size * size
        os.truncate(files.ticks, whole)
        if whole:
            return dict(zip(TICK, array("d", ticks[whole - size : whole]), strict=True))
    return None
