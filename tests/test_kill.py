"""Killing processes; how they end with another one: tests/launcher/test_guard.py, tests/faults."""

from __future__ import annotations

import signal
import subprocess

import psutil

from course_lib.kill import kill_families


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
