"""torchrun(): PyTorch's own launcher with the same faults, and with restarts and nodes."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import wait_for
from course_lib import RankError, RankTimeout, Run, torchrun
from kernels import Kernel
from programs import (
    ENDS,
    ENOUGH,
    HANGS,
    Jump,
    assert_marked,
    assert_none_left,
    calling_work,
    running,
    script,
    timeless,
)

quiet_torchrun = functools.partial(torchrun, dashboard=False)


def failing(*args: Any, **kwargs: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        quiet_torchrun(*args, **kwargs)
    assert caught.value.run.state == "failed"
    assert Run.open().error == str(caught.value)
    assert_none_left(caught.value.run)
    return caught.value


# --- a rank ends before its time --------------------------------------------------------------------------


def test_a_rank_raises_while_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import sys, time
        import torch, torch.distributed as dist
        from course_lib import log

        def fails():
            raise ValueError(f"at {time.time()}")  # here

        dist.init_process_group("gloo")
        log(loss=dist.get_rank() + 0.5)
        print("rank", dist.get_rank(), sys.argv)
        if dist.get_rank() == 1:
            fails()
        while True:
            dist.all_reduce(torch.ones(1))
        """
    script(tmp_path, source, "train.py")
    monkeypatch.chdir(tmp_path)
    error = failing("train.py", "--lr", 0.5)
    took = time.time() - float(str(error).partition("at ")[2].split()[0])

    print(f"raise to RankError: {took:.2f} s")
    assert took < ENOUGH
    assert error.rank == 1
    assert str(error).startswith("rank 1 raised ValueError: at ")
    assert_marked(str(error), source)
    assert "train.py, line 12, in <module>" in str(error)
    last = str(error).splitlines()[-1]
    assert re.match(r"rank 0 (waited in|then lost its connection|was ).*train\.py, line 14: dist", last), last
    for rank in range(2):
        np.testing.assert_array_equal(error.run.metrics[rank]["loss"], [rank + 0.5])
        said = f"rank {rank} ['train.py', '--lr', '0.5']\n"
        assert error.run.logs[rank].startswith(said)
        (kept,) = error.run.folder.glob(f"torchrun/node-0/*/attempt_0/{rank}/stdout.log")
        assert kept.read_text() == said
    assert error.run.logs[1].count("Traceback (most recent call last)") == 1
    assert "runpy" not in error.run.logs[1], "the traceback is as without the course around it"


@pytest.mark.parametrize("how", ENDS)
def test_how_a_rank_ends(how: str, tmp_path: Path) -> None:
    source, words = ENDS[how]
    error = failing(script(tmp_path, calling_work(source)), nproc_per_node=1)

    assert str(error).startswith(f"rank 0 {words}"), str(error)
    assert error.rank == 0
    assert_marked(str(error), source)
    assert ("There is no memory left for this" in str(error)) == how.startswith("no memory")


def test_a_script_that_ends_before_it_begins(tmp_path: Path) -> None:
    """One start for each: wrong arguments, a module that is missing, a slip in the syntax."""
    parses = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        parser.parse_args()  # here
        """
    error = failing(script(tmp_path, parses), "--epochs", "many")
    assert re.match(r"rank \d ended itself by sys\.exit\(2\) and said\nusage: script\.py", str(error))
    assert "error: argument --epochs: invalid int value: 'many'" in str(error), "what it said is the reason"
    assert_marked(str(error), parses)
    assert not re.search(r"sys\.exit\(2\) and said$", str(error)), "nor does the other rank's end break off"

    imports = "import no_such_module  # here\n"
    error = failing(script(tmp_path, imports), nproc_per_node=1)
    assert str(error).startswith("rank 0 raised ModuleNotFoundError: No module named 'no_such_module'\n")
    assert_marked(str(error), imports)

    slips = "x = 1\nprint('hello'  # here\n"
    error = failing(script(tmp_path, slips), nproc_per_node=1)
    assert str(error).startswith("rank 0 raised SyntaxError: '(' was never closed")
    assert_marked(str(error), slips)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node is a whole number from 1 on; got 0"),
        ({"nnodes": "two"}, "nnodes is a whole number from 1 on; got 'two'"),
        ({"max_restarts": -1}, "max_restarts is a whole number from 0 on; got -1"),
        ({"timeout": 0}, "timeout is a number of seconds above 0, or None for no limit; got 0"),
    ],
)
def test_a_wrong_call_is_told_in_a_sentence(
    wrong: dict[str, Any], words: str, tmp_path: Path, course_home: Path
) -> None:
    path = script(tmp_path, "")
    with pytest.raises(ValueError, match=re.escape(words)):
        torchrun(path, **wrong)
    with pytest.raises(FileNotFoundError, match=r"there is no script 'no/such\.py' in /"):
        torchrun("no/such.py")
    assert not (course_home / "runs").exists()


# --- ranks that hang --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HANGS)
def test_a_timeout_names_the_odd_one_out(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, why, doing = HANGS[how]
    path = script(tmp_path, calling_work(source).lstrip())
    jump = Jump(monkeypatch)
    with pytest.raises(RankTimeout) as caught:
        quiet_torchrun(path, timeout=120)
    print(f"timeout to RankTimeout: {time.monotonic() - jump.at:.2f} s")

    head, blank, *lines = timeless(str(caught.value)).splitlines()
    assert re.match(f"not done after 120 s[:;] {why}", head)
    assert blank == ""
    for rank, (line, start) in enumerate(zip(lines, doing, strict=True)):
        assert line.startswith(f"rank {rank} {start}".replace("FILE", "script.py")), str(caught.value)
    assert time.monotonic() - jump.at < ENOUGH
    assert_none_left(caught.value.run)
