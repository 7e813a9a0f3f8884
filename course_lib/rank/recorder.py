"""Record the progress of a watched rank in the run's folder.

Ten times a second, a thread of the rank writes down how far the rank is and how much memory it holds:
whatever ends the rank, its last tick is on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ..compat import flight_recorder, on_cpp_terminate, on_world_size
from ..files import write_whole
from ..record.layout import AT_WORK, ENDING, EVERYONE, STARTING, TICK, RankFiles, process_name
from ..record.series import Series
from ..tracebacks.stack_dumps import answer_requests, leave_at_a_crash
from .counters import Counters
from .failure import report_exception
from .fingerprints import Fingerprints
from .memory import TICK_INTERVAL, Memory
from .standstill import StallRecorder, collectives
from .threads import cpu_seconds, note_exceptions

# Environment variables that a launcher sets for a rank
RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|OMP_NUM_THREADS|"
    r"SLURMD_NODENAME|SLURM_(JOB_ID|NODEID|NNODES)"
)
# In these collectives a rank does not wait for all others, and may leave before some have joined
ONE_WAY = ("broadcast", "gather", "reduce", "scatter")
FIRST_TICK = 0.03  # seconds; the rank's work begins before that
GPU_SECONDS = 5.0  # for the GPU at a rank's end: it may wait for other ranks for ever

_recorder: Recorder | None = None


def attach(rank: int | None = None) -> Recorder | None:
    """Return the recorder of this process, made at the first call; None if no run watches (no COURSE_RUN).

    An entry point passes its rank's number. Otherwise this function finds it, and the rank is at work.
    """
    global _recorder
    if _recorder is None:  # check this first: `log` gets here in every step, and reading os.environ is slow
        folder = os.environ.get("COURSE_RUN")
        if folder is None or (rank is None and os.environ.get("COURSE_RANK")):
            return None  # nobody watches, or this is a program that a rank has started
        files = RankFiles(Path(folder), _rank_number() if rank is None else rank)
        _recorder = Recorder(files, AT_WORK if rank is None else STARTING)
        if rank is not None or multiprocessing.parent_process():
            os.environ["COURSE_RANK"] = str(os.getpid())
        if rank is None:  # its own program started this rank: separate its output from the others' now
            send_output_to(files.log)
        _recorder.start()
    return _recorder if _recorder.pid == os.getpid() else None  # a forked DataLoader worker is no rank


def note(**facts: Any) -> None:
    """Write down facts about this rank (its phase, its device, its backend), if a run watches."""
    if recorder := attach():
        recorder.note(**facts)


def report_failure(folder: Path, rank: int, error: BaseException) -> int:
    """Record how this rank fails, and write what is pending; return its exit code."""
    recorder = attach()
    if recorder:
        recorder.note(phase=ENDING)
        recorder.note_collectives()  # first: torchrun ends all ranks once one has failed
    report_exception(folder, rank, error)
    if recorder:
        recorder.close()
    return 1


def send_output_to(path: Path) -> None:
    """Append everything that this process prints, from Python or from C, to a file."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, a full disk, a closed stream
            stream.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)


def _rank_number() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    # mp.spawn numbers its processes from 1 and sets no RANK
    number = multiprocessing.current_process().name.rpartition("-")[2]
    return int(number) - 1 if multiprocessing.parent_process() and number.isdigit() else 0


