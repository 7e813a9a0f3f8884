"""The questions of lesson 04: which rank sits where, which device is its own, how it joins."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
RANKS = 3  # an answer that knows of 2 shall not pass
Row = tuple[int, int, int]

# --- 04.1 -------------------------------------------------------------------------------------------------

COUNT, ORDER, WHERE = (
    "one row for each process of all nodes",
    "the ranks count on from node to node, in order",
    "each row has the rank's node and its place there",
)


@question("04.1", {COUNT: 1, ORDER: 1, WHERE: 2})
def rank_table(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "rank_table(nodes, ranks_per_node)")
    cases = [(2, 4), (rng.randint(3, 5), rng.choice([2, 6, 7])), (1, 3), (4, 1)]
    tables = observe(_tables, answer, cases)[0]
    for table in tables:
        if isinstance(table, str):
            raise Refused(f"rank_table returns a list of rows (rank, node, local_rank); it returned {table}")
    rights = [_right_table(*case) for case in cases]
    found = list(zip(cases, tables, rights, strict=True))

    case, table, right = next((each for each in found if len(each[1]) != len(each[2])), found[0])
    seen = f"{_shape(*case)}: {len(table)} rows, and there are {len(right)} processes"
    hint = "How many processes does one node start, and how many nodes are there?"
    if any(len(t) == c[0] != len(r) for c, t, r in found):
        hint = "That is a row for each node. A rank is a process, not a machine."
    elif any(len(t) == c[1] != len(r) for c, t, r in found):
        hint = "Those are the processes of one node alone."
    counted = all(len(table) == len(right) for _, table, right in found)
    yield COUNT, counted, seen, hint

    case, table, right = next((e for e in found if _column(e[1], 0) != _column(e[2], 0)), found[0])
    seen = f"{_shape(*case)}: the ranks are {_column(table, 0)}"
    if len(set(_column(table, 0))) < len(table):
        hint = "Two processes with the same rank. A rank is a number over all nodes; which one starts anew?"
    elif min(_column(table, 0), default=0) != 0:
        hint = "At which number do the ranks begin?"
    elif sorted(_column(table, 0)) == _column(right, 0):
        hint = "Every rank is there. In which order shall the rows stand?"
    else:
        hint = "The ranks are 0, 1, 2 and so on, without a gap, up to the world size."
    ordered = counted and all(_column(table, 0) == _column(right, 0) for _, table, right in found)
    yield ORDER, ordered, seen, hint

    case, table, right = next((each for each in found if sorted(each[1]) != each[2]), found[0])
    placed = counted and all(sorted(table) == right for _, table, right in found)
    row, should = next(
        ((a, b) for a, b in zip(sorted(table), right, strict=False) if a != b), (right[-1], right[-1])
    )
    seen = f"{_shape(*case)}: there is the row {row}, and it should be {should}"
    if all(sorted((r, b, a) for r, a, b in t) == right for _, t, right in found):
        hint = "The right numbers, in the wrong columns: (rank, node, local_rank)."
    elif all(sorted(t) == _dealt(*c) for c, t, _ in found):
        hint = "That deals the ranks out like cards. A node holds ranks that follow each other."
    elif all(len({local for _, _, local in t}) == len(t) for _, t, _ in found):
        hint = "A local rank counts on one node alone: where does it begin again?"
    elif any(len({node for _, node, _ in t}) != c[0] for c, t, _ in found):
        hint = "How many nodes are there in your second column?"
    else:
        hint = (
            "Take rank 5 of 2 nodes with 4 each: how many whole nodes lie before it, how many ranks are over?"
        )
    yield WHERE, placed, seen, hint


def _tables(answer: Any, cases: list[tuple[int, int]]) -> list[list[Row] | str]:
    return [_rows(answer(*case)) for case in cases]


def _rows(table: Any) -> list[Row] | str:
    """The rows of a table as plain numbers; of anything else, what it is."""
    if table is None:
        return "nothing (None)"
    rows = []
    with contextlib.suppress(TypeError, ValueError):
        for row in table:
            rank, node, local_rank = row.values() if isinstance(row, dict) else row
            rows.append((int(rank), int(node), int(local_rank)))
        return rows
    return f"{table!r:.80}"


def _right_table(nodes: int, each: int) -> list[Row]:
    return [(node * each + local, node, local) for node in range(nodes) for local in range(each)]


def _dealt(nodes: int, each: int) -> list[Row]:
    return sorted((local * nodes + node, node, local) for node in range(nodes) for local in range(each))


def _column(table: list[Row], which: int) -> list[int]:
    return [row[which] for row in table]


def _shape(nodes: int, each: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)} with {each} rank{'s' * (each > 1)} each"


# --- 04.2 -------------------------------------------------------------------------------------------------

NO_GPU, OWN, SHARED = (
    "without a GPU: the CPU, and gloo",
    "a GPU for each rank of a node: its own, and nccl",
    "more ranks than GPUs on a node: they share them, over gloo",
)


@question("04.2", {NO_GPU: 1, OWN: 1, SHARED: 1})
def device_of(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "my_place(gpus)")
    each = rng.choice([4, 6])
    few = each // 2
    cases = {  # GPUs of a node, ranks of a node, of two nodes
        NO_GPU: [(0, each, rank) for rank in (0, 2 * each - 1)],
        OWN: [(each, each, rank) for rank in (1, each - 1, each, 2 * each - 1)] + [(8, 3, 4)],
        SHARED: [(few, each, rank) for rank in (0, few, each - 1, each + few, 2 * each - 1)] + [(1, 2, 3)],
    }
    found = observe(_places, answer, [case for of in cases.values() for case in of])[0]
    given = iter(found)
    for what, of in cases.items():
        wrong = None
        for case in of:
            value = next(given)
            if wrong is None and value != _right_place(*case):
                wrong = case, value
        (gpus, ranks, rank), value = wrong or (of[0], _right_place(*of[0]))
        if len(value) != 2:
            raise Refused(
                f"my_place returns a device and a backend, as in (device, 'gloo'); it was {value[0]}"
            )
        device, backend = _right_place(gpus, ranks, rank)
        seen = (
            f"rank {rank}, local rank {rank % ranks} of {ranks}, a node with {gpus} GPUs: {value[0]} and "
            f"{value[1]}; it should be {device} and {backend}"
        )
        local = rank % ranks
        if what == NO_GPU:
            hint = "Where there is no GPU, no rank can have one. Which backend works for CPU tensors?"
        elif rank != local and value[0] in (f"cuda:{rank}", f"cuda:{rank % gpus}") and value[0] != device:
            hint = "A node numbers its GPUs from 0. Which number counts on this node alone?"
        elif value[0] == f"cuda:{local}" != device:
            hint = "There is no such GPU on this node. How do you come back to the first one?"
        elif value[0] != device:
            hint = "Which number tells the ranks of one node apart?"
        elif backend == "gloo":
            hint = "NCCL refuses two ranks on one GPU. What goes over gloo then?"
        elif gpus != ranks:
            hint = "Each rank of this node has a GPU of its own, and some are left over."
        else:
            hint = "Compare the GPUs of a node with the ranks of that node, not with those of all nodes."
        yield what, wrong is None, seen, hint


def _right_place(gpus: int, ranks: int, rank: int) -> tuple[str, str]:
    if gpus == 0:
        return "cpu", "gloo"
    return f"cuda:{rank % ranks % gpus}", "nccl" if ranks <= gpus else "gloo"


def _places(answer: Any, cases: list[tuple[int, int, int]]) -> list[tuple[str, ...]]:
    return [_place(answer, *case) for case in cases]


def _place(answer: Any, gpus: int, ranks: int, rank: int) -> tuple[str, ...]:
    """Where an answer puts a rank of two nodes; nothing is run on a GPU."""
    told = {"RANK": rank, "GROUP_RANK": rank // ranks, "LOCAL_RANK": rank % ranks}
    told |= {"WORLD_SIZE": 2 * ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 2}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}),
        mock.patch("torch.cuda.device_count", return_value=gpus),
        mock.patch("torch.cuda.is_available", return_value=gpus > 0),
        mock.patch("torch.cuda.set_device"),
    ):
        value = answer(gpus)
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return ("nothing (None)" if value is None else f"{value!r:.80}",)
    device, backend = value
    with contextlib.suppress(RuntimeError, TypeError):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            return "cuda (which?)", str(backend).lower()
    return str(device), str(backend).lower()


# --- 04.3 -------------------------------------------------------------------------------------------------

MET, TOLD, LOCAL = (
    "all processes join one group",
    "each is the rank that mp.spawn called it by",
    "LOCAL_RANK is set, for what comes after",
)


@question("04.3", {MET: 1, TOLD: 1, LOCAL: 1})
def join(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "join(rank, world_size, port)")
    # as mp.spawn would call it; the process that is launched third is not rank 2 here
    turn = rng.randrange(1, RANKS)
    held = observe(_joined, answer, turn, nprocs=RANKS)
    ranks = [(process + turn) % RANKS for process in range(RANKS)]
    bad = next((i for i, each in enumerate(held) if each["size"] != RANKS), None)
    if bad is not None and held[bad]["size"] is None:
        seen = f"the process that was called with rank {ranks[bad]} is in no group after it"
        hint = "Setting the environment is one half. Which call joins the group?"
    else:
        seen = f"{RANKS} processes; one of them is in a group of {held[bad or 0]['size']}"
        hint = "How many are in the group is known: it comes as an argument."
    yield MET, bad is None, seen, hint
    own = [each["rank"] for each in held]
    yield (
        TOLD,
        own == ranks,
        f"called with the ranks {ranks}, the processes are {own} in their group",
        "Where does a process learn which rank it is: from whoever calls it, or from what was set before?",
    )
    local = [each["local"] for each in held]
    yield (
        LOCAL,
        local == [str(rank) for rank in ranks],
        f"called with the ranks {ranks}, LOCAL_RANK is {local}",
        "On one machine, which rank is a process on this machine? place() reads it from the environment.",
    )


def _joined(answer: Any, turn: int) -> dict[str, Any]:
    """Called as mp.spawn would, in a process that no launcher has told anything."""
    rank = (int(os.environ["RANK"]) + turn) % RANKS
    port = int(os.environ["MASTER_PORT"])
    names = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    for name in names:
        os.environ.pop(name, None)
    answer(rank, RANKS, port)
    found: dict[str, Any] = {"size": None, "rank": None, "local": os.environ.get("LOCAL_RANK")}
    if dist.is_initialized():
        found |= {"size": dist.get_world_size(), "rank": dist.get_rank()}
        if found["size"] == RANKS:
            dist.all_reduce(torch.ones(1))  # none ends before all are in
    return found
