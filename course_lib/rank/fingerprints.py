"""Take fingerprints of tensors that should be the same on all ranks; `report.divergence` compares them.

Each rank writes its own and sends nothing: a rank that has fewer batches, or hangs, holds up no other. Ranks
take them at steps that are a power of two apart, so ranks that choose differently have steps in common.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ..record.series import Series, on_cpu

SHARE = 0.005  # of the loop's time that fingerprints may take
FREE = 0.05  # seconds that they may take at first: a short training run is checked in each step
MOST = 256  # after about this many, they are taken half as often, and so on: the file stays small
BLOCK = 1 << 20  # 8-byte words that are summed up at once
BITS = 53  # of a fingerprint: a float64 holds an integer of this size exactly
ODD = 0x1E3779B97F4A7C15  # an odd factor loses no bit
Batch = TypeVar("Batch")

_known_factors: dict[Any, Any] = {}  # by device, as many as it has needed so far


class Fingerprints:
    """Takes the fingerprints in a rank's `track` loops; on a GPU, the recorder's thread reads them."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._passes = self._steps = 0  # of loops that take fingerprints
        self._pass_steps = 1  # of the last of these loops
        self._interval = 1  # steps from one fingerprint to the next
        self._seconds: tuple[float, ...] = ()  # that each of the last three took
        self._spent = 0.0  # seconds that all of them took
        self._last = (0, time.perf_counter())  # steps and time when the last one was taken
        self._pending: deque[tuple[Any, ...]] = deque()
        self._works = True

    def taken(self, batches: Iterable[Batch], same: Any) -> Iterator[Batch]:
        """Pass the batches on; take fingerprints before the first step, after the last, and in between."""
        self._passes += 1
        number, step = self._passes, 0
        due = (number - 1) % _power_of_two(2 * self._interval / self._pass_steps) == 0
        if due:
            self._take(same, (number, 0))
        for batch in batches:
            yield batch
            step, self._steps = step + 1, self._steps + 1
            if step % self._interval == 0:
                self._take(same, (number, step))
        if due and self._steps > self._last[0]:
            self._take(same, (number, step))
        self._pass_steps = max(1, step)

    def _take(self, same: Any, place: tuple[int, int]) -> None:
        try:
            if self._works:
                self._try(same, place)
        except Exception as error:  # a GPU whose memory is full: the training goes on
            self._works = False
            print(f"course_lib: track(…, same=…) no longer compares: {error!r}", file=sys.stderr)

    def _try(self, same: Any, place: tuple[int, int]) -> None:
        import torch

        began, place_in_run = time.perf_counter(), (self._attempt, *place)
        by_device: dict[Any, dict[str, Any]] = {}
        for name, tensor in whole_parameters(same).items():
            by_device.setdefault(tensor.device, {})[name] = tensor
        on_gpu = []
        for device, tensors in by_device.items():
            if device.type == "cuda":  # read later: no step waits for the device
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record(torch.cuda.current_stream(device))
                values = fingerprints(tensors.values())
                last.record(torch.cuda.current_stream(device))
                on_gpu.append((place_in_run, list(tensors), values, first, last))
            else:
                values = fingerprints(tensors.values())
                self._series.fingerprints(place_in_run, dict(zip(tensors, values.tolist(), strict=True)))
        now = time.perf_counter()
        if on_gpu:
            self._pending.append((on_gpu, now - began))
        else:
            self._took(now - began)
        (steps, since), self._last = self._last, (self._steps, now)
        if self._steps > steps:
            step_seconds = max(1e-9, began - since) / (self._steps - steps)
            seconds = sum(self._seconds) / max(1, len(self._seconds))
            enough = seconds / SHARE / step_seconds if self._spent > FREE else 1
            self._interval = _power_of_two(max(enough, self._steps / MOST))

    def _took(self, seconds: float) -> None:
        self._seconds = (*self._seconds, seconds)[-3:]
        self._spent += seconds

    def flush(self) -> bool:
        """Write the fingerprints that a GPU has computed; return whether some are left."""
        while self._pending and all(last.query() for *_, last in self._pending[0][0]):
            on_gpu, seconds = self._pending.popleft()
            for place_in_run, names, values, first, last in on_gpu:
                seconds += first.elapsed_time(last) / 1000
                values = on_cpu(values).tolist()
                self._series.fingerprints(place_in_run, dict(zip(names, values, strict=True)))
            self._took(seconds)
        return bool(self._pending)


def _power_of_two(least: float) -> int:
    """Return the smallest power of two that is ``least`` or more, and at least 1."""
    return 1 << (math.ceil(least) - 1).bit_length() if least > 1 else 1


def whole_parameters(model: Any) -> dict[str, Any]:
    """Return a model's parameters by name, without those that no rank holds whole."""
    wholes = ((name, _whole(parameter)) for name, parameter in model.named_parameters())
    return {name: whole for name, whole in wholes if whole is not None}


def _whole(tensor: Any) -> Any:
    """Return a tensor's values; None if it has no values yet, or holds only this rank's part (FSDP)."""
    import torch

    if all(each.is_replicate() for each in getattr(tensor, "placements", ())):
        tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if plain and tensor.layout is torch.strided and not tensor.is_meta:
            return tensor.detach().resolve_conj().resolve_neg()
    return None


def fingerprints(tensors: Iterable[Any]) -> Any:
    """Return, on the tensors' device, an integer of `BITS` bits for each that depends on all its bytes.

    The tensor's 8-byte words are multiplied by different odd factors and added up, modulo 2⁶⁴: so their order
    counts, and NaN equals itself.
    """
    import torch

    sums = []
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8)
        data = data.clone() if data.storage_offset() % 8 else data  # int64 needs a multiple of 8
        size = len(data) // 8 * 8
        total = _weighted(data[size:])
        for block in data[:size].view(torch.int64).split(BLOCK):
            # the highest bits, such as the sign's, would vanish from a sum
            mixed = (block >> 32).bitwise_xor_(block)
            total = 2 * ODD * total + _weighted(mixed)
        sums.append(total)
    lowest_bits = (1 << BITS) - 1
    return (torch.stack(sums) >> (64 - BITS)) & lowest_bits  # each bit changes the higher bits of a product


def _weighted(numbers: Any) -> Any:
    """Return the sum of numbers, each multiplied by a different odd factor."""
    import torch

    device, count = numbers.device, len(numbers)
    if len(_known_factors.get(device, ())) < max(1, count):
        _known_factors[device] = ODD * (2 * torch.arange(count + 1, device=device) + 1)
    return (numbers * _known_factors[device][:count]).sum()
