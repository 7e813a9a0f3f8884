"""Lesson 04's programs as somebody uses them in a terminal; the lesson itself has the hangs and the port."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import processes_marked, wait_for

SCRIPTS = Path(__file__).parents[2] / "lessons" / "scripts"
HELLO, WHO = SCRIPTS / "hello_spawn.py", SCRIPTS / "who_am_i.py"
LONG = 240  # seconds; it takes a few


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a terminal, with a mark by which what is left behind can be found."""
    marked = {name: value for name, value in os.environ.items() if name != "COURSE_RUN"}
    marked |= {"TEST_MARK": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    yield marked
    for each in processes_marked("TEST_MARK", str(tmp_path)):
        each.kill()


def terminal(environment: dict[str, str], *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment)


def none_left(environment: dict[str, str]) -> bool:
    return not processes_marked("TEST_MARK", environment["TEST_MARK"])


def test_hello_in_a_terminal(environment: dict[str, str]) -> None:
    done = terminal(environment, HELLO, "--nprocs", 3, "--work", 0)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"I am rank (\d) of 3", done.stdout)) == ["0", "1", "2"]
    pids = re.findall(r"process (\d+):", done.stdout)
    assert len(set(pids)) == 3
    assert "the numbers of the ranks, 1 to 3, add up to 6" in done.stdout
    took = re.search(
        r"start ([\d.]+) s, import ([\d.]+) s, rendezvous ([\d.]+) s, work ([\d.]+) s", done.stdout
    )
    assert took, done.stdout
    assert float(took[2]) > 0.1, "the import of torch"
    assert none_left(environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nprocs", "two"], "argument --nprocs: it is a whole number from 1 on, not 'two'"),
        (["--work", "nan"], "argument --work: it is a number of seconds from 0 on, not 'nan'"),
        (["--port", "65536"], "argument --port: it is a port from 1 to 65535, not '65536'"),
        (["--nprocs", "2", "--absent", "2"], "argument --absent: it is a rank, 0 to 1, not '2'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(HELLO), *words])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(HELLO), run_name="__main__")
    told = capsys.readouterr()
    assert caught.value.code == 2
    assert told.err.splitlines()[-1].endswith(said)
    assert told.out == ""


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe that keeps writes apart")
def test_a_line_of_a_rank_is_one_write(environment: dict[str, str]) -> None:
    """Where Python does not buffer, print() writes a line's end apart, and another's line comes between."""
    reading, writing = os.pipe2(os.O_DIRECT)  # who reads gets one write at a time
    command = [sys.executable, str(HELLO), "--work", "0"]
    unbuffered = environment | {"PYTHONUNBUFFERED": "1"}
    with open(reading, "rb", buffering=0) as pipe:
        with open(writing, "wb") as end:
            program = subprocess.Popen(command, stdout=end, env=unbuffered)
        writes = list(iter(lambda: pipe.read(4096).decode(), ""))
    assert program.wait(LONG) == 0
    of_ranks = [each for each in writes if "I am rank" in each]
    assert len(of_ranks) == 2
    assert all(each.endswith("\n") for each in of_ranks)


def test_ctrl_c_ends_a_hang(environment: dict[str, str]) -> None:
    command = [sys.executable, str(HELLO), "--nprocs", "2", "--absent", "1"]
    program = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert program.stdout is not None
    for _ in range(2):
        program.stdout.readline()
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the ranks, too
    _, said = program.communicate(timeout=LONG)
    assert program.returncode == 1
    assert said.splitlines()[-1] == "stopped"
    wait_for(lambda: none_left(environment))


# --- who_am_i.py ------------------------------------------------------------------------------------------


def test_without_a_launcher_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="RANK is not set: start this with torchrun"):
        runpy.run_path(str(WHO), run_name="__main__")
