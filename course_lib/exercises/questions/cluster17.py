"""Mock Slurm for question 17.1: parse a job file as sbatch does, and run its body with stand-in commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 15.0  # time limit for a job file that runs with the stand-ins
NAMES: tuple[str, ...] = ("sbatch", "srun", "scontrol", "hostname", "torchrun", "python", "python3", "sleep")
SHELLS = ("bash", "sh", "dash", "ksh", "zsh", "csh", "tcsh")
NAMES += ("module", "ml", "conda", "nvidia-smi")  # these do nothing here

# One program under all these names; Python runs it without site (-S), so it starts in milliseconds.
STAND_IN = r"""
import json, os, subprocess, sys, time

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
cluster = json.loads(os.environ["STAND_IN"])
nodes, addresses = cluster["names"], cluster["addresses"]
here = os.environ.get("SLURMD_NODENAME", nodes[0])
FLAGS = "label unbuffered overlap exact kill-on-bad-exit exclusive no-kill verbose quiet pty".split()
WAIT = 4  # seconds that a torchrun waits for those of the other nodes; the true one waits 600


def note(what, words):
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    told = {key: os.environ[key] for key in keys if key in os.environ}
    line = json.dumps({"what": what, "words": words, "node": here, "told": told}) + "\n"
    with open(os.environ["STAND_IN_NOTES"], "a") as file:
        file.write(line)


def srun(words):
    short = {"N": "nodes", "n": "ntasks", "w": "nodelist"}
    options = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word.startswith("--"):
            option, given, value = word[2:].partition("=")
            if not given and option not in FLAGS and words:
                value = words.pop(0)
        else:
            option, value = short.get(word[1], word[1]), word[2:]
            if not value and word[1] not in "luKvQOksE" and words:
                value = words.pop(0)
        options[option] = value
    on = list(nodes)
    if "nodelist" in options:
        on = [node for node in nodes if node in options["nodelist"].split(",")] or on
    if options.get("nodes", "").isdigit():
        on = on[: int(options["nodes"])]
    per_node = options.get("ntasks-per-node") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
    if options.get("ntasks", "").isdigit():
        count = int(options["ntasks"])
    elif per_node.isdigit():
        count = int(per_node) * len(on)
    else:
        count = int(os.environ["SLURM_NTASKS"]) if len(on) == len(nodes) else len(on)
    if count > 64:
        sys.exit("srun: more than 64 tasks")
    status, task = 0, 0
    for place, node in enumerate(on):
        share = count // len(on) + (place < count % len(on))
        for local in range(share):
            environment = dict(
                os.environ,
                SLURM_PROCID=str(task),
                SLURM_NODEID=str(place),
                SLURM_LOCALID=str(local),
                SLURM_NTASKS=str(count),
                SLURM_NPROCS=str(count),
                SLURM_NNODES=str(len(on)),
                SLURMD_NODENAME=node,
                HOSTNAME=node,
                SLURM_LAUNCH_NODE_IPADDR=addresses[0],
            )
            status = max(status, subprocess.call(words, env=environment))
            task += 1
    wait_for_the_others(on[:count])
    sys.exit(status)


def wait_for_the_others(on):
    end = time.monotonic() + WAIT
    while os.path.exists(os.environ["STAND_IN_NOTES"]):
        with open(os.environ["STAND_IN_NOTES"]) as file:
            noted = [json.loads(line) for line in file if line.endswith("\n")]
        known = {line["node"] for line in noted}
        if not known & set(on) or known >= set(nodes):
            return
        if any(line["what"] == "in vain" for line in noted):
            return
        if time.monotonic() > end:
            return note("in vain", on)
        time.sleep(0.05)


def scontrol(words):
    words = [word for word in words if not word.startswith("-")]
    if words[:2] in (["show", "hostnames"], ["show", "hostname"]):
        asked = words[2] if len(words) > 2 else cluster["list"]
        print("\n".join(nodes if asked == cluster["list"] else asked.split(",")))
    elif words[:2] in (["show", "node"], ["show", "nodes"]):
        for node in words[2:] or nodes:
            address = addresses[nodes.index(node)]
            print("NodeName=%s Arch=x86_64\n   NodeAddr=%s NodeHostName=%s" % (node, address, node))
    elif words[:2] == ["show", "job"]:
        job = os.environ["SLURM_JOB_ID"]
        print("JobId=%s\n   NodeList=%s\n   BatchHost=%s" % (job, cluster["list"], nodes[0]))
    else:
        sys.exit("scontrol: this stand-in knows show hostnames, show node and show job")


if name == "srun":
    srun(words)
elif name == "scontrol":
    scontrol(words)
elif name == "hostname":
    address = any(word.lstrip("-").startswith(("i", "I", "all-ip")) for word in words)
    print(addresses[nodes.index(here)] if address else here)
elif name == "torchrun":
    note("torchrun", words)
