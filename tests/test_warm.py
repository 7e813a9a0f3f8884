"""What `tests.support.warm` starts is what `python` would have started, as far as a program can tell."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import wait_for
from tests.support.warm import Warm, ended

PROBE = """
import atexit, os, sys, threading, time

atexit.register(print, "at exit")
threading.Thread(target=lambda: time.sleep(0.2) or print("a thread")).start()
print(__name__, sys.argv, os.getcwd(), sys.path[0], os.environ.get("OF_THE_TEST"), __file__)
print("to stderr", file=sys.stderr)
"""
ENDS = {
    "by itself": "",
    "with a number": "sys.exit(3)",
    "with a text": 'sys.exit("stopped")',
    "with nothing": "sys.exit()",
    "with an exception": 'raise ValueError("wrong")',
    "by a signal": "sys.stdout.flush(); os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("how", ENDS)
def test_it_is_as_from_nothing(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE + ENDS[how])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_TEST", "é")
    cold = subprocess.run([sys.executable, script, "a", "-1"], capture_output=True, text=True)
    code, output, errors = ended(script, "a", -1)
    assert (code, output) == (cold.returncode, cold.stdout)
    assert errors.splitlines()[:1] == cold.stderr.splitlines()[:1]
    assert errors.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_ranks_meet_and_end_with_the_one_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(f'rank {dist.get_rank()} of {dist.get_world_size()}')\n"
        "if len(sys.argv) == 1:\n    dist.barrier()\n    dist.destroy_process_group()\n"
        "elif dist.get_rank() == 1:\n    sys.exit('rank 1 ends')\n"
        "else:\n    time.sleep(600)\n"
    )
    assert ended(script, ranks=2) == (0, "rank 0 of 2\nrank 1 of 2\n", "")
    code, _, errors = ended(script, "fails", ranks=2)
    assert (code, errors) == (1, "rank 1 ends\n")


def test_it_hears_signals(tmp_path: Path) -> None:
    script = tmp_path / "asked.py"
    script.write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "open('ready', 'w').close()\nwhile True:\n    time.sleep(0.1)\n"
    )
    program = Warm(script, cwd=tmp_path)
    wait_for((tmp_path / "ready").exists)
    assert program.returncode is None
    program.send_signal(signal.SIGTERM)
    assert program.communicate() == ("", "")
    assert program.returncode == 7
