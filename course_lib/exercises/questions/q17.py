"""The questions of lesson 17: what a ring sends over the cable, and a job file."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from ..in_rank.work import refuse_unless
from ..judging import Faults, far, first_fault
from ..question import Ask, Finding, Refused, question
from ..shape import NUMBER, reports
from ..wording import number

# --- 17.1 -------------------------------------------------------------------------------------------------

BLOCKS = "with the ranks of a node side by side, each node sends over one edge of the ring"
ORDER = "in any other order, each edge counts for the node that it leaves"
HINTS_1 = {
    BLOCKS: {
        "how much": "With n ranks, how much does each send to its neighbour, from the beginning to the end?",
        "inside": "A part of that goes to a rank on the same node, over no cable.",
        "the last rank": "Which rank comes after the last one?",
        "both ends": "An edge counts for the node that it leaves, not for the one where it arrives.",
    },
    ORDER: {"edges": "Look at each rank and the next one. How many edges leave a node here?"},
}


@question("17.1", "cable(places, size)", {BLOCKS: 2, ORDER: 2}, depends_on={ORDER: BLOCKS}, hints=HINTS_1)
def cable(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    names = rng.sample(("a", "b", "n1", "n2", "n11"), 3)
    block = [name for name in names for _ in range(rng.randint(3, 5))]
    mixed = [rng.sample(block, len(block)) for _ in range(4)]
    mixed[0] = sorted(block, key=lambda name: (name != names[0], rng.random()))
    places = [block, names[:2], *[each for each in mixed if _edges(each) > 4]]
    cases = [(each, rng.randint(10**11, 10**12)) for each in [*places, names * 3]]
    (results,) = ask(_sent_over, cases)
    for case, (given, size), got in zip(range(len(cases)), cases, results, strict=True):
        edge = 2 * (len(given) - 1) / len(given) * size
        leaving = [one for one, other in zip(given, [*given[1:], given[0]], strict=True) if one != other]
        right = {node: edge * leaving.count(node) for node in given}
        node = next((node for node in right if far(got.get(node), right[node]) > 1), given[0])
        seen = (
            f"ranks on the nodes {', '.join(given)}, {size:,} bytes: node {node} sends {right[node]:,.0f}, "
        )
        seen += f"and {got.get(node, 'nothing')} came out"
        known = {
            "both ends": 2 * right[node],
            "inside": given.count(node) * edge,
            "the last rank": right[node] - edge * (node == given[-1]),
        }
        hit = [hint for hint, wrong in known.items() if far(got.get(node), wrong) <= 1]
        ok = got.keys() == right.keys() and all(far(got.get(each), sent) <= 1 for each, sent in right.items())
        what, hint = (ORDER, "edges") if case > 1 else (BLOCKS, [*hit, "how much"][0])
        yield Finding(what, ok, seen, hint)


def _edges(places: list[str]) -> int:
    return sum(one != other for one, other in zip(places, [*places[1:], places[0]], strict=True))


@reports(lambda cases: [{str: NUMBER}] * len(cases))
def _sent_over(answer: Any, cases: list[Any]) -> list[dict[str, Any]]:
    results = []
    for places, size in cases:
        sent = answer(places, size)
        refuse_unless(isinstance(sent, dict), "cable(…) returns a dict, bytes by node", sent)
        results.append({str(node): number(value) for node, value in sent.items()})
        for value in results[-1].values():
            refuse_unless(not isinstance(value, str), "cable(…) returns bytes for each node", value)
    return results


# --- 17.2 -------------------------------------------------------------------------------------------------

ASKS = "its directives ask for the nodes, a task on each, the GPUs and the time"
STARTS = "srun starts torchrun: on all nodes, a rank for each GPU, with the script"
MEETS = "all meet by c10d under the job's number, at its first node"
PORTS = "each job has a port of its own"
HINTS_2 = {
    ASKS: {
        "nodes": "Directives stand above the first command, one a line, each with its value.",
        "ntasks-per-node": "A task is one torchrun here. How many of them does a node need?",
        "gpus-per-node": "Without it, the nodes may come without GPUs. The number is for one node.",
        "time": "A number alone is minutes to Slurm, and two with a colon are minutes and seconds.",
    },
    STARTS: {
        "srun": "This file runs on the first node only. What starts a program on each?",
        "nnodes": "Each torchrun must know how many nodes the job has.",
        "nproc-per-node": "Which option of torchrun is the number of ranks on its node?",
        "the script": "What comes after torchrun's own options? Does each line but the last go on?",
    },
    MEETS: {
        "words": "Three options say how the agents meet, under which name, and where.",
        "host": "Each job gets other nodes, and all must be sent to the same one: where is its name known?",
    },
    PORTS: {
        "port": "Two of your jobs may share a node. What does one have that the other has not, and is "
        "it small enough?"
    },
}
# bash itself reads a job file, where srun and torchrun only note the words that they get.
BEFORE = """
note() { printf '%s\\x1f' "$@" >&3; printf '\\x1e' >&3; }
srun() { case " $* " in *" hostname "*) echo "$ADDRESS";; *) note srun "$@";; esac; }
torchrun() { note torchrun "$@"; }
python() { note python "$@"; }
hostname() { case "$*" in "") echo "$HOSTNAME";; *) echo "$ADDRESS";; esac; }
scontrol() { printf '%s\\n' $NAMES; }
"""


@question(
    "17.2",
    "job_file(script, nodes, gpus, minutes)",
    {ASKS: 2, STARTS: 2, MEETS: 1, PORTS: 1},
    depends_on={MEETS: STARTS, PORTS: MEETS},
    hints=HINTS_2,
)
def job_file(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    for nodes, gpus in rng.sample([(2, 4), (3, 2), (4, 3), (5, 2)], 2):
        script, minutes = f"train_{rng.randint(1, 99)}.py", rng.randint(2, 20) * 60 + rng.randint(1, 59)
        first, job = rng.randint(2, 90), rng.randint(70, 900) * 10_000 + 800  # 0800 is no octal number
        jobs = [
            {
                "SLURM_JOB_ID": str(each),
                "NAMES": " ".join(f"gpu{number}" for number in range(first, first + nodes)),
                "ADDRESS": f"172.16.4.{first}",
            }
            for each in (job, job + 1, job + 100)
        ]
        (submitted,) = ask(_submitted, script, nodes, gpus, minutes, jobs)
        yield first_fault(ASKS, _of_directives(submitted["text"], nodes, gpus, minutes))
        ports = []
        for each, calls in zip(jobs, submitted["calls"], strict=True):
            yield first_fault(STARTS, _of_start(calls, script, nodes, gpus))
            options = _torchrun(calls[0])[0] if calls else {}
            host, _, port = options.get("rdzv-endpoint", "").rpartition(":")
            seen = ", ".join(f"--{name}={options.get(name, '')}" for name in ("rdzv-backend", "rdzv-id"))
            words = (options.get("rdzv-backend"), options.get("rdzv-id")) == ("c10d", each["SLURM_JOB_ID"])
            yield Finding(MEETS, words and bool(host), f"job {each['SLURM_JOB_ID']}: {seen}", "words")
            known = (each["NAMES"].split()[0], each["ADDRESS"])
            yield Finding(
                MEETS, host in known, f"the nodes are {each['NAMES']}, and host is {host!r}", "host"
            )
            ports.append(int(port) if port.isdecimal() else 0)
        seen = f"jobs {', '.join(each['SLURM_JOB_ID'] for each in jobs)} meet at ports {ports}"
        allowed = all(1024 <= port <= 65535 for port in ports)
        yield Finding(PORTS, allowed and len({*ports}) == len(ports), seen, "port")


def _of_directives(text: str, nodes: int, gpus: int, minutes: int) -> Faults:
    head = re.match(r"(?:#.*\n|\s*\n)*", text + "\n")
    found = dict(re.findall(r"^#SBATCH\s+--([\w-]+)[= ]+(\S+)", head[0] if head else "", re.MULTILINE))
    *hours, least = [float(part) for part in found.get("time", "").split(":") if part.isdecimal()] or [0.0]
    if len(hours) > 1:  # h:m:s
        least = hours[0] * 60 + hours[1] + least / 60
    elif hours:  # m:s
        least = hours[0] + least / 60
    wanted = {"nodes": nodes, "ntasks-per-node": 1, "gpus-per-node": gpus}
    for name, value in wanted.items():
        if found.get(name) != str(value):
            yield f"--{name}={value} is needed; the #SBATCH lines say {found.get(name, 'nothing')}", name
    if least != minutes:
        yield f"{minutes} minutes are needed; the #SBATCH lines say {found.get('time', 'nothing')}", "time"


def _torchrun(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words after torchrun, in a call of srun, into options by name and the rest."""
    rest, options = words[words.index("torchrun") + 1 :] if "torchrun" in words else [], dict[str, str]()
    while rest and rest[0].startswith("-"):
        name, given, value = rest.pop(0).lstrip("-").partition("=")
        options[name.replace("_", "-")] = value if given or name == "standalone" or not rest else rest.pop(0)
    return options, rest


