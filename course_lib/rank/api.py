"""The functions that the learner's code calls inside a rank: ``place``, ``track`` and ``log``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ..compat import adapt_torch
from ..host.cluster import tasks_here
from .fingerprints import whole_parameters
from .recorder import attach, note
from .trial import batches_of

Batch = TypeVar("Batch")


def place() -> tuple[Any, str]:
    """Return the device of this rank and the backend that fits it (lesson 04 writes this code out).

    With a GPU for each rank on this machine: ``cuda:<local rank>`` and ``nccl``. With fewer GPUs: a shared
    GPU and ``gloo``, since NCCL refuses two ranks on one GPU. Without a GPU, or with an Apple GPU, since
    gloo carries no MPS tensors: ``cpu`` and ``gloo``. If srun starts the ranks without torchrun (lesson 17),
    Slurm's variables count them unless LOCAL_WORLD_SIZE is set. If each rank sees only its own GPU, as with
    ``--gpus-per-task=1``: ``cuda:0`` and ``nccl``.

    Returns
    -------
    (torch.device, str)
        A GPU is also made the current device, with ``torch.cuda.set_device``.
    """
    import torch

    variable = os.environ.get
    local_rank = int(variable("LOCAL_RANK", variable("SLURM_LOCALID", 0)))
    gpus = gpus_here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world_size, tasks = int(variable("WORLD_SIZE", 1)), tasks_here()
    ranks_here = int(variable("LOCAL_WORLD_SIZE", min(world_size, tasks or world_size)))
    if ranks_here == tasks:  # the ranks are Slurm's tasks, and a task may see only some of the node's GPUs
        gpus_here = max(gpus, int(variable("SLURM_GPUS_ON_NODE", 0)))
    ranks_here *= int(variable("COURSE_NODES_HERE", 1))  # torchrun(nnodes=2): two nodes on one machine
    if gpus == 0:
        device, backend = torch.device("cpu"), "gloo"
    else:
        backend = "nccl" if ranks_here <= gpus_here else "gloo"
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
    adapt_torch()  # for ranks of programs; a rank of `launch` has already done so
    note(device=str(device), backend=backend)
    return device, backend


def track(iterable: Iterable[Batch], total: int | None = None, same: Any = None) -> Iterator[Batch]:
    """Pass the batches of a loader through, like tqdm, and count steps and samples for the run's metrics.

    Put it around the training loop only: throughput is samples per second spent inside such loops. The size
    of a batch is the length of its first tensor (in a tuple, list or dict, of the first item).

    Parameters
    ----------
    iterable
        A ``DataLoader`` or anything that yields batches.
    total
        The number of steps, for the progress bar; by default ``len(iterable)``, if it has a length.
    same
        A model whose parameters should be the same on every rank, bit by bit. Their fingerprints are compared
        every so many steps, in less than 1 % of the time. The dashboard and `divergence` (lesson 06) show the
        first difference. A sharded parameter is left out.

    Raises
    ------
    ValueError
        ``same`` is not a model, or no rank holds a parameter of it whole.
    """
    if same is not None and not (hasattr(same, "named_parameters") and whole_parameters(same)):
        raise ValueError(f"track(…, same=…): no rank holds a parameter of this {type(same).__name__} whole")
    recorder = attach()
    if recorder is None:
        return iter(iterable)
    counted = recorder.counters.counted(batches_of(iterable), total)
    return counted if same is None else recorder.fingerprints.taken(counted, same)


def log(**values: Any) -> None:
    """Log numbers by name: after ``log(loss=loss)`` they are in ``run.metrics[rank]["loss"]``.

    A tensor on a GPU is read later, in a background thread, so that no step synchronises with the device.

    Raises
    ------
    ValueError
        A value is not one number, or a name belongs to the run's own metrics; the message says which.
    """
    if recorder := attach():
        for name, value in values.items():
            recorder.series.point(name, value, recorder.counters.samples)
