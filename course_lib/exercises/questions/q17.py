"""The questions of lesson 17: a job file, an all_reduce in two levels, what a ring sends over a cable."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..asking import Ask, Finding, Refused, far, in_group, number, question, told
from .cluster17 import STAND_IN
from .q05 import COLLECTIVES

# --- 17.1 -------------------------------------------------------------------------------------------------

ASKS = "it asks for the nodes, for their GPUs, and for so much time"
STARTS = "each node starts the script on a rank for each of its GPUs"
MEETS = "all meet at one address, of a node of the job"
PORTS = "another job meets at another port"
SECONDS = 20.0  # that a job file may take on the stand-ins
NAMES = ("sbatch", "srun", "scontrol", "hostname", "torchrun", "python", "python3")
Told = dict[str, Any]


@question(
    "17.1",
    "job_file(script, nodes, gpus, minutes)",
    {ASKS: 1, STARTS: 1, MEETS: 1, PORTS: 1},
    rests={MEETS: STARTS, PORTS: MEETS},
)
def job_file(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    for nodes, gpus in rng.sample([(2, 4), (3, 2), (4, 3), (5, 2)], 2):
        case = _cluster(rng, nodes, gpus)
        (found,) = ask(_submitted, case)
        yield from _of_a_job(case, found)


def _cluster(rng: random.Random, nodes: int, gpus: int) -> Told:
    first, net = rng.randint(2, 90), rng.randint(16, 31)
    begin, job = rng.choice(("gpu", "node", "n-a", "dgx")), rng.randint(700_000, 9_000_000)
    return {
        "script": f"train_{rng.choice(('albert', 'resnet', 'digits'))}.py",
        "nodes": nodes,
        "gpus": gpus,
        "minutes": rng.randint(2, 23) * 60 + rng.randint(1, 59),
        "names": [f"{begin}{number:03}" for number in range(first, first + nodes)],
        "list": f"{begin}[{first:03}-{first + nodes - 1:03}]",
        "addresses": [f"172.{net}.4.{number}" for number in range(first, first + nodes)],
        "jobs": [job, job + rng.randint(1, 40)],
    }


def _of_a_job(case: Told, found: Told) -> Iterator[Finding]:
    yield _of_the_order(case, found["text"])
    runs = [_Started(case, run) for run in found["runs"]]
    for run in runs:
        yield run.of_ranks()
        yield run.of_the_meeting()
    ports = [run.port() for run in runs]
    seen = f"job {case['jobs'][0]} meets at port {ports[0]}, job {case['jobs'][1]} at {ports[1]}"
    if any(port is not None and not 1024 <= port <= 65535 for port in ports):
        hint = "A port is a number from 1024 to 65535, and the numbers of jobs grow far beyond that."
    else:
        hint = "Two of your jobs may share a node. What does one have that the other has not?"
    good = all(port is not None and 1024 <= port <= 65535 for port in ports) and ports[0] != ports[1]
    yield Finding(PORTS, good, seen, hint)


def _of_the_order(case: Told, text: str) -> Finding:
    asked = _orders(text)
    nodes, per_node = asked.get("nodes", ""), _gpus_of_a_node(asked, case["nodes"])
    minutes = _minutes(asked.get("time", ""))
    if not text.startswith("#!"):
        return Finding(ASKS, False, "the first line is no #! line", "sbatch takes scripts: of which shell?")
    if nodes != str(case["nodes"]):
        seen = f"{case['nodes']} nodes are wanted; the #SBATCH lines say {nodes or 'nothing'}"
        hint = "One option of sbatch is the number of nodes. Orders stand above the first command."
    elif per_node != case["gpus"]:
        seen = f"{case['gpus']} GPUs on each node are wanted; the #SBATCH lines say {per_node or 'nothing'}"
        hint = "Without an order the nodes may come without their GPUs. And are they counted on a node?"
    elif minutes != case["minutes"]:
        shown = f"{asked['time']!r}" if "time" in asked else "nothing"
        seen = f"{case['minutes']} minutes are wanted; the #SBATCH lines say {shown}"
        hint = "Hours, minutes, seconds: which of them does Slurm read in a lone number, and in two?"
    else:
        return Finding(ASKS, True)
    return Finding(ASKS, False, seen, hint)


def _orders(text: str) -> dict[str, str]:
    """The options in the #SBATCH lines, by their long names; sbatch reads up to the first command."""
    short = {"N": "nodes", "n": "ntasks", "t": "time", "G": "gpus", "c": "cpus-per-task", "J": "job-name"}
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        words = line.split(" #")[0].split()[1:]
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, given, value = word[2:].partition("=")
                if not given and words and not words[0].startswith("-"):
                    value = words.pop(0)
                found[name] = value
            elif word.startswith("-") and word[1:2] in short:
                value = word[2:] or (words.pop(0) if words else "")
                found[short[word[1]]] = value
    return found


