"""The walls themselves, and what holds where bubblewrap is not there."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_lib.exercises.check import judged
from course_lib.exercises.grading import score, session, walls
from course_lib.exercises.grading.batch import grade_class
from tests.exercises.grading.toys import HONEST_FIRST, HONEST_SECOND, check, notebook
from tests.support.needs import missing
from tests.support.processes import unless_gone, wait_for


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shutil, "which", lambda name, *_: None)
    walls.unprotected.cache_clear()
    yield
    walls.unprotected.cache_clear()


@pytest.mark.usefixtures("no_bubblewrap")
def test_what_is_not_closed_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "anna.ipynb").write_text("{}")
    grade_class([tmp_path], tmp_path / "report", out=sys.stdout)
    warning = capsys.readouterr().out.splitlines()[0]
    assert "bwrap is not installed: not closed are the network, the files" in warning
    assert "apt-get install bubblewrap" in warning


@pytest.mark.usefixtures("no_bubblewrap", "questions", "nothing_left")
def test_without_bubblewrap_the_limits_hold_and_daemons_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "CELL_SECONDS", 4.0)
    monkeypatch.setattr(score, "GRACE_SECONDS", 20.0)
    monkeypatch.setattr(score, "ALL_SECONDS", 15.0)
    mark = f"87654.{os.getpid()}"
    daemon = f"""
import os, time
def first(numbers=()):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 4096)
            os.execve("/bin/sleep", ["sleep", "{mark}"], {{}})
        os._exit(0)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""
    text = notebook(daemon, "first()", check(1), HONEST_SECOND, check(2))
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # short: there are sockets in it
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        with walls.Walls() as there:
            feedback = score.score_notebook(text, "99_toys.ipynb", "", 60.0, there).feedback
        assert os.listdir(temporary) == []
    assert [feedback["99.1"].points, feedback["99.2"].points] == [0, 3], feedback
    assert all(mark not in (each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))


@pytest.mark.usefixtures("questions", "nothing_left")
def test_where_no_namespaces_can_be_made_each_session_has_walls_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason := walls.unprotected():
        missing(reason)
    usual = walls._bubblewrap
    monkeypatch.setattr(walls, "_bubblewrap", lambda user, namespaces=False, seccomp=None: usual(user))
    text = notebook(HONEST_FIRST, check(1), HONEST_SECOND, check(2))
    with walls.Walls() as there:
        there._namespaces = True
        feedback = score.score_notebook(text, "99_toys.ipynb", "", 60.0, there).feedback
        assert not there._namespaces
    assert [feedback["99.1"].points, feedback["99.2"].points] == [2, 3], feedback


def test_no_session_holds_the_way_to_the_others() -> None:
    """Who had it could answer in their place."""
    if reason := walls.unprotected():
        missing(reason)
    with walls.Walls() as there, there.session():
        if not there._namespaces:
            pytest.skip("this folder is in /tmp, so that each session has walls of its own")

        def ours() -> list[psutil.Process]:
            family = [each for each in there._family() if unless_gone(each.name, "bwrap") != "bwrap"]
            commands = {each: " ".join(unless_gone(each.cmdline, [])) for each in family}
            found = [each for each in family if "supervisor import main" in commands[each]]
            return sorted(found, key=lambda each: each.pid)

        # beside the supervisor: process 1 of the session's namespaces, and the one that serves it
        trusted, *others = wait_for(lambda: ours() if len(ours()) > 2 else None, what="the session")
        assert _sockets(trusted)
        for each in others:
            assert not _sockets(trusted) & _sockets(each)


def _sockets(process: psutil.Process) -> set[str]:
    found = set()
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(each))
    return {name for name in found if name.startswith("socket:")}