class Recorder:
    """Writes down ten times a second how far this rank is and what it holds (see `record.layout`)."""

    def __init__(self, files: RankFiles, phase: str = AT_WORK) -> None:
        self.files, self.pid = files, os.getpid()
        self._launched = float(os.environ.get("COURSE_STARTED", time.time()))
        variables = {name: value for name, value in os.environ.items() if RANK_VARIABLES.fullmatch(name)}
        self._facts: dict[str, Any] = {"pid": self.pid, "process": process_name(self.pid), "phase": phase}
        self._facts |= {"launched": self._launched, "environment": variables}
        self.series = Series(files, self._launched)
        self.counters = Counters(self.series.last_tick)
        self.fingerprints = Fingerprints(self.series)
        self._flights, self._last_collective = b"", 0
        self._memory = Memory()
        self._stall_recorder = StallRecorder(files, self.stack_signal)
        self._stack_signal: int | None = None
        self._noting = threading.Lock()
        self._stop = threading.Event()
        self._forget_terminate = lambda: None
        self._flushes = True
        self._thread = threading.Thread(target=self._run, name="course-recorder", daemon=True)

    def start(self) -> None:
        """Begin to tick, and watch how this process fails."""
        self._stack_signal = answer_requests(self.files.stack)
        self.note(stack_signal=self._stack_signal)
        leave_at_a_crash(self.files.crash, note)
        note_exceptions(note)
        on_world_size(self.note_world)
        self._thread.start()
        self._forget_terminate = on_cpp_terminate(self._give_up)
        atexit.register(self.close)

    def note(self, **facts: Any) -> None:
        if facts and facts.items() <= self._facts.items():
            return
        with self._noting, contextlib.suppress(OSError):  # a full disk
            self._facts |= facts
            write_whole(self.files.facts, json.dumps(self._facts))

    def note_world(self, world_size: int) -> None:
        if world_size > self._facts.get("world", 0) and self.pid == os.getpid():  # keep the largest
            self.note(world=world_size)

    def stack_signal(self) -> int | None:
        """Return the signal on which this rank writes its stacks; None once its program has taken it over."""
        number = self._stack_signal
        return number if number and signal.getsignal(number) is signal.SIG_DFL else None

    def tick(self, exact: bool = True) -> None:
        measured = {
            "seconds": time.time() - self._launched,
            "cpu_seconds": cpu_seconds(threading.main_thread().ident),
            **self._memory.read(exact),
        }
        values = self.counters.read() | measured
        self.series.append("ticks", [values[name] for name in TICK])
        self.series.append("arrivals", self.arrivals())

    def arrivals(self) -> list[float]:
        """Return rows of `layout.ARRIVAL`, one after the other: the collectives since the last call."""
        flights, calls, rows = flight_recorder(includeCollectives=False), [], list[float]()
        if flights == self._flights:  # no new collective; much cheaper to ask than to read them
            return rows
        self._flights = flights
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # a changed form
            for group, number, entry in collectives():
                if group == EVERYONE:
                    meets = entry["profiling_name"].rpartition(":")[2] not in ONE_WAY
                    calls.append((number, entry["time_created_ns"] / 1e9 - self._launched, meets))
        calls.sort()
        if calls and calls[-1][0] < self._last_collective:  # a new group, which counts from 1
            self._last_collective = 0
        for call in calls:
            if call[0] > self._last_collective:
                rows.extend(call)
                self._last_collective = call[0]
        return rows

    def close(self) -> None:
        """Write what is pending, and close the files. They can be read at any moment before, too."""
        if self._stop.is_set() or self.pid != os.getpid():
            return
        self._stop.set()
        self._forget_terminate()
        self._thread.join(2)
        self.note_collectives()
        self.tick(exact=False)  # an exact reading would delay the end of every short run
        until = time.monotonic() + GPU_SECONDS
        while self._flush() and time.monotonic() < until:
            time.sleep(0.01)
        self.series.close()

    def _give_up(self) -> None:
        """Write down the collectives before C++ aborts this process, perhaps because they do not match."""
        if self.pid == os.getpid():
            self._stop.set()
            self.note_collectives()

    def note_collectives(self) -> None:
        with contextlib.suppress(Exception):  # the failure itself must still be recorded
            self._stall_recorder.close()

    def _flush(self) -> bool:
        """Write the values that are ready; return whether a GPU still computes others."""
        if not self._flushes:
            return False
        try:
            return any([self.series.flush(), self.fingerprints.flush()])
        except Exception as error:  # once CUDA has failed anywhere, each later call raises the error again
            self._flushes = False
            print(f"course_lib: what was logged on a GPU cannot be read: {error!r}", file=sys.stderr)
            return False

    def _run(self) -> None:
        self._stop.wait(FIRST_TICK)
        while not self._stop.is_set():
            self.tick()
            self.note(stack_signal=self.stack_signal())
            on_world_size(self.note_world)
            self._stall_recorder.look(self.counters.steps)
            self._flush()
            self._stop.wait(until_the_next_tick(time.time()))


def until_the_next_tick(now: float) -> float:
    """Return the seconds until the next tick: all ranks tick together, to see the same last collectives."""
    wait = TICK_INTERVAL - now % TICK_INTERVAL
    return wait if wait > TICK_INTERVAL / 4 else wait + TICK_INTERVAL
