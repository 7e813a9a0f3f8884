"""Measure the memory that a rank holds: on the CPU its own pages, on a GPU what torch has allocated there."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

import psutil

TICK_INTERVAL = 0.1  # seconds between two readings
BYTES = "memory_bytes", "reserved_bytes", "peak_bytes", "driver_bytes"  # of `layout.TICK`


class Memory:
    """Measures how much memory this process holds, cheaply enough for ten readings a second.

    On the CPU, the exact figure is psutil's USS: pages that this process shares with no other, not even with
    the one that forked it. It takes a walk over the page tables, 10 ms with torch loaded. At first, while
    writing copies many shared pages, walks may take 0.5 % of the time, and ever less later, down to 0.1 %.
    Between walks, the change in resident size is added, which takes 10 µs to read.
    """

    OFTEN, SELDOM = 200, 1000  # a walk is due after this many times the last one's cost

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._exact_at = time.monotonic()
        self._cost = TICK_INTERVAL / self.OFTEN  # so the first walk comes after 0.1 s
        self._walks = 0
        self._own, self._resident = 0, self._resident_bytes()

    def read(self, exact: bool = True) -> dict[str, float]:
        """Return the bytes of `layout.TICK`; the GPU's bytes are NaN until the rank uses one."""
        torch: Any = sys.modules.get("torch")  # perhaps half imported by the main thread
        if hasattr(torch, "cuda") and hasattr(torch.cuda, "is_initialized") and torch.cuda.is_initialized():
            # take the GPU on which the rank holds most: each thread has a current device of its own
            gpus = range(torch.cuda.device_count())
            stats = [torch.cuda.memory_stats_as_nested_dict(gpu) for gpu in gpus]
            gpu = max(gpus, key=lambda gpu: stats[gpu]["reserved_bytes"]["all"]["current"])
            reserved, allocated = stats[gpu]["reserved_bytes"]["all"], stats[gpu]["allocated_bytes"]["all"]
            held = allocated["current"], reserved["current"], allocated["peak"]
            return dict(zip(BYTES, (*held, driver_bytes(gpu)), strict=True))
        return dict.fromkeys(BYTES, math.nan) | {"memory_bytes": self._on_the_cpu(exact)}

    def _on_the_cpu(self, exact: bool) -> float:
        resident, now = self._resident_bytes(), time.monotonic()
        patience = min(self.SELDOM, self.OFTEN * max(1, self._walks))
        if exact and now - self._exact_at > patience * self._cost:
            self._walks += 1
            try:
                self._own, self._resident = self._process.memory_full_info().uss, resident
            except (psutil.AccessDenied, AttributeError):  # unknown here: count shared pages, too
                self._own = self._resident = resident
            self._exact_at, self._cost = now, time.monotonic() - now
        return max(0, self._own + resident - self._resident)

    def _resident_bytes(self) -> int:
        info = self._process.memory_info()
        return info.rss - getattr(info, "shared", 0)


def driver_bytes(gpu: int) -> float:
    """Return NVML's bytes of this process on one of torch's GPUs; NaN without NVML."""
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(gpu).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory
        return pynvml.nvmlDeviceGetMemoryInfo(handle).used  # all processes': in most containers it lists none
    except Exception:  # no NVML, no permission, an unknown device: then there is no figure
        return math.nan
