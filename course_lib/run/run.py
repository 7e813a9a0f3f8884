"""A run, during and after it: what each rank returned, printed and measured.

Everything is read from the run's folder. `Run.open` executes no code from there: metrics and texts are data,
results are read as tensors, numbers, strings and containers.
"""

from __future__ import annotations

import html
import math
import os
import shutil
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..compat import array_constructors
from ..figures.tables import html_table
from ..files import read_json
from ..host.hardware import oom_kills
from ..record.layout import PROGRAM, RUN, RankFiles
from ..record.run_record import RunRecord, folder_of_runs, newest_first
from ..record.trace import Trace, peak_bytes

if TYPE_CHECKING:
    from ..figures.style import Picture

RECORD_BYTES = 1 << 16  # with less free space, the disk is full: a failure's record may take as many


def _of_record(name: str, meaning: str) -> Any:
    """Return a property that reads the property of this name from the record."""
    return property(lambda run: getattr(run.record, name), doc=meaning)


def _fact(name: str, default: Any, meaning: str) -> Any:
    """Return a property that reads a fact of run.json."""
    return property(lambda run: run.record.facts.get(name, default), doc=meaning)


class Run:
    """One launch: returned by `launch`, `torchrun`, …, and reopened by `Run.open` (lessons 00 and 06)."""

    name: str = _fact("name", "", "The function or script that ran.")
    world_size: int = _of_record("world_size", "The number of ranks.")
    state: str = _of_record("state", '``"running"``, ``"done"``, ``"failed"``, ``"stopped"``, ``"queued"``.')
    error: str = _fact("error", "", "The report of the failure; empty if there was none.")
    started: float = _fact("started", math.nan, "``time.time()`` at the call or, for a job, at its start.")
    seconds: float = _of_record("seconds", "From ``started`` to the end of the last rank, or so far.")
    folder: Path = _of_record("folder", "The run's folder.")
    command: str = _fact("command", "", "What does the same in a terminal; empty for a `launch`.")
    is_job: bool = _of_record("is_job", "Whether it is meant for Slurm, already submitted or not.")
    job: int | None = _fact("job", None, "The job's number in Slurm's queue; None if there is no job.")
    nodes: str = _fact("nodes", "", "What Slurm allocated, such as ``node[1-2]``; empty before that.")
    queued_seconds: float = _of_record("queued_seconds", "In the queue; whole seconds once the job starts.")

    def __init__(self, record: RunRecord, *, unpickles: bool = False) -> None:
        self.record = record
        self.unpickles = unpickles  # load results of any type, which may run code
        self._traces: dict[int | str, Trace] | None = None  # of a snapshot

    @classmethod
    def create(cls, name: str, world_size: int, unpickles: bool = True, **facts: Any) -> Run:
        """Create the folder of a run that begins now, and that this process watches."""
        return cls(RunRecord.create(name, world_size, **facts), unpickles=unpickles)

    @classmethod
    def open(cls, folder: str | os.PathLike[str] | None = None) -> Run:
        """Open the run kept in a folder; by default the newest of this kernel or, if it has none, of all.

        A job whose kernel is gone is shown as that kernel last saw it; `slurm` watches it again.

        Raises
        ------
        FileNotFoundError
            The folder does not exist, or there is no run yet.
        ValueError
            The folder holds no run, or its run.json is damaged.
        """
        if folder is None:
            runs = newest_first()
            if not runs:
                raise FileNotFoundError(f"there is no run yet in {folder_of_runs()}")
            of_this_kernel = (run for run in runs if read_json(run / RUN).get("kernel_pid") == os.getpid())
            folder = next(of_this_kernel, runs[0])
        path = Path(folder)
        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path}; Run.open() without one opens the newest run")
        return cls(RunRecord.read(path))

    @property
    def short_of_memory(self) -> bool:
        """Whether the system has killed processes for lack of memory since the run began."""
        return oom_kills() > self.record.facts.get("oom_kills", math.inf)

    @property
    def unrecorded(self) -> Literal["", "folder removed", "disk full"]:
        """Why a rank may have been unable to record anything; empty if no reason is seen."""
        try:
            return "disk full" if shutil.disk_usage(self.folder).free < RECORD_BYTES else ""
        except OSError:
            return "folder removed"

    @property
    def restarts(self) -> int:
        """How often torchrun has restarted the ranks."""
        return max((trace.facts.get("restart", 0) for trace in self.traces()), default=0)

    @property
    def environments(self) -> list[dict[str, str]]:
        """The variables that the launcher set, by rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR…"""
        return [trace.facts.get("environment", {}) for trace in self.traces()]

    @property
    def reason(self) -> str:
        """Why the job waits in the queue, in Slurm's words: ``"Resources"``, ``"Priority"``…"""
        return self.record.facts.get("reason", "") if self.state == "queued" else ""

    # --- what the ranks gave back -------------------------------------------------------------------------

    @property
    def results(self) -> list[Any]:
        """What each rank returned, by rank, with tensors on the CPU; None for a rank that did not finish.

        None, too, for a result that cannot be read here: then the run has failed, and `error` says why.

        Raises
        ------
        ValueError
            The run was opened from its folder, and a result holds more than tensors, arrays, numbers, strings
            and containers of them: other types are loaded only from ranks that this process started.
        """
        if self.unpickles and self.record.is_over:
            return self.results_and_errors[0]
        return [self._load_result(rank) for rank in range(self.world_size)]

    @cached_property
    def results_and_errors(self) -> tuple[list[Any], dict[int, Exception]]:
        """What each rank of a run that is over returned and, by rank, why a result cannot be read."""
        results, errors = [None] * self.world_size, {}
        for rank in range(self.world_size):
            try:
                results[rank] = self._load_result(rank)
            except Exception as error:
                errors[rank] = error
        return results, errors

    def _load_result(self, rank: int) -> Any:
        import torch

        path = RankFiles(self.folder, rank).result
        if not path.exists():
            return None
        if self.unpickles:
            return torch.load(path, map_location="cpu", weights_only=False)
        plain_arrays = [*array_constructors(), np.ndarray, np.dtype]
        plain_arrays += [type(np.dtype(kind)) for kind in "?bhilBHILefd"]
        try:
            with torch.serialization.safe_globals(plain_arrays):
                return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise ValueError(
                f"the result of rank {rank} in {path} is not loaded again: from a folder, only tensors, "
                f"arrays, numbers, strings and containers of them are ({reason:.120})"
            ) from None

    @property
    def logs(self) -> list[str]:
        """What each rank printed, by rank; of more than 1 MiB, only the end (the folder has all of it)."""
        return [trace.log() for trace in self.traces()]

    @property
    def output(self) -> str:
        """What a program printed outside its ranks; empty for a `launch`."""
        return self.trace(PROGRAM).log()

    @property
    def metrics(self) -> list[dict[str, np.ndarray]]:
        """What each rank measured, by rank: NumPy float64 arrays by name.

        Ten times a second: ``seconds`` since the launch, ``samples`` and ``steps`` so far,
        ``tracked_seconds`` spent in `track` loops so far, ``memory_bytes`` (on the CPU the process's own
        memory, on a GPU torch's allocated bytes) and, on a GPU, ``reserved_bytes`` (torch's cache) and
        ``driver_bytes`` (NVML). For each name given to `log`, an array with one entry per call, and for
        ``loss`` also ``loss.seconds`` and ``loss.samples``, which say when each call was.
        """
        return [trace.metrics() for trace in self.traces()]

    # --- what one rank has written so far -----------------------------------------------------------------

    def snapshot(self) -> Run:
        """Return this run as it is now: what a rank has written is read once, when it is first needed."""
        if self._traces is not None:
            return self
        now = Run(self.record, unpickles=self.unpickles)
        now._traces = {}
        return now

    def trace(self, rank: int | str) -> Trace:
        """Return what a rank has written so far; in a snapshot, always the same."""
        if self._traces is None:
            return Trace(self.folder, rank)
        if rank not in self._traces:
            self._traces[rank] = Trace(self.folder, rank)
        return self._traces[rank]

    def traces(self) -> list[Trace]:
        """Return the traces of all ranks."""
        return [self.trace(rank) for rank in range(self.world_size)]

    def facts(self, rank: int | str) -> dict[str, Any]:
        """Return what a rank has reported: its pid and, after `place`, device and backend."""
        return self.trace(rank).facts

    def node_of(self, rank: int | str) -> str:
        """Return Slurm's name for a rank's node; empty without a job, or if the rank has not recorded it."""
        variables = self.facts(rank).get("environment", {}) if self.is_job else {}
        return variables.get("SLURMD_NODENAME", "")

    def clock(self, rank: int) -> float:
        """Return ``time.time()`` on a rank's machine; in a job, the time of the rank's last tick."""
        trace = self.trace(rank)
        launched = trace.facts.get("launched")
        if not self.is_job or not len(trace.ticks["seconds"]) or not isinstance(launched, int | float):
            return time.time()
        return launched + float(trace.ticks["seconds"][-1])

    def lives(self, rank: int) -> bool:
        """Return whether the process that a rank has reported still runs; for a job, whether the job does."""
        return not self.record.facts.get("job_over") if self.is_job else self.trace(rank).lives

    # --- figures and words --------------------------------------------------------------------------------

    def samples_per_second(self, rank: int | None = None) -> float:
        """Return the samples per second spent in `track` loops, of one rank or of all together."""
        if rank is None:
            return float(sum(map(self.snapshot().samples_per_second, range(self.world_size))))
        ticks = self.trace(rank).ticks
        seconds = ticks["tracked_seconds"][-1:]
        return float(ticks["samples"][-1] / seconds[0]) if seconds.size and seconds[0] > 0 else 0.0

    @property
    def tracked(self) -> bool:
        """Whether any rank called `track` or `log`; otherwise there is nothing to draw."""
        return any(trace.ticks["passes"].any() or trace.names for trace in self.traces())

    def plot(self) -> Picture:
        """Draw memory and throughput of each rank over the run."""
        from .picture import plot_run

        return plot_run(self.snapshot())

    def table(self) -> list[dict[str, str]]:
        """Return one row per rank, as text: device, samples, throughput, peak memory, last logged values."""
        rows, now = [], self.snapshot()
        for rank, trace in enumerate(now.traces()):
            row = {"rank": str(rank)}
            if self.is_job:
                row["node"] = now.node_of(rank) or "–"
            row["device"] = str(trace.facts.get("device", "–"))
            row["samples"] = f"{trace.ticks['samples'].max(initial=0):,.0f}"
            row["samples/s"] = f"{now.samples_per_second(rank):,.0f}"
            row["peak memory"] = f"{peak_bytes(trace.ticks) / 2**20:,.0f} MiB"
            logged = [f"{name} {value:.4g}" for name, value in trace.latest().items()]
            rows.append(row | {"last logged": ", ".join(logged) or "–"})
        return rows

    def who(self, rank: int | str) -> str:
        """Name a rank: ``"rank 2"``, ``"rank 2 on node2"``, ``"the program"``, ``"the job"``."""
        if rank == PROGRAM:
            return "the job" if self.is_job else "the program"
        node = self.node_of(rank)
        return f"rank {rank} on {node}" if node else f"rank {rank}"

    def duration(self) -> str:
        """Say how long the run took (so far): ``"5.1 s"``, ``"5.1 s (before that 12 s in the queue)"``."""
        if self.is_job and not self.nodes:
            return f"{self.queued_seconds:.0f} s in the queue"
        queued = f" (before that {self.queued_seconds:.0f} s in the queue)" if self.is_job else ""
        return f"{self.seconds:.1f} s{queued}"

    def waits(self) -> str:
        """Say for how long, and why, the job has waited in the queue; empty if it does not wait."""
        if self.state != "queued":
            return ""
        job = "submitting" if self.job is None else f"job {self.job} waits in the queue"
        return f"{job}, {self.queued_seconds:.0f} s" + (f" ({self.reason})" if self.reason else "")

    def headline(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        left = self.job is not None and not self.record.is_over and not self.record.is_watched
        known = "; known when its kernel ended: slurm(run) watches it again" if left else ""
        if self.waits():
            return f"{self.name}: {ranks}, {self.waits()}{known}"
        again = f", restart {self.restarts} of {self.record.facts['max_restarts']}" if self.restarts else ""
        return f"{self.name}: {ranks}, {self.state}, {self.duration()}{again}{known}"

    def __repr__(self) -> str:
        return f"<Run {self.headline()}>"

    def _repr_html_(self) -> str:
        return f"<p><b>{html.escape(self.headline())}</b></p>" + html_table(self.table())
