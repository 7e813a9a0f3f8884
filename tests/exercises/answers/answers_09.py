"""What people answer in exercise 09, wrong and right (see `answers`)."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from tests.exercises.answers import right, wrong

ALPHA, BETA = "α is right, although the times vary", "and so is β"


@wrong("09.1", BETA, hint="unweighted")
def plain_squares(sizes, seconds):
    beta, alpha = np.polyfit(sizes, seconds, 1)
    return alpha, beta


@wrong("09.1", hint="swapped")
def as_polyfit_returns_them(sizes, seconds):
    return np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))


@wrong("09.1", ALPHA, hint="inverse")
def the_bandwidth(sizes, seconds):
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    return alpha, 1 / beta


@wrong("09.1", hint="first time")
def by_the_ends(sizes, seconds):
    return seconds[0], seconds[-1] / sizes[-1]


@wrong("09.1", ALPHA, hint="A single time says α and β together.")
def the_largest_alone(sizes, seconds):
    _, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    return alpha, seconds[-1] / sizes[-1]


@wrong("09.1", BETA, hint="off")
def through_two_points(sizes, seconds):
    beta = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - beta * sizes[0], beta


@wrong("09.1", BETA, hint="off")
def in_microseconds(sizes, seconds):
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    return 1e6 * alpha, beta


@right("09.1")
def again_with_the_fitted_times(sizes, seconds):
    times = np.array(seconds)
    for _ in range(3):
        beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / times)
        times = alpha + beta * np.array(sizes)
    return {"alpha": alpha, "beta": beta}.values()


@right("09.1")
def by_least_squares(sizes, seconds):
    size, took = np.array(sizes, dtype=float), np.array(seconds)
    matrix = np.stack([1 / took, size / took], axis=1)
    solution, *_ = np.linalg.lstsq(matrix, np.ones(len(took)), rcond=None)
    return torch.tensor(solution)


OWN, SHARED, CPU, BOTH = (
    "GPU tensors, a GPU for each rank",
    "GPU tensors, ranks that share a GPU",
    "CPU tensors, on every network",
    "CPU and GPU tensors, a GPU for each rank",
)


def reason(tensors: str, gpus: int, ranks: int, network: str) -> str:
    if tensors == "cpu":
        return "no IP" if network == "infiniband without IP" else "CPU over IP"
    return "shared GPU" if ranks > gpus else "both" if "cpu" in tensors else "own GPU"


@right("09.2")
def by_the_book(tensors, gpus_per_node, ranks_per_node, network):
    why = reason(tensors, gpus_per_node, ranks_per_node, network)
    backends = {"no IP": "mpi", "own GPU": "nccl", "both": "cuda:nccl,cpu:gloo"}
    return backends.get(why, "gloo"), why


@right("09.2")
def of_torchs_own_class(tensors, gpus, ranks, network):
    return [
        dist.Backend(by_the_book(tensors, gpus, ranks, network)[0]),
        reason(tensors, gpus, ranks, network),
    ]


@wrong("09.2", OWN, hint="shared")
def nccl_always(tensors, gpus_per_node, ranks_per_node, network):
    return "nccl", reason(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.2", SHARED, CPU, hint="own")
def as_many_gpus_as_ranks(tensors, gpus_per_node, ranks_per_node, network):
    if "gpu" in tensors and gpus_per_node != ranks_per_node:
        return "gloo", "shared GPU"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.2", OWN, SHARED, BOTH, hint="no IP")
def forgets_mpi(tensors, gpus_per_node, ranks_per_node, network):
    if tensors == "cpu":
        return "gloo", "CPU over IP"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.2", OWN, SHARED, BOTH, hint="on the CPU")
def mpi_on_any_infiniband(tensors, gpus_per_node, ranks_per_node, network):
    if tensors == "cpu" and "infiniband" in network:
        return "mpi", "no IP"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.2", OWN, SHARED, BOTH, hint="backends")
def looks_at_the_machine(tensors, gpus_per_node, ranks_per_node, network):
    if tensors == "cpu" and gpus_per_node:
        return "nccl", reason(tensors, gpus_per_node, ranks_per_node, network)
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.2", OWN, SHARED, CPU, hint="one name")
def forgets_the_cpu_tensors(tensors, gpus_per_node, ranks_per_node, network):
    tensors = "gpu" if "gpu" in tensors else tensors
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.2", OWN, SHARED, CPU, hint="swapped")
def the_backends_are_swapped(tensors, gpus_per_node, ranks_per_node, network):
    backend, why = by_the_book(tensors, gpus_per_node, ranks_per_node, network)
    return "cpu:nccl,cuda:gloo" if why == "both" else backend, why


@wrong("09.2", OWN, SHARED, CPU, BOTH, hint="other words")
def no_reason(tensors, gpus_per_node, ranks_per_node, network):
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)[0]


@wrong("09.2", OWN, SHARED, CPU, BOTH, hint="another")
def the_same_reason(tensors, gpus_per_node, ranks_per_node, network):
    backend, why = by_the_book(tensors, gpus_per_node, ranks_per_node, network)
    return backend, "own GPU" if backend != "gloo" else why
