"""The work that every contender does on its ranks, and the check of its result."""

import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist


def work() -> list[float]:
    """Join a gloo group, all-reduce a small tensor, and leave the group."""
    dist.init_process_group("gloo")
    numbers = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return numbers.tolist()


def check(results: list[list[float]], ranks: int = 2) -> None:
    """Raise unless every rank has the sum of all ranks' numbers."""
    if results != [[ranks * (ranks + 1) / 2] * 4] * ranks:
        raise RuntimeError(f"wrong results: {results}")


def work_as(rank: int, ranks: int, port: int) -> list[float]:
    """Do `work` in a process that has no rank yet: set torchrun's variables first."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store already exists
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return work()


def loopback_store() -> dist.TCPStore:
    """Start a store like the course's own, in a process that must not load the course."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def leave(folder: str, result: list[float] | None = None) -> None:
    """Write the result, by default of `work`, to a file: for launchers that return nothing."""
    Path(folder, f"result-{os.environ['RANK']}").write_text(json.dumps(result or work()))


def collect(folder: str) -> list[list[float]]:
    """Return what the ranks left, by rank, and delete it, so that the next call finds no older result."""
    paths = sorted(Path(folder).glob("result-*"))
    results = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return results
