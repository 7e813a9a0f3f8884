"""What people answer in exercise 17, wrong and right (see `answers`)."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.exercises.answers import right, wrong

ASKS = "it asks for the nodes, their GPUs and the time"
STARTS = "each node runs the script in one rank for each of its GPUs"
MEETS = "all meet at one address, of a node of the job"
PORTS = "another job meets at another port"

HEAD = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
PORT = "port=$((20000 + SLURM_JOB_ID % 10000))\n"
C10D = '--rdzv-backend=c10d --rdzv-endpoint="$head:$port"'


def orders(nodes, gpus, minutes, tasks=1):
    lines = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--gpus-per-node={gpus}", f"--time={minutes}"]
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)


def agents(nodes, gpus):
    return f"torchrun --nnodes={nodes} --nproc-per-node={gpus}"


@wrong("17.1", ASKS, hint="runs on the first node only")
def forgets_srun(script, nodes, gpus, minutes):
    return orders(nodes, gpus, minutes) + HEAD + PORT + f"{agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", ASKS, STARTS, hint="Which machine does each node find there?")
def meets_at_localhost(script, nodes, gpus, minutes):
    meeting = '--rdzv-backend=c10d --rdzv-endpoint="localhost:$port"'
    return orders(nodes, gpus, minutes) + PORT + f"srun {agents(nodes, gpus)} {meeting} {script}\n"


@wrong("17.1", ASKS, STARTS, MEETS, hint="Two of your jobs may share a node")
def a_fixed_port(script, nodes, gpus, minutes):
    body = f"srun {agents(nodes, gpus)} --rdzv-backend=c10d --rdzv-endpoint=$head:29500 {script}\n"
    return orders(nodes, gpus, minutes) + HEAD + body


@wrong("17.1", ASKS, STARTS, MEETS, hint="grow far beyond that")
def the_number_of_the_job_as_port(script, nodes, gpus, minutes):
    port = "port=$((29500 + SLURM_JOB_ID))\n"
    return orders(nodes, gpus, minutes) + HEAD + port + f"srun {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", ASKS, hint="How many torchruns does a node need?")
def a_torchrun_for_each_gpu(script, nodes, gpus, minutes):
    return orders(nodes, gpus, minutes, gpus) + HEAD + PORT + f"srun {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", ASKS, hint="Each torchrun must know how many nodes the job has.")
def standalone_on_each(script, nodes, gpus, minutes):
    return orders(nodes, gpus, minutes) + f"srun torchrun --standalone --nproc-per-node={gpus} {script}\n"


@wrong("17.1", ASKS, hint="Which option of torchrun sets the number of ranks?")
def one_rank_a_node(script, nodes, gpus, minutes):
    return orders(nodes, gpus, minutes) + HEAD + PORT + f"srun torchrun --nnodes={nodes} {C10D} {script}\n"


@wrong("17.1", STARTS, MEETS, PORTS, hint="Without a directive the nodes may come without their GPUs.")
def asks_for_no_gpus(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, minutes).replace(f"#SBATCH --gpus-per-node={gpus}\n", "")
    return text + HEAD + PORT + f"srun {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", STARTS, MEETS, PORTS, hint="Hours, minutes, seconds")
def minutes_as_hours(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, f"{minutes}:00:00")
    return text + HEAD + PORT + f"srun {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", STARTS, MEETS, PORTS, hint="Directives come before the first command.")
def orders_below_a_command(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, minutes).replace("#!/bin/bash\n", "#!/bin/bash\nset -e\n")
    return text + HEAD + PORT + f"srun --ntasks-per-node=1 {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", ASKS, STARTS, hint="In the job's body that is the first node only.")
def every_node_is_node_0(script, nodes, gpus, minutes):
    meeting = "--node-rank=$SLURM_NODEID --master-addr=$head --master-port=$port"
    return orders(nodes, gpus, minutes) + HEAD + PORT + f"srun {agents(nodes, gpus)} {meeting} {script}\n"


@wrong("17.1", ASKS, STARTS, hint="Each node looked it up for itself")
def each_node_its_own_address(script, nodes, gpus, minutes):
    command = f"{agents(nodes, gpus)} --rdzv-backend=c10d --rdzv-endpoint=$(hostname):$port {script}"
    return orders(nodes, gpus, minutes) + PORT + f"export port\nsrun bash -c '{command}'\n"


@wrong("17.1", ASKS, STARTS, hint="Each job gets other nodes.")
def a_node_known_by_heart(script, nodes, gpus, minutes):
    body = f"srun {agents(nodes, gpus)} --rdzv-backend=c10d --rdzv-endpoint=gpu-17:$port {script}\n"
    return orders(nodes, gpus, minutes) + PORT + body


@wrong("17.1", ASKS, hint="Without torchrun, what tells each process which rank it is?")
def plain_python_without_ranks(script, nodes, gpus, minutes):
    return orders(nodes, gpus, minutes, gpus) + HEAD + PORT + f"srun python {script}\n"


@wrong("17.1", ASKS, hint="In the job's body that is the first node only.")
def ranks_set_in_the_body(script, nodes, gpus, minutes):
    body = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\n"
    body += f"export MASTER_ADDR=$head MASTER_PORT=$port\nsrun python {script}\n"
    return orders(nodes, gpus, minutes, gpus) + HEAD + PORT + body


@wrong("17.1", ASKS, hint="What makes that wait for what was started")
def in_the_background(script, nodes, gpus, minutes):
    body = f"srun {agents(nodes, gpus)} {C10D} {script} &\necho started\n"
    return orders(nodes, gpus, minutes) + HEAD + PORT + body


@wrong("17.1", hint="nothing (None)")
def prints_it(script, nodes, gpus, minutes):
    print(orders(nodes, gpus, minutes))


@wrong("17.1", STARTS, MEETS, PORTS, hint="And do you count them per node?")
def the_gpus_of_a_node_for_all(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, minutes).replace("--gpus-per-node=", "--gpus=")
    return text + HEAD + PORT + f"srun {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", STARTS, MEETS, PORTS, hint="sbatch takes a script:")
def indented(script, nodes, gpus, minutes):
    """As a text in triple quotes is, inside of a function."""
    text = orders(nodes, gpus, minutes, 1).replace("#", "    #")
    return "\n" + text + HEAD + PORT + f"srun --ntasks-per-node=1 {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", STARTS, MEETS, PORTS, hint="for which shell?")
def a_shell_without_its_path(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, minutes).replace("#!/bin/bash", "#!bash")
    return text + HEAD + PORT + f"srun {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", STARTS, MEETS, PORTS, hint="in an #SBATCH line is no directive")
def an_order_without_its_value(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, minutes, tasks="")
    return text + HEAD + PORT + f"srun {agents(nodes, gpus)} {C10D} {script}\n"


@wrong("17.1", ASKS, STARTS, hint="each torchrun makes one of its own")
def an_id_that_nobody_has_set(script, nodes, gpus, minutes):
    body = f'srun {agents(nodes, gpus)} --rdzv-id="$JOB_ID" {C10D} {script}\n'
    return orders(nodes, gpus, minutes) + HEAD + PORT + body


@wrong("17.1", ASKS, hint="Where is that, and what joins the lines?")
def a_line_that_does_not_go_on(script, nodes, gpus, minutes):
    body = f"srun {agents(nodes, gpus)} {script}\n    {C10D}\n"
    return orders(nodes, gpus, minutes) + HEAD + PORT + body


JOBS = []


@wrong("17.1", hint="nodes are wanted")
def the_first_one_for_all(script, nodes, gpus, minutes):
    JOBS.append(by_the_address(script, nodes, gpus, minutes))
    return JOBS[0]


@right("17.1")
def as_on_a_real_cluster(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, f"{minutes // 60:02}:{minutes % 60:02}:00").replace(
        f"--nodes={nodes}", f"--nodes={nodes}-{nodes}"
    )
    text += "set -euo pipefail\nmodule purge\nmodule load cuda\nconda activate torch\nnvidia-smi\n"
    return text + HEAD + PORT + f"srun --cpu-bind=none {agents(nodes, gpus)} {C10D} {script}\n"


@right("17.1")
def by_the_address(script, nodes, gpus, minutes):
    """As PyTorch's own example does it."""
    text = orders(nodes, gpus, f"{minutes}:00").replace(f"--gpus-per-node={gpus}", f"--gpus={nodes * gpus}")
    text += "nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )\nhead_node=${nodes[0]}\n"
    text += 'head=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)\n'
    find = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
    text += f"port=$(python -c '{find}')\n"
    meeting = "--rdzv_id $RANDOM --rdzv_backend c10d --rdzv_endpoint $head:$port"
    return (
        text
        + f"srun python -m torch.distributed.run --nnodes {nodes} --nproc_per_node gpu {meeting} {script}\n"
    )


