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


@wrong("04.1", COUNT, hint="Two processes with the same rank")
def ranks_start_anew(nodes, ranks_per_node):
    return [(local, node, local) for node in range(nodes) for local in range(ranks_per_node)]


@wrong("04.1", COUNT, ORDER, hint="in the wrong columns")
def columns_swapped(nodes, ranks_per_node):
    return [(rank, rank % ranks_per_node, rank // ranks_per_node) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", COUNT, ORDER, hint="like cards")
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


@wrong("04.1", hint="it returned nothing (None)")
def prints_it(nodes, ranks_per_node):
    for rank in range(nodes * ranks_per_node):
        print(rank, rank // ranks_per_node, rank % ranks_per_node)


@wrong("04.1", COUNT, "each row has the rank's node and its place there", hint="In which order")
def last_first(nodes, ranks_per_node):
    rows = [(rank, rank // ranks_per_node, rank % ranks_per_node) for rank in range(nodes * ranks_per_node)]
    return rows[::-1]


@wrong("04.1", hint="a list of rows")
def two_columns(nodes, ranks_per_node):
    return [divmod(rank, ranks_per_node) for rank in range(nodes * ranks_per_node)]


@wrong("04.1", COUNT, ORDER, hint="how many whole nodes lie before it")
def nodes_from_one(nodes, ranks_per_node):
    return [(r, r // ranks_per_node + 1, r % ranks_per_node) for r in range(nodes * ranks_per_node)]


NO_GPU = "without a GPU: the CPU, and gloo"
OWN = "a GPU for each rank of a node: its own, and nccl"
SHARED = "more ranks than GPUs on a node: they share them, over gloo"


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


@wrong("04.2", NO_GPU, hint="counts on this node alone")
def by_the_rank(gpus):
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    enough = int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus
    return torch.device("cuda", int(os.environ["RANK"])), "nccl" if enough else "gloo"


@wrong("04.2", NO_GPU, OWN, hint="There is no such GPU on this node")
def never_in_turn(gpus):
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    enough = int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus
    return torch.device("cuda", local_rank()), "nccl" if enough else "gloo"


@wrong("04.2", NO_GPU, OWN, hint="NCCL refuses two ranks on one GPU")
def always_nccl(gpus):
    return (torch.device("cuda", local_rank() % gpus), "nccl") if gpus else (torch.device("cpu"), "gloo")


@wrong("04.2", NO_GPU, SHARED, hint="not with those of all nodes")
def of_all_nodes(gpus):
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    enough = int(os.environ["WORLD_SIZE"]) <= gpus
    return torch.device("cuda", local_rank() % gpus), "nccl" if enough else "gloo"


@wrong("04.2", NO_GPU, SHARED, hint="some are left over")
def only_when_equal(gpus):
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    equal = int(os.environ["LOCAL_WORLD_SIZE"]) == gpus
    return torch.device("cuda", local_rank() % gpus), "nccl" if equal else "gloo"


@wrong("04.2", NO_GPU, hint="tells the ranks of one node apart")
def all_on_the_first(gpus):
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    enough = int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus
    return torch.device("cuda", 0), "nccl" if enough else "gloo"


@wrong("04.2", OWN, SHARED, hint="Which backend works for CPU tensors?")
def nccl_on_the_cpu(gpus):
    if gpus == 0:
        return torch.device("cpu"), "nccl"
    enough = int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus
    return torch.device("cuda", local_rank() % gpus), "nccl" if enough else "gloo"


@wrong("04.2", hint="ZeroDivisionError")
def forgets_the_cpu(gpus):
    return torch.device("cuda", local_rank() % gpus), "nccl"


@wrong("04.2", hint="raised TypeError")
def forgets_int(gpus):
    return torch.device("cuda", os.environ["LOCAL_RANK"] % gpus), "nccl"


@wrong("04.2", hint="returns a device and a backend")
def the_device_alone(gpus):
    return torch.device("cuda", local_rank() % gpus) if gpus else torch.device("cpu")


@wrong("04.2", NO_GPU, hint="tells the ranks of one node apart")
def any_cuda(gpus):
    return (torch.device("cuda"), "nccl") if gpus else (torch.device("cpu"), "gloo")


MET = "all processes join one group"
TOLD = "each is the rank that mp.spawn called it by"
LOCAL = "LOCAL_RANK is set, for what comes after"


def tell(**names: object) -> None:
    os.environ.update({name: str(value) for name, value in names.items()})


@wrong("04.3", LOCAL, hint="Which call joins the group?")
def sets_and_stays_out(rank, world_size, port):
    tell(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


@wrong("04.3", MET, TOLD, hint="which rank is a process on this machine?")
def no_local_rank(rank, world_size, port):
    tell(RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.3", MET, TOLD, hint="which rank is a process on this machine?")
def every_local_rank_0(rank, world_size, port):
    tell(RANK=rank, LOCAL_RANK=0, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")


@wrong("04.3", MET, hint="from whoever calls it")
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


@wrong("04.3", LOCAL, hint="How many are in the group is known")
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
def in_words(gpus):
    if gpus == 0:
        return "cpu", "gloo"
    backend = "gloo" if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus else "nccl"
    return f"cuda:{local_rank() % gpus}", backend


@right("04.2")
def asks_torch(gpus):
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device(f"cuda:{local_rank() % torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    return [device, "nccl" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"]


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
