"""What people answer in exercise 04, wrong and right (see `answers`)."""

from __future__ import annotations

import os
import tempfile

import torch.distributed as dist

from tests.exercises.answers import right, wrong

RANKS = "one row for each process of all nodes, in the order of the ranks"
NODE, LOCAL_RANK = "each row has the rank's node", "each row has the rank's place on its node"


def table(nodes, ranks_per_node, row):
    return [row(rank) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", RANKS, hint="wrong columns")
def columns_swapped(nodes, each):
    return table(nodes, each, lambda rank: (rank, rank % each, rank // each))


@wrong("04.1", RANKS, hint="round robin")
def dealt(nodes, each):
    return table(nodes, each, lambda rank: (rank, rank % nodes, rank // nodes))


@wrong("04.1", RANKS, NODE, hint="counts on")
def local_is_the_rank(nodes, each):
    return table(nodes, each, lambda rank: (rank, rank // each, rank))


@wrong("04.1", RANKS, LOCAL_RANK, hint="another node")
def nodes_from_one(nodes, each):
    return table(nodes, each, lambda rank: (rank, rank // each + 1, rank % each))


@wrong("04.1", hint="other rows")
def a_row_for_each_node(nodes, each):
    return [(node, node, 0) for node in range(nodes)]


@wrong("04.1", hint="other ranks")
def ranks_start_anew(nodes, each):
    return table(nodes, each, lambda rank: (rank % each, rank // each, rank % each))


@wrong("04.1", hint="other rows")
def the_example_alone(nodes, each):
    return [(rank, rank // 4, rank % 4) for rank in range(8)]


@wrong("04.1", hint="of whole numbers")
def divides(nodes, each):
    return table(nodes, each, lambda rank: (rank, rank / each, rank % each))


@wrong("04.1", hint="a list of rows")
def two_columns(nodes, each):
    return table(nodes, each, lambda rank: divmod(rank, each))


@right("04.1")
def node_by_node(nodes, ranks_per_node):
    rows = []
    for node in range(nodes):
        for local in range(ranks_per_node):
            rows.append([len(rows), node, local])
    return rows


@right("04.1")
def by_divmod(nodes, each):
    return tuple(table(nodes, each, lambda rank: (rank, *divmod(rank, each))))


MET = "all processes join one gloo group, over the open store"
CALLED = "each has the rank that mp.spawn passed to it"
LOCAL = "LOCAL_RANK is set, for place() to read"


def tell(**names: object) -> None:
    os.environ.update({name: str(value) for name, value in names.items()})


@wrong("04.2", LOCAL, hint="no group")
def sets_and_stays_out(rank, world_size, port):
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


@wrong("04.2", LOCAL, hint="no group")
def leaves_again(rank, world_size, port):
    all_at_once(rank, world_size, port)
    dist.destroy_process_group()


@wrong("04.2", MET, CALLED, hint="no local rank")
def no_local_rank(rank, world_size, port):
    all_at_once(rank, world_size, port)
    del os.environ["LOCAL_RANK"]


@wrong("04.2", MET, hint="another rank")
def counts_backwards(rank, world_size, port):
    all_at_once(world_size - 1 - rank, world_size, port)


@wrong("04.2", LOCAL, hint="another size")
def a_group_of_one(rank, world_size, port):
    tell(RANK=0, LOCAL_RANK=rank, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.2", CALLED, LOCAL, hint="another way")
def meets_in_a_file(rank, world_size, port):
    tell(LOCAL_RANK=rank)
    place = f"file://{tempfile.gettempdir()}/course-answer-{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size)


@wrong("04.2", hint="raised TypeError: str expected, not int")
def numbers_into_the_environment(rank, world_size, port):
    os.environ["RANK"] = rank
    dist.init_process_group("gloo")


@wrong("04.2", hint="RANK expected, but not set")
def joins_before_it_is_told(rank, world_size, port):
    dist.init_process_group("gloo")
    sets_and_stays_out(rank, world_size, port)


@wrong("04.2", hint="waited in init_process_group")
def one_too_many(rank, world_size, port):
    all_at_once(rank, world_size + 1, port)


@wrong("04.2", hint="EADDRINUSE")
def opens_a_store_of_its_own(rank, world_size, port):
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


@right("04.2")
def by_a_store(rank, world_size, port):
    os.environ["LOCAL_RANK"] = f"{rank}"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


@right("04.2")
def all_at_once(rank, world_size, port):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    tell(**names, MASTER_ADDR="localhost", LOCAL_WORLD_SIZE=world_size)
    dist.init_process_group(backend="gloo")
