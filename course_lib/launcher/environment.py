"""The environment variables of a run's processes, and the store at which its ranks meet."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator

from ..host.hardware import cores, gpu_count
from ..run.run import Run

# What torchrun sets for a rank, perhaps left over in the kernel's environment
OF_A_RANK = re.compile(r"((LOCAL|GROUP|ROLE)_)?RANK|ROLE_\w+|TORCHELASTIC_\w+")
LOOPBACKS = {"lo", "lo0"}  # Linux, macOS; where it has another name, gloo looks for the host's address


@contextlib.contextmanager
def loopback_store() -> Iterator[int]:
    """Open the store at which the ranks meet, on a free port of the loopback address; yield the port."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))  # without it, the store listens on every interface
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    try:
        yield port
    finally:
        del store


def of_a_launch(run: Run, world_size: int, port: int, device: str | None) -> dict[str, str]:
    """Return a launch's environment: torchrun's variables, loopback for gloo and NCCL, the run's folder."""
    return {
        **_of_a_run(run, world_size),
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def loopback_environment() -> dict[str, str]:
    """Return what keeps gloo and NCCL on this machine, and PyTorch's flight recorder small."""
    loopback = {name for _, name in socket.if_nameindex()} & LOOPBACKS
    return {
        **{f"{library}_SOCKET_IFNAME": name for name in loopback for library in ("GLOO", "NCCL")},
        "TORCH_FR_BUFFER_SIZE": "16",  # by default 2000 collectives, which take 20 ms to read
    }


def of_a_program(run: Run, world_size: int | None = None) -> dict[str, str]:
    """Return the environment of what `python` or `torchrun` starts; torchrun sets more for its ranks."""
    variables = _of_a_run(run, world_size) | {"COURSE_KERNEL": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    variables["PYTHONSAFEPATH"] = "1"  # no random.py here hides Python's; see `entry_script._run`
    variables["PYTHONIOENCODING"] = "utf-8:backslashreplace"  # of its logs, wherever it runs
    return {name: value for name, value in variables.items() if not OF_A_RANK.fullmatch(name)}


def _of_a_run(run: Run, world_size: int | None) -> dict[str, str]:
    return {
        **loopback_environment(),
        **({"OMP_NUM_THREADS": str(max(1, cores() // world_size))} if world_size else {}),
        # A notebook's kernel asks its programs for colours (FORCE_COLOR). Ranks print to files, and Python
        # 3.13 would put escape sequences between the words of a traceback there.
        "PYTHON_COLORS": "0",
        **os.environ,
        "MPLBACKEND": "Agg",  # the notebook's own backend cannot draw in a rank
        "COURSE_RUN": str(run.folder),
        "COURSE_RANK": "",
        "COURSE_STARTED": repr(time.time()),
    }


def gpus_of(node: int, nproc_per_node: int, nnodes: int) -> dict[str, str]:
    """Return the variables for a simulated node's GPUs: its own if there are enough, else shared ones."""
    gpus = gpu_count()
    if nnodes == 1 or gpus == 0:
        return {}
    if gpus < nnodes * nproc_per_node:
        return {"COURSE_NODES_HERE": str(nnodes)}  # place() counts all their ranks
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    first = node * nproc_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[first : first + nproc_per_node])}
