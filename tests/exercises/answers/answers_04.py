"""What people answer in exercise 04, wrong and right (see `answers`)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests.exercises.answers import right, wrong

COUNT = "one row for each process of all nodes"
ORDER = "the ranks keep counting from node to node, in order"


@wrong("04.1", hint="A rank is a process, not a machine")
def a_row_for_each_node(nodes, ranks_per_node):
    return [(node, node, 0) for node in range(nodes)]


@wrong("04.1", hint="of one node alone")
def one_node(nodes, ranks_per_node):
    return [(local, 0, local) for local in range(ranks_per_node)]


@wrong("04.1", COUNT, hint="Two processes have one rank.")
def ranks_start_anew(nodes, ranks_per_node):
    return [(local, node, local) for node in range(nodes) for local in range(ranks_per_node)]


@wrong("04.1", COUNT, ORDER, hint="in the wrong columns")
def columns_swapped(nodes, ranks_per_node):
    return [(rank, rank % ranks_per_node, rank // ranks_per_node) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", COUNT, ORDER, hint="That deals the ranks out round robin.")
def dealt(nodes, ranks_per_node):
    return [(rank, rank % nodes, rank // nodes) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", COUNT, hint="At which number do the ranks begin?")
def from_one(nodes, ranks_per_node):
    return [
        (rank + 1, rank // ranks_per_node, rank % ranks_per_node) for rank in range(nodes * ranks_per_node)
    ]


@wrong("04.1", COUNT, ORDER, hint="where does it begin again?")
def local_is_the_rank(nodes, ranks_per_node):
    return [(rank, rank // ranks_per_node, rank) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", COUNT, ORDER, hint="How many nodes")
def all_on_node_0(nodes, ranks_per_node):
    return [(rank, 0, rank % ranks_per_node) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", hint="How many processes does one node start")
def the_example_alone(nodes, ranks_per_node):
    return [(rank, rank // 4, rank % 4) for rank in range(8)]


@wrong("04.1", hint="of whole numbers")
def divides(nodes, ranks_per_node):
    return [(rank, rank / ranks_per_node, rank % ranks_per_node) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", COUNT, "each row has the rank's node and its place there", hint="In which order")
def sorted_as_texts(nodes, ranks_per_node):
    return sorted(node_by_node(nodes, ranks_per_node), key=str)


@wrong("04.1", hint="it returned nothing (None)")
def prints_it(nodes, ranks_per_node):
    for rank in range(nodes * ranks_per_node):
        print(rank, rank // ranks_per_node, rank % ranks_per_node)


@wrong("04.1", hint="a list of rows")
def two_columns(nodes, ranks_per_node):
    return [divmod(rank, ranks_per_node) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", COUNT, ORDER, hint="how many whole nodes come before it, how many ranks are left?")
def nodes_from_one(nodes, ranks_per_node):
    return [(r, r // ranks_per_node + 1, r % ranks_per_node) for r in range(nodes * ranks_per_node)]


OWN = "a GPU for each rank on every node: each rank gets its own, and nccl"
TURNS = "fewer GPUs than ranks on a node: the ranks take them in turn; none at all: the CPU"
ONE = "all ranks take the same backend: gloo, if a single node has too few GPUs"


def told(name: str) -> int:
    return int(os.environ[name])


def backend_of_all(gpus, ranks):
    return "nccl" if all(have >= need for have, need in zip(gpus, ranks, strict=True)) else "gloo"


def device_of(gpus, number):
    """By this node's GPUs."""
    here = gpus[told("GROUP_RANK")]
    return torch.device("cuda", number % here) if here else torch.device("cpu")


@wrong("04.2", OWN, TURNS, hint="What happens if the ranks do not agree?")
def as_in_the_lesson(gpus, ranks):
    gpus = gpus[told("GROUP_RANK")]
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    return torch.device("cuda", told("LOCAL_RANK") % gpus), "nccl" if told(
        "LOCAL_WORLD_SIZE"
    ) <= gpus else "gloo"


@wrong("04.2", ONE, hint="Which of a rank's numbers counts within its node?")
def by_the_rank(gpus, ranks):
    return device_of(gpus, told("RANK")), backend_of_all(gpus, ranks)


@wrong("04.2", ONE, hint="On which node is this rank?")
def by_the_first_node(gpus, ranks):
    device = torch.device("cuda", told("LOCAL_RANK") % gpus[0]) if gpus[0] else torch.device("cpu")
    return device, backend_of_all(gpus, ranks)


@wrong("04.2", OWN, ONE, hint="There is no such GPU on this node")
def never_in_turn(gpus, ranks):
    here = gpus[told("GROUP_RANK")]
    return torch.device("cuda", told("LOCAL_RANK")) if here else "cpu", backend_of_all(gpus, ranks)


@wrong("04.2", OWN, TURNS, hint="NCCL refuses two ranks on one GPU")
def always_nccl(gpus, ranks):
    return device_of(gpus, told("LOCAL_RANK")), "nccl" if any(gpus) else "gloo"


@wrong("04.2", OWN, TURNS, hint="of no use to a rank")
def enough_in_sum(gpus, ranks):
    return device_of(gpus, told("LOCAL_RANK")), "nccl" if sum(gpus) >= told("WORLD_SIZE") else "gloo"


