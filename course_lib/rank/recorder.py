"""What a watched rank writes down about itself, and where.

A thread of the rank notes ten times a second how far the rank is and how much memory it holds, in the
run's folder: whatever ends the rank later, what it measured until then is on disk. Numbers are rows of
float64, so a file that was cut short loses its last row at most.
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
from collections import deque
from pathlib import Path
from typing import Any

import psutil

from .standstill import Lookout

# One tick: what the rank's thread notes ten times a second. Every field is a float64.
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
# What a launcher tells a rank.
TOLD = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|OMP_NUM_THREADS"
)
POINT = ["name", "seconds", "samples", "value"]  # one logged value; name is a line number of rank-N.names
TICK_INTERVAL = 0.1  # seconds
FIRST_TICK = 0.03  # seconds: the rank's own work begins before

_recorder: Recorder | None = None


def attach(rank: int | None = None) -> Recorder | None:
    """The recorder of this process, made at the first call; None where no run watches (no COURSE_RUN)."""
    global _recorder
    if _recorder is None:  # asked first: `log` comes here in every step, and a look at os.environ is slow
        folder = os.environ.get("COURSE_RUN")
        if folder is None:
            return None
        _recorder = Recorder(Path(folder), _rank_number() if rank is None else rank)
        if rank is None:  # a rank that its own program started: its output is parted from the others' now
            send_output_to(Path(folder) / f"rank-{_recorder.rank}.log")
            answer_stack_requests(Path(folder) / f"rank-{_recorder.rank}.stack")
        _recorder.start()
        atexit.register(_recorder.close)
    return _recorder if _recorder.pid == os.getpid() else None  # a forked DataLoader worker is no rank


def send_output_to(path: Path) -> None:
    """Let everything this process prints, from Python or from C, go to the end of a file."""
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
    """Let SIGUSR1, and a crash, write every thread's Python stack to a file, also from inside C code."""
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
    """Counts what `track` and `log` tell it and writes it down ten times a second (see TICK, POINT)."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()
        self.samples = self.steps = self.passes = 0
        self._tracked = 0.0
        self._pass_step = 0  # the step at which the present pass began
        self._pass_total = math.nan
        self._pass_began: float | None = None
        self._launched = float(os.environ.get("COURSE_STARTED", time.time()))
        self._stem = folder / f"rank-{rank}"
        self._names: dict[str, int] = {}
        self._pending: deque[tuple[int, float, int, Any]] = deque()
        told = {name: value for name, value in os.environ.items() if TOLD.fullmatch(name)}
        self._facts: dict[str, Any] = {"pid": self.pid, "environment": told}
        self._memory = Memory()
        self._lookout = Lookout(Path(f"{self._stem}.where"))
        self._lock = threading.RLock()  # held to write, never to wait for the GPU
        self._reading = threading.RLock()  # one thread at a time reads the values, in order
        self._files: dict[str, Any] | None = {
            kind: open(f"{self._stem}.{kind}", "ab", buffering=0) for kind in ("ticks", "points", "names")
        }
        self._go_on()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="course-recorder", daemon=True)
        self.note()

    def start(self) -> None:
        self._thread.start()

    def _go_on(self) -> None:
        """Count on from where an earlier attempt of this rank ended (torchrun has restarted it)."""
        with contextlib.suppress(OSError):
            size = 8 * len(TICK)
            whole = os.path.getsize(f"{self._stem}.ticks") // size
            if whole:
                os.truncate(f"{self._stem}.ticks", whole * size)
                with open(f"{self._stem}.ticks", "rb") as ticks:
                    ticks.seek((whole - 1) * size)
                    last = dict(zip(TICK, array("d", ticks.read(size)), strict=True))
                self.samples, self.steps = int(last["samples"]), int(last["steps"])
                self.passes, self._tracked = int(last["passes"]), last["tracked_seconds"]
                self._pass_step = self.steps
            names = Path(f"{self._stem}.names").read_text(errors="replace").split("\n")[:-1]
            self._names = {name: i for i, name in enumerate(names)}

    def note(self, **facts: Any) -> None:
        """Keep facts about this rank (its device, its backend) beside its figures."""
        self._facts |= facts
        part = Path(f"{self._stem}.json.part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(self._facts))
            part.replace(f"{self._stem}.json")

    def begin_pass(self, total: int | None) -> tuple[int, float, float | None]:
        """Returns what `end_pass` needs to go on with the pass around this one, where there is one."""
        around = self.steps - self._pass_step, self._pass_total, self._pass_began
        self.passes += 1
        self._pass_step, self._pass_total = self.steps, math.nan if total is None else total
        if self._pass_began is None:  # or the time runs already
            self._pass_began = time.time()
        return around

    def end_pass(self, around: tuple[int, float, float | None]) -> None:
        steps, total, began = around
        if began is None and self._pass_began is not None:
            self._tracked, self._pass_began = self._tracked + time.time() - self._pass_began, None
        elif began is not None:
            self._pass_step, self._pass_total = self.steps - steps, total

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
            value = (value.detach().clone(), event)  # a later step may write into the original
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
        if len(self._pending) >= 50_000:  # someone logs faster than the thread writes: bounded all the same
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
        row = [
            now - self._launched,
            self.samples,
            self.steps,
            self._tracked + (now - began if began is not None else 0.0),
            self.passes,
            self.steps - self._pass_step,
            self._pass_total,
            *self._memory.read(exact),
        ]
        self._write("ticks", array("d", row).tobytes())

    def flush(self) -> None:
        with self._reading:
            rows = array("d")
            for _ in range(len(self._pending)):  # one at a time: the training appends meanwhile
                name, seconds, samples, value = self._pending.popleft()
                if isinstance(value, tuple):
                    tensor, event = value
                    event.synchronize()  # waits in this thread, not in the training
                    value = tensor.item()
                rows.extend((name, seconds, samples, value))
            if rows:
                self._write("points", rows.tobytes())

    def close(self) -> None:
        """Write what is pending. The files stay whole at any moment before, too."""
        self._stop.set()
        if self.pid == os.getpid() and self._files is not None:
            self._thread.join(2)
            self._lookout.close()
            self.tick(exact=False)  # the walk would hold up the end of every short run
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
            self._stop.wait(TICK_INTERVAL)

    def _write(self, kind: str, data: bytes) -> None:
        with self._lock:
            try:
                if self._files is not None:
                    self._files[kind].write(data)
            except OSError as error:  # a full disk ends the recording, never the training
                self._files = None
                with contextlib.suppress(OSError):  # the output may be on the same disk
                    print(f"course_lib: the figures of rank {self.rank} end here: {error}", file=sys.stderr)


class Memory:
    """How much memory this process holds, cheap enough to ask ten times a second.

    On the CPU the true figure (the pages that are this process's alone, psutil's USS: those that it shares
    with the process it was forked from are not its own) takes a walk over the page tables, 10 ms with torch
    loaded. It is taken when its cost is under 0.5 % of the time since the last, at the start, when the pages
    are copied that the rank writes to, and ever more seldom until it is under 0.1 %; in between, the resident
    size, which costs 10 µs, says how far it has moved.
    """

    OFTEN, SELDOM = 200, 1000  # a walk is due when this many times its cost has passed since the last

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._exact_at = time.monotonic()
        self._cost = TICK_INTERVAL / 2 / self.OFTEN  # the first walk comes with the second tick
        self._walks = 0
        self._own, self._resident = 0, self._resident_bytes()

    def read(self, exact: bool = True) -> tuple[float, float, float]:
        """Bytes: held (torch's allocated on a GPU), torch's reserved, the driver's figure."""
        torch = sys.modules.get("torch")  # half imported, perhaps, by the main thread
        if hasattr(torch, "cuda") and hasattr(torch.cuda, "is_initialized") and torch.cuda.is_initialized():
            # the rank's GPU is the one it holds most of: the current device is each thread's own
            stats = [torch.cuda.memory_stats_as_nested_dict(i) for i in range(torch.cuda.device_count())]
            held = [
                (each["reserved_bytes"]["all"]["current"], each["allocated_bytes"]["all"]["current"])
                for each in stats
            ]
            reserved, allocated = max(held)
            return allocated, reserved, driver_bytes(held.index((reserved, allocated)))
        return self._on_the_cpu(exact), math.nan, math.nan

    def _on_the_cpu(self, exact: bool) -> float:
        resident, now = self._resident_bytes(), time.monotonic()
        patience = min(self.SELDOM, self.OFTEN * max(1, self._walks))
        if exact and now - self._exact_at > patience * self._cost:
            self._walks += 1
            self._own, self._resident = self._process.memory_full_info().uss, resident
            self._exact_at, self._cost = now, time.monotonic() - now
        return max(0, self._own + resident - self._resident)

    def _resident_bytes(self) -> int:
        info = self._process.memory_info()
        return info.rss - getattr(info, "shared", 0)


def driver_bytes(gpu: int) -> float:
    """Bytes that NVML counts for this process on one of torch's GPUs, or for the whole GPU where it cannot
    tell processes apart (in most containers); NaN without NVML."""
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(gpu).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory
        return pynvml.nvmlDeviceGetMemoryInfo(handle).used
    except Exception:  # no NVML, no permission, a device it does not know: there is no figure then
        return math.nan
