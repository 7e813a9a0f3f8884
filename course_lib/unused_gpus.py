"""Say why torch does not use a GPU that this machine has, and the one thing to do about it (lesson 00).

torch itself says little: if the driver is too old for it, `torch.cuda.is_available()` is False after one
warning, and everything runs on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

VERSION = Path("/proc/driver/nvidia/version")  # of the system, also in a container without its devices
DEVICES = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
OLDEST = {12: 525, 13: 580}  # the driver that a build for CUDA 12, 13 needs (NVIDIA, CUDA Compatibility)
PAGE = "PyTorch's page “Get Started: Start Locally”"


def unused_gpus() -> str:
    """Return why an NVIDIA GPU of this machine is not used, and what to do; "" where none lies idle.

    Elsewhere than on Linux, only the GPUs that torch can use are found.
    """
    import torch

    if torch.version.hip:
        return ""
    used = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = _present()
    if used >= present:
        return ""
    gpus = f"{present} NVIDIA GPU{'s' if present > 1 else ''}"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        return (
            f"this torch ({torch.__version__}) is built for the CPU, not for {gpus}: install another ({PAGE})"
        )
    driver, oldest = _driver(), OLDEST.get(int(torch.version.cuda.partition(".")[0]), 0)
    if not (DEVICES / "nvidiactl").exists():
        if _in_container():
            return f"the container does not get this machine's {gpus}: start it with --gpus all"
        return f"no driver is loaded for {gpus}: install NVIDIA's driver, {oldest or 580} or newer"
    if driver and int(driver.partition(".")[0]) < oldest:
        return (
            f"torch is built for CUDA {torch.version.cuda}, which needs driver {oldest} or newer; this is "
            f"{driver}: install torch 2.14's build for CUDA 12.6 ({PAGE}), or a newer driver"
        )
    if os.environ.get("SLURM_JOB_ID"):
        return f"the job was given {used} of this node's {gpus}: ask for more with --gpus-per-node"
    if shown is not None:
        return f"CUDA_VISIBLE_DEVICES={shown!r} shows {used} of {gpus}: unset it to use all"
    if _in_container():
        return f"the container gets {used} of this machine's {gpus}: start it with --gpus all"
    return f"torch can use {used} of {gpus}: `nvidia-smi` says how the others are"


def _present() -> int:
    """Count the NVIDIA GPUs that the PCI bus knows of."""
    count = 0
    with contextlib.suppress(OSError):  # not Linux
        for device in PCI.iterdir():
            kind = [(device / name).read_text().strip() for name in ("vendor", "class")]
            count += kind[0] == "0x10de" and kind[1].startswith("0x03")  # display and 3D controllers
    return count


def _driver() -> str:
    """Return the driver's version, as in ``580.82.07``; "" where none is loaded."""
    with contextlib.suppress(OSError):  # none is loaded
        if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", VERSION.read_text()):
            return found[0]
    return ""


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in os.environ
