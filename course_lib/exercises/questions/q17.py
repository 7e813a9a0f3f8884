"""The questions of lesson 17: a job file, an all_reduce in two levels, what a ring sends over a cable."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..in_rank.traffic import record_traffic
from ..in_rank.work import in_group, refuse_unless
from ..judging import Faults, by_call, far, first_fault, furthest
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, of_size, reports
from ..wording import number
from .cluster17 import LEFT, NO_DIRECTIVE, directives, gpus_of_a_node, minutes, names_a_shell, run_body

# --- 17.1 -------------------------------------------------------------------------------------------------

ASKS = "it asks for the nodes, their GPUs and the time"
STARTS = "each node runs the script in one rank for each of its GPUs"
MEETS = "all meet at one address, of a node of the job"
PORTS = "another job meets at another port"
Case = dict[str, Any]
WHICH_SHELL = "sbatch takes a script: for which shell?"
LOST = "A line that begins with an option continues a command. Where is that, and what joins the lines?"
NOT_ALONE = "Each torchrun must know how many nodes the job has."
REPLACED = "A variable is expanded where its line runs. In the job's body that is the first node only."


@question(
    "17.1",
    "job_file(script, nodes, gpus, minutes)",
    {ASKS: 1, STARTS: 1, MEETS: 1, PORTS: 1},
    rests={MEETS: STARTS, PORTS: MEETS},
)
def job_file(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    shapes = rng.sample([(2, 4), (3, 2), (4, 3), (5, 2)], 2)
    with_days = zip(shapes, (0, rng.randint(1, 3)), strict=True)
    cases = [_cluster(rng, nodes, gpus, days) for (nodes, gpus), days in with_days]
    for at, case in enumerate(cases):  # each in a process of its own, since a job file that hangs takes long
        (result,) = ask(_submitted, cases, at)
        yield from _of_a_job(case, result)


def _cluster(rng: random.Random, nodes: int, gpus: int, days: int) -> Case:
    first, net = rng.randint(2, 90), rng.randint(16, 31)
    begin = rng.choice(("gpu", "node", "n-a", "dgx"))
    job = rng.randint(70, 900) * 10_000 + rng.randint(800, 899)  # its last digits are no octal number
    return {
        "script": f"train_{rng.choice(('albert', 'resnet', 'digits'))}.py",
        "nodes": nodes,
        "gpus": gpus,
        "minutes": (days * 24 + rng.randint(2, 23)) * 60 + rng.randint(1, 59),
        "names": [f"{begin}{number:03}" for number in range(first, first + nodes)],
        "list": f"{begin}[{first:03}-{first + nodes - 1:03}]",
        "addresses": [f"172.{net}.4.{number}" for number in range(first, first + nodes)],
        "jobs": [job, job + 100 * rng.randint(1, 9)],  # with only 10 or 100 ports, the two would meet
    }


def _of_a_job(case: Case, result: Result) -> Iterator[Finding]:
    yield first_fault(ASKS, _faults_of_directives(case, result["text"]))
    jobs = [_Started(case, run) for run in result["runs"]]
    for started in jobs:
        yield first_fault(STARTS, started.faults_of_ranks())
        yield first_fault(MEETS, started.faults_of_the_meeting())
    ports = [started.port() for started in jobs]
    seen = f"job {case['jobs'][0]} meets at port {ports[0]}, job {case['jobs'][1]} at {ports[1]}"
    hint = "Two of your jobs may share a node. What does one have that the other does not?"
    if any(port is not None and not 1024 <= port <= 65535 for port in ports):
        hint = "A port is a number from 1024 to 65535, and the numbers of jobs grow far beyond that."
    elif None in ports:
        hint = "One of them is not a number. "
        hint += "Which digits of the job's number do you use, and how does bash read a leading 0?"
    elif ports[0] != ports[1]:
        hint = ""
    yield Finding(PORTS, not hint, seen, hint)


def _faults_of_directives(case: Case, text: str) -> Faults:
    asked = directives(text)
    nodes, gpus = asked.get("nodes", "nothing"), gpus_of_a_node(asked, case["nodes"])
    say = "are wanted; the #SBATCH lines say"
    if not text.startswith("#!"):
        yield "the first line is not a #! line", WHICH_SHELL
    if not names_a_shell(text):
        yield f"the first line is {text.splitlines()[0][:60]!r}; it names no shell", WHICH_SHELL
    if nodes not in (str(case["nodes"]), f"{case['nodes']}-{case['nodes']}"):
        seen = f"{case['nodes']} nodes {say} {nodes}"
        yield seen, "One option of sbatch is the number of nodes. Directives come before the first command."
    if gpus != case["gpus"]:
        seen = f"{case['gpus']} GPUs on each node {say} {gpus or 'nothing'}"
        yield (
            seen,
            "Without a directive the nodes may come without their GPUs. And do you count them per node?",
        )
    if minutes(asked.get("time", "")) != case["minutes"]:
        seen = f"{case['minutes']} minutes {say} {asked.get('time', 'nothing')!r}"
        yield (
            seen,
            "Hours, minutes, seconds: which is a single number to Slurm, and which are two with a colon?",
        )
    if NO_DIRECTIVE in asked:
        seen = f"{asked[NO_DIRECTIVE]!r} in an #SBATCH line is no directive"
        yield seen, "A directive has the name of an option and, if it takes one, its value."


FLAGS = {"standalone", "no-python", "module", "m", "run-path", "help", "h"}  # torchrun's, without a value


class _Started:
    """What a job's body started, as recorded by the stand-ins."""

    def __init__(self, case: Case, run: Result) -> None:
        self.case, self.said, self.nodes = case, run["said"], case["names"]
        self.lost = run["lost"]  # an option in the place of a command
        notes: dict[str, list[Result]] = {"torchrun": [], "python": [], "in vain": []}
        for note in run["notes"]:
            notes[note["what"]].append(note)
        self.agents, self.pythons, self.vain = notes.values()
        self.options, self.programs = [], []
        for agent in self.agents:
            options, program = _torchrun(agent["words"])
            self.options.append(options)
            self.programs.append(program)

    def faults_of_ranks(self) -> Faults:
        if self.lost:
            yield f"bash looked for a command with the name {self.lost!r}", LOST
        if not (notes := self.agents or self.pythons):
            seen = f"nothing was started on the nodes {', '.join(self.nodes)}; {self.said}"
            hint = (
                "On how many nodes does the body of a job file run, and what starts a command on all of them?"
            )
            if LEFT in self.said:
                hint = "The job ends with its body's last line. What makes that wait for what was started?"
            yield seen.removesuffix("; "), hint
        if self.agents and self.pythons:
            yield "some ranks are started by torchrun and some without", "Use one way or the other."
        counts = [sum(note["node"] == name for note in notes) for name in self.nodes]
        shown = ", ".join(f"{name}: {count}" for name, count in zip(self.nodes, counts, strict=True))
        yield from (self._of_agents if self.agents else self._of_pythons)(counts, shown)
        if self.vain:
            seen = "what was started on one node waited in vain for those on the others"
            yield seen, "They wait for each other. Does your body wait before it starts the next?"

    def _of_agents(self, counts: list[int], shown: str) -> Faults:
        case = self.case
        shown = f"torchruns on the nodes: {shown}"
        if max(counts) > 1:
            yield shown, "torchrun starts the ranks of its node itself. How many torchruns does a node need?"
        if min(counts) < 1:
            yield shown, "The body runs on the first node only. What starts a task on each?"
        for options, program in zip(self.options, self.programs, strict=True):
            alone, most = "standalone" in options, options.get("nnodes", "1").rsplit(":", 1)[-1]
            if alone or most != str(case["nodes"]):
                seen = f"torchrun is told of {'one node' if alone else f'{most} node(s)'}"
                yield f"{seen}, and there are {case['nodes']}", NOT_ALONE
            if (ranks := options.get("nproc-per-node", "1")) not in (str(case["gpus"]), "gpu", "auto"):
                seen = f"torchrun starts {ranks} ranks on a node with {case['gpus']} GPUs"
                yield seen, "Which option of torchrun sets the number of ranks?"
            if Path((program or [""])[0]).name != case["script"]:
                seen = f"torchrun runs {' '.join(program)[:60]!r}, not {case['script']}"
                yield seen, "What comes after torchrun's own options?"

    def _of_pythons(self, counts: list[int], shown: str) -> Faults:
        gpus, wanted = self.case["gpus"], self.case["nodes"] * self.case["gpus"]
        if counts != [gpus] * self.case["nodes"]:
            seen = f"processes of the script on the nodes: {shown}; each has {gpus} GPUs"
            yield seen, "Without torchrun, what starts a process for each GPU?"

        def numbers(name: str, node: str = "") -> list[int]:
            words = [str(note["told"].get(name)) for note in self.pythons if node in ("", note["node"])]
            return sorted(int(word) if word.isdigit() else -1 for word in words)

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            if numbers(name)[:1] == [-1]:
                seen = f"the script is started {wanted} times, and {name} is not set"
                yield seen, "Without torchrun, what tells each process which rank it is?"
        if (ranks := numbers("RANK")) != list(range(wanted)):
            yield f"the ranks are {ranks[:6]}…, and should be 0 to {wanted - 1}", REPLACED
        for node in self.nodes:
            if (local := numbers("LOCAL_RANK", node)) != list(range(gpus)):
                seen = f"on {node} LOCAL_RANK is {local}"
                yield seen, "Which of Slurm's numbers begins again on each node?"
        if (sizes := set(numbers("WORLD_SIZE"))) != {wanted}:
            yield f"WORLD_SIZE is {sorted(sizes)}", "How many ranks are there in all?"
        script = self.case["script"]
        if not all(any(Path(word).name == script for word in note["words"]) for note in self.pythons):
            yield f"it is not {script} that runs", "What comes after python?"

    def faults_of_the_meeting(self) -> Faults:
        places = self._endpoints()
        ids = {options.get("rdzv-id", "none") for options in self.options}
        hosts = sorted({host for host, _ in places})
        hint = "Each node looked it up for itself. Where can it be looked up for all?"
        if len(ids) > 1:
            yield f"they are told {len(ids)} different --rdzv-id", hint
        if len(places) > 1:
            yield f"they are sent to {len(places)} places, as {', '.join(hosts)[:80]}", hint
        if ids == {""}:
            seen = "they are told an empty --rdzv-id, and each torchrun makes one of its own then"
            yield seen, "What does the job have that is the same for all of its nodes?"
        ((host, _),) = places
        known = self.nodes + self.case["addresses"]
        if host not in known:
            hint = "Each job gets other nodes. How does a job learn their names?"
            if host in ("", "localhost", "127.0.0.1"):
                hint = (
                    "Which machine does each node find there? And which address is the same for all of them?"
                )
            yield f"they are sent to {host!r}; the nodes are {', '.join(self.nodes)}", hint
        place = self.nodes[known.index(host) % len(self.nodes)]
        # The rank that opens the store runs on this node, to which all are sent; c10d finds it by itself.
        first = [note["node"] for note in self.pythons if note["told"].get("RANK") == "0"]
        if self.agents:
            if {options.get("rdzv-backend", "static") for options in self.options} == {"c10d"}:
                return
            ranks = [options.get("node-rank", "0") for options in self.options]
            first = [agent["node"] for agent, rank in zip(self.agents, ranks, strict=True) if rank == "0"]
            if sorted(ranks) != [str(rank) for rank in range(len(self.nodes))]:
                seen = f"the static rendezvous is asked for, and the nodes are numbered {', '.join(ranks)}"
                yield seen, REPLACED
        if first != [place]:
            who = f"{'node' if self.agents else 'rank'} 0 is {', '.join(first) or 'nowhere'}"
            yield (
                f"they are sent to {place}, and {who}",
                "Which of them opens the store, and is it at that address?",
            )

    def _endpoints(self) -> set[tuple[str, int | None]]:
        """Return every (host, port) that the ranks are sent to."""
        environments = [note["told"] for note in self.pythons]
        places = [(own.get("MASTER_ADDR", ""), own.get("MASTER_PORT", "")) for own in environments]
        for options in self.options:
            if "rdzv-endpoint" in options:
                host, colon, port = options["rdzv-endpoint"].partition(":")
                places.append((host, port if colon else "29400"))
            else:
                places.append((options.get("master-addr", ""), options.get("master-port", "29500")))
        return {(host, int(port) if port.isdigit() else None) for host, port in places} or {("", None)}

    def port(self) -> int | None:
        return next(iter(self._endpoints()))[1]


