"""The questions of lesson 04: where each rank runs, which device it uses, how it joins a group."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..in_rank.work import on_each_case
from ..inputs import machine
from ..judging import first_wrong
from ..question import Ask, Finding, Refused, Result, question
from ..shape import reports
from ..wording import told

Row = tuple[int, ...]
COLUMNS = ("rank", "node", "local_rank")  # of a row

# --- 04.1 -------------------------------------------------------------------------------------------------

COUNT = "one row for each process of all nodes"
ORDER = "the ranks keep counting from node to node, in order"
WHERE = "each row has the rank's node and its place there"


@dataclass
class _Table:
    """The table that an answer returned for ``nodes`` nodes with ``ranks_per_node`` ranks on each."""

    nodes: int
    ranks_per_node: int
    rows: list[Row]

    def __post_init__(self) -> None:
        places = list(itertools.product(range(self.nodes), range(self.ranks_per_node)))
        self.right = [(rank, *place) for rank, place in enumerate(places)]
        self.dealt = sorted((local * self.nodes + node, node, local) for node, local in places)
        self.ranks = [row[0] for row in self.rows]
        self.sorted = sorted(self.rows)

    def __str__(self) -> str:
        ranks = self.ranks_per_node
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {ranks} rank{'s' * (ranks > 1)} each"


@question("04.1", "rank_table(nodes, ranks_per_node)", {COUNT: 1, ORDER: 1, WHERE: 2})
def rank_table(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [(2, 4), (rng.randint(3, 5), rng.choice([2, 6, 7])), (1, 3), (4, 1), (rng.randint(11, 13), 9)]
    results = ask(_tables, cases)[0]
    tables = [_Table(*case, list(map(tuple, rows))) for case, rows in zip(cases, results, strict=True)]

    wrong = [table for table in tables if len(table.rows) != len(table.right)]
    hint = "How many processes does one node start, and how many nodes are there?"
    if any(len(table.rows) == table.nodes for table in wrong):
        hint = "That is a row for each node. A rank is a process, not a machine."
    elif any(len(table.rows) == table.ranks_per_node for table in wrong):
        hint = "Those are the processes of one node alone."
    shown = (wrong or tables)[0]
    seen = f"{shown}: {len(shown.rows)} rows, and there are {len(shown.right)} processes"
    yield Finding(COUNT, not wrong, seen, hint)

    wrong = [table for table in tables if table.ranks != list(range(len(table.right)))]
    shown = (wrong or tables)[0]
    hint = "The ranks are 0, 1, 2 and so on, without a gap, up to the world size."
    if len(set(shown.ranks)) < len(shown.ranks):
        hint = "Two processes have one rank. Ranks count over all nodes; which number starts anew on each?"
    elif min(shown.ranks, default=0) != 0:
        hint = "At which number do the ranks begin?"
    elif sorted(shown.ranks) == list(range(len(shown.right))):
        hint = "Every rank is there. In which order should the rows be?"
    yield Finding(ORDER, not wrong, f"{shown}: the ranks are {shown.ranks}", hint)

    wrong = [table for table in tables if table.sorted != table.right]
    shown = (wrong or tables)[0]
    pairs = itertools.zip_longest(shown.sorted, shown.right, fillvalue="(none)")
    row, right = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    hint = "Take rank 5 of 2 nodes with 4 each: how many whole nodes come before it, how many ranks are left?"
    if all(sorted((rank, b, a) for rank, a, b in table.rows) == table.right for table in tables):
        hint = "The right numbers, in the wrong columns: (rank, node, local_rank)."
    elif all(table.sorted == table.dealt for table in tables):
        hint = "That deals the ranks out round robin. A node holds consecutive ranks."
    elif all(len({local for _, _, local in table.rows}) == len(table.rows) for table in tables):
        hint = "A local rank counts within one node: where does it begin again?"
    elif any(len({node for _, node, _ in table.rows}) != table.nodes for table in tables):
        hint = "How many nodes are there in your second column?"
    yield Finding(WHERE, not wrong, f"{shown}: there is the row {row}, and it should be {right}", hint)


@reports(lambda cases: [[[int, int, int], ...]] * len(cases))
@on_each_case
def _tables(answer: Any, nodes: int, ranks_per_node: int) -> list[Row]:
    table = answer(nodes, ranks_per_node)
    with contextlib.suppress(TypeError, ValueError):
        return [_row(row) for row in table]
    asked = "rank_table returns a list of rows (rank, node, local_rank), of whole numbers"
    raise Refused(f"{asked}; it returned {told(table)}")


def _row(row: Any) -> Row:
    if isinstance(row, dict):  # by column name; by position where the names differ
        row = [row.get(name, value) for name, value in zip(COLUMNS, row.values(), strict=True)]
    rank, node, local_rank = row
    whole = int(rank), int(node), int(local_rank)
    if whole != (rank, node, local_rank):  # fractions or strings
        raise ValueError("no whole numbers")
    return whole


# --- 04.2 -------------------------------------------------------------------------------------------------

OWN = "a GPU for each rank on every node: each rank gets its own, and nccl"
TURNS = "fewer GPUs than ranks on a node: the ranks take them in turn; none at all: the CPU"
ONE = "all ranks take the same backend: gloo, if a single node has too few GPUs"


@dataclass
class _World:
    """The number of GPUs and of ranks on each node."""

    gpus: list[int]
    ranks: list[int]

    def __post_init__(self) -> None:
        nodes = [(node, local) for node, count in enumerate(self.ranks) for local in range(count)]
        self.places = [(rank, *place) for rank, place in enumerate(nodes)]
        self.enough = all(gpus >= ranks for gpus, ranks in zip(self.gpus, self.ranks, strict=True))
        self.backend = "nccl" if self.enough else "gloo"

    def __str__(self) -> str:
        return f"nodes with {self.gpus} GPUs and {self.ranks} ranks"

    def device(self, node: int, local: int) -> str:
        return f"cuda:{local % self.gpus[node]}" if self.gpus[node] else "cpu"


@question("04.2", "my_place(gpus, ranks)", {OWN: 1, TURNS: 1, ONE: 1})
def device_of(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    worlds = _worlds(rng)
    places = ask(_places, [[world.gpus, world.ranks] for world in worlds])[0]
    for world, answered in zip(worlds, places, strict=True):
        for (rank, node, local), place in zip(world.places, answered, strict=True):
            if isinstance(place, str):
                asked = "my_place returns a device and a backend, as in (device, 'gloo')"
                raise Refused(f"{asked}; it returned {place}")
            device, backend = place
            right = world.device(node, local)
            seen = f"{world}: rank {rank}, local rank {local} of node {node}: "
            hint = _of_device(world, (rank, node, local), device)
            what = OWN if world.enough else TURNS
            yield Finding(what, device == right, f"{seen}{device}, should be {right}", hint)
            hint = _of_backend(world, node, sum(other[1] == backend for other in answered))
            seen += f"{backend}, should be {world.backend}"
            yield Finding(OWN if world.enough else ONE, backend == world.backend, seen, hint)


def _worlds(rng: random.Random) -> list[_World]:
    """Draw worlds of equal and unequal nodes: a local rank does not follow from rank and node size alone."""
    many, few = rng.choice([4, 6]), rng.choice([2, 3])
    short = rng.randrange(3)  # which of three nodes lacks GPUs
    ranks = rng.choice([[2, 3, 4], [2, 4, 3], [3, 2, 4], [3, 4, 2], [4, 3, 2]])  # not 4, 2, 3: rank % n fits
    uneven = [count + rng.randint(0, 2) for count in ranks]
    lacking = [2 * count if node != short else count - 1 for node, count in enumerate(ranks)]  # enough in all
    without = [count if node != short else 0 for node, count in enumerate(ranks)]
    return [
        *(_World([many] * 2, [many] * 2), _World([8, 4], [3, 4]), _World([4, 8], [3, 7])),
        *(_World(uneven, ranks), _World([4], [3])),
        *(_World([few] * 2, [many + 1] * 2), _World([0] * 2, [many] * 2), _World([1], [3])),
        *(_World(lacking, ranks), _World(without, ranks)),
    ]


def _of_device(world: _World, place: Row, got: str) -> str:
    rank, node, local = place
    gpus = world.gpus[node]
    if gpus == 0:
        return "Where there is no GPU, no rank can have one."
    if rank != local and got in (f"cuda:{rank}", f"cuda:{rank % gpus}"):
        return "A node numbers its GPUs from 0. Which of a rank's numbers counts within its node?"
    if got == f"cuda:{local}":
        return "There is no such GPU on this node. How do you get back to the first one?"
    if got == f"cuda:{local * gpus // world.ranks[node]}":
        return "The ranks of a node take its GPUs in turn: 0, 1, and so on, then 0 again."
    if got == "cpu" or got in [f"cuda:{local % other}" for other in world.gpus if other]:
        return "That follows from another node's GPUs. On which node is this rank?"
    return "Which number tells the ranks of one node apart?"


def _of_backend(world: _World, node: int, of_one_mind: int) -> str:
    gpus, ranks = world.gpus[node], world.ranks[node]
    if world.enough:
        if world.gpus != world.ranks:
            return "Each rank has a GPU of its own, and some are left over."
        return "Compare the GPUs of a node with the ranks of that node, not with those of all nodes."
    if gpus >= ranks and of_one_mind < len(world.places):
        return "This node has enough GPUs, another does not. What happens if the ranks do not agree?"
    if sum(world.gpus) >= sum(world.ranks):
        return "A GPU on another node is of no use to a rank. Which nodes have enough for their own?"
    if gpus == 0:
        return "Which backend works for CPU tensors?"
    return "NCCL refuses two ranks on one GPU. What goes over gloo then?"


@reports(lambda worlds: [[([str, str], str)] * sum(ranks) for _, ranks in worlds])
def _places(answer: Any, worlds: list[list[list[int]]]) -> list[list[list[str] | str]]:
    gpus: list[int] = []
    ranks: list[int] = []  # the same two lists for all worlds, to expose an answer that caches by list
    return [
        [_place(partial(answer, gpus, ranks), world, *place) for place in world.places]
        for gpus[:], ranks[:] in worlds
        for world in [_World(list(gpus), list(ranks))]
    ]


def _place(answer: Any, world: _World, rank: int, node: int, local: int) -> list[str] | str:
    """Return the device and backend that an answer gives a rank; nothing runs on a GPU."""
    names = {"RANK": rank, "GROUP_RANK": node, "LOCAL_RANK": local, "GROUP_WORLD_SIZE": len(world.ranks)}
    names |= {"WORLD_SIZE": sum(world.ranks), "LOCAL_WORLD_SIZE": world.ranks[node]}
    with machine(world.gpus[node], {name: str(value) for name, value in names.items()}):
        value = answer()
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return told(value)
    device, backend = value
    with contextlib.suppress(RuntimeError, TypeError):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = "cuda (which?)"
        elif device.type == "cpu":
            device = "cpu"  # also cpu:0
    return [str(device), str(backend).lower()]


# --- 04.3 -------------------------------------------------------------------------------------------------

MET = "all processes join one group"
CALLED = "each has the rank that mp.spawn passed to it"
LOCAL = "LOCAL_RANK is set, for place() to read"
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@question("04.3", "join(rank, world_size, port)", {MET: 1, CALLED: 1, LOCAL: 1})
def join(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    # as two mp.spawn would call it, at the same time; the third process of a group is not its rank 2
    sizes = rng.choice([(2, 3), (3, 2), (2, 4), (4, 2)])
    called = []
    for group, size in enumerate(sizes):
        turn = rng.randrange(1, size)
        called += [(group, (turn + member) % size, size) for member in range(size)]
    results = list(zip(ask(_joined, called, nprocs=sum(sizes)), called, strict=True))
    for group in (0, 1):
        yield from _of_joining([(result, rank) for result, (own, rank, _) in results if own == group])


def _of_joining(results: list[tuple[dict[str, Any], int]]) -> Iterator[Finding]:
    """Judge one group by what each process holds and the rank it was called with."""
    count, ranks, names = len(results), [rank for _, rank in results], ("size", "rank", "local", "sum")
    sizes, own, local, sums = ([result[name] for result, _ in results] for name in names)
    bad = first_wrong(size == count for size in sizes)
    right = sum(range(1, count + 1))
    if sizes[bad] is None:
        seen = f"the process that was called with rank {ranks[bad]} is in no group afterwards"
        hint = "Setting the environment is only half of it. Which call joins the group?"
    elif sizes[bad] != count:
        seen = f"{count} processes; one of them is in a group of {sizes[bad]}"
        hint = "The size of the group is known: it is one of the arguments."
    else:
        seen = f"the sum over {count} ranks is {sums} on them, and it should be {right}"
        hint = "They are a group in name only. Which backend do they use?"
    yield Finding(MET, sizes == [count] * count and sums == [right] * count, seen, hint)
    seen = f"called with the ranks {ranks}, the processes have the ranks {own} in their group"
    hint = "Where does a process get its rank from: the argument, or a variable that was set before?"
    yield Finding(CALLED, own == ranks, seen, hint)
    seen = f"called with the ranks {ranks}, LOCAL_RANK is {local}"
    hint = "All are on one machine: what is each one's local rank? place() reads it from the environment."
    yield Finding(LOCAL, local == list(map(str, ranks)), seen, hint)


@reports(lambda _: {"size": (int, None), "rank": (int, None), "local": (str, None), "sum": int})
def _joined(answer: Any, called: list[tuple[int, int, int]]) -> Result:
    """Call the answer as mp.spawn would, in a process without the variables of a launcher."""
    process, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group, rank, world_size = called[process]
    if process == 0:
        second = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("course/port", str(second.port))
    if group:
        port = int(store.get("course/port"))
    for name in (*OF_A_LAUNCHER, "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    answer(rank, world_size, port)
    size, own = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (None, None)
    total = torch.tensor(rank + 1)
    if size == world_size:
        dist.all_reduce(total)
    store.set(f"course/ends/{process}", "here")
    # no process ends before all are done
    store.wait([f"course/ends/{other}" for other in range(len(called))])
    return {"size": size, "rank": own, "local": os.environ.get("LOCAL_RANK"), "sum": total.item()}
