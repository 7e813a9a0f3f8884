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

GIB = 2**30
BACKENDS = "gloo", "nccl", "mpi", "ucc", "xccl"
CGROUP = Path("/sys/fs/cgroup")  # a container's limits, on Linux (cgroups of version 2)
DRIVER = Path("/proc/driver/nvidia/version")  # readable even in a container without the GPUs
DEVICES = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
OLDEST = {12: 525, 13: 580}  # the oldest driver for builds for CUDA 12, 13 (NVIDIA, CUDA Compatibility)
PAGE = "PyTorch's page “Get Started: Start Locally”"


@dataclass(frozen=True)
class Machine:
    """What `machine` found: shown as a card in a notebook, as text in a terminal."""

    cores: int  # that this process may use
    rows: dict[str, str]  # the card's text, by title

    def __repr__(self) -> str:
        width = max(map(len, self.rows)) + 2
        lines = (f"{title + ':':{width}}{text}" for title, text in self.rows.items())
        return "\n".join(line.replace("\n", "\n" + " " * width) for line in lines)

    def _repr_html_(self) -> str:
        cell = "padding:.25em .9em .25em 0; text-align:left; vertical-align:top; white-space:pre-line"
        body = "".join(
            f'<tr><th scope="row" style="{cell}">{title}</th><td style="{cell}">{html.escape(text)}</td></tr>'
            for title, text in self.rows.items()
        )
        return (
            '<div style="display:inline-block; border:1px solid #8888; border-left:4px solid #0072b2; '
            'border-radius:4px; padding:.5em 1em"><b>This machine</b>'
            f'<table style="border:none; margin:.3em 0 0">{body}</table></div>'
        )


def machine() -> Machine:
    """Inspect this machine: its accelerators, cores, memory and backends, and what the course will use."""
    import torch
    import torch.distributed as dist

    present, unused, gpus, usable = accelerators(), unused_gpus(), gpu_count(), cores()
    if gpus > 1:
        plan, reason = f"{gpus} GPU ranks, nccl", f"one rank for each of the {gpus} GPUs"
    elif gpus == 1:
        plan, reason = "1 GPU rank, nccl", "one rank on the one GPU; more ranks than GPUs share it, over gloo"
    elif present:
        plan = "2 CPU ranks, gloo"
        reason = "gloo carries no MPS tensors, the Apple GPU's, so ranks are CPU processes"
    else:
        none = "torch can use no GPU" if unused else "there is no GPU"
        plan, reason = "2 CPU ranks, gloo", f"{none}, so ranks are CPU processes"
    total, available = memory()  # bytes
    is_built = {name: getattr(dist, f"is_{name}_available", bool)() for name in BACKENDS}
    has = [name for name in BACKENDS if is_built[name]]
    lacks = [name for name in BACKENDS if not is_built[name]]
    rows = {
        "Accelerators": "\n".join(present) or "none that torch can use",
        **({"Not used": unused} if unused else {}),
        "CPU": f"{usable} core{'s' if usable > 1 else ''} for this process",
        "Memory": f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB of it free",
        "Backends": f"{', '.join(has) or 'none'} (not in this torch: {', '.join(lacks) or 'none'})",
        "Software": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
        "The course will use": f"{plan}: {reason}",
    }
    return Machine(usable, rows)


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


def unused_gpus() -> str:
    """Return why an NVIDIA GPU of this machine is not used, and what to do; "" if all are used.

    torch itself says little: if the driver is too old for it, `torch.cuda.is_available()` is False after one
    warning, and everything runs on the CPU.
    """
    import torch

    used, present = gpu_count(), _present()
    if used >= present:
        return ""
    gpus = f"{present} NVIDIA GPU{'s' if present > 1 else ''}"
    if torch.version.cuda is None:
        built = f"this torch ({torch.__version__}) is built for the CPU"
        return f"{built}, not for {gpus}: install another ({PAGE})"
    driver, oldest = _driver(), OLDEST.get(int(torch.version.cuda.partition(".")[0]), 0)
    if not (DEVICES / "nvidiactl").exists() and not _in_container():
        return f"no driver is loaded for {gpus}: install NVIDIA's driver, {oldest or 580} or newer"
    if driver and int(driver.partition(".")[0]) < oldest:
        return (
            f"torch is built for CUDA {torch.version.cuda}, which needs driver {oldest} or newer; this is "
            f"{driver}: install torch 2.14's build for CUDA 12.6 ({PAGE}), or a newer driver"
        )
    if os.environ.get("SLURM_JOB_ID"):
        return f"the job was given {used} of this node's {gpus}: ask for more with --gpus-per-node"
    if (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={shown!r} shows {used} of {gpus}: unset it to use all"
    if _in_container():
        return f"the container gets {used} of this machine's {gpus}: start it with --gpus all"
    return f"torch can use {used} of {gpus}: `nvidia-smi` says how the others are"


def _present() -> int:
    """Count the NVIDIA GPUs that the PCI bus knows of; 0 except on Linux."""
    nvidia = [path for path in PCI.glob("*/vendor") if path.read_text() == "0x10de\n"]
    return sum(path.with_name("class").read_text().startswith("0x03") for path in nvidia)  # display, 3D


def _driver() -> str:
    """Return the driver's version, as in ``580.82.07``; "" where none is loaded."""
    with contextlib.suppress(OSError, IndexError):
        return re.findall(r"\b\d{3,}\.\d+(?:\.\d+)?\b", DRIVER.read_text())[0]
    return ""


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in os.environ


def cores() -> int:
    """Count the CPU cores that this process may use, by its affinity and a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no container, or no quota ("max")
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        return max(1, min(count, math.ceil(quota / period)))
    return count


def memory() -> tuple[int, int]:
    """Return the total and the available bytes of main memory, within a container's limit."""
    now = psutil.virtual_memory()
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit ("max")
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        if limit < now.total:
            cached = re.search(r"^inactive_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
            left = limit - used + (int(cached[1]) if cached else 0)  # Linux can drop cached files
            return limit, max(0, min(now.available, left))
    return now.total, now.available


def oom_kills() -> int:
    """Count the processes that Linux has killed for lack of memory since it booted; 0 if it does not say."""
    with contextlib.suppress(OSError, IndexError):
        return int(re.findall(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)[0])
    return 0
