"""The questions of lesson 04: where each rank runs, and how it joins a group."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..in_rank.work import on_each_case
from ..judging import first_wrong, with_two_world_sizes
from ..question import REST, Ask, Finding, Refused, Result, question
from ..shape import reports
from ..wording import told

# --- 04.1 -------------------------------------------------------------------------------------------------

RANKS = "one row for each process of all nodes, in the order of the ranks"
NODE, LOCAL_RANK = "each row has the rank's node", "each row has the rank's place on its node"
COLUMNS = {
    "wrong columns": "The right numbers, in the wrong columns: (rank, node, local_rank).",
    "round robin": "That deals the ranks out round robin. A node holds consecutive ranks.",
}


@question(
    "04.1",
    "rank_table(nodes, ranks_per_node)",
    {RANKS: 1, NODE: 1, LOCAL_RANK: 2},
    hints={
        RANKS: {
            "other rows": "How many processes does one node start, and how many nodes are there?",
            "other ranks": "The ranks count on from node to node: 0, 1, 2, without a gap.",
        },
        NODE: COLUMNS | {"another node": "How many whole nodes come before this rank? Nodes begin at 0."},
        LOCAL_RANK: COLUMNS | {"counts on": "A local rank counts within a node: where does it begin again?"},
    },
)
def rank_table(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [(2, 4), (rng.randint(3, 5), rng.choice([2, 6, 7])), (1, 3), (4, 1), (rng.randint(11, 13), 9)]
    for (nodes, each), rows in zip(cases, ask(_tables, cases)[0], strict=True):
        right = [[node * each + local, node, local] for node in range(nodes) for local in range(each)]
        given = f"{nodes} node{'s' * (nodes > 1)} with {each} rank{'s' * (each > 1)} each"
        seen = f"{given}: {len(rows)} rows, and there are {len(right)} processes"
        yield Finding(RANKS, len(rows) == len(right), seen, "other rows")
        ranks = [rank for rank, _, _ in rows]
        yield Finding(RANKS, ranks == [*range(len(right))], f"{given}: the ranks are {ranks}", "other ranks")
        fault = ""
        if sorted([rank, local, node] for rank, node, local in rows) == right:
            fault = "wrong columns"
        elif sorted([local * nodes + node, node, local] for _, node, local in right) == sorted(rows):
            fault = "round robin"
        for column, what, alone in ((1, NODE, "another node"), (2, LOCAL_RANK, "counts on")):
            held = [(row[0], row[column]) for row in sorted(rows)]
            wanted = [(row[0], row[column]) for row in right]
            bad = next((i for i, pair in enumerate(wanted) if held[i : i + 1] != [pair]), 0)
            row = (*sorted(rows)[bad : bad + 1], "missing")[0]
            seen = f"{given}: the row of rank {bad} is {row}, and should be {right[bad]}"
            yield Finding(what, held == wanted, seen, fault or alone)


@reports(lambda cases: [[[int, int, int], ...]] * len(cases))
@on_each_case
def _tables(answer: Any, nodes: int, ranks_per_node: int) -> list[list[int]]:
    table = answer(nodes, ranks_per_node)
    with contextlib.suppress(TypeError, ValueError):
        rows = [[int(rank), int(node), int(local_rank)] for rank, node, local_rank in table]
        if rows == [list(row) for row in table]:
            return rows
    asked = "rank_table returns a list of rows (rank, node, local_rank), of whole numbers"
    raise Refused(f"{asked}; it returned {told(table)}")


# --- 04.2 -------------------------------------------------------------------------------------------------

MET = "all processes join one gloo group, over the open store"
CALLED = "each has the rank that mp.spawn passed to it"
LOCAL = "LOCAL_RANK is set, for place() to read"
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@question(
    "04.2",
    "join(rank, world_size, port)",
    {MET: 2, CALLED: 2, LOCAL: 2},
    hints={
        MET: {
            "no group": "After the call it is in no group. Which call joins one, and does it stay open?",
            "another size": "The size of the group is known: it is one of the arguments.",
            "another way": "They have to meet at the store that is open, over gloo.",
        },
        CALLED: {"another rank": "Where does a process get its rank from?"},
        LOCAL: {"no local rank": "All are on one machine: what is the local rank there? place() reads it."},
    },
)
@with_two_world_sizes()
def join(ask: Ask, rng: random.Random, count: int) -> Iterator[Finding]:
    turn = rng.randrange(1, count)  # the ranks of the check are not those of mp.spawn
    ranks = [(turn + process) % count for process in range(count)]
    results = ask(_joined, ranks, nprocs=count)
    bad = first_wrong(result["met"] == [count, "gloo", True] for result in results)
    size, backend, at_store = results[bad]["met"]
    seen = f"{count} processes: the one called with rank {ranks[bad]} is in a group of {size}, over {backend}"
    fault = "no group" if not size else "another size" if size != count else "another way"
    seen += ", which did not meet at the open store" * (fault == "another way" and not at_store)
    yield Finding(MET, [size, backend, at_store] == [count, "gloo", True], seen, fault)
    own = [result["rank"] for result in results]
    seen = f"called with the ranks {ranks}, the processes have the ranks {own} in their group"
    yield Finding(CALLED, own == ranks, seen, "another rank" if size else REST)
    local = [result["local"] for result in results]
    seen = f"called with the ranks {ranks}, LOCAL_RANK is {local}"
    yield Finding(LOCAL, local == list(map(str, ranks)), seen, "no local rank")


@reports(lambda _: {"met": [int, str, bool], "rank": (int, None), "local": (str, None)})
def _joined(answer: Any, ranks: list[int]) -> Result:
    """Call the answer as mp.spawn would, in a process without a launcher's variables."""
    process, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for name in (*OF_A_LAUNCHER, "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    answer(ranks[process], len(ranks), port)
    met, own = [0, "nothing", False], None
    if dist.is_initialized():
        used, own = dist.distributed_c10d._get_default_store(), dist.get_rank()
        while isinstance(used, dist.PrefixStore):
            used = used.underlying_store
        met = [dist.get_world_size(), dist.get_backend(), getattr(used, "port", None) == port]
    store.set(f"course/ends/{process}", "here")
    # no process ends before all are done
    store.wait([f"course/ends/{other}" for other in range(len(ranks))])
    return {"met": met, "rank": own, "local": os.environ.get("LOCAL_RANK")}
