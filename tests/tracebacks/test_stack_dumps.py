"""Python stacks on a signal that the program does not use: written in C; not sent where it would harm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_lib.tracebacks import stack_dumps
from course_lib.tracebacks.stack_dumps import answer, request, size_of
from tests.support.processes import wait_for

if sys.platform != "linux":
    pytest.skip("only Linux tells which signals a process uses", allow_module_level=True)

HOLD = "import ctypes\nwhile True:\n    ctypes.PyDLL(None).sleep(1000)"  # in C, with its lock held
REAL_TIME = "range(signal.SIGRTMIN, signal.SIGRTMAX + 1)"


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    return tmp_path / "stacks"


class Process:
    """A process that has chosen a signal, then runs some lines, and holds the interpreter's lock."""

    def __init__(self, stacks: Path, before: str = "", after: str = "") -> None:
        source = f"""
import json, signal
from pathlib import Path
from course_lib.tracebacks.stack_dumps import answer_requests
{textwrap.dedent(before)}
print(json.dumps(answer_requests(Path({str(stacks)!r}))))
{textwrap.dedent(after)}
print("holds", flush=True)
{HOLD}
"""
        self.process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.number = json.loads(self.process.stdout.readline())
        self.process.stdout.readline()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_it_answers_from_inside_c_code_each_time(stacks: Path) -> None:
    with Process(stacks) as plain:
        assert plain.number == signal.SIGRTMAX
        for _ in range(2):
            start = size_of(stacks)
            assert request(plain.process.pid, plain.number)
            text = wait_for(lambda start=start: answer(stacks, start, time.monotonic() + 10))
            assert text.startswith("Current thread 0x")
            assert text.count('File "<string>"') == 1
        assert plain.process.poll() is None


@pytest.mark.parametrize(
    "taken",
    [
        f"for n in {REAL_TIME}: signal.signal(n, signal.SIG_DFL)",
        f"for n in {REAL_TIME}: signal.signal(n, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        f"for n in {REAL_TIME}: signal.signal(n, lambda *_: print('met', flush=True))",
        "import faulthandler; faulthandler.unregister(signal.SIGRTMAX)",
    ],
)
def test_none_is_sent_to_a_program_that_has_taken_the_signal(taken: str, stacks: Path) -> None:
    with Process(stacks, after=taken) as process:
        assert process.number
        assert not request(process.process.pid, process.number)
        assert process.process.poll() is None
    assert size_of(stacks) == 0


@pytest.mark.parametrize(
    "used",
    [
        "signal.signal(signal.SIGRTMIN, lambda *_: None)",
        "signal.signal(signal.SIGRTMAX, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX])",
    ],
)
def test_beside_a_program_that_uses_such_signals_none_is_chosen(used: str, stacks: Path) -> None:
    with Process(stacks, before=used) as process:
        assert process.number is None
    assert not stacks.exists()


def test_an_answer_that_is_held_up_is_waited_for(stacks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its process may lose the CPU in the middle of it."""
    clock = {"now": 0.0}
    parts = {0.3: "first ", 0.34: "second ", 0.38: "third", 1.0: "another's"}

    def sleep(seconds: float) -> None:
        clock["now"] += seconds
        stacks.write_text("".join(part for at, part in parts.items() if at <= clock["now"]))

    monkeypatch.setattr(stack_dumps, "time", SimpleNamespace(monotonic=lambda: clock["now"], sleep=sleep))
    assert answer(stacks, 0, 60.0) == "first second third"
    assert clock["now"] < 0.5
    clock["now"] = 0.0
    assert answer(stacks, 0, 0.32) == "first "


def test_who_is_gone_or_never_answers_does_not_hold_up(stacks: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not request(gone.pid, signal.SIGRTMAX)
    began = time.monotonic()
    assert answer(stacks, 0, began + 0.1) == ""
    assert time.monotonic() - began < 10
