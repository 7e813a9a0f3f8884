"""Where a rank's time goes, and when it comes to each collective: whence `why` knows why a run is not faster.

All of it is counted by others: the operating system (how long the main thread has worked, how long it and
gloo's threads waited for a core, in which call it sleeps), PyTorch's flight recorder (when each collective
was called, and which are under way), and `track` (the loader).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import random
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from ..frames import frame_of
from ..run_folder import EVERYONE
from .standstill import ONE_WAY, collectives, is_over, status

TASKS = "/proc/self/task"  # a folder for each thread
TASK = TASKS + "/{}/{}"  # what Linux knows of it
GLOO = "gloo"  # in the names of its threads
BYTES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1}
FUTEX = b"202" if platform.machine() == "x86_64" else b"98"  # in this system call a thread waits for others
LIBRARY = os.path.dirname(threading.__file__)  # Python's own: a lock, a queue
LATE = 1e-3  # seconds: a look that comes later waited for Python's lock, and sees the thread that let it go


class Counted(NamedTuple):
    """What the recorder has counted itself, in seconds so far."""

    tracked: float  # inside loops
    loader: float  # of this, waiting for the next batch, or making it
    loader_cpu: float  # of this the thread's own work
    outside_cpu: float  # its work up to now, or to the start of the present loop, outside of loops
    ended_cpu: float | None  # its work when the last loop ended; None inside a loop


class Pace:
    """Read in every tick by the recorder's thread; ``launched`` is when the run began, by time.time()."""

    def __init__(self, launched: float) -> None:
        self._launched = launched
        self._flights, self._last = b"", 0
        self._before: list[float] | None = None  # the tick before
        self._sums = [0.0] * 7
        self._carriers = Carriers()

    def read(self, now: float, steps: int, counted: Counted, samples: Samples) -> list[float]:
        """A row of `run_folder.PACE`: sums over the time inside loops; nothing where none has passed."""
        cpu, delay = _of_a_thread(os.getpid())
        inside = cpu - counted.outside_cpu
        if counted.ended_cpu is not None:
            inside -= cpu - counted.ended_cpu
        of_all = [time.process_time(), delay, self._carriers.without_core()]
        here = [counted.tracked, counted.loader, counted.loader_cpu, inside, *of_all, now]
        before, self._before = self._before, here
        if before is None:
            before = [0.0, 0.0, 0.0, 0.0, *of_all, now]
        gained = [new - old for new, old in zip(here, before, strict=True)]
        wall = gained.pop()
        if gained[0] <= 0:
            return []
        part = min(1.0, gained[0] / wall) if wall > 0 else 1.0  # of the last three nobody knows when exactly
        gained[4:] = [part * each for each in gained[4:]]
        self._sums = [total + new for total, new in zip(self._sums, gained, strict=True)]
        return [now - self._launched, steps, *self._sums, samples.asleep, samples.in_collectives]

    def arrivals(self) -> list[float]:
        """Rows of `run_folder.ARRIVAL`, one after the other: of the collectives since the last look."""
        flights, rows = status(), []
        if flights != self._flights:
            self._flights = flights
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                called = sorted(_arrival(each) for each in collectives() if _of_all(each))
                if called and called[-1][0] < self._last:  # a new group, which counts from 1
                    self._last = 0
                rows = [(n, at - self._launched, *more) for n, at, *more in called if n > self._last]
                self._last = max([self._last, *(row[0] for row in rows)])
        return [value for row in rows for value in row]


class Carriers:
    """The threads of gloo that carry the collectives, while the main thread waits for these or goes on."""

    def __init__(self) -> None:
        self._without_core: dict[str, float] = {}  # by thread, in seconds
        self._seen: set[str] = set()  # once, by another name: it gets its own a moment after it began
        self._others: set[str] = set()

    def without_core(self) -> float:
        """Seconds that they were ready for work and got no core, so far, summed up."""
        with contextlib.suppress(OSError):  # no Linux
            for thread in set(os.listdir(TASKS)) - self._others:
                if thread in self._without_core or GLOO in _name(thread):
                    before = self._without_core.get(thread, 0.0)
                    self._without_core[thread] = max(before, _of_a_thread(thread)[1])  # NaN: it has ended
                elif thread in self._seen:
                    self._others.add(thread)
                else:
                    self._seen.add(thread)
        return sum(self._without_core.values())


