"""The files in a run's folder: their names and contents.

The launcher writes ``run.json``. Each rank, and the program outside of its ranks (``"program"``), writes most
of the files in `RankFiles`, and the launcher's side reads them. Numbers are rows of float64, so a truncated
file loses at most one row. Text is appended to; all other files are replaced atomically.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

RUN = "run.json"  # name, world_size, state, when the run began, how it ended: see `run_record`
ASKED = "asked"  # exists once the launcher has asked where every rank is (`standstill`)
PROGRAM = "program"  # takes the place of a rank's number: the program outside of its ranks
JOB_SCRIPT = "job.sbatch"  # the script that was submitted to Slurm
JOB_ENDED = "job-ended"  # the exit status of that script, written at its end
AGENT_LOGS = "torchrun/node-*.log"  # the output of torchrun on each of a job's nodes
# One tick: what a rank's recorder thread writes ten times a second. Every field is a float64.
TICK = [
    "seconds",  # since the launch
    "samples",  # processed so far, in all passes
    "steps",
    "tracked_seconds",  # spent inside track() loops so far: throughput is samples per such second
    "stepped_seconds",  # tracked seconds until the end of the last whole step
    "cpu_seconds",  # CPU time of the main thread since the rank began; NaN if the system does not say
    "passes",  # track() loops begun so far
    "pass_steps",  # steps done in the current pass
    "pass_total",  # steps the current pass will take, NaN if unknown
    "memory_bytes",  # on the CPU: the process's own memory; on a GPU: torch's allocated bytes
    "reserved_bytes",  # torch's cached bytes on the GPU, NaN on the CPU
    "peak_bytes",  # the most that torch had allocated there by then, between two ticks too; NaN on the CPU
    "driver_bytes",  # by NVML: used by this process (in a container, by all on the GPU); NaN on the CPU
]
# When a rank called a collective of all ranks, except over NCCL, by PyTorch's flight recorder
ARRIVAL = [
    "number",  # the same on every rank
    "seconds",  # since the launch
    "meets",  # 1 if every rank waits for every other, as in all_reduce; else 0
]
EVERYONE = "0"  # torch's name for the group of all ranks
OVER_NCCL = " over nccl"  # appended to a group's name: NCCL and gloo number its collectives separately
STARTING, AT_WORK, ENDING = "starting", "at work", "ending"  # the phases of a rank, in its facts
# The environment variable in which `why` tells a trial's ranks what to change, and its values
TRIAL = "COURSE_TRIAL"
REPEATED_BATCHES, NO_GRADIENT_SYNC = "first batches repeated", "no gradient sync"
POINT = ["name", "seconds", "samples", "value"]  # one logged value; name is a line number in RankFiles.names
# The fingerprint of one tensor that should be the same on all ranks, taken in a loop of `track(…, same=…)`
FINGERPRINT = [
    "attempt",  # how often torchrun had restarted the rank
    "pass",  # loops with `same` begun so far
    "step",  # steps done in this pass
    "tensor",  # a line number in RankFiles.tensors
    "fingerprint",
]
# The kinds of files that hold rows, and their columns
ROWS = {"ticks": TICK, "arrivals": ARRIVAL, "points": POINT, "fingerprints": FINGERPRINT}


def _file(kind: str) -> cached_property[Path]:
    """Return a property: the path of a rank's file, such as ``rank-3.log``."""
    return cached_property(lambda files: files.folder / f"rank-{files.rank}.{kind}")


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in a run's folder."""

    folder: Path
    rank: int | str

    log = _file("log")  # text: what the rank printed; under torchrun, `facts` names the folder instead
    facts = _file("json")  # what the rank reports about itself: pid, phase, device, backend, environment
    ticks = _file("ticks")
    arrivals = _file("arrivals")  # if a tick has many collectives, only some of them
    points = _file("points")
    names = _file("names")  # text: one line per logged name
    fingerprints = _file("fingerprints")
    tensors = _file("tensors")  # text: one line per tensor that has fingerprints
    result = _file("result")  # what the function returned, by `torch.save`, once the rank has succeeded
    failure = _file("failure.json")  # how the rank failed (`rank.failure`)
    standstill = _file("where")  # JSON: where the rank is while no collective begins, when asked, at its end
    stack = _file("stack")  # text: Python stacks of the rank, or of its forks, when a signal asked for them
    crash = _file("crash")  # text: the Python stacks of the rank's threads when it crashed in C

    def failure_of_attempt(self, attempt: int) -> Path:
        """Return the file that says how an earlier attempt failed, before torchrun restarted the rank."""
        return self.folder / f"rank-{self.rank}.failure-{attempt}.json"


def process_name(pid: int) -> str:
    """Return a name for a process that no other process on the job's nodes has."""
    return f"{os.environ.get('SLURM_NODEID', 0)}-{pid}"


def end_request(folder: Path, process: str) -> Path:
    """Return the file in which torchrun's agent notes when it asked a process where it is before its end."""
    return folder / f"end-of-{process}"


def was_asked_to_end(folder: Path, process: str, by: float) -> bool:
    """Return whether torchrun's agent had asked a process to end by a certain time."""
    with contextlib.suppress(OSError):  # it was never asked
        return float(end_request(folder, process).read_text()) <= by
    return False


def of_everyone(group: str) -> bool:
    """Return whether a group, as named in a standstill record, is the group of all ranks."""
    return group.removesuffix(OVER_NCCL) == EVERYONE


def ranks_seen(folder: Path) -> int:
    """Return the number of ranks, inferred from the highest rank that has written its facts."""
    numbers = [path.name.removeprefix("rank-").removesuffix(".json") for path in folder.glob("rank-*.json")]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
