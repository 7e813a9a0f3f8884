"""What a rank of torchrun does before its script runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_lib.rank import entry_script
from course_lib.rank.recorder import Recorder
from course_lib.run_folder import ASKED, PROGRAM, RankFiles, end_request, process_name
from tests.support.processes import alive, wait_for


def test_a_restarted_rank_knows_what_was_written_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, the pid was that of its rank; here, it may be that of anything."""
    files = RankFiles(tmp_path, 0)
    assert not entry_script._of_this_node(files.facts)
    monkeypatch.setenv("SLURM_NODEID", "1")
    Recorder(files)
    assert entry_script._of_this_node(files.facts)
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert not entry_script._of_this_node(files.facts)


def test_a_program_tells_which_of_its_workers_was_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import multiprocessing, os, signal

def work(end):
    os.kill(os.getpid(), signal.SIGKILL)

here, there = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=work, args=(there,)).start()
there.close()
here.recv()
""")
    environment = os.environ | {"COURSE_RUN": str(tmp_path), "COURSE_KERNEL": str(os.getpid())}
    command = [sys.executable, "-m", "course_lib.rank.entry_script", str(tmp_path / "script.py")]
    assert subprocess.run(command, env=environment, timeout=120).returncode == 1
    record = json.loads(RankFiles(tmp_path, PROGRAM).failure.read_text())
    assert record["type"] == "EOFError"
    assert [code for _, code in record["workers"]] == [-signal.SIGKILL]


def test_ranks_that_record_nothing_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent ends a node's ranks one after the other. Those of a new attempt are waited for anew."""
    monkeypatch.setattr(entry_script, "RECORD_SECONDS", 1.0)
    requests = entry_script._EndRequests(tmp_path)
    ranks = [subprocess.Popen(["sleep", "1000"]) for _ in range(4)]
    seconds = []
    try:
        for rank in ranks:
            if rank is ranks[2]:
                requests._last -= 1000
            began = time.monotonic()
            requests(rank.pid)
            seconds.append(time.monotonic() - began)
            assert end_request(tmp_path, process_name(rank.pid)).exists()
        assert seconds[0] >= 0.9
        assert seconds[1] < seconds[0] / 2, seconds
        assert seconds[2] >= 0.9
        assert seconds[3] < seconds[2] / 2, seconds
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_one_that_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has called wait() yet: it is a zombie, which kill(pid, 0) finds."""
    monkeypatch.setattr(entry_script, "RECORD_SECONDS", 1000.0)
    rank = subprocess.Popen(["true"])
    wait_for(lambda: not alive(rank.pid), what="its end")
    entry_script._EndRequests(tmp_path)(rank.pid)
    assert rank.returncode is None
    assert rank.wait() == 0, "it is left to torchrun to wait for it"


@pytest.mark.parametrize("counted", [0, 1])
def test_a_restarted_rank_forgets_what_was_asked_before(counted: int, tmp_path: Path) -> None:
    """torchrun counts no restart where a node came or went."""
    files, asked = RankFiles(tmp_path, 0), tmp_path / ASKED
    (tmp_path / "script.py").write_text(f"""
from pathlib import Path
print([Path(path).exists() for path in ({str(asked)!r}, {str(files.standstill)!r})])
""")
    environment = os.environ | {"COURSE_RUN": str(tmp_path), "COURSE_KERNEL": str(os.getpid()), "RANK": "0"}
    environment |= {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": str(counted), "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "course_lib.rank.entry_script", str(tmp_path / "script.py")]
    said = []
    for _ in range(2):
        asked.touch()
        if files.facts.exists():
            files.standstill.write_text('{"asked": true}')
        done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
    assert said[0].startswith("[True, "), "asked by the launcher, while it started"
    assert said[1] == "[False, False]"
