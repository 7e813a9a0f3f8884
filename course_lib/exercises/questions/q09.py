"""The questions of lesson 09: which backend, how long a message takes, and a line fitted to the times."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter, sleep  # by name: an answer may replace them in the module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from ..in_rank.work import in_group, on_each_case
from ..judging import by_call, far, nearest, place_of_furthest
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, told

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
    """Draw clusters of every kind on every network, also with just enough GPUs and with one too few."""
    few, many = rng.randint(2, 4), rng.randint(5, 8)
    own = [(1, 1), (few, few), (many, few), (many, many - 1), (many, 1)]  # GPUs, ranks
    shared = [(1, 2), (1, many), (few, few + 1), (few, 2 * few), (few, many + few)]
    none = [(0, 1), (0, many)]
    cases: list[Case] = []
    for network in (*NETWORKS, NO_IP):
        has_ip = network != NO_IP

        def add(what: str, tensors: str, places: list[tuple[int, int]], backend: str, why: str) -> None:
            for gpus, ranks in places:
                cluster = {"tensors": tensors, "gpus_per_node": gpus, "ranks_per_node": ranks}
                cases.append((what, cluster | {"network": network}, backend, why))  # noqa: B023

        add(OWN, "gpu", own, "nccl", "own GPU")
        right = ("gloo", "CPU over IP") if has_ip else ("mpi", "no IP")
        add(CPU, "cpu", own + shared + none, *right)
        if has_ip:  # without IP, gloo has no network, and these would need a third backend: not asked
            add(BOTH, "cpu and gpu", own, "cpu:gloo,cuda:nccl", "both")
            for tensors in ("gpu", "cpu and gpu"):
                add(SHARED, tensors, shared, "gloo", "shared GPU")
    rng.shuffle(cases)
    return cases


@question(
    "09.1",
    "choose(tensors, gpus_per_node, ranks_per_node, network)",
    {OWN: 1, SHARED: 1, CPU: 1, BOTH: 1, WHY: 1},
)
def choose(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = _clusters(rng)
    (results,) = ask(_chosen, [cluster for _, cluster, _, _ in cases])
    if all(backend is None for backend, _ in results):
        raise Refused("choose must return two things, a backend and a reason; it returned neither")
    backends, reasons = [], []
    for (what, cluster, backend, why), (got, because) in zip(cases, results, strict=True):
        seen = f"for {_words(cluster)} it says {got!r}"
        if not _is_same(got, backend, cluster["tensors"]):
            backends.append(Finding(what, False, seen, _of_backend(what, cluster, got)))
        elif because != why:
            reasons.append(Finding(WHY, False, f"{seen} because of {because!r}", _of_reason(why, because)))
    for what in (OWN, SHARED, CPU, BOTH):
        yield next((finding for finding in backends if finding.what == what), Finding(what, True))
    if backends and not reasons:
        hint = "First comes the right backend, and then its reason."
        reasons = [Finding(WHY, False, backends[0].seen, hint)]
    yield reasons[0] if reasons else Finding(WHY, True)


def _is_same(got: str | None, backend: str, tensors: str) -> bool:
    """Compare backends as init_process_group reads them: any order, any case, only devices that matter."""
    if got is None or got.lower() == backend:
        return got is not None
    try:
        backends = BackendConfig(dist.Backend(got)).get_device_backend_map()
    except Exception:
        return False
    wanted = BackendConfig(dist.Backend(backend)).get_device_backend_map()
    devices = {"cpu": {"cpu"}, "gpu": {"cuda"}}.get(tensors, {"cpu", "cuda"})
    return ":" in got and backends == {device: wanted.get(device) for device in devices}


def _words(cluster: Cluster) -> str:
    gpus, ranks = cluster["gpus_per_node"], cluster["ranks_per_node"]
    return f"{cluster['tensors']} tensors, {gpus} GPUs and {ranks} ranks a node, network {cluster['network']}"


def _of_backend(what: str, cluster: Cluster, got: str | None) -> str:
    gpus, ranks = cluster["gpus_per_node"], cluster["ranks_per_node"]
    if got is None:
        return "It must return two things: the backend's name as init_process_group takes it, and a reason."
    if what == OWN:
        enough = ": there are more GPUs than ranks" if gpus > ranks else ""
        hint = f"Each rank has a GPU of its own here{enough}. "
        return hint + "Does the network change which backend moves GPU memory best?"
    if what == SHARED:
        return "Count: there are more ranks than GPUs. Which backend refuses that?"
    if what == BOTH and ":" in got:
        return "Each kind of tensor needs a backend. Which one moves GPU memory, and which one the rest?"
    if what == BOTH:
        return "Two kinds of tensors: a name can give each its own backend, device:backend, with a comma."
    if cluster["network"] == NO_IP and got != "nccl":
        return "There is no IP on this network. What was the one case for building PyTorch yourself?"
    return "The tensors are on the CPU, whatever else the machine has. Which backend moves GPU memory only?"


def _of_reason(why: str, because: str | None) -> str:
    if because not in REASONS:
        return f"The reason is one of {', '.join(REASONS)}, exactly as written there."
    if why == "shared GPU":
        return "The backend is right. What is it about this machine that NCCL would refuse?"
    return "The backend is right. Would it still be right with another network, or with other tensors?"


@reports(lambda clusters: [[(str, None), (str, None)]] * len(clusters))
@on_each_case
def _chosen(answer: Any, cluster: Cluster) -> list[str | None]:
    value = answer(*cluster.values())
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
    return [word if isinstance(word, str) else None for word in pair]


# --- 09.2 -------------------------------------------------------------------------------------------------

BYTES = "the message has the bytes that were asked for"
TYPICAL = "neither the first call nor a stray one counts"
SAME = "every rank returns the time of the slowest"
FASTER = 0.5  # what a call takes on the other ranks, as a fraction of the slowest rank's time
FIRST, STRAY, LUCKY = 10.0, 30.0, 0.25  # times a usual call: the first one, a stray one, some short ones
FEW, MOST, WARM = 12, 50, 10  # fewest and most timed calls, and the most warm-up calls before them
SMALL = 64  # bytes: a message up to this size only agrees on a number
MEETINGS = ("barrier", "monitored_barrier", "broadcast", "allgather")
LEAST, LARGEST = 0.82, 1.25  # times a call: below is a mean of two ranks, above a mean with a stray
OF_WHAT = "Is that the time of one call, in seconds? Or the sum of all, or the first, or in milliseconds?"


@question("09.2", "seconds_of(size)", {BYTES: 1, TYPICAL: 1, SAME: 1}, rests={SAME: TYPICAL})
def seconds_of(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    """Judge the times for two sizes, each with a different slowest rank."""
    ranks = rng.randint(2, 4)
    sizes, slowest = rng.sample(range(150, 1500), 2), rng.sample(range(ranks), 2)
    took = rng.sample([0.036, 0.02], 2)
    plans: list[dict[str, Any]] = [
        {
            "size": 8 * size,
            "slowest": slow,
            "seconds": seconds * rng.uniform(0.9, 1.1),
            "stray": rng.randint(6, 9),
            "late": rng.choice([rank for rank in range(ranks) if rank != slow]),
        }
        for size, slow, seconds in zip(sizes, slowest, took, strict=True)
    ]
    for plan, results in zip(plans, by_call(ask(_measured, plans, nprocs=ranks)), strict=True):
        yield from _of_a_size(plan, results)


def _duration(plan: dict[str, Any], rank: int, place: int) -> float:
    """Return how long a rank's call takes at least."""
    seconds = plan["seconds"] * (1 if rank == plan["slowest"] else FASTER)
    if place == 0:
        return FIRST * seconds
    if place == plan["stray"] or (place > MOST and place % 10 == 0):
        return STRAY * seconds
    return LUCKY * seconds if place % 9 == 4 else seconds


