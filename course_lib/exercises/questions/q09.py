"""The questions of lesson 09: a line fitted to the times of messages, and which backend."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from ..in_rank.work import on_each_case
from ..judging import far, place_of_furthest
from ..question import Ask, Finding, Refused, question
from ..shape import NUMBER, reports
from ..wording import told

# --- 09.1 -------------------------------------------------------------------------------------------------

ALPHA, BETA = "α is right, although the times vary", "and so is β"
NEAR = 0.15
# The largest size, in units of α/β, where a message costs 2α; and the sign of the last time's error (the
# first time is too long). Near α/β no time alone gives α or β; plain least squares loses α on a wide range.
RANGES = ((5, -1), (5, 1), (3000, 1), (3000, -1))
TIMES, VARY, AT_THE_ENDS = 40, 0.05, 0.085


@question(
    "09.1",
    "fit(sizes, seconds)",
    {ALPHA: 2, BETA: 2},
    hints={
        ALPHA: {
            "swapped": "That is β. Which of the two does your fit return first?",
            "first time": "That is the time of the smallest message. Its bytes took a part of that time.",
            "unweighted": "An error of a twentieth counts as much for a small message as for a large one.",
            "off": "Each time is off by several percent. Does your line use them all, in seconds?",
        },
        BETA: {
            "inverse": "That is a bandwidth, bytes per second. β is what each byte costs.",
            "off": "It is the slope of the line. A single time says α and β together.",
        },
    },
)
def fit(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    truths, tasks = [], []
    for most, sign in RANGES:
        alpha, beta = rng.uniform(2e-5, 2e-4), 1e-9 / rng.uniform(0.5, 5)
        sizes = [8 * round(alpha / beta / 16 * (2 * most) ** (i / (TIMES - 1))) for i in range(TIMES)]
        off = [rng.uniform(-VARY, VARY) for _ in sizes]
        off[0], off[-1] = AT_THE_ENDS, sign * AT_THE_ENDS
        truths.append((alpha, beta))
        tasks.append((sizes, [(alpha + beta * n) * (1 + error) for n, error in zip(sizes, off, strict=True)]))
    (results,) = ask(_lines, tasks)
    (alphas, betas), got = torch.tensor(truths).double().T, torch.tensor(results).double().T
    one, firsts = torch.ones(len(RANGES)).double(), torch.tensor([times[0] for _, times in tasks]).double()
    ratios = got[0] / alphas
    hint = "off"
    if far(got[0] / betas, one) < NEAR:
        hint = "swapped"
    elif far(got[0] / firsts, one) < 0.02:
        hint = "first time"
    elif (ratios - 1).abs().max() > 1 and ratios.max() < 1000:
        hint = "unweighted"
    worst = place_of_furthest(ratios, 1.0)
    seen = f"a message of no bytes takes {1e6 * alphas[worst]:.0f} µs"
    seen += f", and α came out as {1e6 * got[0, worst]:.0f} µs"
    yield Finding(ALPHA, far(ratios, one) < NEAR, seen, hint)
    ratios = got[1] / betas
    hint = "inverse" if far(got[1] * betas, one) < NEAR else "off"
    worst = place_of_furthest(ratios, 1.0)
    seen = f"a GB takes {1e9 * betas[worst]:.3f} s, and with your β it takes {1e9 * got[1, worst]:.3g} s"
    yield Finding(BETA, far(ratios, one) < NEAR, seen, hint)


@reports(lambda tasks: [[NUMBER, NUMBER]] * len(tasks))
@on_each_case
def _lines(answer: Any, sizes: list[int], seconds: list[float]) -> list[float]:
    value = answer(sizes, seconds)
    try:
        alpha, beta = map(float, value)
    except (TypeError, ValueError):
        raise Refused(f"fit must return two numbers, alpha and beta; it returned {told(value)}") from None
    return [alpha, beta]


# --- 09.2 -------------------------------------------------------------------------------------------------

OWN = "GPU tensors, a GPU for each rank"
SHARED = "GPU tensors, ranks that share a GPU"
CPU = "CPU tensors, on every network"
BOTH = "CPU and GPU tensors, a GPU for each rank"
WHY = "and each time for the right reason"
NETWORKS, NO_IP = ("none", "ethernet", "infiniband with IP"), "infiniband without IP"
REASONS = ("own GPU", "shared GPU", "CPU over IP", "no IP", "both")
Case = tuple[str, list[Any], str, str]  # property, arguments of choose, backend, reason


@question(
    "09.2",
    "choose(tensors, gpus_per_node, ranks_per_node, network)",
    {OWN: 1, SHARED: 1, CPU: 1, BOTH: 1, WHY: 2},
    hints={
        OWN: {"own": "Each rank has a GPU of its own here. Which backend moves GPU memory, on any network?"},
        SHARED: {"shared": "Count: there are more ranks than GPUs. Which backend refuses that?"},
        CPU: {
            "no IP": "There is no IP on this network. What was the one case for building PyTorch yourself?",
            "on the CPU": "The tensors are on the CPU, with IP. Which backend joins on every machine?",
        },
        BOTH: {
            "one name": "Two kinds of tensors: a name can give each its own backend, device:backend.",
            "swapped": "Each kind needs a backend. Which one moves GPU memory, and which one the rest?",
        },
        WHY: {
            "other words": "It must return a backend and a reason, one of the five exactly as written above.",
            "another": "The backend is right. Would it be, with another network or other tensors?",
            "backends": "First comes the right backend, and then its reason.",
        },
    },
)
def choose(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = _clusters(rng)
    (results,) = ask(_chosen, [cluster for _, cluster, _, _ in cases])
    wrong: list[Finding] = []
    for (what, cluster, backend, why), (got, because) in zip(cases, results, strict=True):
        tensors, gpus, ranks, network = cluster
        seen = f"for {tensors} tensors, {gpus} GPUs and {ranks} ranks a node, network {network}: {got!r}"
        seen += f" because of {because!r}"
        hint = {OWN: "own", SHARED: "shared", CPU: "no IP" if network == NO_IP else "on the CPU"}.get(what)
        if not _is_same(got, backend, tensors):
            wrong.append(Finding(what, False, seen, hint or ("swapped" if ":" in got else "one name")))
        elif because != why:
            wrong.append(Finding(WHY, False, seen, "another" if because in REASONS else "other words"))
    first = {finding.what: finding for finding in reversed(wrong)}
    if wrong and WHY not in first:
        first[WHY] = Finding(WHY, False, wrong[0].seen, "backends")
    yield from (first.get(what, Finding(what, True)) for what in (OWN, SHARED, CPU, BOTH, WHY))


def _clusters(rng: random.Random) -> list[Case]:
    """Draw clusters of every kind on every network, also with just enough GPUs and with one too few."""
    few, many = rng.randint(2, 4), rng.randint(5, 8)
    own = [(1, 1), (few, few), (many, few), (many, many - 1), (many, 1)]  # GPUs, ranks
    shared = [(1, 2), (1, many), (few, few + 1), (few, 2 * few), (few, many + few)]
    none = [(0, 1), (0, many)]
    kinds = [(CPU, "cpu", own + shared + none, "gloo", "CPU over IP"), (OWN, "gpu", own, "nccl", "own GPU")]
    kinds += [(BOTH, "cpu and gpu", own, "cpu:gloo,cuda:nccl", "both")]
    kinds += [(SHARED, tensors, shared, "gloo", "shared GPU") for tensors in ("gpu", "cpu and gpu")]
    cases: list[Case] = [
        (what, [tensors, *place, network], backend, why)
        for what, tensors, places, backend, why in kinds
        for place in places
        for network in NETWORKS
    ]
    cases += [(CPU, ["cpu", *place, NO_IP], "mpi", "no IP") for place in own + shared + none]
    rng.shuffle(cases)
    return cases


def _is_same(got: str, backend: str, tensors: str) -> bool:
    """Compare backends as init_process_group reads them: any order, any case, only devices that matter."""
    try:
        backends = BackendConfig(dist.Backend(got)).get_device_backend_map()
    except Exception:
        return False
    wanted = BackendConfig(dist.Backend(backend)).get_device_backend_map()
    devices = {"cpu": {"cpu"}, "gpu": {"cuda"}}.get(tensors, {"cpu", "cuda"})
    right = {device: wanted.get(device) for device in devices}
    return got.lower() == backend or (":" in got and backends == right)


@reports(lambda clusters: [[str, str]] * len(clusters))
@on_each_case
def _chosen(answer: Any, *cluster: Any) -> list[str]:
    value = answer(*cluster)
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, "")
    return [word if isinstance(word, str) else told(word) for word in pair]