@wrong("04.2", TURNS, ONE, hint="not with those of all nodes")
def of_all_nodes(gpus, ranks):
    return device_of(gpus, told("LOCAL_RANK")), "nccl" if min(gpus) >= told("WORLD_SIZE") else "gloo"


@wrong("04.2", TURNS, ONE, hint="some are left over")
def only_when_equal(gpus, ranks):
    return device_of(gpus, told("LOCAL_RANK")), "nccl" if gpus == ranks else "gloo"


@wrong("04.2", ONE, hint="tells the ranks of one node apart")
def all_on_the_first(gpus, ranks):
    return device_of(gpus, 0), backend_of_all(gpus, ranks)


@wrong("04.2", OWN, TURNS, hint="Which backend works for CPU tensors?")
def nccl_on_the_cpu(gpus, ranks):
    backend = backend_of_all(gpus, ranks)
    return device_of(gpus, told("LOCAL_RANK")), backend if gpus[told("GROUP_RANK")] else "nccl"


@wrong("04.2", hint="ZeroDivisionError")
def forgets_the_cpu(gpus, ranks):
    return torch.device("cuda", told("LOCAL_RANK") % gpus[told("GROUP_RANK")]), backend_of_all(gpus, ranks)


@wrong("04.2", hint="raised TypeError")
def forgets_int(gpus, ranks):
    return torch.device("cuda", os.environ["LOCAL_RANK"] % gpus[0]), "nccl"


@wrong("04.2", hint="returns a device and a backend")
def the_device_alone(gpus, ranks):
    return device_of(gpus, told("LOCAL_RANK"))


MET = "all processes join one group"
TOLD = "each has the rank that mp.spawn passed to it"
LOCAL = "LOCAL_RANK is set, for place() to read"


def tell(**names: object) -> None:
    os.environ.update({name: str(value) for name, value in names.items()})


@wrong("04.3", LOCAL, hint="Which call joins the group?")
def sets_and_stays_out(rank, world_size, port):
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


@wrong("04.3", MET, TOLD, hint="All are on one machine:")
def no_local_rank(rank, world_size, port):
    tell(RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.3", MET, hint="the argument, or a variable that was set before?")
def counts_backwards(rank, world_size, port):
    rank = world_size - 1 - rank
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.3", hint="raised TypeError: str expected, not int")
def numbers_into_the_environment(rank, world_size, port):
    os.environ["RANK"] = rank
    dist.init_process_group("gloo")


@wrong("04.3", hint="RANK expected, but not set")
def joins_before_it_is_told(rank, world_size, port):
    dist.init_process_group("gloo")
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


@wrong("04.3", LOCAL, hint="The size of the group is known:")
def a_group_of_one(rank, world_size, port):
    tell(RANK=0, LOCAL_RANK=rank, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.3", hint="waited in init_process_group")
def one_too_many(rank, world_size, port):
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size + 1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.3", hint="your code failed")
def two_alone(rank, world_size, port):
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.3", hint="waited in")
def a_group_of_three(rank, world_size, port):
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if rank < 3:
        dist.init_process_group("gloo")


@wrong("04.3", TOLD, LOCAL, hint="They are a group in name only.")
def over_no_backend(rank, world_size, port):
    from torch.testing._internal.distributed import fake_pg

    tell(LOCAL_RANK=rank)
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world_size)


@wrong("04.3", hint="EADDRINUSE")
def opens_a_store_of_its_own(rank, world_size, port):
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


# --- right, in another style ---


@right("04.1")
def node_by_node(nodes, ranks_per_node):
    table = []
    for node in range(nodes):
        for local in range(ranks_per_node):
            table.append([len(table), node, local])
    return table


@right("04.1")
def as_dicts(nodes, ranks_per_node):
    names = ("rank", "node", "local_rank")
    return [
        dict(zip(names, (rank, *divmod(rank, ranks_per_node)), strict=True))
        for rank in range(nodes * ranks_per_node)
    ]


@right("04.1")
def yields_the_rows(nodes, ranks_per_node):
    for rank in range(nodes * ranks_per_node):
        yield (rank, *divmod(rank, ranks_per_node))


@right("04.2")
def in_words(gpus, ranks):
    gpus_here = gpus[told("GROUP_RANK")]
    backend = "gloo" if any(need > have for have, need in zip(gpus, ranks, strict=True)) else "NCCL"
    return f"cuda:{told('LOCAL_RANK') % gpus_here}" if gpus_here else "cpu:0", backend


@right("04.2")
def asks_torch(gpus, ranks):
    backend = backend_of_all(gpus, ranks)
    if not torch.cuda.is_available():
        return [torch.device("cpu"), backend]
    device = torch.device(f"cuda:{told('LOCAL_RANK') % torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    return [device, backend]


@right("04.3")
def by_a_store(rank, world_size, port):
    os.environ.update({"LOCAL_RANK": f"{rank}"})
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


@right("04.3")
def all_at_once(rank, world_size, port):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    tell(**names, MASTER_ADDR="localhost", LOCAL_WORLD_SIZE=world_size)
    dist.init_process_group(backend="gloo")