def _of_a_size(plan: dict[str, Any], ranks: list[Result]) -> Iterator[Finding]:
    size = plan["size"]
    for rank, result in enumerate(ranks):
        for place, (_, took) in enumerate(result["calls"]):
            if 0 < took < 0.99 * _duration(plan, rank, place):
                raise Refused(f"rank {rank} reports a shorter time for call {place} than the call took")
    if not any(result["calls"] for result in ranks):
        raise Refused("no all_reduce was seen; call dist.all_reduce(...)")
    values = [result["value"] for result in ranks]
    for rank, value in enumerate(values):
        if isinstance(value, str):
            raise Refused(f"seconds_of must return a number of seconds; rank {rank} returned {value}")
    sent = Counter(message for result in ranks for message, _ in result["calls"])
    largest, usual_size = max(sent), sent.most_common(1)[0][0]
    hint = "The number of elements, times the bytes of each, must be the size."
    if largest in (4 * size, 8 * size):
        hint = "A size in bytes is not a number of elements. How many bytes does each element have?"
    seen = f"{size} bytes were asked for, the largest message has {largest}"
    if largest == size != usual_size:
        seen = f"{size} bytes were asked for; most messages have {usual_size}"
    yield Finding(BYTES, largest == usual_size == size, seen, hint)

    def off(seconds: float) -> float:
        return abs(max(values) / seconds - 1) if seconds > 0 else math.inf

    times = [[took for _, took in result["calls"]] for result in ranks]
    usual = [statistics.median(own[1:] or [0.0]) for own in times]
    lucky = max(min(own[1:] or [0.0]) for own in times)
    top = max(usual)
    shortest = off(lucky) < 0.1 and max(values) < LEAST * top and min(map(off, usual)) >= 0.1
    means = [statistics.mean(own[first:] or [0.0]) for own in times for first in (0, 1, 2, 3, 5, 10)]
    calls = min(map(len, times))
    waited = all(took > 0 for own in times for took in own)
    near = all(LEAST * min(usual) < value < LARGEST * top for value in values)
    together = not near or all(result["met"] >= len(result["calls"]) / 2 for result in ranks)
    seen = f"a call took {1e3 * top:.1f} ms on the slowest rank, it returned {1e3 * max(values):.1f} ms"
    hint = "That is shorter than any call was. Where does the clock start, where does it stop?"
    if calls < FEW:
        seen = f"it made {calls} calls"
        hint = "That is too few to tell a stray one from the rest. Make about 15."
    elif calls > MOST + WARM:
        seen = f"it made {calls} calls"
        hint = "That is more than was asked for. How many are enough to tell a stray one from the rest?"
    elif not waited:
        seen = "there were calls whose end you did not wait for"
        hint = "Such a call returns before it is done. How do you know when it is?"
    elif max(values) > 5 * top:
        hint = OF_WHAT
    elif off(sum(usual)) < min(0.07, *map(off, means)):
        hint = (
            "That is the sum over the ranks, which call at the same time. Which operation takes the largest?"
        )
    elif max(values) >= LARGEST * top:
        hint = "One call was much longer than all others. Which kind of average is not moved by it? "
        hint += "Or does your clock run while a rank waits for a late one?"
    elif not together:
        seen = "between two calls the ranks do not meet"
        hint = "A rank that is early waits inside the call while its clock runs. How do all begin together?"
    elif shortest or max(values) > lucky > 0:
        hint = "Only a lucky call is that short. How long does a call usually take?"
    counted = FEW <= calls <= MOST + WARM and waited
    yield Finding(TYPICAL, counted and near and together and not shortest, seen, hint)
    hint = f"They agree, but not on the slowest rank's {1e3 * top:.0f} ms."
    if apart := max(values) > min(values):
        hint = "Each returns its own. Which operation leaves the largest of all on every rank?"
    seen = f"the ranks return {', '.join(f'{1e3 * value:.1f}' for value in values)} ms"
    yield Finding(SAME, not apart and values[0] > LEAST * top, seen, hint)


