"""What people answer in exercise 17, wrong and right (see `answers`)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from tests.exercises.answers import right, wrong

BLOCKS = "with the ranks of a node side by side, each node sends over one edge of the ring"
ORDER = "in any other order, each edge counts for the node that it leaves"


def leaving(places):
    return [one for one, other in zip(places, [*places[1:], places[0]], strict=True) if one != other]


def sent_over(places, size, edges, ranks=0):
    ranks = ranks or len(places)
    return {node: 2 * (ranks - 1) / ranks * size * list(edges).count(node) for node in places}


@wrong("17.1", hint="how much")
def half_the_way(places, size):
    return sent_over(places, size / 2, leaving(places))


@wrong("17.1", hint="how much")
def the_tensor_once(places, size):
    return {node: size * leaving(places).count(node) for node in places}


@wrong("17.1", hint="how much")
def a_ring_of_the_nodes(places, size):
    return sent_over(places, size, leaving(places), ranks=len(set(places)))


@wrong("17.1", hint="inside")
def all_that_its_ranks_send(places, size):
    return sent_over(places, size, places)


@wrong("17.1", hint="the last rank")
def an_open_ring(places, size):
    return sent_over(places, size, [one for one, other in pairwise(places) if one != other])


@wrong("17.1", hint="both ends")
def edges_at_both_ends(places, size):
    return sent_over(places, 2 * size, leaving(places))


@wrong("17.1", BLOCKS, hint="edges")
def one_edge_for_each_node(places, size):
    return sent_over(places, size, set(places))


@wrong("17.1", BLOCKS, hint="edges")
def each_pair_of_nodes_once(places, size):
    pairs = {(one, other) for one, other in zip(places, places[1:] + places[:1], strict=True) if one != other}
    return sent_over(places, size, [one for one, _ in pairs])


@wrong("17.1", hint="a dict, bytes by node")
def a_list(places, size):
    return [2 * size] * len(places)


@right("17.1")
def by_the_parts_that_leave(places, size):
    steps, part = 2 * (len(places) - 1), size / len(places)
    return {node: steps * part * leaving(places).count(node) for node in set(places)}


@right("17.1")
def with_a_counter(places, size):
    found = Counter(one for rank, one in enumerate(places) if places[rank - len(places) + 1] != one)
    return {node: round(2 * (len(places) - 1) * size * found[node] / len(places)) for node in places}


# --- 17.2 -------------------------------------------------------------------------------------------------

ASKS = "its directives ask for the nodes, a task on each, the GPUs and the time"
STARTS = "srun starts torchrun: on all nodes, a rank for each GPU, with the script"
MEETS = "all meet by c10d under the job's number, at its first node"
PORTS = "each job has a port of its own"

NODES, TASKS, GPUS = "--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node={gpus}"
HEAD = f"#!/bin/bash\n#SBATCH {NODES}\n#SBATCH {TASKS}\n#SBATCH {GPUS}\n#SBATCH --time={{minutes}}\n"
PORT = "port=$((20000 + SLURM_JOB_ID % 10000))\n"
MEETING = '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$(hostname):$port"'
START = "srun torchrun --nnodes={nodes} --nproc-per-node={gpus} "
FILE = f"{HEAD}{PORT}{START}{MEETING} {{script}}\n"


def edited(number, *hold, hint, **edits):
    """Register FILE with an edit under the name of the mistake: a pair of texts that stand in it once."""
    ((name, (old, new)),) = edits.items()
    assert FILE.count(old) == 1

    def answer(script, nodes, gpus, minutes):
        return FILE.replace(old, new).format(script=script, nodes=nodes, gpus=gpus, minutes=minutes)

    answer.__name__ = name
    wrong(number, *hold, hint=hint)(answer)


NOT_ASKED = ("17.2", STARTS, MEETS, PORTS)
edited(*NOT_ASKED, hint="nodes", a_command_comes_first=("#!/bin/bash\n", "#!/bin/bash\nset -e\n"))
edited(*NOT_ASKED, hint="ntasks-per-node", a_torchrun_for_each_gpu=(TASKS, "--ntasks-per-node={gpus}"))
edited(*NOT_ASKED, hint="gpus-per-node", the_gpus_of_a_node_for_all=(GPUS, "--gpus={gpus}"))
edited(*NOT_ASKED, hint="time", minutes_as_hours=("{minutes}", "{minutes}:00:00"))

edited("17.2", ASKS, hint="srun", on_the_first_node_only=("srun torchrun", "torchrun"))
edited("17.2", ASKS, hint="nnodes", standalone_on_each=("--nnodes={nodes}", "--standalone"))
edited("17.2", ASKS, hint="nproc-per-node", one_rank_a_node=("--nproc-per-node={gpus} ", ""))
edited("17.2", ASKS, hint="the script", a_line_that_does_not_go_on=(f"{MEETING} ", f"{MEETING}\n    "))

edited("17.2", ASKS, STARTS, hint="words", a_name_that_nobody_has_set=("$SLURM_JOB_ID", "$JOB_ID"))
edited("17.2", ASKS, STARTS, hint="host", meets_at_localhost=("$(hostname)", "localhost"))
edited("17.2", ASKS, STARTS, hint="host", the_list_of_all_nodes=("$(hostname)", "$SLURM_JOB_NODELIST"))

edited("17.2", ASKS, STARTS, MEETS, hint="port", a_fixed_port=("$port", "29500"))
edited("17.2", ASKS, STARTS, MEETS, hint="port", the_job_as_port=(" % 10000", ""))


@wrong("17.2", hint="returns the text of a job file")
def prints_it(script, nodes, gpus, minutes):
    print(FILE.format(script=script, nodes=nodes, gpus=gpus, minutes=minutes))


@right("17.2")
def as_in_the_lesson(script, nodes, gpus, minutes):
    """With the names of the job's variables, options in two words, and lines that go on."""
    text = HEAD.format(nodes=nodes, gpus=gpus, minutes=f"{minutes // 60}:{minutes % 60:02}:00")
    text += "set -euo pipefail\nendpoint=$(hostname):$((20000 + SLURM_JOB_ID % 10000))\nsrun --wait=60 \\\n"
    text += '    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" \\\n'
    text += "    --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $endpoint \\\n"
    return text + f"    {script} --epochs 3\n"


@right("17.2")
def by_the_address(script, nodes, gpus, minutes):
    """As PyTorch's own example does it."""
    text = HEAD.format(nodes=nodes, gpus=gpus, minutes=minutes)
    text += "nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )\nhead_node=${nodes[0]}\n"
    text += 'head=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)\n'
    text += f"srun torchrun --nnodes {nodes} --nproc_per_node {gpus} --rdzv_id $SLURM_JOB_ID "
    return text + f"--rdzv_backend c10d --rdzv_endpoint $head:$((10000 + SLURM_JOB_ID % 50000)) {script}\n"
