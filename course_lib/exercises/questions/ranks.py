"""What the questions let their ranks do first."""

from __future__ import annotations

import torch.distributed as dist


def join() -> None:
    """Into the group; none goes on before all are in, or one that is done early would fail the others."""
    store, rank, count = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    store.set(f"course/{rank}", "in")
    store.wait([f"course/{each}" for each in range(count)])
