"""Record the progress of a watched rank in the run's folder.

Ten times a second, a thread of the rank writes down how far the rank is and how much memory it holds:
whatever ends the rank, what it has measured until then is on disk. Numbers are rows of float64, so a
truncated file loses its last row at most.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from array import array
from collections import UserDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..run_folder import AT_WORK, STARTING, TICK, RankFiles, write_whole
from .memory import TICK_INTERVAL, Memory
from .pace import Counted, Pace, Samples
from .standstill import Lookout

AT_ONCE = 1e-4  # seconds: a batch that comes in less was not waited for
MAPPINGS = (dict, UserDict)  # the latter is what transformers' collators make
CONTAINERS = (list, tuple, *MAPPINGS)  # built once: ``list | tuple | dict`` takes longer than isinstance
# The environment variables that a launcher sets for a rank
TOLD = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|OMP_NUM_THREADS|"
    r"SLURMD_NODENAME|SLURM_(JOB_ID|NODEID|NNODES)"
)
FIRST_TICK = 0.03  # seconds; the rank's own work begins before
LOOKS = 3  # between two ticks, to see where the main thread sleeps

_recorder: Recorder | None = None


def attach(rank: int | None = None) -> Recorder | None:
    """Return the recorder of this process, made at the first call; None if no run watches (no COURSE_RUN).

    A launcher's wrapper passes the number of its rank; otherwise it is found out, and the rank is at work.
    """
    global _recorder
    if _recorder is None:  # check this first: `log` gets here in every step, and reading os.environ is slow
        folder = os.environ.get("COURSE_RUN")
        if folder is None:
            return None
        files = RankFiles(Path(folder), _rank_number() if rank is None else rank)
        _recorder = Recorder(files, AT_WORK if rank is None else STARTING)
        if rank is None:  # its own program started this rank: separate its output from the others' now
            send_output_to(files.log)
            answer_stack_requests(files.stack)
        _recorder.start()
        atexit.register(_recorder.close)
    return _recorder if _recorder.pid == os.getpid() else None  # a forked DataLoader worker is no rank


def send_output_to(path: Path) -> None:
    """Append everything that this process prints, from Python or from C, to a file."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def answer_stack_requests(path: Path) -> None:
    """On SIGUSR1, or in a crash, write every thread's Python stack to a file, even from inside C code."""
    file = open(path, "w")
    print(f"main thread 0x{threading.main_thread().ident:016x}", file=file, flush=True)
    faulthandler.enable(file)
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, file)


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
    """Counts what `track` and `log` report, and writes it down ten times a second (see `run_folder`)."""

    def __init__(self, files: RankFiles, phase: str = AT_WORK) -> None:
        self.files, self.pid = files, os.getpid()
        self.samples = self.steps = self.passes = 0
        self._tracked = 0.0
        self.loader_seconds = self.loader_cpu_seconds = 0.0  # to get a batch in `track`: wall and CPU time
        self.at_once_seconds = 0.0  # the same for batches that came at once: all of it counts as CPU time
        self._outside_cpu = 0.0  # CPU time of the loop's thread outside of loops, until the latest one began
        self._ended_cpu: float | None = 0.0  # its CPU time when the last loop ended; None inside a loop
        self._pass_step = 0  # the step at which the current pass began
        self._pass_total = math.nan
        self._pass_began: float | None = None
        self._launched = float(os.environ.get("COURSE_STARTED", time.time()))
        self._names: dict[str, int] = {}
        self._pending: deque[tuple[int, float, int, Any]] = deque()
        told = {name: value for name, value in os.environ.items() if TOLD.fullmatch(name)}
        self._facts: dict[str, Any] = {"pid": self.pid, "phase": phase, "environment": told}
        self._facts["launched"] = self._launched
        self._memory = Memory()
        self._lookout = Lookout(files)
        self._pace = Pace(self._launched)
        self._samples = Samples(Recorder.counted.__code__)
        self._lock = threading.RLock()  # held while writing, never while waiting for the GPU
        self._reading = threading.RLock()  # one thread at a time reads the values, in order
        self._files: dict[str, Any] | None = {
            "ticks": open(files.ticks, "ab", buffering=0),
            "points": open(files.points, "ab", buffering=0),
            "names": open(files.names, "ab", buffering=0),
            "pace": open(files.pace, "ab", buffering=0),
            "arrivals": open(files.arrivals, "ab", buffering=0),
        }
        self._go_on()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="course-recorder", daemon=True)
        self.note()

    def start(self) -> None:
        self._thread.start()

    def _go_on(self) -> None:
        """Continue the counts of an earlier attempt of this rank, if torchrun has restarted it."""
        with contextlib.suppress(OSError):
            size = 8 * len(TICK)
            whole = self.files.ticks.stat().st_size // size
            if whole:
                os.truncate(self.files.ticks, whole * size)
                with open(self.files.ticks, "rb") as ticks:
                    ticks.seek((whole - 1) * size)
                    last = dict(zip(TICK, array("d", ticks.read(size)), strict=True))
                self.samples, self.steps = int(last["samples"]), int(last["steps"])
                self.passes, self._tracked = int(last["passes"]), last["tracked_seconds"]
                self._pass_step = self.steps
            names = self.files.names.read_text(errors="replace").split("\n")[:-1]
            self._names = {name: i for i, name in enumerate(names)}

    def note(self, **facts: Any) -> None:
        """Write down facts about this rank (its phase, its device, its backend)."""
        self._facts |= facts
        with contextlib.suppress(OSError):
            write_whole(self.files.facts, json.dumps(self._facts))

    def begin_pass(self, total: int | None) -> tuple[int, float, float | None]:
        """Begin a pass; return what `end_pass` needs to resume the pass around this one, if there is one."""
        around = self.steps - self._pass_step, self._pass_total, self._pass_began
        self.passes += 1
        self._pass_step, self._pass_total = self.steps, math.nan if total is None else total
        if self._pass_began is None:  # otherwise the time runs already
            in_main = threading.get_ident() == threading.main_thread().ident
            worked = time.thread_time() if in_main else math.nan  # ticks measure the main thread
            self._outside_cpu, self._ended_cpu = self._outside_cpu + worked - (self._ended_cpu or 0.0), None
            self._pass_began = time.time()
        return around

    def end_pass(self, around: tuple[int, float, float | None]) -> None:
        steps, total, began = around
        if began is None and self._pass_began is not None:
            self._tracked, self._pass_began = self._tracked + time.time() - self._pass_began, None
            self._ended_cpu = time.thread_time()
        elif began is not None:
            self._pass_step, self._pass_total = self.steps - steps, total

    def counted(self, batches: Iterable[Any], total: int | None = None) -> Iterator[Any]:
        """Yield the batches; count steps, samples and the time that the training loop waits for its loader.

        Reading a thread's CPU time is slow: it is left out for batches that come at once, one after the
        other, so that a step costs less than twice a step of tqdm (`make bench`).
        """
        clock, own_clock = time.perf_counter, time.thread_time
        if total is None:
            with contextlib.suppress(TypeError):  # an iterator without a length
                total = len(batches)  # type: ignore[arg-type]
        around, long = self.begin_pass(total), True
        try:
            worked, began = own_clock(), clock()
            for batch in batches:
                waited = clock() - began
                if long:
                    self.loader_seconds += waited
                    self.loader_cpu_seconds += own_clock() - worked
                    long = waited > AT_ONCE
                elif waited > AT_ONCE:  # the first after short ones: its CPU time was not measured
                    self.loader_seconds += waited
                    self.loader_cpu_seconds += AT_ONCE
                    long = True
                else:
                    self.at_once_seconds += waited
                yield batch
                self.samples += 1 if type(batch) is int else _samples(batch)  # a range: saves the call
                self.steps += 1
                if long:
                    worked = own_clock()
                began = clock()
        finally:
            self.end_pass(around)

    def point(self, name: str, value: Any) -> None:
        numel = getattr(value, "numel", None)
        if numel is not None and numel() != 1:
            raise ValueError(
                f"log({name}=…) takes one number, and got a tensor of shape {tuple(value.shape)}; "
                f"log its mean, or one entry of it"
            )
        if getattr(value, "is_cuda", False):
            import torch

            event = torch.cuda.Event()
            value = (value.detach().clone(), event)  # a later step may overwrite the original
            event.record()
        else:
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                value = float(value if numel is None else value.item())
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"log({name}=…) takes one number, and got {value!r:.80}") from None
        if name not in self._names:
            self._new_name(name)
        self._pending.append((self._names[name], time.time() - self._launched, self.samples, value))
        if len(self._pending) >= 50_000:  # logged faster than the thread writes: stay bounded
            self.flush()

    def _new_name(self, name: str) -> None:
        if name in TICK:
            raise ValueError(f"log({name}=…): the run's own figures have this name; choose another")
        with self._lock:
            if name not in self._names:
                line = name.replace("\n", " ").replace("\r", " ")
                self._write("names", line.encode(errors="replace") + b"\n")
                self._names[name] = len(self._names)

    def tick(self, exact: bool = True) -> None:
        now = time.time()
        began = self._pass_began
        tracked = self._tracked + (now - began if began is not None else 0.0)
        row = [
            now - self._launched,
            self.samples,
            self.steps,
            tracked,
            self.passes,
            self.steps - self._pass_step,
            self._pass_total,
            *self._memory.read(exact),
        ]
        self._write("ticks", array("d", row).tobytes())
        at_once = self.at_once_seconds
        counted = Counted(
            tracked,
            self.loader_seconds + at_once,
            self.loader_cpu_seconds + at_once,
            self._outside_cpu,
            self._ended_cpu,
        )
        pace = self._pace.read(now, self.steps, counted, self._samples)
        self._write("pace", array("d", pace).tobytes())
        self._write("arrivals", array("d", self._pace.arrivals()).tobytes())

    def flush(self) -> None:
        with self._reading:
            rows = array("d")
            for _ in range(len(self._pending)):  # one at a time: the training loop appends meanwhile
                name, seconds, samples, value = self._pending.popleft()
                if isinstance(value, tuple):
                    tensor, event = value
                    event.synchronize()  # waits in this thread, not in the training loop
                    value = tensor.item()
                rows.extend((name, seconds, samples, value))
            if rows:
                self._write("points", rows.tobytes())

    def close(self) -> None:
        """Write what is pending, and close the files, which are usable at any moment before, too."""
        self._stop.set()
        if self.pid == os.getpid() and self._files is not None:
            self._thread.join(2)
            self._lookout.close()
            self.tick(exact=False)  # an exact reading would delay the end of every short run
            self.flush()
            for file in self._files.values():
                file.close()
            self._files = None

    def _run(self) -> None:
        self._stop.wait(FIRST_TICK)
        while not self._stop.is_set():
            self.tick()
            self.flush()
            self._lookout.look(self.steps)
            wait = until_the_next_tick(time.time())
            self._samples.wait_and_look(self._stop, wait, LOOKS, self._in_a_loop)

    def _in_a_loop(self) -> bool:
        return self._pass_began is not None

    def _write(self, kind: str, data: bytes) -> None:
        with self._lock:
            try:
                if self._files is not None:
                    self._files[kind].write(data)
            except OSError as error:  # a full disk ends the recording, never the training
                self._files = None
                with contextlib.suppress(OSError):  # the output may be on the same disk
                    rank = self.files.rank
                    print(f"course_lib: the figures of rank {rank} end here: {error}", file=sys.stderr)


def _samples(batch: Any) -> int:
    while isinstance(batch, CONTAINERS) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, MAPPINGS) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 1


def until_the_next_tick(now: float) -> float:
    """Return the seconds until the next tick: all ranks tick together, to see the same last collectives."""
    wait = TICK_INTERVAL - now % TICK_INTERVAL
    return wait if wait > TICK_INTERVAL / 4 else wait + TICK_INTERVAL