@reports(lambda plans: [{"value": (NUMBER, str), "calls": [[int, float], ...], "met": int}] * len(plans))
@in_group
@on_each_case
def _measured(answer: Any, plan: dict[str, Any]) -> Result:
    """Run the answer with all_reduce calls of known duration; return its value, its calls and meetings."""
    duration = partial(_duration, plan, dist.get_rank())
    calls: list[list[float]] = []
    met: set[int] = set()  # meetings, by the number of calls before them
    pending: dict[int, tuple[Any, float, float, list[float]]] = {}

    def start(real: Callable[..., Any], self: Any, given: Any, *args: Any, **named: Any) -> Any:
        begun, work = perf_counter(), real(self, given, *args, **named)
        tensors = [given] if isinstance(given, torch.Tensor) else given
        size = sum(tensor.nbytes for tensor in tensors)
        if size <= SMALL:
            met.add(len(calls))
        else:
            calls.append([size, 0.0])
            pending[id(work)] = work, begun, begun + duration(len(calls) - 1), calls[-1]
            if work is None:  # torch has waited already
                finish(work)
        return work

    def finish(work: Any) -> None:
        if id(work) in pending:
            _, begun, until, call = pending.pop(id(work))
            sleep(max(0.0, until - perf_counter()))
            call[1] = perf_counter() - begun

    def end(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        result = real(self, *args, **named)
        finish(self)
        return result

    def meet(real: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        met.add(len(calls))
        if dist.get_rank() == plan["late"]:  # it arrives late
            sleep(1.2 * plan["seconds"])
        return real(self, *args, **named)

    def is_completed(real: Callable[..., bool], self: Any) -> bool:
        if id(self) in pending and perf_counter() < pending[id(self)][2]:
            return False
        return end(real, self) if real(self) else False

    def method(call: Callable[..., Any], of: type, name: str) -> Any:
        bound = partial(call, getattr(of, name))
        return mock.patch.object(of, name, lambda self, *args, **named: bound(self, *args, **named))

    with contextlib.ExitStack() as stack:
        stack.enter_context(method(start, dist.ProcessGroup, "allreduce"))
        stack.enter_context(method(is_completed, dist.Work, "is_completed"))
        for name in filter(partial(hasattr, dist.ProcessGroup), MEETINGS):
            stack.enter_context(method(meet, dist.ProcessGroup, name))
        for name in ("wait", "synchronize", "get_future"):
            stack.enter_context(method(end, dist.Work, name))
        value = number(answer(plan["size"]))
    return {"value": value, "calls": calls, "met": len(met - {0, len(calls)})}


# --- 09.3 -------------------------------------------------------------------------------------------------

ALPHA, BUS = "α is right, although the times vary", "and so is the bus bandwidth that large messages reach"
NEAR, WORLD_SIZES = 0.15, (2, 3, 4, 8, 16)  # the small world sizes tell the bus factor from 2
# The largest size in units of α/β, where a message costs 2α, and the sign of the last time's error (the first
# time is too long). Near α/β no single time gives α or β; with a wide range, plain least squares loses α.
RANGES = ((5, -1), (5, 1), (3000, 1), (3000, -1), (3000, 1), (5, 1))
TIMES, VARY, AT_THE_ENDS = 40, 0.05, 0.085
ALGORITHM = "That is the algorithm bandwidth, bytes over seconds. What does each rank really send?"
HALF = "That is half of it. The data moves twice: once to be added up, once to be distributed."
HOP = "That is something like the latency of a single step of the ring. "
HOP += "α is what the whole call takes with no bytes."
FIRST_TIME = "That is the time of the smallest message. Its bytes took some of it."
ONES = torch.ones(len(RANGES), dtype=torch.float64)


@question("09.3", "line(sizes, seconds, world_size)", {ALPHA: 1, BUS: 1})
def line(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    world_sizes = rng.sample(WORLD_SIZES, len(WORLD_SIZES))
    world_sizes.append(world_sizes[-1])  # the same world size, measured again
    ranks = torch.tensor(world_sizes, dtype=torch.float64)
    factors = 2 - 2 / ranks
    truths, tasks = [], []
    for world_size, factor, (most, sign) in zip(world_sizes, factors.tolist(), RANGES, strict=True):
        alpha, bus = rng.uniform(2e-5, 2e-4), rng.uniform(0.5e9, 5e9)
        bend = alpha * bus / factor
        sizes = [8 * round(bend / 16 * (2 * most) ** (i / (TIMES - 1))) for i in range(TIMES)]
        off = [rng.uniform(-VARY, VARY) for _ in sizes]
        off[0], off[-1] = AT_THE_ENDS, sign * AT_THE_ENDS
        times = [(alpha + size / bus * factor) * (1 + error) for size, error in zip(sizes, off, strict=True)]
        truths.append((alpha, bus))
        tasks.append((sizes, times, world_size))
    (results,) = ask(_lines, tasks)
    alphas, buses = torch.tensor(truths, dtype=torch.float64).T
    got_alphas, got_buses = torch.tensor(results, dtype=torch.float64).T
    firsts = torch.tensor([times[0] for _, times, _ in tasks], dtype=torch.float64)
    ratios = got_alphas / alphas
    steps = (2 * (ranks - 1), ranks - 1, ranks)
    hint = "Each time is off by several percent, so two of them are not enough: use them all."
    if far(got_alphas * buses / factors, ONES) < NEAR:
        hint = "That is β. Which of the two does your fit return first?"
    elif far(got_alphas / firsts, ONES) < 0.02:
        hint = FIRST_TIME
    elif any(far(ratios * factor, ONES) < NEAR for factor in steps):
        hint = HOP
    elif all(1e2 < abs(ratio) < 1e10 for ratio in ratios):
        hint = "In which unit? Seconds are asked for."
    elif any(abs(ratio - 1) > 1 for ratio in ratios[2:]):
        hint = "An error of a twentieth should count as much for a small message as for a large one."
    worst = place_of_furthest(ratios, 1.0)
    seen = f"a message of no bytes takes {1e6 * alphas[worst]:.0f} µs"
    seen += f", and α came out as {1e6 * got_alphas[worst]:.0f} µs"
    yield Finding(ALPHA, far(ratios, ONES) < NEAR, seen, hint)
    ratios = got_buses / buses
    hint = "Take it from the slope, which large messages determine, with the factor for this many ranks."
    if (got_buses < 1).all():
        hint = "That is a time per byte. A bandwidth is bytes per second."
    hint = nearest(
        ratios.log(),  # logarithms, to compare factors of any size alike
        (-factors.log(), ALGORITHM),
        (-math.log(2) * ONES, HALF),
        (-2 * factors.log(), "Is the factor on the right side? A rank sends more than its message."),
        (math.log(1e-9) * ONES, "In which unit? Bytes per second are asked for."),
        otherwise=hint,
        within=NEAR,
    )
    worst = place_of_furthest(ratios, 1.0)
    seen = f"with {world_sizes[worst]} ranks it is {buses[worst] / 1e9:.2f} GB/s"
    seen += f", and {got_buses[worst] / 1e9:.3g} came out"
    yield Finding(BUS, far(ratios, ONES) < NEAR, seen, hint)


@reports(lambda tasks: [[NUMBER, NUMBER]] * len(tasks))
def _lines(answer: Any, tasks: list[tuple[list[int], list[float], int]]) -> list[list[float]]:
    results = []
    sizes: list[int] = []
    seconds: list[float] = []
    for sizes[:], seconds[:], world_size in tasks:  # the same two lists, with new numbers each time
        value = answer(sizes, seconds, world_size)
        try:
            alpha, bus = map(float, value)
        except (TypeError, ValueError):
            asked = "line must return two numbers, alpha and the bus bandwidth"
            raise Refused(f"{asked}; it returned {told(value)}") from None
        results.append([alpha, bus])
    return results
