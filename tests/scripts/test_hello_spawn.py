"""Lesson 04's programs as somebody uses them in a terminal: right, wrong, hanging, and two on one port."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_lib import RankTimeout, python, torchrun
from tests.support.processes import free_port, processes_marked, unless_gone, wait_for
from tests.support.programs import Jump, running

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


def test_one_rank_alone(environment: dict[str, str]) -> None:
    done = terminal(environment, HELLO, "--nprocs", 1, "--work", 0)
    assert done.returncode == 0, done.stderr
    assert "I am rank 0 of 1" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nprocs", "0"], "argument --nprocs: it is a whole number from 1 on, not '0'"),
        (["--nprocs", "two"], "argument --nprocs: it is a whole number from 1 on, not 'two'"),
        (["--world-size", "-1"], "argument --world-size: it is a whole number from 1 on, not '-1'"),
        (["--work", "-1"], "argument --work: it is a number of seconds from 0 on, not '-1'"),
        (["--work", "nan"], "argument --work: it is a number of seconds from 0 on, not 'nan'"),
        (["--port", "0"], "argument --port: it is a port from 1 to 65535, not '0'"),
        (["--port", "65536"], "argument --port: it is a port from 1 to 65535, not '65536'"),
        (["--nprocs", "2", "--absent", "2"], "argument --absent: it is a rank, 0 to 1, not '2'"),
        (["--absent", "one"], "argument --absent: it is a rank, 0 to 1, not 'one'"),
        (["--epochs", "3"], "unrecognized arguments: --epochs 3"),
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


def stand_still(*places: str) -> bool:
    """Return whether the ranks of the newest run, from rank 0 on, stand still in these functions."""
    run = running()
    try:
        return run is not None and all(
            f'"{place}"' in (run.folder / f"rank-{rank}.where").read_text()
            for rank, place in enumerate(places)
        )
    except OSError:
        return False


def test_one_more_is_expected_than_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    Jump(monkeypatch, lambda: stand_still("init_process_group", "init_process_group"))
    with pytest.raises(RankTimeout) as caught:
        python(HELLO, "--nprocs", 2, "--world-size", 3, timeout=LONG, dashboard=False)
    text = str(caught.value)
    assert all(f"rank {rank} waited in init_process_group" in text for rank in range(2)), text
    assert "rank 2" not in text


def test_one_rank_never_calls_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    Jump(monkeypatch, lambda: stand_still("wait_for_a_file_that_never_comes", "barrier", "barrier"))
    with pytest.raises(RankTimeout) as caught:
        python(HELLO, "--nprocs", 3, "--absent", 0, timeout=LONG, dashboard=False)
    text = str(caught.value)
    assert "rank 0 never called barrier (collective 1), in which ranks 1, 2 waited" in text.splitlines()[0]
    assert "time.sleep(0.1)" in text


def test_fewer_expected_than_started(environment: dict[str, str]) -> None:
    done = terminal(environment, HELLO, "--nprocs", 2, "--world-size", 1, "--work", LONG)
    assert done.returncode == 1
    assert "Process 1 terminated with the following error" in done.stderr
    assert re.search(r"Terminating process \d+ via signal SIGTERM", done.stderr), (
        "what mp.spawn does to rank 0"
    )
    assert none_left(environment)


def test_two_trainings_on_one_port(environment: dict[str, str]) -> None:
    port = free_port()
    command = [sys.executable, str(HELLO), "--nprocs", "2", "--port", str(port), "--work", "600"]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert first.stdout is not None
    try:
        heard = sorted(re.sub(r"\d+:", "N:", first.stdout.readline()) for _ in range(2))
        assert heard == [f"process N: I am rank {rank} of 2\n" for rank in range(2)]
        second = terminal(environment, HELLO, "--nprocs", 2, "--port", port)
        assert second.returncode == 1
        assert "EADDRINUSE" in second.stderr
        assert first.poll() is None
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe that keeps writes apart")
@pytest.mark.parametrize("script", [HELLO, WHO])
def test_a_line_of_a_rank_is_one_write(script: Path, environment: dict[str, str]) -> None:
    """Where Python does not buffer, print() writes a line's end apart, and another's line comes between."""
    reading, writing = os.pipe2(os.O_DIRECT)  # who reads gets one write at a time
    command = [sys.executable, str(HELLO), "--work", "0"]
    if script == WHO:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(WHO),
        ]
    unbuffered = environment | {"PYTHONUNBUFFERED": "1"}
    with open(reading, "rb", buffering=0) as pipe:
        with open(writing, "wb") as end:
            program = subprocess.Popen(command, stdout=end, env=unbuffered)
        writes = list(iter(lambda: pipe.read(4096).decode(), ""))
    assert program.wait(LONG) == 0
    of_ranks = [each for each in writes if "I am rank" in each or "WORLD_SIZE=" in each]
    assert len(of_ranks) == 2
    assert all(each.endswith("\n") for each in of_ranks)


def test_two_trainings_at_once_without_a_number(environment: dict[str, str]) -> None:
    done: list[subprocess.CompletedProcess[str]] = []
    threads = [
        threading.Thread(target=lambda: done.append(terminal(environment, HELLO, "--nprocs", 2, "--work", 1)))
        for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.returncode for each in done] == [0, 0], done


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


def test_two_nodes_say_who_they_are() -> None:
    run = torchrun(WHO, nnodes=2, nproc_per_node=2, dashboard=False, timeout=LONG)
    for rank, text in enumerate(run.logs):
        told = dict(word.split("=") for word in text.split()[:-1])
        assert told == {
            "RANK": str(rank),
            "GROUP_RANK": str(rank // 2),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
        }
    family = psutil.Process().children(recursive=True)
    assert not [each for each in family if WHO.name in " ".join(unless_gone(each.cmdline, []))]


def test_without_a_launcher_it_says_so(environment: dict[str, str]) -> None:
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    done = terminal(environment, WHO)
    assert done.returncode == 1
    assert done.stderr == "RANK is not set: start this with torchrun, as its first lines say\n"
