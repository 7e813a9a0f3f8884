"""What every contender does on its two ranks, and how its result is checked."""

import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist


def work() -> list[float]:
    """Meet over gloo, add up a small tensor, part."""
    dist.init_process_group("gloo")
    numbers = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return numbers.tolist()


def check(results: list[list[float]], ranks: int = 2) -> None:
    """Every rank has the sum of all ranks' numbers."""
    if results != [[ranks * (ranks + 1) / 2] * 4] * ranks:
        raise RuntimeError(f"wrong results: {results}")


def work_as(rank: int, ranks: int, port: int) -> list[float]:
    """`work` in a process that nobody has told yet which rank it is."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there already
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return work()


def loopback_store() -> dist.TCPStore:
    """As the course's own; its process must not load the course."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def leave(folder: str, result: list[float] | None = None) -> None:
    """Work, and leave the result in a file: for starters that bring nothing back."""
    Path(folder, f"result-{os.environ['RANK']}").write_text(json.dumps(result or work()))


def collect(folder: str) -> list[list[float]]:
    """What the ranks left, by rank; gone afterwards, so that nobody finds an older result."""
    paths = sorted(Path(folder).glob("result-*"))
    results = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return results
