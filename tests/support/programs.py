"""Faults to cause under both `launch` and `torchrun`, and checks of how they are reported."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from course_lib import RankTimeout, Run
from course_lib.launcher import watch
from course_lib.launcher.ask import silent_ranks
from course_lib.tracebacks.learner_code import is_learners
from tests.support.processes import alive, processes_marked, wait_for

ENOUGH = 20.0  # seconds; the design promises 1 to 3 (tests print them), but machines are noisy

# What `work` does, and how the report words it. "# here" marks the line that ends the rank.
ENDS = {
    "an exception that cannot be pickled, of a class whose text fails": (
        """
        import threading

        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no words")

            def __reduce__(self):
                raise TypeError("never")

        def work():
            raise Odd(threading.Lock())  # here
        """,
        "raised Odd: <exception str() failed>",
    ),
    "an exception in a worker of a DataLoader": (
        """
        from torch.utils.data import DataLoader, Dataset

        class Broken(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                raise KeyError(f"no sample {i}")

        def work():
            for batch in DataLoader(Broken(), num_workers=1):  # here
                pass
        """,
        "raised KeyError: Caught KeyError in DataLoader worker process 0.",
    ),
    "os._exit": (
        """
        import os

        def work():
            os._exit(3)
        """,
        "ended with exit code 3 and without an exception (os._exit?)",
    ),
    "sys.exit": (
        """
        import argparse

        def work():
            parser = argparse.ArgumentParser("train.py")
            parser.add_argument("--epochs", type=int)
            parser.parse_args(["--epochs", "many"])  # here
        """,
        "ended itself by sys.exit(2) and said\n"
        "usage: train.py [-h] [--epochs EPOCHS]\n"
        "train.py: error: argument --epochs: invalid int value: 'many'\n",
    ),
    "SIGKILL": (
        """
        import os

        def work():
            os.kill(os.getpid(), 9)
        """,
        "was killed (SIGKILL); the system does that when memory runs out, a person by kill -9",
    ),
    "SIGSEGV": (
        """
        import ctypes

        def work():
            ctypes.string_at(0)  # here
        """,
        "crashed (SIGSEGV: it touched memory that is not its own)",
    ),
    "no memory": (
        """
        import resource

        def work():
            import torch
            resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
            torch.ones(64 << 30)  # here
        """,
        "raised RuntimeError: [enforce fail at alloc_cpu.cpp",
    ),
}

# A program for two ranks, a pattern for the first line of the report, and what it says about each rank.
HANGS = {
    "a rank never calls the collective": (
        """
        import time, torch, torch.distributed as dist

        def work():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            while True:
                time.sleep(0.05)
        """,
        r"rank 1 never called all_reduce \(collective 1\), in which rank 0 waited$",
        ["waited in all_reduce (FILE, line 6: dist.all_reduce(torch.ones(1)))", "was at FILE, line 8: "],
    ),
    "a rank does not join": (
        """
        import os, time, torch.distributed as dist

        def work():
            if os.environ["RANK"] == "1":
                dist.init_process_group("gloo")
            while True:
                time.sleep(0.05)
        """,
        "rank 0 never called init_process_group, in which rank 1 waited$",
        ["was at FILE, line 7: time.sleep(0.05)", "waited in init_process_group (FILE, line 5: "],
    ),
    "a rank holds the interpreter's lock": (
        """
        import ctypes, os, torch, torch.distributed as dist
        from pathlib import Path

        def work():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            (Path(os.environ["COURSE_RUN"]) / "holds-1").touch()
            while True:
                ctypes.PyDLL(None).sleep(60)
        """,
        r"rank 1 never called all_reduce \(collective 1\), in which rank 0 waited; "
        r"rank 1 held Python's interpreter lock for \d+ s, so that no other thread could run$",
        ["waited in all_reduce (FILE, line 7: ", "was at FILE, line 10: ctypes.PyDLL(None).sleep(60)"],
    ),
    "a rank has returned": (
        """
        import os, threading, time, torch, torch.distributed as dist

        def work():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            else:  # the process lives on, and with it its connections
                threading.Thread(target=time.sleep, args=(600,)).start()
                return "early"
        """,
        r"rank 1 never called all_reduce \(collective 1\), in which rank 0 waited; it has returned$",
        ["waited in all_reduce (FILE, line 6: dist.all_reduce(torch.ones(1)))", "had returned"],
    ),
}


# What ranks do when they are interrupted or killed, for the source of a `Kernel`
STATES = """
    import signal, subprocess
    from multiprocessing import util
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset
    from course_lib import launch, log, Run

    def stay(name):
        say(f"{name}-{os.environ['RANK']}")
        while True:
            time.sleep(0.05)

    def measure(rank):
        log(loss=0.5)
        points = Path(os.environ["COURSE_RUN"]) / f"rank-{rank}.points"
        while not (points.exists() and points.stat().st_size):
            time.sleep(0.01)

    def python_code(rank):
        measure(rank)
        stay("python_code")

    def rendezvous(rank):
        if rank == 0:
            say("rendezvous-0")
            dist.init_process_group("gloo")
        stay("rendezvous")

    def all_reduce(rank):
        dist.init_process_group("gloo")
        say(f"all_reduce-{rank}")
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        stay("all_reduce")

    class Slow(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):  # a worker that looks at nothing else
            stay("loader")

    def loader(rank):
        for batch in DataLoader(Slow(), num_workers=2):
            pass

    def lock(rank):  # holds the interpreter's lock in C: none of its Python threads can run
        import ctypes
        say(f"lock-{rank}")
        while True:
            ctypes.PyDLL(None).sleep(60)

    def child(rank):
        subprocess.Popen(["sleep", "1000"])
        deaf(rank, "child")

    def deafen():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def deaf(rank, name="deaf"):
        measure(rank)
        deafen()
        stay(name)

    def teardown(rank):  # as a slow destroy_process_group()
        try:
            return "done"
        finally:
            deaf(rank, "teardown")

    def at_exit(rank):  # of multiprocessing
        measure(rank)
        deafen()
        util.Finalize(None, stay, ("at_exit",), exitpriority=1)
        return "done"

    states = [python_code, rendezvous, all_reduce, loader, lock, child, deaf, teardown, at_exit]
    """


def script(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    return path


def calling_work(source: str) -> str:
    """Return a program that runs ``work``, which the source defines."""
    return textwrap.dedent(source) + '\nif __name__ == "__main__":\n    work()\n'


def assert_marked(report: str, source: str) -> None:
    """Assert that the report marks the "# here" line, if there is one, and shows no framework's code."""
    marked = [line.split(maxsplit=2)[2] for line in report.splitlines() if line.startswith("---->")]
    expected = [line.strip() for line in source.splitlines() if line.endswith("# here")]
    assert marked[-1:] == expected, report
    for foreign in ("site-packages", "runpy", "course_lib", "multiprocessing/"):
        assert foreign not in report.partition("\n\n")[2].partition("Original Traceback")[0], report


def timeless(text: str) -> str:
    """Remove the seconds that ranks waited from a text."""
    return re.sub(r" for \d+\.\d s", "", text)


def running() -> Run | None:
    try:
        run = Run.open()
    except (FileNotFoundError, ValueError):
        return None
    return run if run.state == "running" else None


def all_at(*lines: int | None) -> bool:
    """Return whether each rank of the newest run is at its line of the test's source; None: it has returned.

    On a busy machine a rank may also stand still elsewhere, while it imports torch or joins the others.
    """
    run = running()
    return run is not None and all(is_at(run, rank, line) for rank, line in enumerate(lines))


def is_at(run: Run, rank: int, line: int | None) -> bool:
    if (run.folder / f"holds-{rank}").exists():  # it can report nothing more
        return rank in silent_ranks(run, [rank])
    if line is None:
        return run.trace(rank).has_returned
    stack = run.trace(rank).standstill.get("stack", [])
    return next((number for file, number, _ in stack if is_learners(file)), None) == line


def lines_of(doing: list[str]) -> list[int | None]:
    """Return the lines at which the ranks of one of HANGS hang, for `all_at`."""
    found = [re.search(r"line (\d+)", each) for each in doing]
    return [each and int(each[1]) for each in found]


class Jump:
    """Let the launcher's clock jump far ahead once the condition that a test waits for is true.

    The first reading sets the deadline, when a quick rank may already be in place: it shows the true time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, there: Callable[[], Any]) -> None:
        self._there = there
        self._deadline_is_set = False
        self.at = 0.0  # time.monotonic() of the jump
        clock = SimpleNamespace(monotonic=self._now, time=time.time, sleep=time.sleep)
        monkeypatch.setattr(watch, "time", clock)

    def _now(self) -> float:
        if self._deadline_is_set and not self.at and self._there():
            self.at = time.monotonic()
        self._deadline_is_set = True
        return time.monotonic() + (1000 if self.at else 0)


def assert_none_left(run: Run) -> None:
    """Assert that all ranks are gone, with all that they had started.

    The system may still be ending what was killed, and init reaping it if its parent was killed, too.
    """
    wait_for(lambda: not left_of(run), what="the ranks and what they had started to be gone")


def left_of(run: Run) -> list[psutil.Process]:
    """Return the living processes of a run: by its folder in their environment, or by a rank's group."""
    ranks = {run.facts(rank).get("pid") for rank in range(run.world_size)}

    def is_of_a_rank(pid: int) -> bool:
        with contextlib.suppress(OSError):  # it has ended
            return bool({pid, os.getpgid(pid), os.getsid(pid)} & ranks)
        return False

    marked = processes_marked("COURSE_RUN", str(run.folder))
    grouped = [each for each in psutil.process_iter() if is_of_a_rank(each.pid) and alive(each)]
    return marked + grouped


def assert_timed_out(error: RankTimeout, why: str, doing: list[str], file: str) -> None:
    """Assert that the report fits one of HANGS, and that no rank is left."""
    head, blank, *lines = timeless(str(error)).splitlines()
    assert re.match(f"not done after 120 s[:;] {why}", head)
    assert blank == ""
    for rank, (line, start) in enumerate(zip(lines, doing, strict=True)):
        assert line.startswith(f"rank {rank} {start}".replace("FILE", file)), str(error)
    assert_none_left(error.run)
