"""What a rank of torchrun does before its script runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from course_lib.files import read_json
from course_lib.rank import entry_script
from course_lib.rank.recorder import Recorder
from course_lib.record.layout import PROGRAM, RankFiles, end_request, process_name
from tests.support.processes import alive, wait_for


def test_a_restarted_rank_knows_what_was_written_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, the pid was that of its rank; here, it may be that of anything."""
    files = RankFiles(tmp_path, 0)
    assert not entry_script._of_this_node(read_json(files.facts))
    monkeypatch.setenv("SLURM_NODEID", "1")
    Recorder(files).note()
    assert entry_script._of_this_node(read_json(files.facts))
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert not entry_script._of_this_node(read_json(files.facts))


def run_script(folder: Path, source: str, *options: str, **variables: str) -> Any:
    """Run a script as a part of the run in this folder."""
    (folder / "script.py").write_text(source)
    environment = os.environ | {"COURSE_RUN": str(folder), "COURSE_KERNEL": str(os.getpid())} | variables
    command = [sys.executable, "-m", "course_lib.rank.entry_script", *options, str(folder / "script.py")]
    return subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)


def test_a_program_tells_which_of_its_workers_was_killed(tmp_path: Path) -> None:
    source = """
import multiprocessing, os, signal

def work(end):
    os.kill(os.getpid(), signal.SIGKILL)

here, there = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=work, args=(there,)).start()
there.close()
here.recv()
"""
    assert run_script(tmp_path, source).returncode == 1
    record = json.loads(RankFiles(tmp_path, PROGRAM).failure.read_text())
    assert record["type"] == "EOFError"
    assert [code for _, code in record["workers"]] == [-signal.SIGKILL]


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that this one, in the part of torchrun's agent, has started; they record nothing."""
    started = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_the_ranks_of_an_agent_are_asked_at_once_and_waited_for_together(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the agent's own clock; the next attempt's ranks are asked anew."""
    first, second = ranks
    monkeypatch.setattr(entry_script, "RECORD_SECONDS", 0.1)
    began = time.time()
    entry_script._before_it_is_ended(tmp_path, first.pid)
    requests = {each.pid: end_request(tmp_path, process_name(each.pid)) for each in ranks}
    asked = [float(request.read_text()) for request in requests.values()]
    assert began <= asked[0] == asked[1] <= time.time() - 0.1, "before it is waited for"
    monkeypatch.setattr(entry_script, "RECORD_SECONDS", 1000.0)
    entry_script._before_it_is_ended(tmp_path, second.pid)
    entry_script._before_it_is_ended(tmp_path, second.pid)  # by SIGKILL, after SIGTERM

    third = subprocess.Popen(["sleep", "1000"])
    ranks.append(third)
    monkeypatch.setattr(entry_script, "RECORD_SECONDS", 0.1)
    entry_script._before_it_is_ended(tmp_path, third.pid)
    assert float(end_request(tmp_path, process_name(third.pid)).read_text()) > asked[0]


def test_a_rank_that_has_ended_is_neither_asked_nor_waited_for(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent has not yet looked at it, and so it is a zombie; another one that ends meanwhile, too."""
    monkeypatch.setattr(entry_script, "RECORD_SECONDS", 1000.0)
    first, second = ranks
    first.kill()
    wait_for(lambda: not alive(first.pid), what="its end")
    threading.Timer(0.2, second.kill).start()
    entry_script._before_it_is_ended(tmp_path, second.pid)
    assert not end_request(tmp_path, process_name(first.pid)).exists(), "nobody asked it to end"
    assert end_request(tmp_path, process_name(second.pid)).exists()


def test_a_restarted_rank_forgets_where_it_was_before(tmp_path: Path) -> None:
    """The number of its restart is 0 on a node whose own ranks had not failed."""
    source = """
import os
from pathlib import Path
print(sorted(path.name for path in Path(os.environ["COURSE_RUN"]).glob("*.where")), flush=True)
os._exit(0)
"""
    RankFiles(tmp_path, 0).standstill.write_text('{"asked": true}')
    attempt = {"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}
    said = run_script(tmp_path, source, "--rank", **attempt)
    assert said.stdout == "[]\n", said


def test_a_spawned_ranks_traceback_is_read_as_python_writes_it(tmp_path: Path) -> None:
    """Its notes are no exception, and the frames of what led to it are not its own."""
    try:
        try:
            {}["a"]
        except KeyError as cause:
            error = ValueError("no: data\nat all")
            error.add_note("in a shard")
            raise error from cause
    except ValueError:
        text = traceback.format_exc()
    entry_script._report_spawned(tmp_path, 1, RuntimeError(f"\n\n-- Process 1 terminated:\n{text}"))
    record = json.loads(RankFiles(tmp_path, 1).failure.read_text())
    assert (record["type"], record["message"]) == ("ValueError", "no: data\nat all\nin a shard")
    ((related,), (frame,)) = record["related"], record["frames"]
    assert (related["how"], related["text"]) == ("from", "KeyError: 'a'")
    assert related["frames"][0]["line"] + 4 == frame["line"]
