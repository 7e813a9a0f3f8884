"""A data set is made once, whoever asks: several at once, killed makers, hanging makers, full disks."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from course_lib.data import once
from course_lib.files import whole_file
from course_lib.host.home import CourseHomeError
from tests.support.processes import wait_for

WHOLE = b"whole" * 1000


def make(folder: Path) -> None:
    with whole_file(folder / "data", durable=True) as file:
        file.write(WHOLE)


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


DONE = {".lock": b"", ".whole": b"", "data": WHOLE}


def test_it_is_made_once_and_for_its_owner_alone(course_home: Path) -> None:
    folder = once.made_once("a", make)
    assert folder == course_home / "data" / "a"
    assert contents(folder) == DONE
    assert course_home.stat().st_mode & 0o777 == 0o700
    assert once.made_once("a", lambda _: pytest.fail("made twice")) == folder


EIGHT = """
import os
from course_lib.data.once import made_once
gate, opener = os.pipe()
makers = []
for _ in range(8):
    makers.append(os.fork())
    if not makers[-1]:
        os.close(opener)
        os.read(gate, 1)  # all wait here until the parent closes its end
        folder = made_once("a", lambda folder: (os.write(1, b"made "), (folder / "data").write_text("whole")))
        os._exit((folder / "data").read_text() != "whole")
os.close(opener)
print([os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) for maker in makers])
"""


def test_of_eight_processes_at_once_one_makes_it() -> None:
    parent = subprocess.run([sys.executable, "-c", EIGHT], capture_output=True, text=True, timeout=300)
    assert parent.stdout == f"made {[0] * 8}\n", parent.stderr


HALF_WAY = """
import signal
from course_lib.data.once import made_once
from course_lib.files import whole_file

def half(folder):
    with whole_file(folder / "data", durable=True) as file:
        file.write(b"half")
        file.flush()
        print("half", flush=True)
        signal.pause()

made_once("a", half)
"""


@pytest.fixture
def half_way() -> Iterator[subprocess.Popen[str]]:
    """A maker that has written half of its file, and holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HALF_WAY], stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout
            assert maker.stdout.readline() == "half\n"
            yield maker
        finally:
            maker.kill()


def test_a_killed_maker_frees_those_who_wait(half_way: subprocess.Popen[str], course_home: Path) -> None:
    folder = course_home / "data" / "a"
    program = "from tests.data import test_once; test_once.once.made_once('a', test_once.make)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2]) as waiting:
        try:
            process = psutil.Process(waiting.pid)
            wait_for(lambda: str(folder / ".lock") in {file.path for file in process.open_files()})
            assert waiting.poll() is None
            half_way.kill()
            assert waiting.wait(300) == 0
        finally:
            waiting.kill()
    assert contents(folder) == DONE, "and the half file is gone"


def test_a_maker_that_hangs_does_not_block_the_others(
    half_way: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "LOCK_SECONDS", 0.2)
    assert (once.made_once("a", make) / "data").read_bytes() == WHOLE
    assert half_way.poll() is None


def test_a_write_that_fails_leaves_nothing_half_done(course_home: Path) -> None:
    """The kernel lets no file of this process grow beyond 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CourseHomeError, match=r"data/a \(.*File too large\): set COURSE_HOME"):
            once.made_once("a", make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(contents(course_home / "data" / "a")) == {".lock"}
    assert contents(once.made_once("a", make)) == DONE, "and with space again, it goes"