elif name.startswith("python"):
    while words and words[0] in ("-u", "-B", "-O"):
        words.pop(0)
    if words[:1] == ["-c"]:
        sys.exit(subprocess.call([sys.executable, *words]))
    if words[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        note("torchrun", words[2:])
    else:
        note("python", words)
elif name not in ("sleep", "module", "ml", "conda", "nvidia-smi"):  # here nothing takes its time
    sys.exit(name + ": not on this cluster")
"""


# --- how sbatch reads a job file --------------------------------------------------------------------------


LEFT = "the job ended with its body, and something that it had started was still running"
NO_DIRECTIVE = ""  # the key in `directives` for a word that sbatch cannot parse


def names_a_shell(text: str) -> bool:
    """Whether the first line, after its ``#!``, has the path of a shell, or of env followed by a shell."""
    words = (text.splitlines() or [""])[0][2:].split()
    folder, _, program = words[0].rpartition("/") if words else ("", "", "")
    if program == "env":
        program = next((word for word in words[1:] if word[0] != "-" and "=" not in word), "")
    return folder.strip("/") != "" and program in SHELLS


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an unclosed quote
        return line.split()


def directives(text: str) -> dict[str, str]:
    """Return the options in the #SBATCH lines by long name; like sbatch, stop at the first command."""
    short = {"N": "nodes", "n": "ntasks", "t": "time", "G": "gpus", "c": "cpus-per-task", "J": "job-name"}
    options: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        words = _words(line.split(" #")[0])[1:] if line.startswith("#SBATCH") else []
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, given, value = word[2:].partition("=")
                if not given and words and not words[0].startswith("-"):
                    value = words.pop(0)
                options[name] = value
                if not name or (given and not value):
                    options[NO_DIRECTIVE] = word
            elif word.startswith("-") and word[1:2] in short:
                options[short[word[1]]] = word[2:] or (words.pop(0) if words else "")
            elif not word.startswith("-"):
                options[NO_DIRECTIVE] = word
            elif len(word) == 2 and words and not words[0].startswith("-"):
                words.pop(0)  # the value of an option that is not needed here
    return options


def gpus_of_a_node(asked: dict[str, str], nodes: int) -> int | None:
    """Return how many GPUs per node the directives request, or None if they give no such number."""

    def count(value: str) -> int | None:
        last = value.rsplit(":", 1)[-1]
        return int(last) if last.isdigit() else None

    if "gpus-per-node" in asked:
        return count(asked["gpus-per-node"])
    if (match := re.search(r"(?:^|,)gpu:((?:\w+:)?\d+)", asked.get("gres", ""))) is not None:
        return count(match[1])
    if "gpus-per-task" in asked:
        return (count(asked["gpus-per-task"]) or 0) * tasks(asked, nodes) // nodes
    total = count(asked.get("gpus", "")) or 0
    return total // nodes if total and total % nodes == 0 else None


def tasks(asked: dict[str, str], nodes: int) -> int:
    """Return how many tasks the directives request in total."""
    if asked.get("ntasks", "").isdigit():
        return int(asked["ntasks"])
    per_node = asked.get("ntasks-per-node", "")
    return nodes * (int(per_node) if per_node.isdigit() else 1)


def minutes(time: str) -> float | None:
    """Convert a Slurm time limit to minutes: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for anything else."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    given = [int(part) for part in parts]
    if not dash and len(given) < 3:
        given.insert(0, 0)  # no hours
    hours, minute, seconds = [*given, 0, 0][:3]
    return int(days or 0) * 1440 + hours * 60 + minute + seconds / 60


# --- in a rank --------------------------------------------------------------------------------------------


def run_body(bash: str, text: str, case: dict[str, Any], job: int) -> dict[str, Any]:
    """Run a job file on the first node, as Slurm does, with stand-ins that record how they are called."""
    asked, nodes = directives(text), case["nodes"]
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
            "HOSTNAME": case["names"][0],
            "STAND_IN": json.dumps({key: case[key] for key in ("names", "addresses", "list")}),
            "STAND_IN_NOTES": str(folder / "notes"),
            **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), str(job)),
            "SLURM_JOB_NAME": "job",
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), case["list"]),
            **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(nodes)),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(tasks(asked, nodes))),
            "SLURM_TASKS_PER_NODE": f"{-(-tasks(asked, nodes) // nodes)}(x{nodes})",
            "SLURM_SUBMIT_DIR": name,
            **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
            "SLURMD_NODENAME": case["names"][0],
            "SLURM_GPUS_ON_NODE": str(gpus_of_a_node(asked, nodes) or 0),
        }
        for option in ("ntasks-per-node", "gpus-per-node", "cpus-per-task", "gpus-per-task"):
            if option in asked:
                environment[f"SLURM_{option.upper().replace('-', '_')}"] = asked[option]
        said = _bash([bash, "job.sh"], environment, folder)
        notes = folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        complaints = (folder / "complaints").read_text(errors="replace")
        lost = re.search(r": (-[\w-]+)\S*: command not found$", complaints, re.MULTILINE)
        return {"notes": [json.loads(line) for line in lines], "said": said, "lost": lost[1] if lost else ""}


def _bash(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Run bash and kill what it left running, as at the end of a job; return what went wrong, or ``""``."""
    complaints = folder / "complaints"
    with open(complaints, "wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    last = ""
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        last = f"it was not done after {SECONDS:g} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        last = last or LEFT
    process.wait()
    said = complaints.read_text(errors="replace").strip().splitlines()
    return last or (f"bash said: {said[-1][:150]}" if said else "")
