"""Answers that would harm the check, or the machine: each is feedback, soon, and leaves nothing behind."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import check
from course_lib.exercises import question as question_module
from course_lib.exercises.in_rank.work import in_group
from course_lib.exercises.question import Ask, Finding, question
from course_lib.exercises.wording import told
from tests.support.processes import alive, wait_for
from tests.support.programs import Jump, running

CHECK = importlib.import_module("course_lib.exercises.check")  # the module, not the function of its name


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about a function without arguments."""
    check("", None)
    monkeypatch.setattr(CHECK, "QUESTIONS", dict(CHECK.QUESTIONS))
    monkeypatch.setattr(question_module, "QUESTIONS", CHECK.QUESTIONS)

    @question("99.1", "f()", {"it returns 3": 1})
    def judge(ask: Ask, rng: Any) -> Iterator[Finding]:
        found = ask(lambda answer: answer())[0]
        yield Finding("it returns 3", found == 3, told(found), "Look.")

    @question("99.2", "f()", {"again and again": 1})
    def asks_often(ask: Ask, rng: Any) -> Iterator[Finding]:
        for _ in range(20):
            ask(lambda answer: answer())
        yield Finding("again and again", True)

    @question("99.3", "f()", {"together": 1})
    def asks_a_group(ask: Ask, rng: Any) -> Iterator[Finding]:
        ask(in_group(lambda answer: answer()), nprocs=2)
        yield Finding("together", True)


def refused(answer: Any, number: str = "99.1") -> str:
    feedback = check(number, answer)
    assert repr(feedback) == "0"
    assert len(str(feedback)) < 5000
    return str(feedback)


def ends_it(*_: Any) -> Any:
    raise SystemExit(0)


def interrupts_it(*_: Any) -> Any:
    raise KeyboardInterrupt


def never_ends(*_: Any) -> Any:
    if folder := os.environ.get("COURSE_RUN"):  # in a rank
        Path(folder, "holds-0").touch()
    while True:
        pass


RUDE: dict[str, Callable[..., Any]] = {"ends": ends_it, "interrupts": interrupts_it, "never ends": never_ends}
WHY = {
    "ends": "SystemExit: 0",
    "interrupts": "KeyboardInterrupt: ",
    "never ends": "it was not pickled after 1 s",
}


def odd(method: str, does: str) -> Any:
    """A function's stand-in with one method that does something else than it should."""
    return type("Odd", (), {"__call__": lambda self: 3, method: RUDE[does]})()


@pytest.mark.parametrize("does", RUDE)
def test_what_pickling_does_is_feedback(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if does == "never ends":
        monkeypatch.setattr(CHECK, "LIMIT_SECONDS", 1.0)
    threads = threading.active_count()
    assert f"your answer cannot be sent to the ranks: {WHY[does]}" in refused(odd("__reduce__", does))
    wait_for(lambda: threading.active_count() <= threads, what="the thread that never came back to be ended")


@pytest.mark.parametrize(
    ("method", "does"), [("__repr__", "never ends"), ("__repr__", "ends"), ("tolist", "interrupts")]
)
def test_what_comes_back_may_be_odd(method: str, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> Any:
        return odd(method, does)

    Jump(monkeypatch, lambda: (run := running()) and (run.folder / "holds-0").exists())
    assert ("not done after 20 s" in refused(answer)) == (does == "never ends")


@pytest.mark.parametrize(
    "made",
    [
        lambda: [0.5] * 10**7,
        lambda: {"a": torch.zeros(10**7).numpy()},
        lambda: "x" * 10**8,
    ],
)
def test_more_numbers_than_anybody_asked_for_are_refused_at_once(made: Any) -> None:
    began = time.process_time()
    assert "returned more than 400,000 numbers" in refused(made)
    assert time.process_time() - began < 1


def test_a_long_error_is_cut() -> None:
    def raises() -> None:
        raise ValueError("x" * 10**6)

    assert "raised ValueError: xxx" in refused(raises)


def test_all_that_a_judge_asks_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each time it asks takes 100 s."""
    limits: list[float] = []
    told_by_ranks = CHECK.told_by_ranks

    def noted(work: Any, given: Any, nprocs: int, limit: float) -> list[str]:
        limits.append(limit)
        return told_by_ranks(work, given, nprocs, limit)

    monkeypatch.setattr(CHECK, "told_by_ranks", noted)
    monkeypatch.setattr(CHECK, "time", SimpleNamespace(monotonic=itertools.count(0, 100).__next__))
    monkeypatch.setattr(CHECK, "LIMIT_SECONDS", 200.0)
    monkeypatch.setattr(CHECK, "ALL_SECONDS", 300.0)
    assert "your code was not done after 300 s, in all calls of the check" in refused(lambda: 3, "99.2")
    assert limits == [200, 200, 100]


# --- what is left behind -----------------------------------------------------------------------------------

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def note(path: Path, pid: int) -> None:
    """Write the process's number so that whoever sees the file finds it there."""
    part = path.with_suffix(".part")
    part.write_text(f"{pid}\n")
    part.rename(path)


def without_an_environment(path: Path) -> None:
    note(path, subprocess.Popen(SLEEPS, start_new_session=True, env={}, close_fds=True).pid)


def as_a_daemon(path: Path) -> None:
    """As textbooks have it: two forks, a session of its own, all files closed."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(path, os.getpid())
            os.closerange(0, 4096)
            time.sleep(600)
        os._exit(0)
    while not path.exists():
        time.sleep(0.01)


def forked_and_away(path: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        note(path, os.getpid())
        time.sleep(600)
    while not path.exists():
        time.sleep(0.01)
    os._exit(0)


def as_a_daemon_and_hangs(path: Path) -> None:
    as_a_daemon(path)
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are handed over there alone")
@pytest.mark.parametrize(
    "leaves", [without_an_environment, as_a_daemon, forked_and_away, as_a_daemon_and_hangs]
)
def test_nothing_that_an_answer_starts_outlives_the_check(
    leaves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pids"
    if leaves is as_a_daemon_and_hangs:
        Jump(monkeypatch, path.exists)
    check("99.1", lambda: leaves(path))
    pids = [int(line) for line in path.read_text().split()]
    assert pids
    wait_for(lambda: not any(map(alive, pids)), what="all that it started to be gone")


# --- without an end ----------------------------------------------------------------------------------------


def endless(*_: Any) -> Iterator[int]:
    while True:
        yield 1


def fills_memory() -> bytes:
    return bytes(2 << 30)  # at once: piece by piece takes long where memory is scarce


@pytest.mark.skipif(sys.platform != "linux", reason="memory has a limit there alone")
def test_memory_has_a_limit() -> None:
    said = refused(fills_memory)
    assert "MemoryError" in said
    assert "ever end?" in said


def test_a_generator_without_an_end_is_called_so() -> None:
    said = refused(lambda n, world_size, rank, *_, **__: endless(), "07.1")
    assert "ever end?" in said or "in endless" in said or "yield 1" in said


def test_where_gloo_gives_up_the_sizes_are_named() -> None:
    def answer() -> None:
        receives = dist.get_rank() == 1
        work = dist.irecv(torch.ones(3), 0) if receives else dist.isend(torch.ones(1000), 1)
        work.wait()

    assert CHECK.ABORTED in refused(answer, "99.3")
