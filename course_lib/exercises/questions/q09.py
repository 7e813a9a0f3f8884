"""The questions of lesson 09: which backend, how long a message takes, and the line through the times."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..check import Refused, a_function, observe, question
from .ranks import join

Found = Iterator[tuple[str, bool, str, str]]
RANKS = 3

# --- 09.1 -------------------------------------------------------------------------------------------------

OWN, SHARED, CPU, BOTH, WHY = (
    "GPU tensors, a GPU for each rank",
    "GPU tensors, ranks that share a GPU",
    "CPU tensors, on every network",
    "CPU and GPU tensors, a GPU for each rank",
    "and each time for the right reason",
)
NETWORKS = ("none", "ethernet", "infiniband with IP")
NO_IP = "infiniband without IP"
Cluster = dict[str, Any]  # the arguments of choose
Case = tuple[str, Cluster, str, str]  # property, cluster, backend, reason


def _clusters(rng: random.Random) -> list[Case]:
    """Clusters of each kind, drawn; every network is among them where it matters."""
    cases: list[Case] = []

    def add(what: str, tensors: str, gpus: int, ranks: int, network: str, backend: str, why: str) -> None:
        cluster = {"tensors": tensors, "gpus_per_node": gpus, "ranks_per_node": ranks, "network": network}
        cases.append((what, cluster, backend, why))

    for network in (*NETWORKS, NO_IP):
        gpus = rng.choice((2, 4, 8))
        add(OWN, "gpu", gpus, gpus, network, "nccl", "own GPU")
        add(BOTH, "cpu and gpu", gpus, gpus, network, "cpu:gloo,cuda:nccl", "both")
    fewer = rng.choice((4, 6, 8))
    add(OWN, "gpu", fewer, rng.randint(2, fewer - 1), "ethernet", "nccl", "own GPU")
    for network in NETWORKS:
        gpus = rng.randint(1, 4)
        add(SHARED, "gpu", gpus, gpus + rng.randint(1, 4), network, "gloo", "shared GPU")
    add(SHARED, "cpu and gpu", 1, rng.randint(2, 4), "none", "gloo", "shared GPU")
    for network, gpus in zip(NETWORKS, rng.sample((0, 2, 8), 3), strict=True):
        add(CPU, "cpu", gpus, rng.randint(2, 8), network, "gloo", "CPU over IP")
    add(CPU, "cpu", 0, rng.randint(2, 8), NO_IP, "mpi", "no IP")
    # both, over a network that gloo cannot use, would need a third backend: not asked
    cases = [case for case in cases if not (case[0] == BOTH and case[1]["network"] == NO_IP)]
    rng.shuffle(cases)
    return cases


@question("09.1", {OWN: 1, SHARED: 1, CPU: 1, BOTH: 1, WHY: 1})
def choose(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "choose(tensors, gpus_per_node, ranks_per_node, network)")
    cases = _clusters(rng)
    found = observe(_chosen, answer, [cluster for _, cluster, _, _ in cases])[0]
    if all(backend is None for backend, _ in found):
        raise Refused("choose shall return two things, a backend and a reason; it returned neither")
    for what in (OWN, SHARED, CPU, BOTH):
        mine = [(case, got) for case, got in zip(cases, found, strict=True) if case[0] == what]
        missed = [(case, got[0]) for case, got in mine if got[0] != case[2]]
        seen, hint = "", ""
        if missed:
            (_, cluster, _, _), got = missed[0]
            seen = f"for {_words(cluster)} it says {got!r}"
            hint = _of_backend(what, cluster, got)
        yield what, not missed, seen, hint
    missed = [
        (case, got) for case, got in zip(cases, found, strict=True) if got[0] != case[2] or got[1] != case[3]
    ]
    seen, hint = "", ""
    if missed:
        wrong_reason = [pair for pair in missed if pair[1][0] == pair[0][2]]
        (_, cluster, _, why), got = (wrong_reason or missed)[0]
        seen = f"for {_words(cluster)} it says {got[0]!r} because of {got[1]!r}"
        if not wrong_reason:
            hint = "A reason for the wrong backend is none: that comes first."
        elif got[1] not in REASONS:
            hint = f"The reason is one of {', '.join(REASONS)}, as they are written there."
        elif why == "shared GPU":
            hint = "The backend is right. What is it about this machine that NCCL would refuse?"
        else:
            hint = "The backend is right. Would it be so with another network, or with other tensors?"
    yield WHY, not missed, seen, hint


REASONS = ("own GPU", "shared GPU", "CPU over IP", "no IP", "both")


def _words(cluster: Cluster) -> str:
    gpus, ranks = cluster["gpus_per_node"], cluster["ranks_per_node"]
    return f"{cluster['tensors']} tensors, {gpus} GPUs and {ranks} ranks a node, network {cluster['network']}"


def _of_backend(what: str, cluster: Cluster, got: Any) -> str:
    if not isinstance(got, str):
        return "It shall return two things: the backend's name as init_process_group takes it, and a reason."
    if what == OWN:
        return "Each rank has a GPU of its own here. Does the network change who moves GPU memory best?"
    if what == SHARED:
        return "Count: there are more ranks than GPUs. Which backend refuses that?"
    if what == BOTH:
        return "Two kinds of tensors: a name can give each its own carrier, device:backend, with a comma."
    if cluster["network"] == NO_IP:
        return "There is no IP on this network. What was the one case for a PyTorch built by yourself?"
    return "The tensors are on the CPU, whatever the machine has besides. Who moves GPU memory alone?"


def _chosen(answer: Any, clusters: list[Cluster]) -> list[list[Any]]:
    found = []
    for cluster in clusters:
        value = answer(**cluster)
        pair = list(value) if isinstance(value, tuple | list) and len(value) == 2 else [value, None]
        found.append([each if isinstance(each, str) else None for each in pair])
    return found


# --- 09.2 -------------------------------------------------------------------------------------------------

BYTES, TYPICAL, SAME = (
    "the message has the bytes that were asked for",
    "neither the first call nor a stray one counts",
    "every rank returns the time of the slowest",
)
SHORT, LONG = 0.01, 1.5  # seconds of a call on rank 0, and of a stray one: the first, the 7th, the 19th, …
STRAY, EVERY = 6, 12
MUCH = 0.1  # a call takes SHORT · RANKS on the slowest rank, and a mean with a stray one in it is more


@question("09.2", {BYTES: 1, TYPICAL: 1, SAME: 1})
def seconds_of(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "seconds_of(size)")
    size = 8 * rng.randrange(150, 1500)
    ranks = observe(_measured, answer, size, nprocs=RANKS)
    sizes = [each for _, calls in ranks for each in calls]
    if not sizes:
        raise Refused("there was no all_reduce to be seen; call it as dist.all_reduce(...)")
    values = [value for value, _ in ranks]
    for rank, value in enumerate(values):
        if not isinstance(value, float):
            raise Refused(f"seconds_of shall return a number of seconds; rank {rank} returned {value!r:.40}")
    ok = size in sizes and max(sizes) == size
    seen = f"{size} bytes were asked for, the largest message has {max(sizes)}"
    if max(sizes) in (4 * size, 8 * size):
        hint = "A size in bytes is no number of elements. How many bytes has each element?"
    else:
        hint = "Make a tensor whose elements, times the bytes of each, are the size."
    yield BYTES, ok, seen, hint
    calls = min(len([s for s in found if s > 64]) for _, found in ranks)
    slowest = SHORT * RANKS
    typical = all(SHORT / 2 < value < MUCH for value in values) and calls > STRAY + 1
    seen = f"a call took {1e3 * slowest:.0f} ms on the slowest rank, it returned {1e3 * max(values):.0f} ms"
    if calls <= STRAY + 1:
        seen = f"it made {calls} calls"
        hint = "That is too few to tell a stray one from the rest. Make 15 or so."
    elif max(values) > LONG:
        hint = (
            "Is that the time of one call, in seconds, or the sum of all, or the first, or in milliseconds?"
        )
    elif max(values) >= MUCH:
        hint = "One call was much longer than all others. Which kind of middle is not moved by it?"
    else:
        hint = "That is shorter than any call was. Where does the clock start, where does it stop?"
    yield TYPICAL, typical, seen, hint
    apart = max(values) - min(values)
    ok = apart == 0 and typical and values[0] > 0.95 * slowest
    seen = "the ranks return " + ", ".join(f"{1e3 * value:.1f}" for value in values) + " ms"
    if not typical:
        hint = "Once the times are right, look at this again."
    elif apart:
        hint = "Each returns its own. Which operation leaves the largest of all on every rank?"
    else:
        hint = f"They agree, on something else than the slowest rank's {1e3 * slowest:.0f} ms."
    yield SAME, ok, seen, hint


def _measured(answer: Any, size: int) -> tuple[Any, list[int]]:
    """The answer, with an all_reduce that takes known times; and the bytes of each of its messages."""
    join()
    real, calls = dist.all_reduce, []

    def slow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        count = len([each for each in calls if each > 64])  # the smaller ones agree on a number
        calls.append(tensor.nbytes)
        work = real(tensor, *args, **kwargs)
        if tensor.nbytes > 64:
            wanted = LONG if count == 0 or count % EVERY == STRAY else SHORT * (1 + dist.get_rank())
            time.sleep(max(0.0, wanted - (time.perf_counter() - begun)))
        return work

    dist.all_reduce = slow
    value = answer(size)
    dist.all_reduce = real
    try:
        value = float(value)
    except (TypeError, ValueError):
        value = None if value is None else str(value)[:40]
    return value, calls


# --- 09.3 -------------------------------------------------------------------------------------------------

ALPHA, BUS = "α is right, although the times wobble", "and so is the bus bandwidth that large messages reach"
NEAR, WORLD_SIZES = 0.15, (3, 3, 4, 6, 8, 16)  # the small ones tell its factor from 2


@question("09.3", {ALPHA: 1, BUS: 1})
def line(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "line(sizes, seconds, world_size)")
    sizes = [4**k for k in range(3, 14)]
    truths, tasks = [], []
    for world_size in rng.sample(WORLD_SIZES, len(WORLD_SIZES)):
        alpha, bus = rng.uniform(2e-5, 2e-4), rng.uniform(0.5e9, 5e9)
        factor = 2 * (world_size - 1) / world_size
        times = [(alpha + size / bus * factor) * rng.uniform(0.93, 1.07) for size in sizes]
        truths.append((alpha, bus))
        tasks.append((sizes, times, world_size))
    found = observe(_lines, answer, tasks)[0]
    for value in found:
        if isinstance(value, str):
            raise Refused(f"line shall return two numbers, alpha and the bus bandwidth; it returned {value}")
    pairs = list(zip(found, truths, tasks, strict=True))
    off = [abs(got[0] / true[0] - 1) for got, true, _ in pairs]
    worst = max(range(len(found)), key=lambda i: off[i] if math.isfinite(off[i]) else math.inf)
    got, true = found[worst][0], truths[worst][0]
    seen = f"a message of no bytes takes {1e6 * true:.0f} µs, and α came out as {1e6 * got:.0f} µs"
    ratios = [got[0] / true[0] for got, true, _ in pairs]
    swapped = all(abs(got[0] * true[1] / (2 * (n - 1) / n) - 1) < NEAR for got, true, (_, _, n) in pairs)
    if swapped:
        hint = "That is β. Which of the two does your fit return first?"
    elif any(1e2 < abs(each) < 1e10 for each in ratios) and min(map(abs, ratios)) > 1e2:
        hint = "In which unit? Seconds are asked for."
    else:
        hint = "Being off by a twentieth should count as much in a small message as in a large one."
    yield ALPHA, all(each < NEAR for each in off), seen, hint
    off = [abs(got[1] / true[1] - 1) for got, true, _ in pairs]
    worst = max(range(len(found)), key=lambda i: off[i] if math.isfinite(off[i]) else math.inf)
    got, true, world_size = found[worst][1], truths[worst][1], tasks[worst][2]
    seen = f"with {world_size} ranks it is {true / 1e9:.2f} GB/s, and {got / 1e9:.3g} came out"
    factors = [2 * (n - 1) / n for _, _, (_, _, n) in pairs]
    ratios = [got[1] / true[1] for got, true, _ in pairs]

    def are(shape: list[float]) -> bool:
        return all(abs(ratio / each - 1) < NEAR for ratio, each in zip(ratios, shape, strict=True))

    if are([1 / each for each in factors]):
        hint = "That is the algorithm bandwidth, bytes over seconds. What does each rank really send?"
    elif are([1 / 2] * len(factors)):
        hint = "It is half of it. The data moves twice: once to be added up, once to be handed out."
    elif are([1 / each**2 for each in factors]):
        hint = "Is the factor on the right side? A rank sends more than its message."
    elif are([1e-9] * len(factors)):
        hint = "In which unit? Bytes per second are asked for."
    elif all(got[1] < 1 for got, _, _ in pairs):
        hint = "That is a time for each byte. A bandwidth is bytes for each second."
    else:
        hint = "Take it from the slope, which knows large messages, with the factor for this many ranks."
    yield BUS, all(each < NEAR for each in off), seen, hint


def _lines(answer: Any, tasks: list[tuple[list[int], list[float], int]]) -> list[Any]:
    found: list[Any] = []
    for sizes, times, world_size in tasks:
        value = answer(list(sizes), list(times), world_size)
        try:
            alpha, bus = value
            found.append((float(alpha), float(bus)))
        except (TypeError, ValueError):
            found.append("nothing (None)" if value is None else f"{value!r:.60}")
    return found
