"""The questions of lesson 09: which backend, how long a message takes, and the line through the times."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ..asking import Ask, Finding, Refused, far, in_group, nearest, number, question, told

RANKS = 3

# --- 09.1 -------------------------------------------------------------------------------------------------

OWN = "GPU tensors, a GPU for each rank"
SHARED = "GPU tensors, ranks that share a GPU"
CPU = "CPU tensors, on every network"
BOTH = "CPU and GPU tensors, a GPU for each rank"
WHY = "and each time for the right reason"
NETWORKS, NO_IP = ("none", "ethernet", "infiniband with IP"), "infiniband without IP"
REASONS = ("own GPU", "shared GPU", "CPU over IP", "no IP", "both")
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
        if network != NO_IP:  # both, where gloo has no network, would need a third backend: not asked
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
    rng.shuffle(cases)
    return cases


@question(
    "09.1",
    "choose(tensors, gpus_per_node, ranks_per_node, network)",
    {OWN: 1, SHARED: 1, CPU: 1, BOTH: 1, WHY: 1},
)
def choose(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = _clusters(rng)
    (found,) = ask(_chosen, [cluster for _, cluster, _, _ in cases])
    if all(backend is None for backend, _ in found):
        raise Refused("choose must return two things, a backend and a reason; it returned neither")
    backends, reasons = [], []
    for (what, cluster, backend, why), (got, because) in zip(cases, found, strict=True):
        seen = f"for {_words(cluster)} it says {got!r}"
        if got != backend:
            backends.append(Finding(what, False, seen, _of_backend(what, cluster, got)))
        elif because != why:
            reasons.append(Finding(WHY, False, f"{seen} because of {because!r}", _of_reason(why, because)))
    for what in (OWN, SHARED, CPU, BOTH):
        yield next((each for each in backends if each.what == what), Finding(what, True))
    if backends and not reasons:
        hint = "A reason for the wrong backend is none: that comes first."
        reasons = [Finding(WHY, False, backends[0].seen, hint)]
    yield reasons[0] if reasons else Finding(WHY, True)


def _words(cluster: Cluster) -> str:
    gpus, ranks = cluster["gpus_per_node"], cluster["ranks_per_node"]
    return f"{cluster['tensors']} tensors, {gpus} GPUs and {ranks} ranks a node, network {cluster['network']}"


def _of_backend(what: str, cluster: Cluster, got: str | None) -> str:
    if got is None:
        return "It must return two things: the backend's name as init_process_group takes it, and a reason."
    if what == OWN:
        return "Each rank has a GPU of its own here. Does the network change who moves GPU memory best?"
    if what == SHARED:
        return "Count: there are more ranks than GPUs. Which backend refuses that?"
    if what == BOTH:
        return "Two kinds of tensors: a name can give each its own carrier, device:backend, with a comma."
    if cluster["network"] == NO_IP:
        return "There is no IP on this network. What was the one case for a PyTorch built by yourself?"
    return "The tensors are on the CPU, whatever the machine has besides. Who moves GPU memory alone?"


def _of_reason(why: str, because: str | None) -> str:
    if because not in REASONS:
        return f"The reason is one of {', '.join(REASONS)}, as they are written there."
    if why == "shared GPU":
        return "The backend is right. What is it about this machine that NCCL would refuse?"
    return "The backend is right. Would it be so with another network, or with other tensors?"


def _chosen(answer: Any, clusters: list[Cluster]) -> list[list[str | None]]:
    found = []
    for cluster in clusters:
        value = answer(**cluster)
        pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
        found.append([each if isinstance(each, str) else None for each in pair])
    return found


# --- 09.2 -------------------------------------------------------------------------------------------------

BYTES = "the message has the bytes that were asked for"
TYPICAL = "neither the first call nor a stray one counts"
SAME = "every rank returns the time of the slowest"
SHORT, LONG = 0.01, 1.5  # seconds of a call on rank 0, and of a stray one: the first, the 7th, the 19th, …
STRAY, EVERY = 6, 12
SLOWEST = SHORT * RANKS
MUCH = 0.1  # a call takes SLOWEST on the slowest rank, and a mean with a stray one in it is more
SMALL = 64  # bytes of a message that only agrees on a number
OF_WHAT = "Is that the time of one call, in seconds, or the sum of all, or the first, or in milliseconds?"


@question("09.2", "seconds_of(size)", {BYTES: 1, TYPICAL: 1, SAME: 1}, rests={SAME: TYPICAL})
def seconds_of(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    size = 8 * rng.randrange(150, 1500)
    ranks = ask(_measured, size, nprocs=RANKS)
    if not any(each["sent"] for each in ranks):
        raise Refused("there was no all_reduce to be seen; call it as dist.all_reduce(...)")
    values = [each["value"] for each in ranks]
    for rank, value in enumerate(values):
        if isinstance(value, str):
            raise Refused(f"seconds_of must return a number of seconds; rank {rank} returned {value}")
    largest = max(max(each["sent"], default=0) for each in ranks)
    if largest in (4 * size, 8 * size):
        hint = "A size in bytes is no number of elements. How many bytes has each element?"
    else:
        hint = "Make a tensor whose elements, times the bytes of each, are the size."
    seen = f"{size} bytes were asked for, the largest message has {largest}"
    yield Finding(BYTES, largest == size, seen, hint)
    calls = min(sum(message > SMALL for message in each["sent"]) for each in ranks)
    enough = calls > STRAY + 1
    seen = f"a call took {1e3 * SLOWEST:.0f} ms on the slowest rank, it returned {1e3 * max(values):.0f} ms"
    if not enough:
        seen = f"it made {calls} calls"
        hint = "That is too few to tell a stray one from the rest. Make 15 or so."
    elif max(values) > LONG:
        hint = OF_WHAT
    elif max(values) >= MUCH:
        hint = "One call was much longer than all others. Which kind of middle is not moved by it?"
    else:
        hint = "That is shorter than any call was. Where does the clock start, where does it stop?"
    yield Finding(TYPICAL, enough and all(SHORT / 2 < value < MUCH for value in values), seen, hint)
    apart = max(values) > min(values)
    if apart:
        hint = "Each returns its own. Which operation leaves the largest of all on every rank?"
    else:
        hint = f"They agree, on something else than the slowest rank's {1e3 * SLOWEST:.0f} ms."
    seen = f"the ranks return {', '.join(f'{1e3 * value:.1f}' for value in values)} ms"
    yield Finding(SAME, not apart and values[0] > 0.95 * SLOWEST, seen, hint)


@in_group
def _measured(answer: Any, size: int) -> dict[str, Any]:
    """The answer, with an all_reduce that takes known times; and the bytes of each of its messages."""
    real, sent = dist.all_reduce, []

    def slow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        before = sum(message > SMALL for message in sent)
        sent.append(tensor.nbytes)
        work = real(tensor, *args, **kwargs)
        if tensor.nbytes > SMALL:
            stray = before == 0 or before % EVERY == STRAY
            wanted = LONG if stray else SHORT * (1 + dist.get_rank())
            time.sleep(max(0.0, wanted - (time.perf_counter() - begun)))
        return work

    with mock.patch.object(dist, "all_reduce", slow):
        return {"value": number(answer(size)), "sent": sent}


# --- 09.3 -------------------------------------------------------------------------------------------------

ALPHA, BUS = "α is right, although the times wobble", "and so is the bus bandwidth that large messages reach"
NEAR, WORLD_SIZES = 0.15, (3, 3, 4, 6, 8, 16)  # the small ones tell its factor from 2
ALGORITHM = "That is the algorithm bandwidth, bytes over seconds. What does each rank really send?"
HALF = "It is half of it. The data moves twice: once to be added up, once to be handed out."
ONES = torch.ones(len(WORLD_SIZES), dtype=torch.float64)


@question("09.3", "line(sizes, seconds, world_size)", {ALPHA: 1, BUS: 1})
def line(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    sizes = [4**k for k in range(3, 14)]
    world_sizes = rng.sample(WORLD_SIZES, len(WORLD_SIZES))
    factors = 2 - 2 / torch.tensor(world_sizes, dtype=torch.float64)
    truths, tasks = [], []
    for world_size, factor in zip(world_sizes, factors.tolist(), strict=True):
        alpha, bus = rng.uniform(2e-5, 2e-4), rng.uniform(0.5e9, 5e9)
        times = [(alpha + size / bus * factor) * rng.uniform(0.93, 1.07) for size in sizes]
        truths.append((alpha, bus))
        tasks.append((sizes, times, world_size))
    (found,) = ask(_lines, tasks)
    alphas, buses = torch.tensor(truths, dtype=torch.float64).T
    got_alphas, got_buses = torch.tensor(found, dtype=torch.float64).T
    ratios = got_alphas / alphas
    if far(got_alphas * buses / factors, ONES) < NEAR:
        hint = "That is β. Which of the two does your fit return first?"
    elif all(1e2 < abs(ratio) < 1e10 for ratio in ratios):
        hint = "In which unit? Seconds are asked for."
    else:
        hint = "Being off by a twentieth should count as much in a small message as in a large one."
    worst = _worst(ratios)
    seen = f"a message of no bytes takes {1e6 * alphas[worst]:.0f} µs"
    seen += f", and α came out as {1e6 * got_alphas[worst]:.0f} µs"
    yield Finding(ALPHA, far(ratios, ONES) < NEAR, seen, hint)
    ratios = got_buses / buses
    if (got_buses < 1).all():
        hint = "That is a time for each byte. A bandwidth is bytes for each second."
    else:
        hint = "Take it from the slope, which knows large messages, with the factor for this many ranks."
    hint = nearest(
        ratios.log(),  # as logarithms factors of any size are compared alike
        (-factors.log(), ALGORITHM),
        (-math.log(2) * ONES, HALF),
        (-2 * factors.log(), "Is the factor on the right side? A rank sends more than its message."),
        (math.log(1e-9) * ONES, "In which unit? Bytes per second are asked for."),
        otherwise=hint,
        within=NEAR,
    )
    worst = _worst(ratios)
    seen = f"with {world_sizes[worst]} ranks it is {buses[worst] / 1e9:.2f} GB/s"
    seen += f", and {got_buses[worst] / 1e9:.3g} came out"
    yield Finding(BUS, far(ratios, ONES) < NEAR, seen, hint)


def _worst(ratios: torch.Tensor) -> int:
    """The place of what is farthest from 1; no number is farther than all."""
    return int((ratios - 1).abs().nan_to_num(math.inf).argmax())


def _lines(answer: Any, tasks: list[tuple[list[int], list[float], int]]) -> list[list[float]]:
    found = []
    for task in tasks:
        value = answer(*task)
        try:
            alpha, bus = map(float, value)
        except (TypeError, ValueError):
            asked = "line must return two numbers, alpha and the bus bandwidth"
            raise Refused(f"{asked}; it returned {told(value)}") from None
        found.append([alpha, bus])
    return found
