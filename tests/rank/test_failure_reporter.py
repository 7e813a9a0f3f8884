"""What a rank says last: no signal handler of its program keeps it from that, or adds to it."""

from __future__ import annotations

import pytest

from course_lib import RankError
from tests.support.cells import cell, quiet_launch

HANDLED = """
import os, signal, threading, time

NAMES = "SIGCHLD SIGTERM SIGUSR1 SIGUSR2 SIGALRM SIGINT SIGHUP"
NUMBERS = [signal.Signals[name] for name in NAMES.split()]
over = False

def handler(number, frame):
    if over:
        WHAT

def send():
    while True:
        for number in NUMBERS:
            time.sleep(5e-5)  # without a break they pile up on Python's stack
            os.kill(os.getpid(), number)

def work():
    global over
    for number in NUMBERS:
        signal.signal(number, handler)
    signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
    threading.Thread(target=send, daemon=True).start()
    error = ValueError("the cause")
    over = True
    raise error
"""


@pytest.mark.parametrize("what", ["os._exit(77)", "raise SystemExit(0)", "raise RuntimeError(number)"])
def test_no_handler_runs_after_the_last_line(what: str) -> None:
    """Some 10,000 signals a second; with a report from the main thread, each launch had another end."""
    with pytest.raises(RankError) as caught:
        quiet_launch(cell(HANDLED.replace("WHAT", what)).work, nprocs=1)

    cause = caught.value.report.first_failure
    assert cause is not None
    assert (cause.kind, cause.exception, cause.message) == ("raised", "ValueError", "the cause")
    assert cause.related == []


def test_what_is_left_at_its_default_does_not_end_it_either() -> None:
    """torchrun ends the other ranks by SIGTERM once one has failed."""

    def work() -> None:
        import os
        import signal

        class Slow(Exception):
            def __str__(self) -> str:
                for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                    os.kill(os.getpid(), number)
                return "the cause"

        raise Slow

    with pytest.raises(RankError, match="raised Slow: the cause"):
        quiet_launch(work, nprocs=1)


def test_a_rank_that_cannot_start_a_thread_reports_all_the_same() -> None:
    def work() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))  # no room for a thread's stack
        raise ValueError("the cause")

    with pytest.raises(RankError, match="raised ValueError: the cause"):
        quiet_launch(work, nprocs=1)
