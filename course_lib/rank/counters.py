"""Count the steps, samples and seconds of a rank's `track` loops."""

from __future__ import annotations

import math
import time
from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

MAPPINGS = (dict, UserDict)  # transformers' collators make a UserDict
CONTAINERS = (list, tuple, *MAPPINGS)  # built once: ``list | tuple | dict`` takes longer than isinstance does


class Counters:
    """Counters of the loops' progress: the loop's thread advances them, the recorder's thread reads them.

    If torchrun has restarted this rank, they go on from the last ``tick`` of the earlier attempt.
    """

    def __init__(self, tick: dict[str, float] | None = None) -> None:
        last = tick or {}
        self.samples, self.steps = int(last.get("samples", 0)), int(last.get("steps", 0))
        self._passes = int(last.get("passes", 0))
        self._tracked = last.get("tracked_seconds", 0.0)  # in passes that are over
        self._stepped = last.get("stepped_seconds", 0.0)  # tracked seconds until the last step ended
        self._pass_began: float | None = None
        self._pass_step = self.steps  # the step at which the current pass began
        self._pass_total = math.nan

    def counted(self, batches: Iterable[Any], total: int | None = None) -> Iterator[Any]:
        """Yield the batches; count steps and samples."""
        total = length_of(batches) if total is None else total
        nested = self._pass_began is not None
        outer_steps, outer_total = self.steps - self._pass_step, self._pass_total
        self._passes += 1
        self._pass_step, self._pass_total = self.steps, math.nan if total is None else total
        if not nested:
            self._pass_began = time.perf_counter()
        try:
            for batch in batches:
                yield batch
                self.samples += 1 if type(batch) is int else _samples(batch)  # a range: saves the call
                self.steps += 1
                self._stepped = self._tracked_so_far()
        finally:
            if nested:  # go on with the pass around this one
                self._pass_step, self._pass_total = self.steps - outer_steps, outer_total
            else:
                self._tracked, self._pass_began = self._tracked_so_far(), None

    def _tracked_so_far(self) -> float:
        return self._tracked + (0.0 if self._pass_began is None else time.perf_counter() - self._pass_began)

    def read(self) -> dict[str, float]:
        """Return the fields of `layout.TICK` that are counted here."""
        return {
            "samples": self.samples,
            "steps": self.steps,
            "tracked_seconds": self._tracked_so_far(),
            "stepped_seconds": self._stepped,
            "passes": self._passes,
            "pass_steps": self.steps - self._pass_step,
            "pass_total": self._pass_total,
        }


def length_of(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:  # an iterator
        return None


def _samples(batch: Any) -> int:
    while isinstance(batch, CONTAINERS) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, MAPPINGS) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 1
