"""What stands in a run's folder: the names of its files and what is in them.

``run.json`` is the launcher's own. Each rank, and ``"program"`` for what is outside the ranks, has
the files of `RankFiles`: the rank writes, the launcher's side reads them. Numbers are rows of float64, so
a file that was cut short loses its last row at most; all else that is read meanwhile is replaced whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

RUN = "run.json"  # name, world_size, state, when it began, how it ended: as `run.Run` has them
ASKED = "asked"  # there as soon as the launcher wants to know where every rank stands (`standstill`)
PROGRAM = "program"  # in the place of a rank's number: a program outside of its ranks
JOB_SCRIPT = "job.sbatch"  # what was submitted to Slurm
JOB_ENDED = "job-ended"  # there once that script has come to its end: its exit status
AGENT_LOGS = "torchrun/node-*.log"  # what the torchrun of each of a job's nodes printed
# One tick: what a rank's thread notes ten times a second. Every field is a float64.
TICK = [
    "seconds",  # since the launch
    "samples",  # processed so far, in all passes
    "steps",
    "tracked_seconds",  # spent inside track() loops so far: the time that throughput is measured over
    "passes",  # track() loops begun so far
    "pass_steps",  # steps done in the present pass
    "pass_total",  # steps the present pass will take, NaN where that is unknown
    "memory_bytes",  # on the CPU: what the process itself holds; on a GPU: torch's allocated bytes
    "reserved_bytes",  # torch's cached bytes on the GPU, NaN on the CPU
    "driver_bytes",  # what NVML says this process (or, in a container, the GPU) holds, NaN on the CPU
]
# Where a rank's time inside `track` loops went, summed up: a row with each tick after time in a loop
PACE = [
    "seconds",
    "steps",
    "tracked_seconds",
    "loader_seconds",  # waiting for the next batch, or making it
    "loader_cpu_seconds",  # of this the main thread's own work
    "cpu_seconds",  # the main thread's work, the loader's included
    "process_cpu_seconds",  # the work of all threads of the process
    "delay_seconds",  # the main thread could have worked and got no core; NaN where the system does not say
    "carriers_delay_seconds",  # the same of gloo's threads, which carry the collectives, summed up
    "asleep_samples",  # so often it was seen asleep, at random moments, outside of the loader
    "collective_samples",  # of these, in a collective of all ranks
]
# When a rank came to a collective of the group of all ranks, by PyTorch's flight recorder
ARRIVAL = [
    "number",  # every rank counts them alike
    "seconds",  # since the launch
    "bytes",  # of its tensors
    "meets",  # 1 where each rank waits for each of the others, as in all_reduce; else 0
]
EVERYONE = "0"  # torch's name of the group of all ranks
OVER_NCCL = " over nccl"  # behind a group's name: NCCL and gloo count the collectives of one group apart
STARTING, AT_WORK, ENDING = "starting", "at work", "ending"  # a rank's phase, among its facts
POINT = ["name", "seconds", "samples", "value"]  # one logged value; name is a line number of RankFiles.names


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in a run's folder."""

    folder: Path
    rank: int | str

    def _of(self, kind: str) -> Path:
        return self.folder / f"rank-{self.rank}.{kind}"

    @property
    def log(self) -> Path:
        """What it printed; of a rank of torchrun see `facts`."""
        return self._of("log")

    @property
    def facts(self) -> Path:
        """JSON: what the rank says of itself: its pid, its phase, device, backend, environment."""
        return self._of("json")

    @property
    def ticks(self) -> Path:
        """Rows of `TICK`."""
        return self._of("ticks")

    @property
    def pace(self) -> Path:
        """Rows of `PACE`."""
        return self._of("pace")

    @property
    def arrivals(self) -> Path:
        """Rows of `ARRIVAL`; where there are many collectives, of some each tick."""
        return self._of("arrivals")

    @property
    def points(self) -> Path:
        """Rows of `POINT`."""
        return self._of("points")

    @property
    def names(self) -> Path:
        """Text: a line for each name that was logged."""
        return self._of("names")

    @property
    def result(self) -> Path:
        """What the function returned, saved by `torch.save`; it is there once the rank has ended well."""
        return self._of("result")

    @property
    def answer(self) -> Path:
        """JSON: what an exercise's answer did, in a rank of `check`."""
        return self._of("answer")

    @property
    def failure(self) -> Path:
        """JSON: how the rank failed (`rank.failure`)."""
        return self._of("failure.json")

    def failure_of_attempt(self, attempt: int) -> Path:
        """JSON: how it failed in an attempt before the present one, which torchrun has started anew."""
        return self._of(f"failure-{attempt}.json")

    @property
    def standstill(self) -> Path:
        """JSON: where it stands, since when, in which collective; while it stands still, or is asked."""
        return self._of("where")

    @property
    def stack(self) -> Path:
        """Text: the Python stacks of its threads, each time that it was asked for them, or crashed."""
        return self._of("stack")


def of_everyone(group: str) -> bool:
    """Whether all ranks are in this group of a standstill's record."""
    return group.removesuffix(OVER_NCCL) == EVERYONE


def ranks_seen(folder: Path) -> int:
    """How many ranks have said something of themselves, by the highest number among them."""
    numbers = [path.name.removeprefix("rank-").removesuffix(".json") for path in folder.glob("rank-*.json")]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that whoever reads it finds it whole.

    Raises
    ------
    OSError
        A full disk, a folder that was removed; what stood there before stands.
    """
    part = beside(path)
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        discard(part)
        raise


def beside(path: Path) -> Path:
    """A name beside a file's, for this thread of this process alone."""
    return path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")


def discard(part: Path) -> None:
    """Remove a file that will not be moved to its place, where that can be done."""
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)
