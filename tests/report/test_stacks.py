"""The ranks' Python stacks, read."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib import Run, compat
from course_lib.record.layout import RankFiles
from course_lib.report import stacks
from course_lib.tracebacks.learner_code import OURS

FILE = """Thread 0x00000000000000bb (most recent call first):
  File "/lib/threading.py", line 5 in wait

Current thread 0x00000000000000aa [pt_main_thread] (most recent call first):
  File "/my code.py", line 12 in train
  File "/my code.py", line 3 in <lambda>
  File "<string>", line 1 in <module>
"""
CRASH = "Fatal Python error: Segmentation fault\n\n"
TRAIN = [("/my code.py", 12, "train"), ("/my code.py", 3, "<lambda>")]


def with_stack(text: str, **facts: Any) -> Run:
    run = Run.create("train", 1)
    RankFiles(run.folder, 0).stack.write_text(text)
    RankFiles(run.folder, 0).facts.write_text(json.dumps(facts))
    return run


def test_the_stack_of_the_current_thread_comes_first() -> None:
    library = [(os.path.join(sysconfig.get_path("stdlib"), "threading.py"), 5, "wait")]
    here = FILE.replace("/lib/threading.py", library[0][0])
    assert stacks.dumped(here) == [TRAIN, library]
    assert stacks.asked_stack(with_stack(here).trace(0)) == TRAIN
    position = stacks.position_of(TRAIN)
    assert position is not None
    assert (position.frame["function"], position.function, position.waits) == ("train", None, False)
    met_another = here.replace("Current t", "X").replace("Thread", "Current thread").replace("X", "T")
    assert stacks.dumped(met_another) == [library, TRAIN]
    assert stacks.asked_stack(with_stack(met_another).trace(0)) == TRAIN, "the learner's, of two"


def test_what_we_put_around_a_function_of_torch_is_not_named() -> None:
    torchs = os.path.join(os.path.dirname(torch.__file__), "distributed", "distributed_c10d.py")
    inner = [(torchs, 1700, "init_process_group"), (compat.__file__, 209, "let_go_and_init")]
    position = stacks.position_of([*inner, *TRAIN])
    assert position is not None
    assert (position.function, position.waits) == ("init_process_group", True)


@pytest.mark.parametrize("kept", [0, 5, 40])
def test_a_file_cut_short_is_no_stack(kept: int) -> None:
    assert stacks.asked_stack(with_stack(FILE[:kept]).trace(0)) == []
    assert stacks.asked_stack(Run.create("train", 1).trace(0)) == []


def test_a_crash_is_found_wherever_it_was_written(tmp_path: Path) -> None:
    """The program may say where: to its output, or to a file of its own."""
    run = with_stack(FILE)  # it was asked once, and that was no crash
    files = RankFiles(run.folder, 0)
    assert stacks.crash_position(run.trace(0)) == (None, "")

    def line_after(path: Path, text: str) -> int | None:
        path.write_text(text)
        position, _ = stacks.crash_position(run.trace(0))
        return position and position.frame["line"]

    assert line_after(files.log, f"step 1\n{CRASH}{FILE}") == 12
    assert line_after(files.log, f"{CRASH}{FILE}{CRASH}{FILE.replace('line 12', 'line 21')}") == 21
    files.facts.write_text(json.dumps({"crash_file": str(tmp_path / "own.log")}))
    assert line_after(tmp_path / "own.log", CRASH + FILE.replace("line 12", "line 13")) == 13
    assert line_after(files.crash, CRASH + FILE.replace("line 12", "line 14")) == 14
    assert line_after(files.crash, CRASH + "Current thread 0xaa (most recent call first):\n") is None
    files.crash.write_text(CRASH + FILE.replace("Current thread", "Thread"))
    assert stacks.crash_position(run.trace(0))[1] == "in a thread that runs no Python code"


# --- beside its main thread --------------------------------------------------------------------------------

PROCESS = os.path.join(sysconfig.get_path("stdlib"), "multiprocessing", "process.py")
WORKER = f"""Current thread 0x00000000000000aa (most recent call first):
  File "/data.py", line 7 in __getitem__
  File "/venv/torch/utils/data/_utils/worker.py", line 349 in _worker_loop
  File "{PROCESS}", line 108 in run
  File "{PROCESS}", line 314 in _bootstrap
  File "/my code.py", line 12 in train
"""


def test_a_forked_process_is_told_by_what_it_does_itself() -> None:
    """Below multiprocessing's frames its stack is that of the rank where the rank has forked it."""
    idle = WORKER.replace("/data.py", PROCESS).replace("/venv/torch/utils", f"{OURS}")
    other = WORKER.replace("_worker_loop", "work")
    (loads, forked) = stacks.others_in({"forked": [WORKER, idle, "", other]})
    assert (loads.loads, loads.thread, forked.loads) == (True, "", False)
    assert loads.position is not None
    assert loads.position.frame["line"] == 7


def test_a_pending_collective_is_the_main_threads_unless_another_thread_is_in_one() -> None:
    saver = {"name": "saver", "daemon": False, "stack": [(f"/venv/{stacks.DISTRIBUTED}c10d.py", 7, "gather")]}
    record = {"pending": [{}], "threads": [saver | {"stack": TRAIN}]}
    for each, waits in ((record, True), (record | {"threads": [saver]}, False), ({}, False)):
        position = stacks.position_in(each, TRAIN)
        assert position is not None
        assert position.waits == waits
    (told,) = stacks.others_in(record)
    assert (told.thread, told.daemon, told.position and told.position.frame["line"]) == ("saver", False, 12)