class Samples:
    """Looks at the main thread at random moments: how often it sleeps, and how often in a collective.

    Only the operating system knows how long the thread slept; what it waited for, these few looks tell. They
    come at random, since steps of a regular length would else be seen at the same place each time. What is
    done inside the loader does not count: `track` measures it.
    """

    def __init__(self, loader: CodeType) -> None:
        self.asleep = self.in_collectives = 0
        self._loader = loader  # the code that is on the stack while the loop waits for its next batch
        self._main = threading.main_thread().ident or 0
        self._dice = random.Random()  # the training's own random numbers are left alone
        self._call: int | None = None  # the file that says in which system call the main thread is
        self._own: int | None = None  # and the one that says how long the looking thread waited for a core

    def wait_and_look(
        self, stop: threading.Event, seconds: float, looks: int, inside: Callable[[], bool]
    ) -> None:
        """Wait, and look in between, each time at a moment of its own, where that is ``inside`` of a loop."""
        began = time.monotonic()
        looks = looks if inside() and self._open() else 0
        without_core = self._without_core() if looks else 0.0
        for i in range(looks):
            due = began + seconds * (i + self._dice.random()) / looks
            if stop.wait(max(0.0, due - time.monotonic())):
                return
            late = time.monotonic() - due
            if late >= LATE:
                before, without_core = without_core, self._without_core()
                late -= without_core - before
            if late < LATE and inside():
                self.look()
        stop.wait(max(0.0, began + seconds - time.monotonic()))

    def look(self) -> None:
        """Once. The collective may be over when the file has been read: Python's lock is free meanwhile."""
        before = status()
        try:
            call = os.pread(self._call or 0, 8, 0).split()[0]
        except (OSError, IndexError):
            return
        if call == b"running":
            return
        frame = innermost = frame_of(self._main)
        while frame is not None and frame.f_code is not self._loader:
            frame = frame.f_back
        if innermost is None or frame is not None:
            return
        self.asleep += 1
        if call == FUTEX and not _of_the_library(innermost.f_code.co_filename):
            self.in_collectives += _ends_open(before) or _under_way()

    def _open(self) -> bool:
        if self._call is None:
            with contextlib.suppress(OSError):  # no Linux
                self._own = os.open(TASK.format(threading.get_native_id(), "schedstat"), os.O_RDONLY)
                self._call = os.open(TASK.format(os.getpid(), "syscall"), os.O_RDONLY)
        return self._call is not None

    def _without_core(self) -> float:
        return int(os.pread(self._own or 0, 64, 0).split()[1]) / 1e9


def _of_the_library(file: str) -> bool:
    return file.startswith(LIBRARY) and "site-packages" not in file


def _under_way() -> bool:
    """Whether a collective of all ranks was called that is not over: a small one may overtake a large one."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return _ends_open(status()) or not all(is_over(each) for each in collectives() if _of_all(each))
    return False


def _ends_open(flights: bytes) -> bool:
    """Whether the last collective of all ranks was not over; cheap to know."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        known = json.loads(flights or "{}")["pg_status"][EVERYONE]
        return int(known["last_enqueued_collective"]) > int(known["last_completed_collective"])
    return False


def _name(thread: str) -> str:
    with contextlib.suppress(OSError), open(TASK.format(thread, "comm")) as file:
        return file.read()
    return ""


def _of_a_thread(number: int | str) -> tuple[float, float]:
    """Seconds: at work, and ready for work without a core."""
    with contextlib.suppress(OSError, ValueError):  # no Linux, or a kernel that does not count
        with open(TASK.format(number, "schedstat"), "rb", buffering=0) as file:
            cpu, delay = file.read().split()[:2]
        return int(cpu) / 1e9, int(delay) / 1e9
    return math.nan, math.nan


def _of_all(entry: dict[str, Any]) -> bool:
    return entry["process_group"][0] == EVERYONE


def _arrival(entry: dict[str, Any]) -> tuple[int, float, int, bool]:
    tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    size = sum(math.prod(shape) * BYTES.get(dtype, 4) for shape, dtype in tensors)
    meets = entry["profiling_name"].rpartition(":")[2] not in ONE_WAY
    return entry["collective_seq_id"], entry["time_created_ns"] / 1e9, size, meets