def _of_start(calls: list[list[str]], script: str, nodes: int, gpus: int) -> Faults:
    started = [" ".join(words)[:60] for words in calls]
    if len(calls) != 1 or calls[0][0] != "srun" or "torchrun" not in calls[0]:
        yield f"the file starts {'; '.join(started) or 'nothing'}", "srun"
        return
    options, rest = _torchrun(calls[0])
    if options.get("nnodes") != str(nodes):
        yield f"{nodes} nodes, and torchrun is told --nnodes={options.get('nnodes', '1')}", "nnodes"
    if (ranks := options.get("nproc-per-node", "1")) not in (str(gpus), "gpu"):
        yield f"a node has {gpus} GPUs, and torchrun starts {ranks} ranks", "nproc-per-node"
    if rest[:1] != [script]:
        yield f"torchrun runs {' '.join(rest) or 'nothing'}, and should run {script}", "the script"


@reports(lambda *asked: {"text": str, "calls": [[[str, str, ...], ...]] * len(asked[-1])})
def _submitted(answer: Any, script: str, nodes: int, gpus: int, minutes: int, jobs: Any) -> dict[str, Any]:
    """Return a job file's text, and the calls in its body for each job: their words, as bash gives them."""
    text = answer(script, nodes, gpus, minutes)
    refuse_unless(isinstance(text, str), "job_file(…) returns the text of a job file", text)
    if (bash := shutil.which("bash")) is None:
        raise Refused("there is no bash on this machine to read your job file")
    return {"text": text, "calls": [_calls(bash, text, nodes, gpus, job) for job in jobs]}


def _calls(bash: str, text: str, nodes: int, gpus: int, job: dict[str, str]) -> list[list[str]]:
    names = job["NAMES"].split()
    of_slurm = {
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_GPUS_ON_NODE": str(gpus),
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_JOB_NODELIST": f"gpu[{names[0][3:]}-{names[-1][3:]}]",
        "HOSTNAME": names[0],
        "SLURMD_NODENAME": names[0],
        "PATH": "/usr/bin:/bin",
    }
    with tempfile.TemporaryFile() as notes:
        command = [bash, "-c", f"exec 3>&{notes.fileno()}\n{BEFORE}{text}"]
        subprocess.run(
            command, env=of_slurm | job, pass_fds=[notes.fileno()], timeout=10, capture_output=True
        )
        notes.seek(0)
        said = notes.read(os.sysconf("SC_PAGE_SIZE") * 16).decode(errors="replace")
    return [call.split("\x1f")[:-1] for call in said.split("\x1e")[:-1]]
