"""Killing processes; how they end with another one: tests/launcher/test_guard.py, tests/faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil

from course_lib.kill import kill_families, kill_group_of


def test_a_process_that_has_a_dead_ones_number_is_not_meant() -> None:
    pipe = subprocess.PIPE
    dead, living = (subprocess.Popen("cat", stdin=pipe, stdout=pipe, start_new_session=True) for _ in "12")
    with dead, living:
        reused = psutil.Process(dead.pid)
        dead.kill()
        dead.wait()
        reused._pid = living.pid  # as if the system had given the number anew

        kill_families([reused])
        assert living.stdin is not None
        assert living.stdout is not None
        living.stdin.write(b"alive\n")
        living.stdin.flush()
        assert living.stdout.readline() == b"alive\n"

        kill_families([psutil.Process(living.pid)])
        assert living.wait(20) == -signal.SIGKILL, "the test's own weapon is blunt"


def test_the_group_of_a_rank_and_not_of_a_later_process_that_has_its_pid(tmp_path: Path) -> None:
    facts = tmp_path / "rank-0.json"
    with subprocess.Popen("cat", stdin=subprocess.PIPE, start_new_session=True) as leader:
        facts.write_text(json.dumps({"pid": leader.pid}))
        os.utime(facts, (1, 1))  # the rank with this pid wrote them long before this process began
        kill_group_of(facts)
        assert leader.poll() is None

        facts.touch()
        kill_group_of(facts)
        assert leader.wait(20) == -signal.SIGKILL