@contextmanager
def says(program: str) -> Iterator[session.Session]:
    """A program of a test's own on the other side of the way."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs) as there,
    ):
        theirs.close()
        told = session.Session(ours, lambda: None)
        told.limit(60)
        try:
            yield told
        finally:
            there.kill()


def replies(program: str, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 16) -> tuple[list[Any], str]:
    monkeypatch.setattr(session, "MOST_REPLY_BYTES", most)
    found = []
    with says(program) as there:
        try:
            for each in there._messages():
                found.append(each)
        except session.SessionEnded as why:
            return found, str(why)
    raise AssertionError("it has no end")


@pytest.mark.parametrize(
    ("program", "found", "why"),
    [
        ("print('{\"a\": 1}')", [{"a": 1}], "ended the process"),
        ("print('nonsense\\n[1]\\n3\\n{\"a\"\\n{}')", [{}], "ended the process"),
        ("print('[' * 50000)", [], "ended the process"),
        ("print('{\"a\": [' + '[],' * 500 + '[]]}')", [], "ended the process"),
        ("print('{' + '\"a\": \"\",' * 500 + '\"b\": 3}')", [], "ended the process"),
        ("print('{\"a\": \"' + '[],\\\\\"' * 5000 + '\"}')", [{"a": '[],"' * 5000}], "ended the process"),
        ("while True: print('x' * 1000, end='')", [], "more than 0 MiB came back"),
        (
            "import sys; sys.stdout.buffer.write(bytes(range(128, 256)) + b'\\n{}\\n')",
            [{}],
            "ended the process",
        ),
    ],
)
def test_what_comes_is_data_or_nothing(
    program: str, found: list[Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, ended = replies(program, monkeypatch)
    assert told == found
    assert why in ended


def test_who_does_not_read_is_given_up() -> None:
    with says("import time; time.sleep(600)") as there:
        there.limit(1)
        with pytest.raises(session.SessionEnded, match="not done in time"):
            next(there.ask({"long": "x" * (1 << 20)}))
        assert there.struck


def test_a_limit_that_the_sandbox_keeps_is_noted_here() -> None:
    with says("import time; time.sleep(600)") as there:
        there.note_limit(10.0)
        assert not there.struck
        there._since -= 10.0
        there.note_limit(10.0)
        assert there.struck


@pytest.mark.parametrize(
    "reply",
    [
        *({}, {"texts": 3}, {"texts": ["{}"]}, {"texts": ["{}", 3]}, {"texts": ["x", "y"]}, {"refused": 3}),
        {"texts": [json.dumps({"points": 3})] * 2},
    ],
)
def test_a_reply_that_is_none_is_refused(reply: dict[str, Any]) -> None:
    with pytest.raises(score.Refused, match="cannot be read"):
        score._seen(reply, 2)


def test_of_a_list_without_end_nothing_is_read() -> None:
    """In memory, a list takes twenty times the room of its text."""
    told = '{"seen": [' + "[]," * (score.MOST_PARTS // 2) + "[]]}"
    with pytest.raises(score.Refused, match="more than 400,000 numbers"):
        score._seen({"texts": [told]}, 1)


@pytest.mark.usefixtures("questions", "nothing_left")
def test_a_submission_has_cores_of_its_own() -> None:
    if reason := walls.unprotected():
        missing(reason)
    program = """
import os
def first(numbers):
    try:
        os.sched_setaffinity(0, range(os.cpu_count()))
        changed = "changed"
    except OSError:
        changed = "unchanged"
    return f"{sorted(os.sched_getaffinity(0))} {changed}"
"""
    own = max(os.sched_getaffinity(0))
    with walls.Walls([own]) as there:
        feedback = score.score_notebook(
            notebook(program, check(1)), "99_toys.ipynb", "", 60.0, there
        ).feedback
    assert f"[{own}] unchanged" in feedback["99.1"].findings[0].seen
    assert len(os.sched_getaffinity(0)) > 1 or os.cpu_count() == 1


@pytest.mark.parametrize("number", score.answer_names())
def test_a_judge_without_an_answer_says_why(number: str) -> None:
    """Also one that first asks for a folder."""
    feedback = judged(number, score.NoAnswer("there is none"), random.Random(3))
    assert (feedback.points, feedback.trouble) == (0, "there is none")
