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

from ..asking import Ask, Finding, Refused, far, in_group, number, question, told
from ..traffic import traffic
from .cluster17 import LEFT, NO_ORDER, gpus_of_a_node, minutes, names_a_shell, orders, run_body

# --- 17.1 -------------------------------------------------------------------------------------------------

ASKS = "it asks for the nodes, for their GPUs, and for so much time"
STARTS = "each node starts the script on a rank for each of its GPUs"
MEETS = "all meet at one address, of a node of the job"
PORTS = "another job meets at another port"
Told = dict[str, Any]


@question(
    "17.1",
    "job_file(script, nodes, gpus, minutes)",
    {ASKS: 1, STARTS: 1, MEETS: 1, PORTS: 1},
    rests={MEETS: STARTS, PORTS: MEETS},
)
def job_file(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    shapes = rng.sample([(2, 4), (3, 2), (4, 3), (5, 2)], 2)
    shapes = zip(shapes, (0, rng.randint(1, 3)), strict=True)
    cases = [_cluster(rng, nodes, gpus, days) for (nodes, gpus), days in shapes]
    for at, case in enumerate(cases):  # each in a process of its own, since a job file that hangs takes long
        (found,) = ask(_submitted, cases, at)
        yield from _of_a_job(case, found)


def _cluster(rng: random.Random, nodes: int, gpus: int, days: int) -> Told:
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


def _first(what: str, *faults: tuple[bool, str, str]) -> Finding:
    """Report the first of the faults, each (is it one, what was seen, a hint), or that all is well."""
    found = [Finding(what, False, seen, hint) for bad, seen, hint in faults if bad]
    return found[0] if found else Finding(what, True)


def _of_a_job(case: Told, found: Told) -> Iterator[Finding]:
    yield _of_the_orders(case, found["text"])
    ports = []
    for run in found["runs"]:
        started = _Started(case, run)
        yield started.of_ranks()
        yield started.of_the_meeting()
        ports.append(started.port())
    seen = f"job {case['jobs'][0]} meets at port {ports[0]}, job {case['jobs'][1]} at {ports[1]}"
    outside = any(port is not None and not 1024 <= port <= 65535 for port in ports)
    hint = "A port is a number from 1024 to 65535, and the numbers of jobs grow far beyond that."
    same = "Two of your jobs may share a node. What does one have that the other has not?"
    none = (
        "One of them is no number. Which digits does the job's number have there, and what is that to bash?"
    )
    yield _first(
        PORTS, (outside, seen, hint), (None in ports, seen, none), (ports[0] == ports[1], seen, same)
    )


WHICH_SHELL = "sbatch takes scripts: of which shell?"


def _of_the_orders(case: Told, text: str) -> Finding:
    asked = orders(text)
    nodes, gpus = asked.get("nodes", "nothing"), gpus_of_a_node(asked, case["nodes"])
    say = "are wanted; the #SBATCH lines say"
    return _first(
        ASKS,
        (not text.startswith("#!"), "the first line is no #! line", WHICH_SHELL),
        (
            not names_a_shell(text),
            f"the first line is {text.splitlines()[0][:60]!r}; no shell is there" if text else "",
            WHICH_SHELL,
        ),
        (
            nodes not in (str(case["nodes"]), f"{case['nodes']}-{case['nodes']}"),
            f"{case['nodes']} nodes {say} {nodes}",
            "One option of sbatch is the number of nodes. Orders stand above the first command.",
        ),
        (
            gpus != case["gpus"],
            f"{case['gpus']} GPUs on each node {say} {gpus or 'nothing'}",
            "Without an order the nodes may come without their GPUs. And are they counted on a node?",
        ),
        (
            minutes(asked.get("time", "")) != case["minutes"],
            f"{case['minutes']} minutes {say} {asked.get('time', 'nothing')!r}",
            "Hours, minutes, seconds: which of them does Slurm read in a lone number, and in two?",
        ),
        (
            NO_ORDER in asked,
            f"{asked.get(NO_ORDER, '')!r} in an #SBATCH line is no order",
            "An order has the name of an option and, where that takes one, its value.",
        ),
    )


LOST = "A line that begins with an option belongs to a command. Where is that, and what joins the two?"
NOT_ALONE = "Each of them must know how many nodes belong to the training."
REPLACED = "A variable is replaced where its line is run. In the job's body that is the first node alone."
FLAGS = {"standalone", "no-python", "module", "m", "run-path", "help", "h"}  # torchrun's, without a value


class _Started:
    """What a job's body started, as recorded by the stand-ins."""

    def __init__(self, case: Told, run: Told) -> None:
        self.case, self.said, self.nodes = case, run["said"], case["names"]
        self.lost = run["lost"]  # an option in the place of a command
        notes: dict[str, list[Told]] = {"torchrun": [], "python": [], "in vain": []}
        for note in run["notes"]:
            notes[note["what"]].append(note)
        self.agents, self.pythons, self.vain = notes.values()
        self.options, self.programs = [], []
        for agent in self.agents:
            options, program = _torchrun(agent["words"])
            self.options.append(options)
            self.programs.append(program)

    def of_ranks(self) -> Finding:
        notes = self.agents or self.pythons
        counts = [sum(note["node"] == name for note in notes) for name in self.nodes]
        shown = ", ".join(f"{name}: {count}" for name, count in zip(self.nodes, counts, strict=True))
        seen = f"nothing was started on the nodes {', '.join(self.nodes)}; {self.said}"
        hint = "On how many nodes does the body of a job file run, and what starts something on all?"
        if LEFT in self.said:
            hint = "The job ends with its body's last line. What makes that wait for what was started?"
        both = "some ranks are started by torchrun and some without"
        vain = "what was started on one node waited in vain for those on the others"
        return _first(
            STARTS,
            (bool(self.lost), f"bash looked for a command with the name {self.lost!r}", LOST),
            (not notes, seen.removesuffix("; "), hint),
            (bool(self.agents and self.pythons), both, "Either, or."),
            *(self._of_agents(counts, shown) if self.agents else self._of_pythons(counts, shown)),
            (
                bool(self.vain),
                vain,
                "They wait for each other. Does your body wait before it starts the next?",
            ),
        )

    def _of_agents(self, counts: list[int], shown: str) -> Iterator[tuple[bool, str, str]]:
        case = self.case
        shown = f"torchruns on the nodes: {shown}"
        hint = "torchrun starts the ranks of its node itself. How many of it does a node need?"
        yield max(counts) > 1, shown, hint
        yield min(counts) < 1, shown, "The body runs on the first node only. What starts a task on each?"
        for options, program in zip(self.options, self.programs, strict=True):
            alone, most = "standalone" in options, options.get("nnodes", "1").rsplit(":", 1)[-1]
            seen = f"torchrun is told of {'one node' if alone else f'{most} node(s)'}"
            yield alone or most != str(case["nodes"]), f"{seen}, and there are {case['nodes']}", NOT_ALONE
            ranks = options.get("nproc-per-node", "1")
            seen = f"torchrun starts {ranks} ranks on a node with {case['gpus']} GPUs"
            hint = "Which option of torchrun is the number of ranks?"
            yield ranks not in (str(case["gpus"]), "gpu", "auto"), seen, hint
            seen = f"torchrun runs {' '.join(program)[:60]!r}, not {case['script']}"
            hint = "What comes after torchrun's own options?"
            yield Path((program or [""])[0]).name != case["script"], seen, hint

    def _of_pythons(self, counts: list[int], shown: str) -> Iterator[tuple[bool, str, str]]:
        gpus, wanted = self.case["gpus"], self.case["nodes"] * self.case["gpus"]
        seen = f"processes of the script on the nodes: {shown}; each has {gpus} GPUs"
        hint = "Without torchrun, who starts a process for each GPU?"
        yield counts != [gpus] * self.case["nodes"], seen, hint

        def numbers(name: str, node: str = "") -> list[int]:
            told_ = [str(note["told"].get(name)) for note in self.pythons if node in ("", note["node"])]
            return sorted(int(each) if each.isdigit() else -1 for each in told_)

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            seen = f"the script is started {wanted} times, and {name} is not set"
            yield numbers(name)[:1] == [-1], seen, "Without torchrun, who tells each process who it is?"
        seen = f"the ranks are {numbers('RANK')[:6]}…, and should be 0 to {wanted - 1}"
        yield numbers("RANK") != list(range(wanted)), seen, REPLACED
        for node in self.nodes:
            seen = f"on {node} LOCAL_RANK is {numbers('LOCAL_RANK', node)}"
            hint = "Which of Slurm's numbers begins again on each node?"
            yield numbers("LOCAL_RANK", node) != list(range(gpus)), seen, hint
        sizes = set(numbers("WORLD_SIZE"))
        yield sizes != {wanted}, f"WORLD_SIZE is {sorted(sizes)}", "How many ranks are there in all?"
        script = self.case["script"]
        other = not all(any(Path(word).name == script for word in note["words"]) for note in self.pythons)
        yield other, f"it is not {script} that runs", "What comes after python?"

    def of_the_meeting(self) -> Finding:
        places = self._endpoints()
        ids = {options.get("rdzv-id", "none") for options in self.options}
        hosts = sorted({host for host, _ in places})
        seen = f"they are sent to {len(places)} places, as {', '.join(hosts)[:80]}"
        if len(ids) > 1:
            seen = f"they are told {len(ids)} different --rdzv-id"
        if len(places) > 1 or len(ids) > 1:
            return Finding(MEETS, False, seen, "Each node looked it up for itself. Who looks it up for all?")
        if ids == {""}:
            seen = "they are told an empty --rdzv-id, and each torchrun makes one of its own then"
            return Finding(MEETS, False, seen, "What has the job that is the same for all of its nodes?")
        ((host, _),) = places
        known = self.nodes + self.case["addresses"]
        hint = "The nodes are others in each job. How does a job learn their names?"
        if host in ("", "localhost", "127.0.0.1"):
            hint = "Whom does each node find there? And what is the same place for all of them?"
        if host not in known:
            seen = f"they are sent to {host!r}; the nodes are {', '.join(self.nodes)}"
            return Finding(MEETS, False, seen, hint)
        return self._of_its_first(self.nodes[known.index(host) % len(self.nodes)])

    def _of_its_first(self, place: str) -> Finding:
        """Check that the rank that opens the store runs on this node, to which all are sent."""
        first = [note["node"] for note in self.pythons if note["told"].get("RANK") == "0"]
        if self.agents:
            if {options.get("rdzv-backend", "static") for options in self.options} == {"c10d"}:
                return Finding(MEETS, True)
            ranks = [options.get("node-rank", "0") for options in self.options]
            first = [agent["node"] for agent, rank in zip(self.agents, ranks, strict=True) if rank == "0"]
            if sorted(ranks) != [str(each) for each in range(len(self.nodes))]:
                seen = f"the static meeting is asked for, and the nodes are numbered {', '.join(ranks)}"
                return Finding(MEETS, False, seen, REPLACED)
        who = f"{'node' if self.agents else 'rank'} 0 is {', '.join(first) or 'nowhere'}"
        seen = f"they are sent to {place}, and {who}"
        return Finding(MEETS, first == [place], seen, "Who opens the store at that address?")

    def _endpoints(self) -> set[tuple[str, int | None]]:
        """Return every (host, port) that the ranks are sent to."""
        told_ = [
            (note["told"].get("MASTER_ADDR", ""), note["told"].get("MASTER_PORT", ""))
            for note in self.pythons
        ]
        for options in self.options:
            if "rdzv-endpoint" in options:
                host, colon, port = options["rdzv-endpoint"].partition(":")
                told_.append((host, port if colon else "29400"))
            else:
                told_.append((options.get("master-addr", ""), options.get("master-port", "29500")))
        return {(host, int(port) if port.isdigit() else None) for host, port in told_} or {("", None)}

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


def _submitted(answer: Any, cases: list[Told], at: int) -> Told:
    """Return the text of job file ``at`` and what its body did, run once for each job number."""
    for case in cases[: at + 1]:  # what an answer kept of one must not serve the next
        text = answer(case["script"], case["nodes"], case["gpus"], case["minutes"])
        if not isinstance(text, str):
            raise Refused(f"job_file(…) returns the text of a job file; it returned {told(text)}")
    if (bash := shutil.which("bash")) is None:
        raise Refused("there is no bash on this machine to run your job file")
    return {"text": text, "runs": [run_body(bash, text, case, job) for job in case["jobs"]]}


# --- 17.2 -------------------------------------------------------------------------------------------------

SUM = "every rank holds the sum over all ranks"
CABLE = "a node sends no more over the cable than one rank of each node would, in a ring"


@question("17.2", "two_levels(tensor, per_node)", {SUM: 1, CABLE: 2}, rests={CABLE: SUM})
def two_levels(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    """Judge calls on the same ranks as nodes of different sizes: nothing kept of one call may serve the next.

    In the last call, the first tensor comes again, with other numbers in it.
    """
    ends = rng.sample([1, 4], 2)  # one node per rank, and one node for all
    found = [*_on(ask, rng, 6, rng.sample([2, 3], 2)), *_on(ask, rng, 4, [2, *ends])]
    yield from found


def _on(ask: Ask, rng: random.Random, ranks: int, nodes_of: list[int]) -> Iterator[Finding]:
    calls = [(per_node, rng.randrange(2**31), [rng.randint(31, 89), 67]) for per_node in nodes_of]
    calls.append((nodes_of[0], rng.randrange(2**31), calls[0][2]))
    held = ask(_summed, calls, nprocs=ranks)
    for call, (per_node, seed, shape) in enumerate(calls):
        nodes, size = ranks // per_node, 8 * math.prod(shape)
        each = [_numbers(seed, rank, shape) for rank in range(ranks)]
        gaps = [far(rank[call]["held"], torch.stack(each).sum(0)) for rank in held]
        wrong = gaps.index(max(gaps))
        got, mates = held[wrong][call]["held"], each[wrong // per_node * per_node :][:per_node]
        hint = "What a rank adds up is right only if everything of every node reaches it, and once."
        if far(got, torch.stack(mates).sum(0)) == 0:
            hint = "That is the sum of its node. How do the nodes come together?"
        elif call == len(nodes_of) and far(got, each[wrong]) == 0 and _all_right(held, calls[0], 0):
            hint = "The same tensor came before, with other numbers in it. It must be added up again."
        elif far(got, each[wrong]) == 0:
            hint = "It holds what it began with. Who tells the ranks that are not the first of their node?"
        elif call and per_node in (1, ranks):
            hint = (
                "One rank on each node, or one node for all: what is there to do in each of the two levels?"
            )
        elif call:
            hint = "The first call is right, and one for other nodes is not. What does it find of the first?"
        seen = f"{nodes} nodes with {per_node} ranks each: rank {wrong} is off by up to {max(gaps):g}"
        yield Finding(SUM, max(gaps) == 0, seen, hint)
        most = 2 * (nodes - 1) / nodes * size
        of_rank = [rank[call]["sent"] for rank in held]
        sent = [sum(of_rank[first : first + per_node]) for first in range(0, ranks, per_node)]
        seen = f"of {size:,} bytes in a tensor, node {sent.index(max(sent))} sent {max(sent):,.0f}"
        hint = "Which ranks of a node have to talk to other nodes at all, and about how much?"
        if nodes > 2 and max(sent) <= (nodes - 1) * size * 1.01 and min(sent) < max(sent):
            hint = "With two nodes that is all it takes. With more, one node sends for all of them."
        yield Finding(
            CABLE, max(sent) <= 1.02 * most + 256, f"{seen} over the cable; {most:,.0f} are enough", hint
        )


def _all_right(held: list[Any], given: tuple[int, int, list[int]], call: int) -> bool:
    _, seed, shape = given
    total = torch.stack([_numbers(seed, rank, shape) for rank in range(len(held))]).sum(0)
    return all(far(rank[call]["held"], total) == 0 for rank in held)


def _numbers(seed: int, rank: int, shape: list[int]) -> torch.Tensor:
    """Draw whole numbers in float64, too large for float32, with exact sums in any order."""
    dice = torch.Generator().manual_seed(seed + rank)
    return torch.randint(-(2**40), 2**40, shape, generator=dice).double()


@in_group
def _summed(answer: Any, calls: list[tuple[int, int, list[int]]]) -> list[Told]:
    cable = _watch_the_cable()
    found, last = [], len(calls) - 1
    with traffic() as seen:
        for call, (per_node, seed, shape) in enumerate(calls):
            tensor = _numbers(seed, dist.get_rank(), shape)
            if call == 0:
                first = tensor
            if call == last:  # the same tensor object, with other numbers
                tensor = first.copy_(tensor)
            cable |= {"per_node": per_node, "sent": 0.0}
            answer(tensor, per_node)
            if list(tensor.shape) != shape:
                raise Refused(
                    f"two_levels changes the tensor in place; its shape is now {tuple(tensor.shape)}"
                )
            found.append({"held": tensor.clone(), "sent": cable["sent"]})
    if sum(name not in UNCOUNTED for name, _ in seen.calls) > cable["calls"]:
        raise Refused("not every call went through torch.distributed's own functions; use those")
    return found


UNCOUNTED = ("recv", "barrier")  # they send nothing


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


def _watch_the_cable() -> Told:
    """Count, from now on, the bytes that this rank sends to other nodes, of ``per_node`` ranks each.

    What it writes into the store counts, too, since any of them may read it.
    """
    cable: Told = {"per_node": 1, "sent": 0.0, "calls": 0}
    group, put = dist.ProcessGroup, dist.Store.set

    def noted(real: Any, name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            cable["sent"] += _crossing(self, name, cable["per_node"], args)
            cable["calls"] += 1
            return real(self, *args, **named)

        return call

    def stored(self: Any, key: str, value: Any) -> None:
        cable["sent"] += len(value)
        put(self, key, value)

    dist.Store.set = stored
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


@question("17.3", "cable(places, size)", {NODES: 1, ORDER: 1, NOTHING: 1}, rests={ORDER: NODES})
def cable(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    drawn = [(what, _places(rng, what)) for what in (NODES, ORDER, NOTHING) for _ in "ab"]
    drawn.append((NODES, rng.sample(NODE_NAMES, 2)))  # two ranks: the next one is also the one before
    cases = [(what, places, rng.randint(10**11, 10**12)) for what, places in drawn]  # beyond float32
    others = [_places(rng, NODES) if what == NODES else None for what, _ in drawn]
    (found,) = ask(_sent_over, [case[1:] for case in cases], others)
    for (what, places, size), other, (got, again, *then) in zip(cases, others, found, strict=True):
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
        yield Finding(what, again == got, seen, "What you are given must be the same afterwards.")
        for sent in then:
            right = _over(other, size)
            seen = f"with other nodes in the very same list it returned {sent}, and {right} is right"
            hint = "What is kept from one call to the next? The list is the same, and what is in it is not."
            ok = sent.keys() == right.keys() and all(_same(sent[node], right[node]) for node in right)
            yield Finding(what, ok, seen, hint)


def _same(got: Any, right: float) -> bool:
    """Compare up to a few bytes, since an answer may round to whole ones."""
    return far(got, right) <= 1e-9 * max(right, 1)


def _places(rng: random.Random, what: str) -> list[str]:
    names = NODE_NAMES + rng.sample(MORE_NAMES, rng.randint(0, 2))
    rng.shuffle(names)
    if what == NOTHING:
        return [names[0]] * rng.randint(3, 6)
    places = block = [name for name in names for _ in range(rng.randint(3, 5))]
    while what == ORDER and _edges(places) <= len(names) + 1:
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


EDGE = "What goes over an edge of a ring of so many ranks?"
OWN = "What of it goes to a rank on the same node?"


def _of_a_ring(places: list[str], size: int, node: str, got: Told) -> str:
    n, nodes, right = len(places), len(set(places)), _over(places, size)[node]
    edge = 2 * (n - 1) / n * size
    known = [
        (2 * right, "That is twice as much. Does an edge count where it leaves a node, or at both ends?"),
        (places.count(node) * edge, f"That is all that its ranks send. {OWN}"),
        (edge, "That is one edge. How many edges of the ring leave this node?"),
        (right - edge, "A ring is closed: who comes after the last rank?"),
        (right / 2, "A ring goes round twice: once to add up, once to hand out."),
        (
            right * n / (n - 1) / 2,
            f"That is the tensor, once for each edge. {EDGE}",
        ),
        (right * n / (n - 1), "In each step a rank sends a part of the tensor. How many steps are there?"),
        (
            (right / edge) * 2 * (nodes - 1) / nodes * size,
            f"Divided as if the nodes were the ring's members. {EDGE}",
        ),
        (_edges(places) * edge, "That is what crosses in all. Which of it leaves this node?"),
    ]
    if node not in got:
        return "Which nodes are there, and which of them send nothing?"
    hit = [hint for wrong, hint in known if wrong != right and _same(got[node], wrong)]
    return (hit or ["Rank by rank: who is next in the ring, and does that one sit on the same node?"])[0]


def _sent_over(answer: Any, cases: list[Any], others: list[Any]) -> list[list[Told]]:
    """Call twice for each case, and again with the nodes in ``others`` in the same list, if there are any."""
    found = []
    for (given, size), other in zip(cases, others, strict=True):
        found.append([_as_numbers(answer(given, size)) for _ in "ab"])
        if other:
            given[:] = other
            found[-1].append(_as_numbers(answer(given, size)))
    return found


def _as_numbers(sent: Any) -> Told:
    if not isinstance(sent, dict) or not all(isinstance(node, str) for node in sent):
        raise Refused(f"cable(…) returns a dict, bytes by node; it returned {told(sent)}")
    values = {node: number(value) for node, value in sent.items()}
    for strange in (value for value in values.values() if isinstance(value, str)):
        raise Refused(f"cable(…) returns a number of bytes for each node; one of them is {strange}")
    return values