@right("17.1")
def a_loop_over_the_nodes(script, nodes, gpus, minutes):
    text = orders(nodes, gpus, minutes) + "port=$((20000 + SLURM_JOB_ID % 10000))\n"
    text += 'for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do\n'
    text += f"  srun --nodes=1 --ntasks=1 --nodelist=$host {agents(nodes, gpus)} "
    return text + f"--rdzv-backend=c10d --rdzv-endpoint=$HOSTNAME:$port {script} &\ndone\nwait\n"


SUM = "every rank holds the sum over all ranks"


def groups(per_node):
    """The ranks of this rank's node as a group, and one rank of each node."""
    everyone = list(range(dist.get_world_size()))
    nodes = [dist.new_group(everyone[first : first + per_node]) for first in everyone[::per_node]]
    return nodes[dist.get_rank() // per_node], dist.new_group(everyone[::per_node])


@wrong("17.2", SUM, hint="Which ranks of a node have to send to other nodes at all, and how much?")
def one_level(tensor, per_node):
    dist.all_reduce(tensor)


@wrong("17.2", hint="How do ranks that are not the first of their node get the sum?")
def nobody_tells_the_others(tensor, per_node):
    mine, heads = groups(per_node)
    head = dist.get_rank() // per_node * per_node
    kept = tensor.clone()
    dist.reduce(kept, head, group=mine)
    if dist.get_rank() == head:
        dist.all_reduce(kept, group=heads)
        tensor.copy_(kept)


@wrong("17.2", hint="That is the sum of its node")
def in_the_node_alone(tensor, per_node):
    mine, _ = groups(per_node)
    dist.all_reduce(tensor, group=mine)


@wrong("17.2", SUM, hint="With more, one node sends for all of them")
def by_rank_0(tensor, per_node):
    mine, heads = groups(per_node)
    head = dist.get_rank() // per_node * per_node
    dist.reduce(tensor, head, group=mine)
    if dist.get_rank() == head:
        dist.reduce(tensor, 0, group=heads)
        dist.broadcast(tensor, 0, group=heads)
    dist.broadcast(tensor, head, group=mine)


KEPT = []


@wrong("17.2", SUM, hint="Which ranks of a node have to send to other nodes at all, and how much?")
def the_groups_of_the_first_call(tensor, per_node):
    if not KEPT:
        KEPT.append((per_node, *groups(per_node)))
    of, mine, heads = KEPT[0]
    head = dist.get_rank() // of * of
    dist.reduce(tensor, head, group=mine)
    if dist.get_rank() == head:
        dist.all_reduce(tensor, group=heads)
    dist.broadcast(tensor, head, group=mine)


SUMMED = []


@wrong("17.2", hint="It must be added up again")
def remembers_the_tensor(tensor, per_node):
    if not any(each is tensor and of == per_node for each, of in SUMMED):
        SUMMED.append((tensor, per_node))
        mine, heads = groups(per_node)
        head = dist.get_rank() // per_node * per_node
        dist.reduce(tensor, head, group=mine)
        if dist.get_rank() == head:
            dist.all_reduce(tensor, group=heads)
        dist.broadcast(tensor, head, group=mine)


@wrong("17.2", hint="The sum is right only if the numbers of every rank reach it, each of them once.")
def in_float32(tensor, per_node):
    mine, heads = groups(per_node)
    head = dist.get_rank() // per_node * per_node
    total = tensor.float()
    dist.reduce(total, head, group=mine)
    if dist.get_rank() == head:
        dist.all_reduce(total, group=heads)
    dist.broadcast(total, head, group=mine)
    tensor.copy_(total)


@wrong("17.2", hint="torch.distributed's own functions")
def by_the_functional_ones(tensor, per_node):
    """One level, by calls that few know."""
    tensor.copy_(functional.all_reduce(tensor, "sum", dist.group.WORLD))


@wrong("17.2", hint="without waiting for the end of it")
def nobody_waits(tensor, per_node):
    mine, heads = groups(per_node)
    head = dist.get_rank() // per_node * per_node
    dist.reduce(tensor, head, group=mine)
    if dist.get_rank() == head:
        dist.all_reduce(tensor, group=heads)
    dist.broadcast(tensor, head, group=mine, async_op=True)
    dist.barrier()


@right("17.2")
def one_group_at_a_time(tensor, per_node):
    """Each waits for what it has started."""
    world = dist.get_world_size()
    for first in range(0, world, per_node):
        group = dist.new_group(list(range(first, first + per_node)))
        if first <= dist.get_rank() < first + per_node:
            mine, head = group, first
    heads = dist.new_group(list(range(0, world, per_node)))
    dist.reduce(tensor, head, group=mine, async_op=True).wait()
    if heads != dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(tensor, group=heads, async_op=True).wait()
    dist.broadcast(tensor, head, group=mine, async_op=True).wait()


@right("17.2")
def by_messages(tensor, per_node):
    """No group: messages within the node, and a ring of the first ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    head, heads = rank // per_node * per_node, range(0, world, per_node)
    if rank != head:
        dist.send(tensor, head)
        dist.recv(tensor, head)
        return
    for mate in range(head + 1, head + per_node):
        got = torch.empty_like(tensor)
        dist.recv(got, mate)
        tensor += got
    pieces, me = tensor.view(-1).tensor_split(len(heads)), heads.index(head)
    for step in range(2 * (len(heads) - 1)):
        into = pieces[(me - step - 1) % len(heads)]
        got = torch.empty_like(into)
        sending = dist.isend(pieces[(me - step) % len(heads)].clone(), heads[(me + 1) % len(heads)])
        dist.recv(got, heads[me - 1])
        sending.wait()
        into.copy_(into + got if step < len(heads) - 1 else got)
    for mate in range(head + 1, head + per_node):
        dist.send(tensor, mate)


NODES = "with the ranks of a node side by side, each node sends over one edge of the ring"
ORDER = "in any other order, an edge counts for the node that it leaves"
NOTHING = "every node is in the answer, and one that sends nothing has 0"


def edges(places):
    return [(one, other) for one, other in zip(places, [*places[1:], places[0]], strict=True) if one != other]


def of_an_edge(places, size):
    return 2 * (len(places) - 1) / len(places) * size


@wrong("17.3", NOTHING, hint="goes round twice")
def half_the_way(places, size):
    sent = dict.fromkeys(places, 0.0)
    for one, _ in edges(places):
        sent[one] += of_an_edge(places, size) / 2
    return sent


@wrong("17.3", NOTHING, hint="once for each edge")
def the_tensor_once(places, size):
    sent = dict.fromkeys(places, 0)
    for one, _ in edges(places):
        sent[one] += size
    return sent


@wrong("17.3", NOTHING, hint="How much goes over one edge of a ring of that many ranks?")
def a_ring_of_nodes(places, size):
    sent, nodes = dict.fromkeys(places, 0.0), len(set(places))
    for one, _ in edges(places):
        sent[one] += 2 * (nodes - 1) / nodes * size
    return sent


@wrong("17.3", NODES, NOTHING, hint="That is one edge")
def one_edge_for_each_node(places, size):
    several = len(set(places)) > 1
    return dict.fromkeys(places, of_an_edge(places, size) * several)


@wrong("17.3", NODES, ORDER, hint="which of them send nothing")
def leaves_out_who_sends_nothing(places, size):
    sent = {}
    for one, _ in edges(places):
        sent[one] = sent.get(one, 0) + of_an_edge(places, size)
    return sent


@wrong("17.3", hint="How much of it goes to a rank on the same node?")
def all_that_its_ranks_send(places, size):
    return {node: places.count(node) * of_an_edge(places, size) for node in places}


@wrong("17.3", NOTHING, hint="Which rank comes after the last one?")
def an_open_ring(places, size):
    sent = dict.fromkeys(places, 0.0)
    for one, other in pairwise(places):
        sent[one] += of_an_edge(places, size) * (one != other)
    return sent


@wrong("17.3", NOTHING, hint="or at both ends")
def both_ends(places, size):
    sent = dict.fromkeys(places, 0.0)
    for one, other in edges(places):
        sent[one] += of_an_edge(places, size)
        sent[other] += of_an_edge(places, size)
    return sent


@wrong("17.3", NOTHING, hint="twice as much")
def ranks_at_a_border(places, size):
    sent = dict.fromkeys(places, 0.0)
    for rank, node in enumerate(places):
        if node != places[rank - 1] or node != places[(rank + 1) % len(places)]:
            sent[node] += of_an_edge(places, size)
    return sent


@wrong("17.3", NOTHING, hint="ring")
def a_ring_of_the_nodes(places, size):
    sent = dict.fromkeys(places, 0.0)
    for one, _ in edges(places):
        sent[one] += of_an_edge(sorted(set(places)), size)
    return sent


@wrong("17.3", hint="IndexError")
def uses_up_the_list(places, size):
    n, sent = len(places), dict.fromkeys(places, 0.0)
    places.append(places[0])
    while len(places) > 1:
        one = places.pop(0)
        sent[one] += 2 * (n - 1) / n * size * (one != places[0])
    places.pop()
    return sent


@wrong("17.3", hint="a dict, bytes by node")
def a_list(places, size):
    return [of_an_edge(places, size)] * len(places)


@wrong("17.3", NOTHING, hint="ring")
def as_letters(places, size):
    """It looks for one name behind another in a text."""
    text = "".join([*places, places[0]])
    return {
        node: of_an_edge(places, size) * sum(text.count(node + other) for other in {*places} - {node})
        for node in places
    }


@wrong("17.3", NODES, NOTHING, hint="edge")
def two_ends_at_most(places, size):
    """A node's ranks lie side by side, it thinks."""
    last = {node: rank for rank, node in enumerate(places)}
    n = len(places)
    return {node: of_an_edge(places, size) * (places[(rank + 1) % n] != node) for node, rank in last.items()}


@wrong("17.3", NOTHING, hint="How many steps are there")
def a_step_too_many(places, size):
    sent = dict.fromkeys(places, 0.0)
    for one, _ in edges(places):
        sent[one] += 2 * size
    return sent


@right("17.3")
def with_a_deque(places, size):
    from collections import Counter, deque
    from fractions import Fraction

    after = deque(places)
    after.rotate(-1)
    leaving = Counter(one for one, other in zip(places, after, strict=True) if one != other)
    return {node: Fraction(2 * (len(places) - 1) * size, len(places)) * leaving[node] for node in places}


@right("17.3")
def by_counting(places, size):
    ranks = len(places)
    steps, part = 2 * (ranks - 1), size / ranks
    crossing = [one for one, _ in edges(places)]
    return {node: steps * part * crossing.count(node) for node in set(places)}


SENT = {}


@wrong("17.3", NOTHING, hint="The list is the same object, with other nodes.")
def remembers_the_list(places, size):
    if (id(places), size) not in SENT:
        sent = dict.fromkeys(places, 0.0)
        for one, _ in edges(places):
            sent[one] += of_an_edge(places, size)
        SENT[id(places), size] = places, sent
    return SENT[id(places), size][1]


# --- the result is right, and it was not done as asked ---


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


@wrong("17.2", hint="It still has its own.")
def in_other_memory(tensor, per_node):
    copy = tensor.clone()
    dist.all_reduce(copy)
    tensor.data = copy


def over_edges(places, size, leaving):
    edge = 2 * (len(places) - 1) / len(places) * size
    return {node: leaving.count(node) * edge for node in places}


@wrong("17.3", NODES, NOTHING, hint="ranks on the nodes")
def blocks_that_are_not_joined(places, size):
    blocks = [node for i, node in enumerate(places) if i == 0 or places[i - 1] != node]
    return over_edges(places, size, blocks if len(blocks) > 1 else [])


@wrong("17.3", NODES, NOTHING, hint="came out")
def each_pair_of_nodes_once(places, size):
    pairs = {(one, other) for one, other in zip(places, places[1:] + places[:1], strict=True) if one != other}
    return over_edges(places, size, [one for one, _ in pairs])
