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


def test_a_second_rank_that_records_nothing_is_not_waited_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a node are asked at once; the agent ends them one after the other."""
    monkeypatch.setattr(entry_script, "RECORD_SECONDS", 1000.0)
    asked = tmp_path / ASKED
    asked.touch()
    os.utime(asked, (0, time.time() - 1000))
    entry_script._before_it_is_ended(tmp_path, os.getpid())
    assert end_request(tmp_path, process_name(os.getpid())).exists()
