"""The ranks' Python stacks: asked for, read, shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_lib import Run
from course_lib.report import stacks
from tests.support.cells import quiet_launch
from tests.support.processes import wait_for

FILE = """main thread 0x00000000000000aa
Thread 0x00000000000000bb (most recent call first):
  File "/lib/threading.py", line 5 in wait

Current thread 0x00000000000000aa (most recent call first):
  File "/old.py", line 1 in <module>
Thread 0x00000000000000bb (most recent call first):
  File "/lib/threading.py", line 5 in wait
Current thread 0x00000000000000aa [pt_main_thread] (most recent call first):
  File "/my code.py", line 12 in train
  File "/my code.py", line 3 in <lambda>
  File "<string>", line 1 in <module>
"""


def with_stack(text: str, **facts: int) -> Run:
    run = Run.create("train", 1)
    (run.folder / "rank-0.stack").write_text(text)
    (run.folder / "rank-0.json").write_text(json.dumps(facts))
    return run


def test_the_main_threads_last_stack_is_read() -> None:
    expected = [("/my code.py", 12, "train"), ("/my code.py", 3, "<lambda>")]
    assert stacks.python_stack(with_stack(FILE), 0) == expected
    position = stacks.position_of(expected)
    assert position is not None
    assert (position.frame["function"], position.function, position.waits) == ("train", None, False)


@pytest.mark.parametrize("kept", [0, 5, len("main thread 0x00000000000000aa\n"), 120])
def test_a_file_cut_short_is_no_stack(kept: int) -> None:
    assert stacks.python_stack(with_stack(FILE[:kept]), 0) == []
    assert stacks.python_stack(Run.create("train", 1), 0) == []


def test_only_who_listens_is_asked() -> None:
    """SIGUSR1 would end a process that does not; one that is gone does not hold up the report."""
    deaf = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    try:
        began = time.monotonic()
        stacks.ask_stacks(with_stack("", pid=deaf.pid), [0])
        stacks.ask_stacks(with_stack("main thread 0xaa\n", pid=gone.pid), [0])
        stacks.ask_stacks(with_stack("main thread 0xaa\n"), [0])  # its pid is not known yet
        assert time.monotonic() - began < stacks.STACK_SECONDS
        assert deaf.poll() is None
    finally:
        deaf.kill()
        deaf.wait()


def test_a_living_rank_answers_from_inside_c_code(tmp_path: Path) -> None:
    def work() -> list[str]:
        run = Run.open()
        if os.environ["RANK"] == "0":
            wait_for((tmp_path / "go").exists)
            return []
        wait_for(lambda: (run.folder / "rank-0.json").exists())

        def asked() -> list[str]:
            stacks.ask_stacks(run, [0])
            return [function for _, _, function in stacks.python_stack(run, 0)]

        try:
            return wait_for(lambda: "wait_for" in asked() and asked())
        finally:
            (tmp_path / "go").touch()

    assert "work" in quiet_launch(work).results[1]