def _gpus_of_a_node(asked: dict[str, str], nodes: int) -> int | None:
    def count(value: str) -> int | None:
        last = value.rsplit(":", 1)[-1]
        return int(last) if last.isdigit() else None

    if "gpus-per-node" in asked:
        return count(asked["gpus-per-node"])
    if (found := re.search(r"(?:^|,)gpu:((?:\w+:)?\d+)", asked.get("gres", ""))) is not None:
        return count(found[1])
    tasks = _tasks_of_a_node(asked, nodes)
    if "gpus-per-task" in asked and tasks:
        return (count(asked["gpus-per-task"]) or 0) * tasks
    if "gpus" in asked and (total := count(asked["gpus"])) is not None and total % nodes == 0:
        return total // nodes
    return None


def _tasks_of_a_node(asked: dict[str, str], nodes: int) -> int:
    if asked.get("ntasks-per-node", "").isdigit():
        return int(asked["ntasks-per-node"])
    if asked.get("ntasks", "").isdigit():
        return -(-int(asked["ntasks"]) // nodes)
    return 1


def _minutes(time: str) -> float | None:
    """As Slurm reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    given = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*given, 0, 0][:3]
        return int(days) * 1440 + hours * 60 + minutes + seconds / 60
    if len(given) == 3:
        return given[0] * 60 + given[1] + given[2] / 60
    return given[0] + (given[1] / 60 if len(given) == 2 else 0)


class _Started:
    """What a job's body has started, as the stand-ins noted it."""

    def __init__(self, case: Told, run: Told) -> None:
        self.case, self.said = case, run["said"]
        self.agents = [
            note | {"options": _torchrun(note["words"])}
            for note in run["notes"]
            if note["what"] == "torchrun"
        ]
        self.pythons = [note for note in run["notes"] if note["what"] == "python"]

    def _count(self, notes: list[Told]) -> list[int]:
        return [sum(note["node"] == name for note in notes) for name in self.case["names"]]

    def of_ranks(self) -> Finding:
        case = self.case
        if self.agents and not self.pythons:
            return self._of_agents()
        if not self.agents and self.pythons:
            return self._of_pythons()
        seen = "the script was started" if self.agents else "nothing was started"
        seen += f" on the nodes {', '.join(case['names'])}"
        seen += f"; bash said: {self.said}" if self.said else ""
        hint = "On how many nodes does the body of a job file run, and what starts something on all of them?"
        if self.agents:
            seen, hint = "some ranks are started by torchrun and some without", "Either, or."
        return Finding(STARTS, False, seen, hint)

    def _of_agents(self) -> Finding:
        case, counts = self.case, self._count(self.agents)
        if counts != [1] * case["nodes"]:
            shown = ", ".join(f"{name}: {count}" for name, count in zip(case["names"], counts, strict=True))
            hint = "The body runs on the first node only. What starts a task on each?"
            if max(counts) > 1:
                hint = "torchrun starts the ranks of its node itself. How many of it does a node need?"
            return Finding(STARTS, False, f"torchruns on the nodes: {shown}", hint)
        for agent in self.agents:
            options, program = agent["options"]
            most = options.get("nnodes", "1").rsplit(":", 1)[-1]
            ranks = options.get("nproc-per-node", "1")
            if most != str(case["nodes"]) or "standalone" in options:
                seen = f"torchrun is told of {'one node' if 'standalone' in options else f'{most} node(s)'}"
                return Finding(STARTS, False, f"{seen}, and there are {case['nodes']}", NOT_ALONE)
            if ranks not in (str(case["gpus"]), "gpu", "auto"):
                seen = f"torchrun starts {ranks} ranks on a node with {case['gpus']} GPUs"
                return Finding(STARTS, False, seen, "Which option of torchrun is the number of ranks?")
            if Path((program or [""])[0]).name != case["script"]:
                seen = f"torchrun runs {' '.join(program)[:60]!r}, not {case['script']}"
                return Finding(STARTS, False, seen, "What comes after torchrun's own options?")
        return Finding(STARTS, True)

    def _of_pythons(self) -> Finding:
        case, wanted = self.case, self.case["nodes"] * self.case["gpus"]
        counts = self._count(self.pythons)
        if counts != [case["gpus"]] * case["nodes"]:
            shown = ", ".join(f"{name}: {count}" for name, count in zip(case["names"], counts, strict=True))
            seen = f"processes of the script on the nodes: {shown}; each has {case['gpus']} GPUs"
            return Finding(STARTS, False, seen, "Without torchrun, who starts a process for each GPU?")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            if any(not str(note["told"].get(name, "")).isdigit() for note in self.pythons):
                seen = f"the script is started {wanted} times, and {name} is not set"
                return Finding(STARTS, False, seen, "Without torchrun, who tells each process who it is?")
        ranks = sorted(int(note["told"]["RANK"]) for note in self.pythons)
        local = {
            name: sorted(int(note["told"]["LOCAL_RANK"]) for note in self.pythons if note["node"] == name)
            for name in case["names"]
        }
        if ranks != list(range(wanted)):
            seen = f"the ranks are {ranks[:6]}…, and should be 0 to {wanted - 1}"
            return Finding(STARTS, False, seen, WHERE_REPLACED)
        if any(each != list(range(case["gpus"])) for each in local.values()):
            seen = f"on {case['names'][0]} LOCAL_RANK is {local[case['names'][0]]}"
            return Finding(STARTS, False, seen, "Which of Slurm's numbers begins again on each node?")
        sizes = {note["told"]["WORLD_SIZE"] for note in self.pythons}
        right = all(any(Path(word).name == case["script"] for word in note["words"]) for note in self.pythons)
        seen = (
            f"WORLD_SIZE is {', '.join(sorted(sizes))}" if right else f"it is not {case['script']} that runs"
        )
        return Finding(STARTS, sizes == {str(wanted)} and right, seen, "How many ranks are there in all?")

    def of_the_meeting(self) -> Finding:
        hosts, numbers = {host for host, _ in self._endpoints()}, {port for _, port in self._endpoints()}
        known = self.case["names"] + self.case["addresses"]
        if len(hosts) != 1 or len(numbers) != 1:
            seen = f"they are sent to {len(self._endpoints())} places, as {', '.join(sorted(hosts))[:80]}"
            return Finding(MEETS, False, seen, "Each node looked it up for itself. Who looks it up for all?")
        (host,) = hosts
        if not host or host not in known:
            seen = f"they are sent to {host!r}; the nodes are {', '.join(self.case['names'])}"
            hint = "The nodes are others in each job. How does a job learn their names?"
            if host in ("", "localhost", "127.0.0.1"):
                hint = "Whom does each node find there? And what is the same place for all of them?"
            return Finding(MEETS, False, seen, hint)
        return self._of_its_first(known.index(host) % self.case["nodes"])

    def _of_its_first(self, node: int) -> Finding:
        """The place is on this node of the job: does the rank sit there that opens the store?"""
        case = self.case
        if self.pythons:
            first = next((note["node"] for note in self.pythons if note["told"].get("RANK") == "0"), "none")
            seen = f"they are sent to {case['names'][node]}, and rank 0 sits on {first}"
            return Finding(MEETS, first == case["names"][node], seen, "Who opens the store at that address?")
        backends = {agent["options"][0].get("rdzv-backend", "static") for agent in self.agents}
        if backends == {"c10d"}:
            return Finding(MEETS, True)
        numbers = [agent["options"][0].get("node-rank", "0") for agent in self.agents]
        places = [agent["node"] for agent in self.agents]
        if sorted(numbers) != [str(number) for number in range(case["nodes"])]:
            seen = f"the static meeting is asked for, and the nodes are numbered {', '.join(numbers)}"
            return Finding(MEETS, False, seen, WHERE_REPLACED)
        first = places[numbers.index("0")]
        seen = f"they are sent to {case['names'][node]}, and node 0 is {first}"
        return Finding(MEETS, first == case["names"][node], seen, "Who opens the store at that address?")

    def _endpoints(self) -> set[tuple[str, int | None]]:
        """(host, port) that the ranks are sent to."""
        found: set[tuple[str, int | None]] = set()
        for note in self.pythons:
            port = str(note["told"].get("MASTER_PORT", ""))
            found.add((str(note["told"].get("MASTER_ADDR", "")), int(port) if port.isdigit() else None))
        for agent in self.agents:
            options = agent["options"][0]
            if "rdzv-endpoint" in options:
                host, _, port = options["rdzv-endpoint"].partition(":")
            else:
                host, port = options.get("master-addr", ""), options.get("master-port", "")
            found.add((host, int(port) if port.isdigit() else 29500 if not port else None))
        return found or {("", None)}

    def port(self) -> int | None:
        return next(iter(self._endpoints()))[1]


NOT_ALONE = "Each of them must know how many nodes belong to the training."
WHERE_REPLACED = (
    "A variable is replaced where its line is run. In the job's body that is the first node alone."
)
FLAGS = {"standalone", "no-python", "module", "m", "run-path", "help", "h"}  # torchrun's, without a value


def _torchrun(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """torchrun's options by name, and the program with its arguments."""
    rest, options = list(words), dict[str, str]()
    while rest and rest[0].startswith("-"):
        name, given, value = rest.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not given and name not in FLAGS and rest:
            value = rest.pop(0)
        options[name] = value
    return options, rest


def _submitted(answer: Any, case: Told) -> Told:
    """The text of the job file, and what its body did, once for each number of a job."""
    text = answer(case["script"], case["nodes"], case["gpus"], case["minutes"])
    if not isinstance(text, str):
        raise Refused(f"job_file(…) returns the text of a job file; it returned {told(text)}")
    if (bash := shutil.which("bash")) is None:
        raise Refused("there is no bash on this machine to run your job file")
    return {"text": text, "runs": [_run_body(bash, text, case, job) for job in case["jobs"]]}


def _run_body(bash: str, text: str, case: Told, job: int) -> Told:
    """Run the body as Slurm does, on the first node, with stand-ins that only note what they are asked."""
    asked = _orders(text)
    tasks = _tasks_of_a_node(asked, case["nodes"])
    with tempfile.TemporaryDirectory(prefix="job-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        for program in NAMES:
            stand_in = folder / "bin" / program
            stand_in.write_text(f"#!{sys.executable} -SE\n{STAND_IN}")
            stand_in.chmod(0o755)
        (folder / "job.sh").write_text(text)
        (folder / case["script"]).touch()
        environment = {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "HOME": name,
            "STAND_IN": json.dumps({key: case[key] for key in ("names", "addresses", "list")}),
            "STAND_IN_NOTES": str(folder / "notes"),
            "SLURM_JOB_ID": str(job),
            "SLURM_JOBID": str(job),
            "SLURM_JOB_NAME": "job",
            "SLURM_JOB_NODELIST": case["list"],
            "SLURM_NODELIST": case["list"],
            "SLURM_JOB_NUM_NODES": str(case["nodes"]),
            "SLURM_NNODES": str(case["nodes"]),
            "SLURM_NTASKS": str(tasks * case["nodes"]),
            "SLURM_NPROCS": str(tasks * case["nodes"]),
            "SLURM_TASKS_PER_NODE": f"{tasks}(x{case['nodes']})",
            "SLURM_SUBMIT_DIR": name,
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURMD_NODENAME": case["names"][0],
            "SLURM_GPUS_ON_NODE": str(_gpus_of_a_node(asked, case["nodes"]) or 0),
        }
        for order in ("ntasks-per-node", "gpus-per-node", "cpus-per-task", "gpus-per-task"):
            if order in asked:
                environment[f"SLURM_{order.upper().replace('-', '_')}"] = asked[order]
        said = _bash([bash, "job.sh"], environment, folder)
        notes = folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return {"notes": [json.loads(line) for line in lines], "said": said}


def _bash(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Run it, and end all that it started; its last line of complaint."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, complaint = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        complaint = f"it was not done after {SECONDS:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    return (complaint.strip().splitlines() or [""])[-1][:150]


# --- 17.2 -------------------------------------------------------------------------------------------------

SUM = "every rank holds the sum over all ranks"
CABLE = "a node sends no more over the cable than one rank of each node would, in a ring"


@question("17.2", "two_levels(tensor, per_node)", {SUM: 1, CABLE: 2}, rests={CABLE: SUM})
def two_levels(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    found = [each for shape in rng.sample([(2, 2), (2, 3), (3, 2)], 2) for each in _on(ask, rng, *shape)]
    yield from found


def _on(ask: Ask, rng: random.Random, nodes: int, per_node: int) -> Iterator[Finding]:
    calls = [(rng.randrange(2**31), size) for size in rng.sample(range(2000, 6000), 2)]
    held = ask(_summed, per_node, calls, nprocs=nodes * per_node)
    for call, (seed, size) in enumerate(calls):
        each = [_numbers(seed, rank, size) for rank in range(nodes * per_node)]
        total = torch.stack(each).sum(0)
        gaps = [far(rank[call]["held"], total) for rank in held]
        wrong = gaps.index(max(gaps))
        of_node = torch.stack(each[wrong // per_node * per_node :][:per_node]).sum(0)
        hint = "What a rank adds up is right only if everything of every node reaches it, and once."
        if far(held[wrong][call]["held"], of_node) == 0:
            hint = "That is the sum of its node. How do the nodes come together?"
        elif far(held[wrong][call]["held"], each[wrong]) == 0:
            hint = "It holds what it began with. Who tells the ranks that are not the first of their node?"
        elif call and gaps[wrong]:
            hint = "The first call is right, and a second one is not. What does it find of the first?"
        seen = f"{nodes} nodes with {per_node} ranks each: rank {wrong} is off by up to {max(gaps):g}"
        yield Finding(SUM, max(gaps) == 0, seen, hint)
        most = 2 * (nodes - 1) / nodes * size * 8
        sent = [
            sum(rank[call]["sent"] for rank in held[node * per_node : (node + 1) * per_node])
            for node in range(nodes)
        ]
        node = sent.index(max(sent))
        seen = f"of {size * 8:,} bytes in a tensor, node {node} sent {max(sent):,.0f} over the cable"
        seen += f"; {most:,.0f} are enough"
        hint = "Which ranks of a node have to talk to other nodes at all, and about how much?"
        if nodes > 2 and max(sent) <= (nodes - 1) * size * 8 * 1.01:
            hint = "With two nodes that is all it takes. With more, one node sends for all of them."
        yield Finding(CABLE, max(sent) <= 1.02 * most + 256, seen, hint)


def _numbers(seed: int, rank: int, size: int) -> torch.Tensor:
    """Whole numbers in float64, beyond float32: their sums are exact, in whatever order."""
    dice = torch.Generator().manual_seed(seed + rank)
    return torch.randint(-(2**40), 2**40, (size,), generator=dice).double()


@in_group
def _summed(answer: Any, per_node: int, calls: list[tuple[int, int]]) -> list[Told]:
    sent = _watch_the_cable(per_node)
    found = []
    for seed, size in calls:
        tensor = _numbers(seed, dist.get_rank(), size)
        before = sum(sent)
        answer(tensor, per_node)
        if tensor.shape != (size,):
            raise Refused(f"two_levels changes the tensor in place; its shape is now {tuple(tensor.shape)}")
        found.append({"held": tensor, "sent": sum(sent) - before})
    return found


def _watch_the_cable(per_node: int) -> list[float]:
    """Note from now on the bytes that this rank sends to other nodes."""
    sent: list[float] = []
    group = dist.ProcessGroup

    def noted(real: Any, name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            sent.append(_crossing(self, name, per_node, args))
            return real(self, *args, **named)

        return call

    for name, attributes in (COLLECTIVES | {"send": ("send",)}).items():
        for attribute in filter(partial(hasattr, group), attributes):
            setattr(group, attribute, noted(getattr(group, attribute), name))
    return sent


def _crossing(group: Any, name: str, per_node: int, args: tuple[Any, ...]) -> float:
    """What this rank sends to other nodes: in rings, and straight where one rank is the source or the aim."""
    ranks = dist.get_process_group_ranks(group)
    here = dist.get_rank() // per_node
    elsewhere = sum(rank // per_node != here for rank in ranks)
    if not elsewhere:
        return 0.0
    n, size = len(ranks), _bytes(args[0])
    if name == "send":
        return float(size) if ranks[args[1]] // per_node != here else 0.0
    if name in ("reduce", "broadcast", "gather", "scatter"):
        root = ranks[getattr(args[-1], "rootRank", 0)]
        if name in ("reduce", "gather"):
            own = size if name == "reduce" else _bytes(args[1])
            return float(own) if root // per_node != here else 0.0
        of_each = size if name == "broadcast" else _bytes(args[0])
        others = len({rank // per_node for rank in ranks} - {here}) if name == "broadcast" else elsewhere
        return float(of_each * others) if root == dist.get_rank() else 0.0
    if name == "all_reduce":
        return 2 * (n - 1) / n * size
    if name == "all_gather":
        return float(_bytes(args[1]) * (n - 1))
    return (n - 1) / n * _bytes(args[1])  # reduce_scatter, all_to_all


def _bytes(given: Any) -> int:
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(_bytes, given)) if isinstance(given, list | tuple) else 0


# --- 17.3 -------------------------------------------------------------------------------------------------

NODES = "with the ranks of a node side by side, each node sends over one edge of the ring"
ORDER = "in any other order, an edge counts for the node that it leaves"
NOTHING = "every node is in the answer, and one that sends nothing has 0"


@question("17.3", "cable(places, size)", {NODES: 1, ORDER: 1, NOTHING: 1}, rests={ORDER: NODES})
def cable(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [
        (what, _places(rng, what), rng.randint(10**6, 10**8))
        for what in (NODES, ORDER, NOTHING)
        for _ in "ab"
    ]
    (found,) = ask(_sent_over, [case[1:] for case in cases])
    for (what, places, size), (got, again) in zip(cases, found, strict=True):
        right = _over(places, size)
        good = got.keys() == right.keys() and all(_same(got[node], right[node]) for node in right)
        node = next((each for each in right if not _same(got.get(each), right[each])), next(iter(right)))
        seen = f"ranks on the nodes {', '.join(places)}, {size:,} bytes: node {node} sends {right[node]:,.0f}"
        seen += f", and {got.get(node, 'nothing')} came out"
        if got.keys() - right.keys():
            seen, hint = (
                f"the nodes are {sorted(right)}, and {sorted(got)} came out",
                "Which nodes are there?",
            )
        else:
            hint = _of_a_ring(places, size, node, got.get(node))
        yield Finding(what, good, seen, hint)
        seen = f"with the same list once more it returned {again}"
        yield Finding(what, again == got, seen, "What you are given must be the same afterwards.")


def _same(got: Any, right: float) -> bool:
    return far(got, right) <= 1e-9 * max(right, 1)


def _places(rng: random.Random, what: str) -> list[str]:
    names = rng.sample(["a", "b", "c", "d", "e", "f"], rng.randint(2, 4))
    if what == NOTHING:
        return [names[0]] * rng.randint(3, 6)
    places = [name for name in names for _ in range(rng.randint(3, 5))]
    if what == ORDER:
        block = places
        while _edges(places) <= len(names) + 1 or places == block:
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


def _of_a_ring(places: list[str], size: int, node: str, got: Any) -> str:
    n, edge = len(places), 2 * (len(places) - 1) / len(places) * size
    right, mine = _over(places, size)[node], places.count(node)
    known = [
        (2 * right, "That is twice as much. Does an edge count where it leaves a node, or at both ends?"),
        (mine * edge, "That is all that its ranks send. What of it goes to a rank on the same node?"),
        (edge, "That is one edge. How many edges of the ring leave this node?"),
        (right - edge, "A ring is closed: who comes after the last rank?"),
        (right / 2, "A ring goes round twice: once to add up, once to hand out."),
        (
            right * n / (n - 1) / 2,
            "That is the tensor, once for each edge. What goes over an edge of a ring?",
        ),
        (
            right * n / (n - 1),
            "In each of its steps a rank sends a part of the tensor. How many steps are there?",
        ),
        (_edges(places) * edge, "That is what crosses in all. Which of it leaves this node?"),
    ]
    if got is None:
        return "Which nodes are there, and which of them send nothing?"
    value = number(got)
    if not isinstance(value, str) and math.isfinite(value):
        for wrong, hint in known:
            if wrong != right and _same(value, wrong):
                return hint
    return "Rank by rank: who is next in the ring, and does that one sit on the same node?"


def _sent_over(answer: Any, cases: list[Any]) -> list[list[dict[str, Any]]]:
    """Of each case twice."""
    found = []
    for places, size in cases:
        given = list(places)
        found.append([])
        for _ in range(2):
            sent = answer(given, size)
            if not isinstance(sent, dict) or not all(isinstance(node, str) for node in sent):
                raise Refused(f"cable(…) returns a dict, bytes by node; it returned {told(sent)}")
            values = {node: number(value) for node, value in sent.items()}
            strange = [value for value in values.values() if isinstance(value, str)]
            if strange:
                raise Refused(
                    f"cable(…) returns a number of bytes for each node; one of them is {strange[0]}"
                )
            found[-1].append(values)
    return found
