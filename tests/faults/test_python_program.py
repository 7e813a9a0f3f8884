"""python(): a program that starts its own ranks with mp.spawn; one raises, and one is interrupted.

How else ranks end and hang: test_launch_faults.py and test_torchrun.py.
"""

from __future__ import annotations

import functools
import json
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from course_lib import RankError, Run, python
from tests.support.kernels import Kernel
from tests.support.processes import wait_for
from tests.support.programs import assert_none_left, running, script

quiet_python = functools.partial(python, dashboard=False)

# Its first argument says what its rank 1 does.
PROGRAM = """
    import os, sys, time
    import helper  # a module beside the script
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    from course_lib import log, place, track

    def train(rank, how, store):
        device, backend = place()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        total = torch.ones(1)
        for batch in track([torch.zeros(4)] * 3):
            dist.all_reduce(total)
            log(loss=rank + 0.5)
        print(f"rank {rank} of {helper.NAME}: {total.item()}", flush=True)
        if how == "raise" and rank == 1:
            fails(rank)
        if how == "deaf":
            import signal
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while how != "fine":
            dist.all_reduce(total)
        dist.destroy_process_group()

    def fails(rank):
        raise KeyError(f"no column of rank {rank}")  # marked

    if __name__ == "__main__":
        print("program", sys.argv, __file__, flush=True)
        mp.spawn(train, args=(sys.argv[1], sys.argv[2]), nprocs=2)
        print("after the ranks")
    """


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/helper.py").write_text("NAME = 'helper'\n")
    path = tmp_path / "scripts/train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def failing(*args: Any, **kwargs: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        quiet_python(*args, **kwargs)
    assert caught.value.run.state == "failed"
    assert Run.open().error == str(caught.value)
    return caught.value


# --- with ranks -------------------------------------------------------------------------------------------


def test_its_ranks_are_watched(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = quiet_python("scripts/train.py", "fine", tmp_path / "store")

    assert (run.name, run.state, run.world_size) == ("train.py", "done", 2)
    first, last = run.output.splitlines()
    assert first == f"program ['scripts/train.py', 'fine', '{tmp_path / 'store'}'] scripts/train.py"
    assert last == "after the ranks"
    for rank, again in ((rank, Run.open()) for rank in range(2)):
        assert again.logs[rank] == run.logs[rank] == f"rank {rank} of helper: 8.0\n"
        series = again.metrics[rank]
        np.testing.assert_array_equal(series["loss"], [rank + 0.5] * 3)
        assert (series["steps"][-1], series["samples"][-1]) == (3, 12)
        assert (run.facts(rank)["device"], run.facts(rank)["backend"])[0] in ("cpu", "cuda:0", "cuda:1")
    assert run.results == [None, None]
    assert "COURSE_RUN" not in os.environ


def test_a_rank_of_it_raises(program: Path, tmp_path: Path) -> None:
    error = failing(program, "raise", tmp_path / "store")

    assert str(error).splitlines()[0] == "rank 1 raised KeyError: 'no column of rank 1'"
    assert 'raise KeyError(f"no column of rank {rank}")  # marked' in str(error)
    assert "---->   16         fails(rank)" in str(error)
    assert "site-packages" not in str(error)
    assert error.rank == 1
    assert "\nrank 0 had ended" in str(error) or "\nrank 0 waited in all_reduce" in str(error)
    np.testing.assert_array_equal(error.run.metrics[1]["loss"], [1.5] * 3)
    assert error.run.logs[1].startswith("rank 1 of helper: 8.0\n")
    assert_none_left(error.run)


def with_its_ranks() -> Run | None:
    """The running run, once its ranks have logged."""
    run = running()
    logged = run and run.world_size == 2 and all(len(each.get("loss", [])) == 3 for each in run.metrics)
    return run if logged else None


# --- without ranks ----------------------------------------------------------------------------------------


def test_a_program_without_ranks(tmp_path: Path) -> None:
    run = quiet_python(script(tmp_path, "import sys\nprint(sys.argv[1:], file=sys.stderr)\n"), 3, 0.5, "a b")

    assert (run.state, run.world_size, run.results, list(run.logs)) == ("done", 0, [], [])
    assert run.output == "['3', '0.5', 'a b']\n"
    assert repr(run).startswith("<Run script.py: 0 ranks, done")
    assert run._repr_html_()


def test_a_program_that_is_one_rank_itself(tmp_path: Path) -> None:
    source = "from course_lib import log, track\nfor i in track(range(5)):\n    log(i=i)\n"
    run = quiet_python(script(tmp_path, source))
    assert run.world_size == 1
    np.testing.assert_array_equal(run.metrics[0]["i"], range(5))


def test_a_program_that_raises_before_its_ranks(tmp_path: Path) -> None:
    path = script(tmp_path, "import os\n\ndef read():\n    open('/no/such/file')\n\nread()\n")
    error = failing(path)
    assert str(error).startswith("the program raised FileNotFoundError: [Errno 2]")
    assert "---->    4     open('/no/such/file')" in str(error)
    assert "runpy" not in str(error)
    assert error.rank == "program"


def test_a_program_that_exits(tmp_path: Path) -> None:
    source = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs', type=int)\n"
    )
    path = script(tmp_path, source + "print(parser.parse_args().epochs)\n")

    assert quiet_python(path, "--epochs", 3).output == "3\n"
    error = failing(path, "--epochs", "many")
    assert str(error).startswith("the program ended with exit code 2")
    assert "argument --epochs: invalid int value: 'many'" in str(error), "what it said is the reason"
    assert "argument --epochs: invalid int value: 'many'" in error.run.output

    path = script(tmp_path, "import sys\nsys.exit('no data here')\n")
    assert "no data here" in str(failing(path))


# --- interrupted, and its kernel killed -------------------------------------------------------------------


def test_an_interrupt_and_the_end_of_its_kernel_end_it_with_its_ranks(program: Path, tmp_path: Path) -> None:
    source = f"""
    import json
    from course_lib import python, Run
    try:
        python({str(program)!r}, "deaf", {str(tmp_path / "store")!r}, dashboard=False)
    except KeyboardInterrupt as error:
        run = Run.open()
        losses = list(run.metrics[1]["loss"])
        say("caught", json.dumps([run.state, type(error).__name__, run.world_size, losses]))
    python({str(program)!r}, "deaf", {str(tmp_path / "another")!r}, dashboard=False)
    """
    with Kernel(tmp_path, source) as kernel:
        run = wait_for(with_its_ranks)
        assert isinstance(run, Run)
        pids = [run.facts(rank)["pid"] for rank in range(2)]
        began = time.monotonic()
        kernel.interrupt()
        kernel.wait_for("caught")
        print(f"interrupt of a program to KeyboardInterrupt: {time.monotonic() - began:.2f} s")
        left = [process for process in kernel.left() if process.pid in pids]
        assert left == []
        assert json.loads((kernel.there / "caught").read_text()) == ["stopped", "Stopped", 2, [1.5] * 3]
        wait_for(with_its_ranks)
        assert len(kernel.left()) >= 4, "kernel, program, two ranks"
        kernel.kill()  # waits until everything is gone
