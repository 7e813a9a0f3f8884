"""What the learner's code calls inside a rank: ``place``, ``track`` and ``log``.

The three work in a function started by `launch`, in a program started by `python`, and in a plain script,
where nothing watches: ``track`` then only passes the batches through and ``log`` does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from .recorder import attach

Batch = TypeVar("Batch")


def place() -> tuple[Any, str]:
    """The device of this rank and the backend that fits it (lesson 04 writes its lines out).

    One GPU for each rank on this machine: ``cuda:<local rank>`` and ``nccl``. More ranks than GPUs: they
    share them, and talk over ``gloo``, since NCCL refuses two ranks on one GPU. No GPU: ``cpu``, ``gloo``.

    Returns
    -------
    (torch.device, str)
        Made current with ``torch.cuda.set_device`` where it is a GPU.
    """
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    ranks_here *= int(os.environ.get("COURSE_NODES_HERE", 1))  # torchrun(nnodes=2): two nodes, one machine
    gpus = torch.cuda.device_count()
    if gpus == 0:
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = torch.device("cuda", local_rank % gpus), "nccl" if ranks_here <= gpus else "gloo"
        torch.cuda.set_device(device)
    if recorder := attach():
        recorder.note(device=str(device), backend=backend)
    return device, backend


def track(iterable: Iterable[Batch], total: int | None = None) -> Iterator[Batch]:
    """Pass the batches of a loader through, like tqdm, and count steps and samples for the figures.

    Put it around the training loop alone: throughput is samples over the time spent inside such loops.
    The samples of a batch are the length of its first tensor (of the first item of a tuple, list or dict).

    Parameters
    ----------
    iterable
        A ``DataLoader`` or anything that yields batches.
    total
        Steps it will take, for the progress bar; by default ``len(iterable)`` where it has one.
    """
    recorder = attach()
    return recorder.counted(iterable, total) if recorder else iter(iterable)


def log(**values: Any) -> None:
    """Note numbers under names of your own: ``log(loss=loss)``; they are in ``run.metrics[rank]["loss"]``.

    A tensor on a GPU is read later, by the rank's own thread: no device synchronisation in a step.

    Raises
    ------
    ValueError
        A value that is not one number; the message names it.
    """
    if recorder := attach():
        for name, value in values.items():
            recorder.point(name, value)
