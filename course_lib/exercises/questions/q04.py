"""The questions of lesson 04: which rank sits where, which device is its own, how it joins."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ..asking import Ask, Finding, Refused, question, told

RANKS = 3  # an answer that knows of 2 must not pass
Row = tuple[int, ...]  # rank, node, local rank

# --- 04.1 -------------------------------------------------------------------------------------------------

COUNT = "one row for each process of all nodes"
ORDER = "the ranks keep counting from node to node, in order"
WHERE = "each row has the rank's node and its place there"


@dataclass
class _Table:
    """What an answer returned for so many nodes, with so many ranks each."""

    nodes: int
    each: int
    rows: list[Row]

    def __post_init__(self) -> None:
        places = list(itertools.product(range(self.nodes), range(self.each)))
        self.right = [(rank, *place) for rank, place in enumerate(places)]
        self.dealt = sorted((local * self.nodes + node, node, local) for node, local in places)
        self.ranks = [row[0] for row in self.rows]
        self.sorted = sorted(self.rows)

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {self.each} rank{'s' * (self.each > 1)} each"


@question("04.1", "rank_table(nodes, ranks_per_node)", {COUNT: 1, ORDER: 1, WHERE: 2})
def rank_table(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [(2, 4), (rng.randint(3, 5), rng.choice([2, 6, 7])), (1, 3), (4, 1)]
    found = ask(_tables, cases)[0]
    tables = [_Table(*case, list(map(tuple, rows))) for case, rows in zip(cases, found, strict=True)]

    wrong = [each for each in tables if len(each.rows) != len(each.right)]
    if any(len(each.rows) == each.nodes for each in wrong):
        hint = "That is a row for each node. A rank is a process, not a machine."
    elif any(len(each.rows) == each.each for each in wrong):
        hint = "Those are the processes of one node alone."
    else:
        hint = "How many processes does one node start, and how many nodes are there?"
    shown = (wrong or tables)[0]
    seen = f"{shown}: {len(shown.rows)} rows, and there are {len(shown.right)} processes"
    yield Finding(COUNT, not wrong, seen, hint)

    wrong = [each for each in tables if each.ranks != list(range(len(each.right)))]
    shown = (wrong or tables)[0]
    if len(set(shown.ranks)) < len(shown.ranks):
        hint = "Two processes with the same rank. A rank is a number over all nodes; which one starts anew?"
    elif min(shown.ranks, default=0) != 0:
        hint = "At which number do the ranks begin?"
    elif sorted(shown.ranks) == list(range(len(shown.right))):
        hint = "Every rank is there. In which order must the rows stand?"
    else:
        hint = "The ranks are 0, 1, 2 and so on, without a gap, up to the world size."
    yield Finding(ORDER, not wrong, f"{shown}: the ranks are {shown.ranks}", hint)

    wrong = [each for each in tables if each.sorted != each.right]
    shown = (wrong or tables)[0]
    pairs = itertools.zip_longest(shown.sorted, shown.right, fillvalue="(none)")
    row, right = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    if all(sorted((rank, b, a) for rank, a, b in each.rows) == each.right for each in tables):
        hint = "The right numbers, in the wrong columns: (rank, node, local_rank)."
    elif all(each.sorted == each.dealt for each in tables):
        hint = "That deals the ranks out like cards. A node holds ranks that follow each other."
    elif all(len({local for _, _, local in each.rows}) == len(each.rows) for each in tables):
        hint = "A local rank counts on one node alone: where does it begin again?"
    elif any(len({node for _, node, _ in each.rows}) != each.nodes for each in tables):
        hint = "How many nodes are there in your second column?"
    else:
        hint = "Take rank 5 of 2 nodes with 4 each: how many whole nodes lie before it, how many ranks over?"
    yield Finding(WHERE, not wrong, f"{shown}: there is the row {row}, and it should be {right}", hint)


def _tables(answer: Any, cases: list[tuple[int, int]]) -> list[list[Row]]:
    return [_rows(answer(*case)) for case in cases]


def _rows(table: Any) -> list[Row]:
    with contextlib.suppress(TypeError, ValueError):
        rows = [row.values() if isinstance(row, dict) else row for row in table]
        return [(int(rank), int(node), int(local_rank)) for rank, node, local_rank in rows]
    raise Refused(f"rank_table returns a list of rows (rank, node, local_rank); it returned {told(table)}")


# --- 04.2 -------------------------------------------------------------------------------------------------

NO_GPU = "without a GPU: the CPU, and gloo"
OWN = "a GPU for each rank of a node: its own, and nccl"
SHARED = "more ranks than GPUs on a node: they share them, over gloo"
Case = tuple[int, int, int]  # GPUs of a node, ranks of a node, a rank; there are two nodes


@question("04.2", "my_place(gpus)", {NO_GPU: 1, OWN: 1, SHARED: 1})
def device_of(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    each = rng.choice([4, 6])
    few = each // 2
    cases: dict[str, list[Case]] = {
        NO_GPU: [(0, each, rank) for rank in (0, 2 * each - 1)],
        OWN: [(each, each, rank) for rank in (1, each - 1, each, 2 * each - 1)] + [(8, 3, 4)],
        SHARED: [(few, each, rank) for rank in (0, few, each - 1, each + few, 2 * each - 1)] + [(1, 2, 3)],
    }
    found = ask(_places, list(cases.values()))[0]
    for (what, asked), places in zip(cases.items(), found, strict=True):
        pairs = zip(asked, places, strict=True)
        wrong = [(case, place) for case, place in pairs if place != _right_place(*case)]
        yield _misplaced(what, *wrong[0]) if wrong else Finding(what, True)


def _misplaced(what: str, case: Case, place: list[str] | str) -> Finding:
    if isinstance(place, str):
        raise Refused(f"my_place returns a device and a backend, as in (device, 'gloo'); it was {place}")
    (gpus, ranks, rank), (device, backend) = case, _right_place(*case)
    local = rank % ranks
    if what == NO_GPU:
        hint = "Where there is no GPU, no rank can have one. Which backend works for CPU tensors?"
    elif rank != local and place[0] in (f"cuda:{rank}", f"cuda:{rank % gpus}") and place[0] != device:
        hint = "A node numbers its GPUs from 0. Which number counts on this node alone?"
    elif place[0] == f"cuda:{local}" != device:
        hint = "There is no such GPU on this node. How do you come back to the first one?"
    elif place[0] != device:
        hint = "Which number tells the ranks of one node apart?"
    elif backend == "gloo":
        hint = "NCCL refuses two ranks on one GPU. What goes over gloo then?"
    elif gpus != ranks:
        hint = "Each rank of this node has a GPU of its own, and some are left over."
    else:
        hint = "Compare the GPUs of a node with the ranks of that node, not with those of all nodes."
    seen = f"rank {rank}, local rank {local} of {ranks}, a node with {gpus} GPUs: "
    seen += f"{place[0]} and {place[1]}; it should be {device} and {backend}"
    return Finding(what, False, seen, hint)


def _right_place(gpus: int, ranks: int, rank: int) -> list[str]:
    if gpus == 0:
        return ["cpu", "gloo"]
    return [f"cuda:{rank % ranks % gpus}", "nccl" if ranks <= gpus else "gloo"]


def _places(answer: Any, groups: list[list[Case]]) -> list[list[list[str] | str]]:
    return [[_place(answer, *case) for case in cases] for cases in groups]


def _place(answer: Any, gpus: int, ranks: int, rank: int) -> list[str] | str:
    """Where an answer puts a rank of two nodes; nothing is run on a GPU."""
    names = {"RANK": rank, "GROUP_RANK": rank // ranks, "LOCAL_RANK": rank % ranks}
    names |= {"WORLD_SIZE": 2 * ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 2}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        mock.patch("torch.cuda.device_count", return_value=gpus),
        mock.patch("torch.cuda.is_available", return_value=gpus > 0),
        mock.patch("torch.cuda.set_device"),
    ):
        value = answer(gpus)
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return told(value)
    device, backend = value
    with contextlib.suppress(RuntimeError, TypeError):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = "cuda (which?)"
    return [str(device), str(backend).lower()]


# --- 04.3 -------------------------------------------------------------------------------------------------

MET = "all processes join one group"
CALLED = "each is the rank that mp.spawn called it by"
LOCAL = "LOCAL_RANK is set, for what comes after"
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@question("04.3", "join(rank, world_size, port)", {MET: 1, CALLED: 1, LOCAL: 1})
def join(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    # as mp.spawn would call it; the process that is launched third is not rank 2 here
    turn = rng.randrange(1, RANKS)
    held = ask(_joined, turn, nprocs=RANKS)
    ranks = [(process + turn) % RANKS for process in range(RANKS)]
    sizes, own, local = ([each[name] for each in held] for name in ("size", "rank", "local"))
    bad = next((process for process, size in enumerate(sizes) if size != RANKS), 0)
    if sizes[bad] is None:
        seen = f"the process that was called with rank {ranks[bad]} is in no group after it"
        hint = "Setting the environment is one half. Which call joins the group?"
    else:
        seen = f"{RANKS} processes; one of them is in a group of {sizes[bad]}"
        hint = "How many are in the group is known: it comes as an argument."
    yield Finding(MET, sizes[bad] == RANKS, seen, hint)
    seen = f"called with the ranks {ranks}, the processes are {own} in their group"
    hint = "Where does a process learn which rank it is: from whoever calls it, or from what was set before?"
    yield Finding(CALLED, own == ranks, seen, hint)
    seen = f"called with the ranks {ranks}, LOCAL_RANK is {local}"
    hint = "On one machine, which rank is a process on this machine? place() reads it from the environment."
    yield Finding(LOCAL, local == list(map(str, ranks)), seen, hint)


def _joined(answer: Any, turn: int) -> dict[str, Any]:
    """Called as mp.spawn would, in a process that no launcher has told anything."""
    rank, port = (int(os.environ["RANK"]) + turn) % RANKS, int(os.environ["MASTER_PORT"])
    for name in (*OF_A_LAUNCHER, "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    answer(rank, RANKS, port)
    size, own = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (None, None)
    if size == RANKS:
        dist.all_reduce(torch.ones(1))  # none ends before all are in
    return {"size": size, "rank": own, "local": os.environ.get("LOCAL_RANK")}
