"""How much memory a rank holds: on the CPU the pages of its own, on a GPU what torch has allocated there."""

from __future__ import annotations

import math
import os
import sys
import time

import psutil

TICK_INTERVAL = 0.1  # seconds between two readings


class Memory:
    """How much memory this process holds, cheap enough to ask ten times a second.

    On the CPU the true figure (the pages that are this process's alone, psutil's USS: those that it shares
    with the process it was forked from are not its own) takes a walk over the page tables, 10 ms with torch
    loaded. It is taken when its cost is under 0.5 % of the time since the last, at the start, when the pages
    are copied that the rank writes to, and ever more seldom until it is under 0.1 %; in between, the resident
    size, which costs 10 µs, says how far it has moved.
    """

    OFTEN, SELDOM = 200, 1000  # a walk is due when this many times its cost has passed since the last

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._exact_at = time.monotonic()
        self._cost = TICK_INTERVAL / 2 / self.OFTEN  # the first walk comes with the second tick
        self._walks = 0
        self._own, self._resident = 0, self._resident_bytes()

    def read(self, exact: bool = True) -> tuple[float, float, float]:
        """Bytes: held (torch's allocated on a GPU), torch's reserved, the driver's figure."""
        torch = sys.modules.get("torch")  # half imported, perhaps, by the main thread
        if hasattr(torch, "cuda") and hasattr(torch.cuda, "is_initialized") and torch.cuda.is_initialized():
            # the rank's GPU is the one it holds most of: the current device is each thread's own
            stats = [torch.cuda.memory_stats_as_nested_dict(i) for i in range(torch.cuda.device_count())]
            held = [
                (each["reserved_bytes"]["all"]["current"], each["allocated_bytes"]["all"]["current"])
                for each in stats
            ]
            reserved, allocated = max(held)
            return allocated, reserved, driver_bytes(held.index((reserved, allocated)))
        return self._on_the_cpu(exact), math.nan, math.nan

    def _on_the_cpu(self, exact: bool) -> float:
        resident, now = self._resident_bytes(), time.monotonic()
        patience = min(self.SELDOM, self.OFTEN * max(1, self._walks))
        if exact and now - self._exact_at > patience * self._cost:
            self._walks += 1
            self._own, self._resident = self._process.memory_full_info().uss, resident
            self._exact_at, self._cost = now, time.monotonic() - now
        return max(0, self._own + resident - self._resident)

    def _resident_bytes(self) -> int:
        info = self._process.memory_info()
        return info.rss - getattr(info, "shared", 0)


def driver_bytes(gpu: int) -> float:
    """Bytes that NVML counts for this process on one of torch's GPUs, or for the whole GPU where it cannot
    tell processes apart (in most containers); NaN without NVML."""
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(gpu).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory
        return pynvml.nvmlDeviceGetMemoryInfo(handle).used
    except Exception:  # no NVML, no permission, a device it does not know: there is no figure then
        return math.nan
