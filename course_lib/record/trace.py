"""Read what one rank has written to the run's folder by now."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ..files import lines_of, read_json
from ..kill import is_alive
from .layout import AGENT_LOGS, PROGRAM, ROWS, RankFiles, was_asked_to_end

LOG_BYTES = 1 << 20  # of a longer output, `Trace.log` returns the end
TAIL_BYTES = 1 << 14
DUMP_BYTES = 1 << 18  # of stacks: a dump has a hundred frames for each of a hundred threads
LINE_LENGTH = 400  # of a longer line, the beginning and the end are shown
MOST_ARRIVALS = 1024  # read for each rank, the latest ones
LATEST_POINTS = 512
Content = TypeVar("Content")
# Gloo prints this for each group in torch 2.10, and no longer in 2.11
GLOO_SAYS = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+ *"
)


def peak_bytes(ticks: dict[str, np.ndarray]) -> float:
    """Return the most memory that a rank held, given its ticks."""
    return float(np.fmax(ticks["memory_bytes"], ticks["peak_bytes"]).max(initial=0))


class Check(NamedTuple):
    """When fingerprints were taken, in numbers that ranks have in common."""

    attempt: int  # how often torchrun had restarted the ranks
    number: int  # of the pass over a loader
    step: int  # steps done in this pass


def _content(read: Callable[[Path], Content], kind: str) -> cached_property[Content]:
    """Return a property: the content of a rank's file (see `RankFiles`), empty if the file is missing."""
    return cached_property(lambda trace: read(getattr(trace.files, kind)))


