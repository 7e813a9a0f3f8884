"""Find out what this machine offers and what the course will use of it (lesson 00)."""

from __future__ import annotations

import contextlib
import html
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from .unused_gpus import unused_gpus

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")  # a container's limits, on Linux (cgroups of version 2)


@dataclass(frozen=True)
class Machine:
    """What `machine` found: shown as a card in a notebook, as text in a terminal.

    Attributes
    ----------
    accelerators : list of str
        Each with torch's name of the device, its own name and its memory: ``"cuda:0 NVIDIA H100, 79.2 GiB"``.
    unused : str
        Why a GPU of this machine is not used, and what to do; empty if each is used.
    cores : int
        CPU cores that this process may use.
    memory_bytes, available_bytes : int
        Main memory, within a container's limit.
    backends : dict of str to bool
        Each backend of torch.distributed, and whether this build of torch has it.
    world_size, backend : int, str
        What `launch` uses by default.
    reason : str
        Why these two.
    """

    accelerators: list[str]
    unused: str
    cores: int
    memory_bytes: int
    available_bytes: int
    backends: dict[str, bool]
    world_size: int
    backend: str
    reason: str

    @property
    def plan(self) -> str:
        """The default ranks and backend, in a few words: ``"2 CPU ranks, gloo"``."""
        kind = "GPU" if self.backend == "nccl" else "CPU"
        return f"{self.world_size} {kind} rank{'s' if self.world_size > 1 else ''}, {self.backend}"

    def rows(self) -> dict[str, str]:
        """Return the text of the card's rows, by title."""
        import torch

        has = [name for name, there in self.backends.items() if there]
        lacks = [name for name, there in self.backends.items() if not there]
        return {
            "Accelerators": "\n".join(self.accelerators) or "none that torch can use",
            **({"Not used": self.unused} if self.unused else {}),
            "CPU": f"{self.cores} core{'s' if self.cores > 1 else ''} for this process",
            "Memory": f"{self.memory_bytes / GIB:.1f} GiB, {self.available_bytes / GIB:.1f} GiB of it free",
            "Backends": f"{', '.join(has) or 'none'} (not in this torch: {', '.join(lacks) or 'none'})",
            "Software": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
            "The course will use": f"{self.plan}: {self.reason}",
        }

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(map(len, rows)) + 2
        return "\n".join(
            f"{title + ':':{width}}{text}".replace("\n", "\n" + " " * width) for title, text in rows.items()
        )

    def _repr_html_(self) -> str:
        cell = "padding:.25em .9em .25em 0; text-align:left; vertical-align:top"
        body = "".join(
            f'<tr><th scope="row" style="{cell}">{html.escape(title)}</th>'
            f'<td style="{cell}">{html.escape(text).replace(chr(10), "<br>")}</td></tr>'
            for title, text in self.rows().items()
        )
        return (
            '<div style="display:inline-block; border:1px solid #8888; border-left:4px solid #0072b2; '
            'border-radius:4px; padding:.5em 1em"><b>This machine</b>'
            f'<table style="border:none; margin:.3em 0 0">{body}</table></div>'
        )


def machine() -> Machine:
    """Inspect this machine: its accelerators, cores, memory and backends, and what the course will use."""
    present, unused, gpus = accelerators(), unused_gpus(), gpu_count()
    if gpus > 1:
        reason = f"one rank for each of the {gpus} GPUs"
    elif gpus == 1:
        reason = "one rank on the one GPU; more ranks than GPUs share it, over gloo"
    elif present:
        reason = "gloo carries no MPS tensors, the Apple GPU's, so ranks are CPU processes"
    else:
        none = "torch can use no GPU" if unused else "there is no GPU"
        reason = f"{none}, so ranks are CPU processes"
    total, available = memory()
    return Machine(
        accelerators=present,
        unused=unused,
        cores=cores(),
        memory_bytes=total,
        available_bytes=available,
        backends=backends(),
        world_size=gpus or 2,
        backend="nccl" if gpus else "gloo",
        reason=reason,
    )


def gpu_count() -> int:
    """Count the GPUs that ranks can use (CUDA, or ROCm under the same name) within CUDA_VISIBLE_DEVICES.

    `torch.cuda.device_count()` alone also counts GPUs whose driver is too old for this torch.
    """
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerators() -> list[str]:
    """Name the GPUs that torch can use here: NVIDIA's, AMD's (ROCm, too, calls them cuda) or Apple's."""
    import torch

    if gpus := [torch.cuda.get_device_properties(index) for index in range(gpu_count())]:
        return [f"cuda:{i} {gpu.name}, {gpu.total_memory / GIB:.1f} GiB" for i, gpu in enumerate(gpus)]
    return ["mps:0 Apple GPU (shares main memory)"] if torch.backends.mps.is_available() else []


def cores() -> int:
    """Count the CPU cores that this process may use, by its affinity and a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no container, or no quota ("max")
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        return max(1, min(count, math.ceil(quota / period)))
    return count


def memory() -> tuple[int, int]:
    """Return the total and the available bytes of main memory, within a container's limit.

    Cached files that Linux can drop count as available, as they do outside a container.
    """
    now = psutil.virtual_memory()
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit ("max")
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        if limit < now.total:
            dropped = re.search(r"^inactive_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
            left = limit - used + (int(dropped[1]) if dropped else 0)
            return limit, max(0, min(now.available, left))
    return now.total, now.available


def backends() -> dict[str, bool]:
    """Return the backends of torch.distributed, and whether this build of torch has each."""
    import torch.distributed as dist

    names = ["gloo", "nccl", "mpi", "ucc", "xccl"]
    return {name: bool(getattr(dist, f"is_{name}_available", bool)()) for name in names}


def oom_kills() -> int:
    """Count the processes that Linux has killed for lack of memory since it booted; 0 if it does not say."""
    try:
        with open("/proc/vmstat") as counters:
            return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
