"""Write the batch script that `slurm` hands to ``sbatch``; it can be read, and submitted by hand, too."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..record.layout import AGENT_LOGS, JOB_ENDED

SCRIPT = """\
#!/bin/bash
{directives}
{setup}
# This script runs on the job's first node. There the torchruns of all nodes meet, at a port of the job's own.
endpoint=$(hostname):$((20000 + SLURM_JOB_ID % 10000))
{exports}
torchrun=({python} -m torch.distributed.run)
program=({program})
if [[ -n ${{COURSE_RUN:-}} ]]; then  # by slurm(), which reads what is noted there; by hand it is not set
    export COURSE_STARTED=$(date +%s.%N) SLURM_STDOUTMODE="$COURSE_RUN/{agent_logs}"
    torchrun=({python} -m course_lib.rank.entry_script --node)
    program=(-m course_lib.rank.entry_script --rank "${{program[@]}}")
    trap 'echo $? >"$COURSE_RUN/{ended}.part"; mv "$COURSE_RUN/{ended}.part" "$COURSE_RUN/{ended}"' EXIT
fi

# One torchrun on each node, which starts the node's ranks; when one fails, Slurm ends the others.
srun --kill-on-bad-exit=1{step} "${{torchrun[@]}}" \\
    {shape} \\
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID" \\
    "${{program[@]}}"
"""
# Options that slurm() sets itself, and what to do instead of passing them
OWN = {
    "nnodes N": "say nodes=…, as sbatch does",
    "ntasks ntasks_per_node n": "each node has one torchrun; say nproc_per_node=…",
    "output error open_mode": "what is printed is in run.logs and run.output",
    "requeue no_requeue": "its records would mix with earlier ones; submit it again",
    "export export_file": "the job gets this process's environment; set os.environ",
    "chdir D": "the job runs in the current folder; os.chdir(…) before",
    "array a": "one run is one job; call slurm() for each",
    "wait W": "slurm() waits for the job's end",
    "wrap parsable test_only input help version usage": "leave it out",
    "clusters M": "set SLURM_CLUSTERS in the environment",
}


def directives(options: Mapping[str, Any]) -> list[str]:
    """Convert keyword arguments to options of sbatch: ``time="1:00:00"`` becomes ``--time=1:00:00``.

    Raise ValueError if slurm() sets an option itself, a name is no option, or a value is not one line.
    """
    lines = []
    for name, value in options.items():
        if instead := next((text for names, text in OWN.items() if name in names.split()), None):
            raise ValueError(f"slurm() decides about {name} itself: {instead}; got {name}={value!r}")
        if not re.fullmatch(r"[a-z][a-z0-9_]+", name):
            raise ValueError(f"an option of sbatch is a name such as partition or time; got {name!r}")
        option = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        if not text or re.search(r"[\x00-\x1f]", text):
            raise ValueError(f"the value of an option is one line; got {name}={value!r}")
        lines.append(option if value is True else f"{option}={shlex.quote(text)}")
    return lines


def gpus_of_a_node(options: Mapping[str, Any]) -> int | None:
    """Return how many GPUs a job requests per node, by ``gpus_per_node=4`` or ``gres="gpu:a100:4"``."""
    gpus = options.get("gpus_per_node")
    if gpus is None:
        gres = options.get("gres") or ""
        resources = map(str, gres if isinstance(gres, list | tuple) else gres.split(","))
        gpus = next((each for each in resources if re.match(r"gpu\b", each)), None)
    if gpus is None:
        return None
    last = str(gpus).rpartition(":")[2]
    return int(last) if last.isdecimal() and int(last) > 0 else 1


def job_script(
    script: Path,
    args: Iterable[Any],
    nodes: int,
    shape: Iterable[str],
    setup: Iterable[str],
    options: Mapping[str, Any],
    exports: Mapping[str, str],
) -> str:
    """Return the text of a job's batch script.

    ``shape`` holds torchrun's options for the number of ranks, ``setup`` shell lines to run first,
    ``options`` sbatch's options, and ``exports`` variables that the job gets unless it has them already.
    """
    name, *given = directives({"job_name": script.name, **options})
    own = [f"--nodes={nodes}", "--ntasks-per-node=1", "--no-requeue", f"--chdir={shlex.quote(os.getcwd())}"]
    cpus = options.get("cpus_per_task")
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in [name, *own, *given]),
        setup="".join(f"{line}\n" for line in setup),
        exports="".join(f'export {name}="${{{name}:-{value}}}"\n' for name, value in exports.items()),
        python=shlex.quote(sys.executable),
        program=shlex.join([str(script), *map(str, args)]),
        agent_logs=AGENT_LOGS.replace("*", "%n"),
        ended=JOB_ENDED,
        step=f" --cpus-per-task={cpus}" if cpus else "",
        shape=" ".join(shape),
    )
