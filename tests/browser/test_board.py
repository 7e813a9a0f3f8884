"""`course board` in a browser, before a class of thirty."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from course_lib import share_progress
from course_lib.exercises import sharing
from course_lib.exercises.sharing import note_try
from tests.support.axe import PHONE, RULES, WIDTH, violations
from tests.support.lab import fresh_page
from tests.support.needs import require
from tests.support.processes import listening

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>"
CLASS = [HOSTILE, *(f"learner {number:02}" for number in range(2, 31))]
MOST = {"05.1": 3, "06.1": 3, "06.2": 2, "06.3": 5}
ROW = "#wide tbody tr:has(th:text-is({}))"


class Class:
    """Thirty learners, each with a course folder of their own, who share what they do."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._homes, self._monkeypatch = place / "class", place / "homes", monkeypatch
        self.folder.mkdir()
        for number, name in enumerate(CLASS):
            self._is(name)
            share_progress(self.folder, name)
            for question, most in MOST.items():
                if number % 4 or question < "06.2":
                    self.tries(name, question, (number + len(question)) % (most + 1), 120 + number)

    def _is(self, name: str) -> None:
        self._monkeypatch.setenv("COURSE_HOME", str(self._homes / str(CLASS.index(name))))

    def tries(self, name: str, question: str, points: float, seconds_ago: float) -> None:
        self._is(name)
        now = time.time() - seconds_ago
        with self._monkeypatch.context() as patched:
            patched.setattr(sharing.time, "time", lambda: now)
            note_try(question, points, MOST[question])


@pytest.fixture
def thirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    return Class(tmp_path, monkeypatch)


class Served:
    """`course board` as a program."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "course_lib", "board", str(folder), "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def end(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGINT)
        assert self.process.wait(120) == 0


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts boards, and ends those that the test has not ended."""
    with contextlib.ExitStack() as ends:

        def start(folder: Path, *options: str) -> Served:
            served = Served(folder, *options)
            ends.callback(served.end)
            return served

        yield start


@pytest.fixture
def board(thirty: Class, serve: Callable[..., Served]) -> Served:
    return serve(thirty.folder)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    """A page; nothing may go wrong in it."""
    wrong: list[str] = []
    with fresh_page(require("chromium", "it shows the board"), tmp_path / "profile") as fresh:
        fresh.on("pageerror", lambda error: wrong.append(str(error)))
        fresh.on("dialog", lambda dialog: wrong.append(dialog.message))
        yield fresh
    assert wrong == []


def row(page: Any, name: str) -> Any:
    return page.locator(ROW.format(json.dumps(name)))


def shows(page: Any, words: str) -> None:
    page.locator("main").get_by_text(words).locator("visible=true").first.wait_for()


def test_a_class_of_thirty_at_work(page: Any, thirty: Class, board: Served) -> None:
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    page.goto(board.address)
    shows(page, "30 learners, 0 stuck")
    assert page.locator("#what").inner_text() == "Exercise 06", "the busiest"
    assert page.locator("#wide tbody tr").count() == 30
    assert page.locator("#wide tbody th").first.inner_text() == HOSTILE, "as text"
    assert "–" in row(page, "learner 05").inner_text(), "06.2 is not begun"
    page.evaluate("window.loadedOnce = true")

    (thirty.folder / "broken.json").write_text("{")
    thirty.tries("learner 07", "06.2", 2, 1)
    row(page, "learner 07").get_by_text("✓ 2 of 2").wait_for()
    shows(page, "1 file in the folder could not be read as progress.")

    for seconds_ago in (840, 400, 2):
        thirty.tries("learner 09", "06.3", 0, seconds_ago)
    row(page, "learner 09").get_by_text("⚠ stuck").wait_for()
    shows(page, "30 learners, 1 stuck")
    shows(page, "1 learner is stuck")
    assert page.locator("#wide tbody th").first.inner_text() == "learner 09", "the stuck come first"
    assert "tries in vain" in page.locator("#stuck li").inner_text()
    thirty.tries("learner 09", "06.3", 5, 1)
    shows(page, "30 learners, 0 stuck")
    page.locator("#stuck").wait_for(state="hidden")

    page.select_option("#exercise", "05")
    assert page.locator("#what").inner_text() == "Exercise 05"
    page.select_option("#exercise", "all")
    assert page.locator("#wide thead th").count() == 1 + len(MOST)
    assert page.evaluate("window.loadedOnce") is True, "the page was not loaded again"
    assert asked == {board.address, f"{board.address}class.json"}


def test_readable_by_all_in_light_and_dark_and_on_a_phone(page: Any, thirty: Class, board: Served) -> None:
    for seconds_ago in (840, 400, 2):
        thirty.tries("learner 09", "06.3", 0, seconds_ago)
    (thirty.folder / "broken.json").write_text("{")
    page.goto(board.address)
    shows(page, "1 stuck")
    page.select_option("#exercise", "all")
    wrong = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        wrong += violations(page, scheme, {"runOnly": RULES})
    page.set_viewport_size({"width": PHONE, "height": 844})
    assert page.evaluate(WIDTH) <= PHONE
    board.end()
    shows(page, "The board does not answer.")
    wrong += violations(page, "gone", {"runOnly": RULES})
    assert wrong == []


def test_a_folder_and_a_board_that_go_are_told_of(page: Any, thirty: Class, board: Served) -> None:
    """What was seen last stays."""
    page.goto(board.address)
    shows(page, "30 learners")
    moved = thirty.folder.rename(thirty.folder.with_name("moved"))
    shows(page, "cannot be read: No such file or directory. What you see is older.")
    moved.rename(thirty.folder)
    page.locator("#alarm:empty").wait_for(state="attached")
    board.end()
    shows(page, "The board does not answer. What you see is from")
    assert page.locator("#wide tbody tr").count() == 30


def test_nobody_shares_yet(page: Any, tmp_path: Path, serve: Callable[..., Served]) -> None:
    page.goto(serve(tmp_path).address)
    shows(page, f'share_progress("{tmp_path}")')


class Proxy(BaseHTTPRequestHandler):
    """A hub's: takes the path in front away and keeps the name that the browser asked for."""

    def __init__(self, to: list[str], *given: Any) -> None:
        self.to = to
        super().__init__(*given)

    def do_GET(self) -> None:
        path = self.path.removeprefix("/user/anna/proxy/8642")
        with urlopen(Request(f"{self.to[0]}{path}", headers={"Host": self.headers["Host"]})) as answer:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.read())

    def log_message(self, *_: Any) -> None:
        pass


def test_behind_a_hubs_proxy(page: Any, thirty: Class, serve: Callable[..., Served]) -> None:
    to: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Proxy, to)) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{hub.server_port}/user/anna/proxy/8642/"
        board = serve(thirty.folder, "--base-url", base)
        (socket,) = listening(psutil.Process(board.process.pid))
        to.append(f"http://127.0.0.1:{socket.port}")
        assert board.address.startswith(base)
        page.goto(board.address)
        shows(page, "30 learners")
        hub.shutdown()