def _torchrun(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split torchrun's arguments into its options, by name, and the program with its own arguments."""
    rest, options = list(words), dict[str, str]()
    while rest and rest[0].startswith("-"):
        name, given, value = rest.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not given and name not in FLAGS and rest:
            value = rest.pop(0)
        options[name] = value
    return options, rest


NOTE: Result = {"words": [str, ...], "told": {str: str}, "what": ("torchrun", "python", "in vain")}


@reports(
    lambda cases, at: {
        "text": str,
        "runs": [{"notes": [NOTE | {"node": tuple(cases[at]["names"])}, ...], "said": str, "lost": str}] * 2,
    }
)
def _submitted(answer: Any, cases: list[Case], at: int) -> Result:
    """Return the text of job file ``at`` and what its body did, run once for each job number."""
    for case in cases[: at + 1]:  # what an answer kept of one must not serve the next
        text = answer(case["script"], case["nodes"], case["gpus"], case["minutes"])
        refuse_unless(isinstance(text, str), "job_file(…) returns the text of a job file", text)
    if (bash := shutil.which("bash")) is None:
        raise Refused("there is no bash on this machine to run your job file")
    return {"text": text, "runs": [run_body(bash, text, case, job) for job in case["jobs"]]}


# --- 17.2 -------------------------------------------------------------------------------------------------

SUM = "every rank holds the sum over all ranks"
CABLE = "a node sends no more over the cable than one rank of each node would, in a ring"
UNCOUNTED = ("recv", "barrier")  # they send nothing


@question("17.2", "two_levels(tensor, per_node)", {SUM: 1, CABLE: 2}, rests={CABLE: SUM})
def two_levels(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    """Judge calls on the same ranks as nodes of different sizes: nothing kept of one call may serve the next.

    In the last call, the first tensor comes again, with other numbers in it.
    """
    ends = rng.sample([1, 4], 2)  # one node per rank, and one node for all
    yield from [*_on(ask, rng, 6, rng.sample([2, 3], 2)), *_on(ask, rng, 4, [2, *ends])]


def _on(ask: Ask, rng: random.Random, ranks: int, nodes_of: list[int]) -> Iterator[Finding]:
    calls = [(per_node, rng.randrange(2**31), [rng.randint(31, 89), 67]) for per_node in nodes_of]
    calls.append((nodes_of[0], rng.randrange(2**31), calls[0][2]))
    results = by_call(ask(_summed, calls, nprocs=ranks))
    first_is_right = False
    for call, ((per_node, seed, shape), of_call) in enumerate(zip(calls, results, strict=True)):
        nodes, size = ranks // per_node, 8 * math.prod(shape)
        own = [_numbers(seed, rank, shape) for rank in range(ranks)]
        wrong, gap = furthest(far(result["sum"], torch.stack(own).sum(0)) for result in of_call)
        first_is_right = first_is_right or (call == 0 and gap == 0)
        got, mates = of_call[wrong]["sum"], own[wrong // per_node * per_node :][:per_node]
        hint = "The sum is right only if the numbers of every rank reach it, each of them once."
        if far(got, torch.stack(mates).sum(0)) == 0:
            hint = "That is the sum of its node. How are the sums of the nodes combined?"
        elif call == len(nodes_of) and far(got, own[wrong]) == 0 and first_is_right:
            hint = "The same tensor came before, with other numbers in it. It must be added up again."
        elif far(got, own[wrong]) == 0:
            hint = "It still has its own. How do ranks that are not the first of their node get the sum?"
        elif call and per_node in (1, ranks):
            hint = "One rank on each node, or one node for all: "
            hint += "what is there to do in each of the two levels?"
        elif call:
            hint = "The first call is right, but one with other nodes is not. What do you keep of the first?"
        seen = f"{nodes} nodes with {per_node} ranks each: rank {wrong} is off by up to {gap:g}"
        yield Finding(SUM, gap == 0, seen, hint)
        most = 2 * (nodes - 1) / nodes * size
        of_rank = [result["sent"] for result in of_call]
        sent = [sum(of_rank[first : first + per_node]) for first in range(0, ranks, per_node)]
        node, largest = furthest(sent)
        seen = f"of {size:,} bytes in a tensor, node {node} sent {largest:,.0f} over the cable;"
        seen += f" {most:,.0f} are enough"
        hint = "Which ranks of a node have to send to other nodes at all, and how much?"
        if nodes > 2 and largest <= (nodes - 1) * size * 1.01 and min(sent) < largest:
            hint = "With two nodes that would be enough. With more, one node sends for all of them."
        yield Finding(CABLE, largest <= 1.02 * most + 256, seen, hint)


def _numbers(seed: int, rank: int, shape: list[int]) -> torch.Tensor:
    """Draw whole numbers in float64, too large for float32, with exact sums in any order."""
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randint(-(2**40), 2**40, shape, generator=generator).double()


@reports(lambda calls: [{"sum": of_size(NUMBER, *shape), "sent": float} for *_, shape in calls])
@in_group
def _summed(answer: Any, calls: list[tuple[int, int, list[int]]]) -> list[Result]:
    cable = _watch_the_cable()
    results, last = [], len(calls) - 1
    with record_traffic() as seen:
        for call, (per_node, seed, shape) in enumerate(calls):
            tensor = _numbers(seed, dist.get_rank(), shape)
            if call == 0:
                first = tensor
            if call == last:  # the same tensor object, with other numbers
                tensor = first.copy_(tensor)
            cable |= {"per_node": per_node, "sent": 0.0}
            held = tensor.view_as(tensor)  # as somebody else holds the same memory
            answer(tensor, per_node)
            if list(tensor.shape) != shape:
                changed = f"its shape is now {tuple(tensor.shape)}"
                raise Refused(f"two_levels changes the tensor in place; {changed}")
            results.append({"sum": held.clone(), "sent": cable["sent"]})
    if sum(name not in UNCOUNTED for name, _ in seen.calls) > cable["calls"]:
        raise Refused("not every call went through torch.distributed's own functions; use those")
    return results


# The methods of a process group that torch's functions call. Not every version of torch has all of them.
COLLECTIVES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "reduce": ("reduce",),
    "broadcast": ("broadcast",),
    "all_gather": ("allgather", "_allgather_base", "all_gather_single"),
    "gather": ("gather", "gather_single"),
    "scatter": ("scatter",),
    "reduce_scatter": ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
}


def _watch_the_cable() -> Result:
    """Count, from now on, the bytes that this rank sends to other nodes, of ``per_node`` ranks each.

    What it writes into the store counts, too, since any of them may read it.
    """
    cable: Result = {"per_node": 1, "sent": 0.0, "calls": 0}
    store: Any = dist.Store
    group, put = dist.ProcessGroup, store.set

    def noted(real: Any, name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            cable["sent"] += _crossing(self, name, cable["per_node"], args)
            cable["calls"] += 1
            return real(self, *args, **named)

        return call

    def stored(self: Any, key: str, value: Any) -> None:
        cable["sent"] += len(value)
        put(self, key, value)

    store.set = stored
    for name, attributes in (COLLECTIVES | {"send": ("send",)}).items():
        for attribute in filter(partial(hasattr, group), attributes):
            setattr(group, attribute, noted(getattr(group, attribute), name))
    return cable


def _crossing(group: Any, name: str, per_node: int, args: tuple[Any, ...]) -> float:
    """Return the bytes sent to other nodes: in a ring for all_reduce and the like, directly for the rest."""
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank() // per_node
    away = [rank // per_node != here for rank in ranks]
    mine, n = ranks.index(dist.get_rank()), len(ranks)
    if not any(away):
        return 0.0
    if name == "send":
        return float(_bytes(args[0]) * away[args[1]])
    if name in ("reduce", "broadcast", "gather", "scatter"):
        root = getattr(args[-1], "rootRank", 0)
        if name in ("reduce", "gather"):  # to the root
            return float(_bytes(args[name == "gather"]) * away[root])
        others = len({rank // per_node for rank in ranks}) - 1 if name == "broadcast" else sum(away)
        return float(_bytes(args[0]) * others * (root == mine))
    if name == "all_to_all":
        return _bytes(args[1]) * sum(away) / n
    size = {"all_reduce": 2 * _bytes(args[0]) / n, "all_gather": _bytes(args[1])}
    return away[(mine + 1) % n] * (n - 1) * size.get(name, _bytes(args[1]) / n)


def _bytes(given: Any) -> int:
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(_bytes, given)) if isinstance(given, list | tuple) else 0


# --- 17.3 -------------------------------------------------------------------------------------------------

NODES = "with the ranks of a node side by side, each node sends over one edge of the ring"
ORDER = "in any other order, an edge counts for the node that it leaves"
NOTHING = "every node is in the answer, and one that sends nothing has 0"
NODE_NAMES = ["n1", "n11"]  # one is contained in the other
MORE_NAMES = ["n2", "n21", "a", "b"]
EDGE = "How much goes over one edge of a ring of that many ranks?"
OWN = "How much of it goes to a rank on the same node?"


@question("17.3", "cable(places, size)", {NODES: 1, ORDER: 1, NOTHING: 1}, rests={ORDER: NODES})
def cable(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    drawn = [
        (what, _places(rng, what, joined)) for what in (NODES, ORDER, NOTHING) for joined in (False, True)
    ]
    drawn.append((NODES, rng.sample(NODE_NAMES, 2)))  # two ranks: the next one is also the one before
    cases = [(what, places, rng.randint(10**11, 10**12)) for what, places in drawn]  # beyond float32
    others: list[Any] = [_places(rng, NODES) if what == NODES else None for what, _ in drawn]
    (results,) = ask(_sent_over, [case[1:] for case in cases], others)
    for (what, places, size), other, (got, again, *then) in zip(cases, others, results, strict=True):
        right = _over(places, size)
        off = [node for node in right if not _same(got.get(node, math.inf), right[node])]
        node = (off or places)[0]
        seen = f"ranks on the nodes {', '.join(places)}, {size:,} bytes: node {node} sends {right[node]:,.0f}"
        seen, hint = f"{seen}, and {got.get(node, 'nothing')} came out", _of_a_ring(places, size, node, got)
        if got.keys() - right.keys():
            seen = f"the nodes are {sorted(right)}, and {sorted(got)} came out"
            hint = "Which nodes are there?"
        yield Finding(what, not off and got.keys() == right.keys(), seen, hint)
        seen = f"with the same list once more it returned {again}"
        yield Finding(what, again == got, seen, "What you are given must be unchanged afterwards.")
        for sent in then:
            right = _over(other, size)
            seen = f"with other nodes in the very same list it returned {sent}, and {right} is right"
            hint = (
                "The list is the same object, with other nodes. What do you keep from one call to the next?"
            )
            ok = sent.keys() == right.keys() and all(_same(sent[node], right[node]) for node in right)
            yield Finding(what, ok, seen, hint)


def _same(got: Any, right: float) -> bool:
    """Compare up to a few bytes, since an answer may round to whole ones."""
    return far(got, right) <= 1e-9 * max(right, 1)


def _places(rng: random.Random, what: str, joined: bool = False) -> list[str]:
    """Draw the nodes of the ranks; ``joined``: in any other order, the last rank sits where rank 0 does."""
    names = NODE_NAMES + rng.sample(MORE_NAMES, rng.randint(0, 2))
    rng.shuffle(names)
    if what == NOTHING:
        return [names[0]] * rng.randint(3, 6)
    places = block = [name for name in names for _ in range(rng.randint(3, 5))]
    while what == ORDER and (_edges(places) <= len(names) + 1 or (places[0] == places[-1]) != joined):
        places = rng.sample(block, len(block))
    return places


def _edges(places: list[str]) -> int:
    return sum(one != other for one, other in zip(places, [*places[1:], places[0]], strict=True))


def _over(places: list[str], size: float) -> dict[str, float]:
    n = len(places)
    sent = dict.fromkeys(places, 0.0)
    for i, place in enumerate(places):
        if places[(i + 1) % n] != place:
            sent[place] += 2 * (n - 1) / n * size
    return sent


def _of_a_ring(places: list[str], size: int, node: str, got: Result) -> str:
    n, nodes, over = len(places), len(set(places)), _over(places, size)
    right, halves = over[node], all(_same(got.get(each, -1), value / 2) for each, value in over.items())
    edge = 2 * (n - 1) / n * size
    of_nodes = (right / edge) * 2 * (nodes - 1) / nodes * size
    known = [
        (2 * right, "That is twice as much. Does an edge count where it leaves a node, or at both ends?"),
        (places.count(node) * edge, f"That is all that its ranks send. {OWN}"),
        (edge, "That is one edge. How many edges of the ring leave this node?"),
        (right - edge, _missing(places, node)),
        (right / 2 if halves else right, "A ring goes round twice: once to add up, once to distribute."),
        (right * n / (n - 1) / 2, f"That is the tensor, once for each edge. {EDGE}"),
        (right * n / (n - 1), "In each step a rank sends a part of the tensor. How many steps are there?"),
        (of_nodes, f"That is divided as if the nodes were the ring's members. {EDGE}"),
        (_edges(places) * edge, "That is what crosses in all. How much of it leaves this node?"),
    ]
    if node not in got:
        return "Which nodes are there, and which of them send nothing?"
    hit = [hint for wrong, hint in known if wrong != right and _same(got[node], wrong)]
    return (hit or ["Rank by rank: which one is next in the ring, and is it on the same node?"])[0]


def _missing(places: list[str], node: str) -> str:
    """Choose the hint for one edge too few: of the node with the last rank, or of another one."""
    last = "Which rank comes after the last one? " if node == places[-1] != places[0] else ""
    return (
        f"One edge of this node is missing there. {last}Do two edges to the same node count once, or twice?"
    )


@reports(lambda _, others: [[{str: NUMBER}] * (2 + bool(other)) for other in others])
def _sent_over(answer: Any, cases: list[Any], others: list[Any]) -> list[list[Result]]:
    """Call twice for each case, and again with the nodes in ``others`` in the same list, if there are any."""
    results = []
    for (given, size), other in zip(cases, others, strict=True):
        results.append([_as_numbers(answer(given, size)) for _ in "ab"])
        if other:
            given[:] = other
            results[-1].append(_as_numbers(answer(given, size)))
    return results


def _as_numbers(sent: Any) -> Result:
    of_nodes = isinstance(sent, dict) and all(isinstance(node, str) for node in sent)
    refuse_unless(of_nodes, "cable(…) returns a dict, bytes by node", sent)
    values = {node: number(value) for node, value in sent.items()}
    for strange in (value for value in values.values() if isinstance(value, str)):
        raise Refused(f"cable(…) returns a number of bytes for each node; one of them is {strange}")
    return values