class Trace:
    """What one rank, or a program outside of its ranks (rank ``"program"``), has written by now.

    Each file except the output is read once, when it is first needed. For a later look, make another trace.
    """

    def __init__(self, folder: Path, rank: int | str) -> None:
        self.files = RankFiles(folder, rank)

    facts = _content(read_json, "facts")
    standstill = _content(read_json, "standstill")
    failure = _content(read_json, "failure")
    names = _content(lines_of, "names")
    tensors = _content(lines_of, "tensors")
    stacks = _content(lambda path: end_of(path, DUMP_BYTES)[1], "stack")
    has_result = _content(Path.exists, "result")
    has_failed = _content(Path.exists, "failure")  # it has said so, perhaps in a file that is damaged

    @cached_property
    def lives(self) -> bool:
        """Whether the process that the rank has reported runs on this machine."""
        return "pid" in self.facts and is_alive(self.facts["pid"])

    @cached_property
    def has_returned(self) -> bool:
        """Whether the rank has ended successfully, and not because torchrun's agent asked it to."""
        process, at = self.facts.get("process", ""), self.facts.get("returned", 0)
        return self.has_result or (bool(at) and not was_asked_to_end(self.files.folder, process, at))

    @property
    def seconds_since_return(self) -> float:
        """How long ago the rank has returned; 0 if the run's folder has been removed."""
        path = self.files.result if self.has_result else self.files.facts
        return time.time() - path.stat().st_mtime if path.exists() else 0.0

    def crash_texts(self) -> Iterator[str]:
        """Yield the ends of the files in which a crash may have left the Python stacks."""
        named = self.facts.get("crash_file")
        for path in [self.files.crash, *([Path(named)] if named else []), *reversed(self.log_files())]:
            yield end_of(path, DUMP_BYTES)[1]

    # --- what it printed ----------------------------------------------------------------------------------

    def log_files(self) -> list[Path]:
        """Return the files with the rank's output; torchrun writes two for each attempt."""
        if self.files.rank == PROGRAM:  # for a job, also the output of torchrun on each node
            return [self.files.log, *sorted(self.files.folder.glob(AGENT_LOGS))]
        output = self.facts.get("output")
        if not isinstance(output, str):
            return [self.files.log]
        last = self.files.folder / output  # torchrun/node-0/<id>/attempt_0/<local rank>
        attempts = sorted(last.parents[1].glob("attempt_*"), key=lambda attempt: attempt.stat().st_mtime)
        return [attempt / last.name / f"{kind}.log" for attempt in attempts for kind in ("stdout", "stderr")]

    def log(self) -> str:
        """Return what the rank printed, as a terminal shows it; of a file larger than 1 MiB, only the end."""
        texts = []
        for path in self.log_files():
            size, text = end_of(path, LOG_BYTES)
            if size > LOG_BYTES:
                text = f"[the first {size - LOG_BYTES:,} of {size:,} bytes are only in {path}]\n{text}"
            texts.append(as_shown(text))
        return "".join(texts)

    def last_lines(self, count: int) -> list[str]:
        lines: list[str] = []
        files = self.log_files()
        for path in files if self.files.rank == PROGRAM else files[-2:]:  # of the last attempt
            for size in (TAIL_BYTES, LOG_BYTES):  # a progress bar may fill the first
                whole, text = end_of(path, size)
                found = as_shown(text).rstrip().splitlines()[-count:]
                if len(found) == count or whole <= size:
                    break
            lines += found
        return [shortened(line) for line in lines[-count:]]

    # --- what it measured ---------------------------------------------------------------------------------

    @cached_property
    def ticks(self) -> dict[str, np.ndarray]:
        """Every column of `layout.TICK`, with one entry per tick so far."""
        ticks = rows_of(self.files, "ticks")
        on_a_gpu = np.isfinite(ticks["reserved_bytes"])
        if on_a_gpu.any():  # before that it held nothing there; main memory does not count
            ticks["memory_bytes"] = np.where(on_a_gpu, ticks["memory_bytes"], 0.0)
        return ticks

    @cached_property
    def unheard_seconds(self) -> float:
        """For how long the rank's recorder has written nothing."""
        # before a rank's first tick there are only its facts
        wrote = [path.stat().st_mtime for path in (self.files.ticks, self.files.facts) if path.exists()]
        return time.time() - max(wrote) if wrote else 0.0

    def cpu_share(self, seconds: float) -> float:
        """Return the main thread's CPU time per second, in the last ``seconds``; NaN if unknown."""
        now, used = self.ticks["seconds"], self.ticks["cpu_seconds"]
        recent = now >= now.max(initial=0) - seconds
        elapsed = np.ptp(now[recent]) if recent.any() else 0.0
        return float(np.ptp(used[recent]) / elapsed) if elapsed else math.nan

    @cached_property
    def arrivals(self) -> dict[str, np.ndarray]:
        """The columns of `layout.ARRIVAL`: when the rank called its latest collectives, by number."""
        rows = rows_of(self.files, "arrivals", last=MOST_ARRIVALS)
        first = 1 + int(np.flatnonzero(np.diff(rows["number"]) <= 0).max(initial=-1))  # of the newest group
        return {name: column[first:] for name, column in rows.items()}

    def fingerprints(self, last: int | None = None) -> dict[Check, np.ndarray]:
        """Return rows of (tensor, fingerprint) by check, from all rows or the ``last`` ones."""
        rows = np.stack(list(rows_of(self.files, "fingerprints", last).values()), axis=1)
        begins = np.flatnonzero(np.diff(rows[:, :3], axis=0, prepend=math.nan).any(axis=1))
        checks: dict[Check, np.ndarray] = {}
        for part in np.split(rows, begins[1:]) if len(rows) else []:
            check = Check(*map(int, part[0, :3]))
            checks[check] = np.concatenate([checks.get(check, part[:0, 3:]), part[:, 3:]])
        return checks

    def metrics(self) -> dict[str, np.ndarray]:
        """Return the metrics of this rank, as in `Run.metrics`."""
        ticks = self.ticks
        shown = ["seconds", "samples", "steps", "tracked_seconds", "memory_bytes"]
        shown += [name for name in ("reserved_bytes", "driver_bytes") if not np.isnan(ticks[name]).all()]
        series = {name: ticks[name] for name in shown}
        points = rows_of(self.files, "points")
        for i, name in enumerate(self.names):
            own = points["name"] == i
            series[name] = points["value"][own]
            for field in ("seconds", "samples"):
                series[f"{name}.{field}"] = points[field][own]
        return series

    def latest(self) -> dict[str, float]:
        """Return the last value of each name among the latest points, without reading the rest."""
        points = rows_of(self.files, "points", last=LATEST_POINTS)
        values = dict(zip(points["name"], points["value"], strict=True))
        return {name: values[i] for i, name in enumerate(self.names) if i in values}


def rows_of(files: RankFiles, kind: str, last: int | None = None) -> dict[str, np.ndarray]:
    """Read the columns of a rank's file of rows (the ``last`` ones), without a truncated last row."""
    path, columns = getattr(files, kind), ROWS[kind]
    size = 8 * len(columns)
    try:
        skip = 0 if last is None else max(0, path.stat().st_size // size - last)
        flat = np.fromfile(path, "<f8", offset=size * skip)
    except OSError:
        flat = np.empty(0)
    whole = flat[: flat.size // len(columns) * len(columns)].reshape(-1, len(columns))
    return dict(zip(columns, whole.T, strict=True))


def as_shown(text: str) -> str:
    """Return a text as a terminal shows it: only the last state of a progress bar, and no line of gloo's."""
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(line for line in shown if not GLOO_SAYS.fullmatch(line))


def end_of(path: Path, count: int) -> tuple[int, str]:
    """Return a text file's size in bytes, and the text of its last ``count`` bytes."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - count))
            return size, file.read(count).decode(errors="replace")
    except OSError:
        return 0, ""


def shortened(line: str, length: int = LINE_LENGTH) -> str:
    """Leave out the middle of a line that is longer than ``length``: the cause is often at the end."""
    if len(line) <= length:
        return line
    return f"{line[: length // 2]} [… {len(line) - length:,} characters …] {line[-(length // 2) :]}"
