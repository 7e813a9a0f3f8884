"""What people answer in exercise 09, wrong and right (see `answers`)."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import all_reduce

from tests.exercises.answers import right, wrong

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


@wrong("09.1", OWN, hint="there are more ranks than GPUs")
def nccl_always(tensors, gpus_per_node, ranks_per_node, network):
    return "nccl", reason(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", SHARED, hint="Does the network change")
def gloo_always(tensors, gpus_per_node, ranks_per_node, network):
    return "gloo", reason(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", OWN, SHARED, BOTH, hint="What was the one case for building PyTorch yourself?")
def forgets_mpi(tensors, gpus_per_node, ranks_per_node, network):
    if tensors == "cpu":
        return "gloo", "CPU over IP"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", SHARED, CPU, hint="there are more GPUs than ranks")
def as_many_gpus_as_ranks(tensors, gpus_per_node, ranks_per_node, network):
    if "gpu" in tensors and gpus_per_node != ranks_per_node:
        return "gloo", "shared GPU"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", SHARED, CPU, BOTH, hint="Does the network change")
def by_the_network(tensors, gpus_per_node, ranks_per_node, network):
    if tensors == "gpu" and network == "ethernet":
        return "gloo", "CPU over IP"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", OWN, CPU, BOTH, hint="there are more ranks than GPUs")
def does_not_count(tensors, gpus_per_node, ranks_per_node, network):
    return by_the_book(tensors, 99, ranks_per_node, network)


@wrong("09.1", OWN, SHARED, CPU, hint="a name can give each its own backend, device:backend, with a comma.")
def forgets_the_cpu_tensors(tensors, gpus_per_node, ranks_per_node, network):
    tensors = "gpu" if "gpu" in tensors else tensors
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", SHARED, CPU, hint="Does the network change")
def has_to_be_as_many_gpus_as_ranks(tensors, gpus_per_node, ranks_per_node, network):
    if gpus_per_node != ranks_per_node and tensors != "cpu":
        return "gloo", "shared GPU"
    if tensors == "cpu and gpu":
        return "nccl", "both"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", OWN, SHARED, BOTH, hint="The tensors are on the CPU, whatever else the machine has.")
def looks_at_the_machine(tensors, gpus_per_node, ranks_per_node, network):
    if tensors == "cpu" and gpus_per_node:
        return "nccl", "own GPU"
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)


@wrong("09.1", OWN, SHARED, CPU, BOTH, hint="The reason is one of")
def in_its_own_words(tensors, gpus_per_node, ranks_per_node, network):
    backend, _ = by_the_book(tensors, gpus_per_node, ranks_per_node, network)
    return backend, "because it is fastest"


@wrong(
    "09.1",
    OWN,
    SHARED,
    CPU,
    BOTH,
    hint="Would it still be right with another network, or with other tensors?",
)
def the_same_reason(tensors, gpus_per_node, ranks_per_node, network):
    backend, why = by_the_book(tensors, gpus_per_node, ranks_per_node, network)
    return backend, "own GPU" if backend != "gloo" else why


@wrong("09.1", OWN, SHARED, CPU, BOTH, hint="because of None")
def no_reason(tensors, gpus_per_node, ranks_per_node, network):
    return by_the_book(tensors, gpus_per_node, ranks_per_node, network)[0]


@wrong("09.1", hint="raised KeyError")
def a_table_with_holes(tensors, gpus_per_node, ranks_per_node, network):
    return {"cpu": ("gloo", "CPU over IP")}[tensors]


@wrong("09.1", OWN, SHARED, CPU, hint="Which one moves GPU memory")
def the_backends_are_swapped(tensors, gpus_per_node, ranks_per_node, network):
    backend, why = by_the_book(tensors, gpus_per_node, ranks_per_node, network)
    return "cpu:nccl,cuda:gloo" if why == "both" else backend, why


@wrong("09.1", SHARED, CPU, hint="Does the network change")
def one_gpu_is_shared(tensors, gpus_per_node, ranks_per_node, network):
    return by_the_book(tensors, gpus_per_node if gpus_per_node > 1 else 0, ranks_per_node, network)


@right("09.1")
def of_torchs_own_class(tensors, gpus, ranks, network):
    return dist.Backend(by_the_book(tensors, gpus, ranks, network)[0]), reason(tensors, gpus, ranks, network)


@right("09.1")
def by_the_book(tensors, gpus_per_node, ranks_per_node, network):
    why = reason(tensors, gpus_per_node, ranks_per_node, network)
    backends = {"no IP": "mpi", "own GPU": "nccl", "both": "cpu:gloo,cuda:nccl"}
    return backends.get(why, "gloo"), why


@right("09.1")
def as_a_list(tensors, gpus_per_node, ranks_per_node, network):
    match tensors:
        case "cpu":
            gloo = network != "infiniband without IP"
            return ["gloo", "CPU over IP"] if gloo else ["mpi", "no IP"]
        case _ if gpus_per_node < ranks_per_node:
            return ["gloo", "shared GPU"]
        case "gpu":
            return ["nccl", "own GPU"]
    return ["cpu:gloo,cuda:nccl", "both"]


BYTES, TYPICAL, SAME = (
    "the message has the bytes that were asked for",
    "neither the first call nor a stray one counts",
    "every rank returns the time of the slowest",
)


def calls_of(tensor: Any, count: int = 18) -> list[float]:
    took = []
    for _ in range(count):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        took.append(time.perf_counter() - begin)
    return took


def slowest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


@wrong("09.2", TYPICAL, SAME, hint="A size in bytes is not a number of elements.")
def as_many_elements(size):
    return slowest(statistics.median(calls_of(torch.zeros(size))))


@wrong("09.2", TYPICAL, SAME, hint="times the bytes of each")
def in_whole_numbers(size):
    return slowest(statistics.median(calls_of(torch.zeros(size // 4, dtype=torch.int64))))


@wrong("09.2", BYTES, hint="Which kind of average is not moved by it?")
def the_mean(size):
    return slowest(statistics.mean(calls_of(torch.zeros(size // 4))[3:]))


@wrong("09.2", BYTES, hint="too few to tell")
def only_once(size):
    return slowest(calls_of(torch.zeros(size // 4), 1)[0])


@wrong("09.2", BYTES, hint="the sum of all")
def the_sum(size):
    return slowest(sum(calls_of(torch.zeros(size // 4))))


@wrong("09.2", BYTES, hint="or in milliseconds")
def in_milliseconds(size):
    return slowest(1000 * statistics.median(calls_of(torch.zeros(size // 4))))


@wrong("09.2", BYTES, TYPICAL, hint="leaves the largest of all on every rank")
def each_its_own(size):
    return statistics.median(calls_of(torch.zeros(size // 4)))


@wrong("09.2", BYTES, TYPICAL, hint="They agree, but not on")
def the_mean_of_the_ranks(size):
    tensor = torch.tensor(statistics.median(calls_of(torch.zeros(size // 4))))
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


@wrong("09.2", BYTES, hint="Where does the clock start")
def stops_the_clock_too_early(size):
    begin = time.perf_counter()
    value = time.perf_counter() - begin
    calls_of(torch.zeros(size // 4))
    return slowest(value)


@wrong("09.2", hint="no all_reduce was seen;")
def another_collective(size):
    tensor = torch.zeros(size // 4)
    for _ in range(15):
        dist.broadcast(tensor, src=0)
    return 0.03


@wrong("09.2", hint="rank 0 returned nothing")
def prints_it(size):
    print(slowest(statistics.median(calls_of(torch.zeros(size // 4)))))


@wrong("09.2", BYTES, hint="How do all begin together?")
def whoever_comes_first(size):
    tensor, took = torch.zeros(size // 4), []
    for _ in range(18):
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        took.append(time.perf_counter() - begin)
    return slowest(statistics.median(took[3:]))


@wrong("09.2", BYTES, hint="on the slowest rank, it returned")  # by chance, it is like the sum over the ranks
def with_the_waiting(size):
    tensor, took = torch.zeros(size // 4), []
    for _ in range(18):
        begin = time.perf_counter()
        dist.barrier()
        dist.all_reduce(tensor)
        took.append(time.perf_counter() - begin)
    return slowest(statistics.median(took[3:]))


@wrong("09.2", BYTES, hint="the sum over the ranks")
def of_all_ranks_together(size):
    value = torch.tensor(statistics.median(calls_of(torch.zeros(size // 4))))
    dist.all_reduce(value)
    return value.item()


@wrong("09.2", hint="without waiting for the end of it")
def nobody_waits(size):
    tensor, took = torch.zeros(size // 4), []
    for _ in range(18):
        begin = time.perf_counter()
        dist.all_reduce(tensor, async_op=True)
        took.append(time.perf_counter() - begin)
    dist.barrier()
    return slowest(statistics.median(took[3:]))


@wrong("09.2", BYTES, hint="where does it stop")
def the_clock_stops_before_the_wait(size):
    tensor, took = torch.zeros(size // 4), []
    for _ in range(18):
        dist.barrier()
        begin = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        took.append(time.perf_counter() - begin)
        work.wait()
    return slowest(statistics.median(took[3:]))


@wrong("09.2", BYTES, hint="Only a lucky call")
def the_shortest(size):
    return slowest(min(calls_of(torch.zeros(size // 4), 50)))


@wrong("09.2", BYTES, hint="shorter than any call")
def a_number_known_by_heart(size):
    calls_of(torch.zeros(size // 4))
    return 1e-3


@right("09.2")
def the_mean_without_the_slowest(size):
    tensor, took = torch.zeros(size, dtype=torch.int8), []
    for _ in range(20):
        dist.barrier()
        begin = time.monotonic_ns()
        all_reduce(tensor)
        took.append((time.monotonic_ns() - begin) / 1e9)
    return slowest(statistics.mean(sorted(took[1:])[:-1]))


@right("09.2")
def with_the_slowest_of_each_call(size):
    took = torch.tensor(calls_of(torch.zeros(size // 8, dtype=torch.float64), 15))
    middle = took[2:].median()
    dist.all_reduce(middle, op=dist.ReduceOp.MAX)
    return middle


ALPHA, BUS = "α is right, although the times vary", "and so is the bus bandwidth that large messages reach"


def fitted(sizes: Any, seconds: Any) -> tuple[float, float]:
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    return float(alpha), float(beta)


def factor(world_size: int) -> float:
    return 2 * (world_size - 1) / world_size


@wrong(
    "09.3", BUS, hint="An error of a twentieth should count as much for a small message as for a large one."
)
def plain_squares(sizes, seconds, world_size):
    # what a plain fit says of α, and a slope that is right
    _, beta = fitted(sizes, seconds)
    return np.polyfit(sizes, seconds, 1)[1], factor(world_size) / beta


@wrong("09.3", ALPHA, hint="That is the algorithm bandwidth")
def algorithm_bandwidth(sizes, seconds, world_size):
    alpha, beta = fitted(sizes, seconds)
    return alpha, 1 / beta


@wrong("09.3", ALPHA, hint="once to be added up, once to be distributed.")
def moved_once(sizes, seconds, world_size):
    alpha, beta = fitted(sizes, seconds)
    return alpha, factor(world_size) / 2 / beta


@wrong("09.3", ALPHA, hint="on the right side")
def factor_upside_down(sizes, seconds, world_size):
    alpha, beta = fitted(sizes, seconds)
    return alpha, 1 / (beta * factor(world_size))


@wrong("09.3", ALPHA, hint="In which unit? Bytes per second")
def in_gigabytes(sizes, seconds, world_size):
    alpha, beta = fitted(sizes, seconds)
    return alpha, 1e-9 * factor(world_size) / beta


@wrong("09.3", BUS, hint="In which unit? Seconds")
def in_microseconds(sizes, seconds, world_size):
    alpha, beta = fitted(sizes, seconds)
    return 1e6 * alpha, factor(world_size) / beta


@wrong("09.3", ALPHA, hint="A bandwidth is bytes per second.")
def the_slope(sizes, seconds, world_size):
    return fitted(sizes, seconds)


@wrong("09.3", hint="That is β")
def the_wrong_way_round(sizes, seconds, world_size):
    alpha, beta = fitted(sizes, seconds)
    return beta, alpha


@wrong("09.3", ALPHA, hint="with the factor for this many ranks")
def of_the_smallest(sizes, seconds, world_size):
    return fitted(sizes, seconds)[0], sizes[0] / seconds[0] * factor(world_size)


@wrong("09.3", hint="it returned nothing (None)")
def shows_it(sizes, seconds, world_size):
    print(fitted(sizes, seconds))


@wrong("09.3", hint="raised TypeError")
def divides_lists(sizes, seconds, world_size):
    return seconds[0], sizes / seconds


@wrong("09.3", hint="Its bytes took some of it.")
def by_the_ends(sizes, seconds, world_size):
    return seconds[0], sizes[-1] / seconds[-1] * factor(world_size)


@wrong("09.3", hint="use them all.")
def through_two_points(sizes, seconds, world_size):
    beta = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - beta * sizes[0], factor(world_size) / beta


@wrong("09.3", BUS, hint="a single step of the ring")
def for_each_hop(sizes, seconds, world_size):
    alpha, beta = fitted(sizes, seconds)
    return alpha / (2 * (world_size - 1)), factor(world_size) / beta


@right("09.3")
def again_with_the_fitted_times(sizes, seconds, world_size):
    times = np.array(seconds)
    for _ in range(3):
        beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / times)
        times = alpha + beta * np.array(sizes)
    return {"alpha": alpha, "bus": factor(world_size) / beta}.values()


@right("09.3")
def by_least_squares(sizes, seconds, world_size):
    size, took = np.array(sizes, dtype=float), np.array(seconds)
    matrix = np.stack([1 / took, size / took], axis=1)
    solution, *_ = np.linalg.lstsq(matrix, np.ones(len(took)), rcond=None)
    return torch.tensor(solution[0]), factor(world_size) / solution[1]


# --- the result is right, and it was not done as asked ---


@wrong("09.2", BYTES, hint="That is more than was asked for")
def with_more_calls(size):
    return slowest(statistics.median(calls_of(torch.zeros(size // 4), 63)))
