"""A run, during and after it: what each rank returned, printed and measured.

Everything is read from the run's folder, which only its owner can enter and which is kept (the newest 50
are): ``Run.open()`` reopens the last one, even in another kernel. Metrics and texts are plain data, and
results are read as tensors, numbers, strings and containers of them: opening a folder runs no code from it.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..figures.tables import html_table
from ..hardware import oom_kills
from ..run_folder import PROGRAM, RUN, RankFiles, ranks_seen, write_whole
from .job import JobFacts
from .kept import LASTING, UNREADABLE, facts_of, folder_of_runs, is_watched, kernel_of, newest_first
from .trace import ByRank, Trace

if TYPE_CHECKING:
    from ..figures.style import Picture


class Run(JobFacts):
    """One launch: returned by `launch`, `torchrun`, …, and reopened by `Run.open` (lessons 00 and 06).

    Attributes
    ----------
    name : str
        The function or script that ran.
    world_size : int
        The number of ranks.
    state : str
        ``"running"``, ``"done"``, ``"failed"`` or ``"stopped"``; for a job before its start ``"queued"``.
    seconds : float
        From the call, or a job's start, to the end of the last rank (so far, while it runs).
    folder : pathlib.Path
        The folder that it is kept in.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], trusted: bool = False) -> None:
        self.folder = folder
        self._facts = facts
        self.trusted = trusted  # this process started the ranks, so it may unpickle their results
        self.watched = trusted  # this process records the state of the run
        self._results: list[Any] | None = None

    # --- made, opened, ended ------------------------------------------------------------------------------

    @classmethod
    def create(cls, name: str, world_size: int, trusted: bool = True, **facts: Any) -> Run:
        """Create the folder of a run that begins now; if ``trusted``, its results may be unpickled here."""
        runs = folder_of_runs()
        try:
            runs.mkdir(mode=0o700, exist_ok=True)
            safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:40]
            now = time.time()
            stamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S', time.localtime(now))}.{int(now * 1000) % 1000:03}"
            folder = Path(tempfile.mkdtemp(prefix=f"{stamp}_{safe}_", dir=runs))  # mode 0700
            run = cls(
                folder,
                {
                    "name": name,
                    "world_size": world_size,
                    "state": "running",
                    "started": time.time(),
                    "kernel_pid": os.getpid(),
                    "host": socket.gethostname(),
                    "oom_kills": oom_kills(),
                    **facts,
                },
                trusted,
            )
            run._save()
        except OSError as error:
            raise type(error)(
                error.errno,
                f"no run can be kept: {error.strerror}; set COURSE_HOME to a folder with space",
                str(runs),
            ) from None
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike[str] | None = None) -> Run:
        """Open the run kept in a folder; by default the newest of this kernel or, if it has none, of all.

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
            path = next((each for each in runs if kernel_of(each) == os.getpid()), runs[0])
        else:
            path = Path(folder)
            if not path.is_dir():
                raise FileNotFoundError(
                    f"there is no folder {path}; Run.open() without one opens the newest run"
                )
        try:
            return cls(path, facts_of(path))
        except UNREADABLE as error:
            raise ValueError(f"{path} holds no whole run: its run.json cannot be read ({error!r})") from None

    def refresh(self) -> Run:
        """Read the run's file again; for a Slurm job that no kernel watches any longer, ask Slurm.

        `Run.open` and all attributes return at once what is known; Slurm may take a minute to answer.

        Returns
        -------
        Run
            This run.

        Raises
        ------
        cluster.SlurmError
            Slurm gave no answer; what was known is kept.
        """
        if self.watched or self.state not in LASTING:
            return self
        self._read_again()
        if self.job is not None and self.state in LASTING and not is_watched(self._facts):
            self._ask(self.job)
        return self

    def _read_again(self) -> None:
        with contextlib.suppress(*UNREADABLE):
            self._facts |= facts_of(self.folder)

    def end(self, state: str, error: str = "") -> None:
        """Record how the run ended."""
        self._facts["world_size"] = self.world_size
        if self.is_job:
            self._facts["queued_seconds"] = self.queued_seconds
        self._facts |= {"state": state, "seconds": self._seconds_so_far(), "error": error}
        try:
            self._save()
        except OSError as reason:  # a full disk, a folder that was removed: it has ended all the same
            print(f"course_lib: how this run ended cannot be kept: {reason}", file=sys.stderr)

    def _save(self) -> None:
        write_whole(self.folder / RUN, json.dumps(self._facts))

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._facts["name"]

    @property
    def world_size(self) -> int:
        known = self._facts["world_size"]
        if known == 0 or (self._facts.get("program") and self.state == "running"):  # it starts its own ranks
            return ranks_seen(self.folder)
        return known

    @property
    def state(self) -> str:
        return self._facts.get("state", "running")

    @property
    def error(self) -> str:
        """The report of the failure; empty if there was none."""
        return self._facts.get("error", "")

    @property
    def started(self) -> float:
        """``time.time()`` at the call or, for a job, at its start."""
        return self._facts.get("started", math.nan)

    @property
    def seconds(self) -> float:
        return self._facts.get("seconds", self._seconds_so_far())

    def _seconds_so_far(self) -> float:
        so_far = time.time() - self._facts.get("started", math.nan)
        return self._of_a_job(so_far) if self.is_job else so_far

    @property
    def short_of_memory(self) -> bool:
        """Whether the system has killed processes for lack of memory since the run began."""
        return oom_kills() > self._facts.get("oom_kills", math.inf)

    @property
    def command(self) -> str:
        """The command that does the same in a terminal, if a program ran; empty for a `launch`."""
        return self._facts.get("command", "")

    @property
    def restarts(self) -> int:
        """How often torchrun has restarted the ranks."""
        return max((self.facts(rank).get("restart", 0) for rank in range(self.world_size)), default=0)

    @property
    def environments(self) -> Sequence[dict[str, str]]:
        """The variables that the launcher set, by rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR…"""
        return ByRank(self.world_size, lambda rank: self.facts(rank).get("environment", {}))

    # --- what the ranks gave back -------------------------------------------------------------------------

    @property
    def results(self) -> list[Any]:
        """What each rank returned, by rank, with tensors on the CPU; None for a rank that did not finish.

        Raises
        ------
        ValueError
            The run was opened from its folder, and a result holds more than tensors, arrays, numbers, strings
            and containers of them: that is only loaded from ranks that this process started.
        """
        if self._results is None:
            results = [self._load_result(rank) for rank in range(self.world_size)]
            if self.state in LASTING:
                return results
            self._results = results
        return self._results

    def _load_result(self, rank: int) -> Any:
        import torch

        path = RankFiles(self.folder, rank).result
        if not path.exists():
            return None
        if self.trusted:
            return torch.load(path, map_location="cpu", weights_only=False)
        loaded = sys.modules  # NumPy 1 has it elsewhere
        multiarray = loaded.get("numpy._core.multiarray") or loaded["numpy.core.multiarray"]
        plain_arrays = [multiarray._reconstruct, np.ndarray, np.dtype, multiarray.scalar]
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
    def logs(self) -> Sequence[str]:
        """What each rank printed, by rank (of more than 1 MiB, the end; all of it is in the folder)."""
        return ByRank(self.world_size, lambda rank: self.trace(rank).log())

    @property
    def output(self) -> str:
        """What a program printed outside its ranks; empty for a `launch`."""
        return self.trace(PROGRAM).log()

    @property
    def metrics(self) -> Sequence[dict[str, np.ndarray]]:
        """What each rank measured, by rank: NumPy float64 arrays by name.

        Ten times a second: ``seconds`` since the launch, ``samples`` and ``steps`` so far,
        ``tracked_seconds`` spent in `track` loops so far, ``memory_bytes`` (on the CPU the process's own
        memory, on a GPU torch's allocated bytes) and, on a GPU, ``reserved_bytes`` (torch's cache) and
        ``driver_bytes`` (NVML). For each name given to `log`, an array with one entry per call, and for
        ``loss`` also ``loss.seconds`` and ``loss.samples``, which say when each call was.
        """
        return ByRank(self.world_size, lambda rank: self.trace(rank).metrics())

    # --- what one rank has written so far -----------------------------------------------------------------

    def trace(self, rank: int | str) -> Trace:
        return Trace(self.folder, rank)

    def facts(self, rank: int | str) -> dict[str, Any]:
        """Return what a rank has reported about itself: its pid and, after `place`, device and backend."""
        return self.trace(rank).facts()

    def ticks(self, rank: int) -> dict[str, np.ndarray]:
        """Return every column of `run_folder.TICK` for one rank, with one entry per tick so far."""
        return self.trace(rank).ticks()

    # --- figures and words --------------------------------------------------------------------------------

    def samples_per_second(self, rank: int | None = None) -> float:
        """Return the samples per second spent in `track` loops, of one rank or of all together."""
        if rank is None:
            return float(sum(self.samples_per_second(each) for each in range(self.world_size)))
        ticks = self.ticks(rank)
        seconds = ticks["tracked_seconds"][-1:]
        return float(ticks["samples"][-1] / seconds[0]) if seconds.size and seconds[0] > 0 else 0.0

    def peak_memory_bytes(self, rank: int) -> float:
        """Return the most memory that a rank was seen to hold, in bytes."""
        return float(self.ticks(rank)["memory_bytes"].max(initial=0))

    @property
    def tracked(self) -> bool:
        """Whether any rank called `track` or `log`; otherwise there is nothing to draw."""
        traces = map(self.trace, range(self.world_size))
        return any(each.ticks()["passes"].any() or each.names() for each in traces)

    def plot(self) -> Picture:
        """Draw memory and throughput of each rank over the run."""
        from .picture import plot_run

        return plot_run(self)

    def table(self) -> list[dict[str, str]]:
        """Return one row per rank, as text: device, samples, throughput, peak memory, last logged values."""
        rows = []
        for rank in range(self.world_size):
            trace = self.trace(rank)
            rows.append(
                {
                    "rank": str(rank),
                    **({"node": self.node_of(rank) or "–"} if self.is_job else {}),
                    "device": str(trace.facts().get("device", "–")),
                    "samples": f"{trace.ticks()['samples'].max(initial=0):,.0f}",
                    "samples/s": f"{self.samples_per_second(rank):,.0f}",
                    "peak memory": f"{self.peak_memory_bytes(rank) / 2**20:,.0f} MiB",
                    "last logged": ", ".join(f"{k} {v:.4g}" for k, v in trace.latest().items()) or "–",
                }
            )
        return rows

    def headline(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        again = f", restart {self.restarts} of {self._facts['max_restarts']}" if self.restarts else ""
        alone = self.job is not None and self.state in LASTING and not is_watched(self._facts)
        asked = "; known when Slurm was last asked: run.refresh() asks again" if alone else ""
        if self.waits():
            return f"{self.name}: {ranks}, {self.waits()}{asked}"
        return f"{self.name}: {ranks}, {self.state}, {self.duration()}{again}{asked}"

    def __repr__(self) -> str:
        return f"<Run {self.headline()}>"

    def _repr_html_(self) -> str:
        return f"<p><b>{html.escape(self.headline())}</b></p>" + html_table(self.table())
