"""`course board`: what it answers, to whom, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from course_lib import share_progress
from course_lib.__main__ import main
from course_lib.exercises.board.serve import Board
from course_lib.exercises.sharing import note_try
from tests.support.processes import listening, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With one learner in it."""
    made = tmp_path / "class"
    made.mkdir()
    share_progress(made, "anna")
    note_try("06.1", 1, 3)
    return made


@pytest.fixture
def board(folder: Path) -> Iterator[Board]:
    yield from serving(Board(folder, 0))


@pytest.fixture
def behind_a_hub(folder: Path) -> Iterator[Board]:
    yield from serving(Board(folder, 0, "https://Hub.example.org/user/anna/proxy/8642/"))


def serving(board: Board) -> Iterator[Board]:
    with board:
        threading.Thread(target=board.serve_forever, daemon=True).start()
        yield board
        board.shutdown()


def ask(
    board: Board, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", board.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{board.server_port}"})
    answer = connection.getresponse()
    told = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return told


def test_the_page_and_its_data(board: Board) -> None:
    assert board.address == f"http://127.0.0.1:{board.server_port}/{board.token}/"
    status, headers, page = ask(board, f"/{board.token}/?a=b")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page.startswith("<!doctype html>")
    status, headers, data = ask(board, f"/{board.token}/class.json", f"LOCALHOST:{board.server_port}")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert [each["name"] for each in json.loads(data)["learners"]] == ["anna"]


def test_nothing_is_fetched_from_elsewhere_and_nothing_but_the_page_runs(board: Board) -> None:
    _, headers, page = ask(board, f"/{board.token}/")
    assert not re.findall(r"https?://|\bsrc=|\bhref=|url\(|innerHTML|\bstyle=|\bon[a-z]+=", page)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]+='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]+='", policy["style-src"])


@pytest.mark.parametrize(
    "path", ["/", "/class.json", "/{}", "/{}/class.jsonx", "/{}/../x", "/%00/", "//", "*"]
)
def test_no_other_path_is_known(path: str, board: Board) -> None:
    status, headers, words = ask(board, path.format(board.token))
    assert status == 404
    assert "anna" not in words
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_bytes_that_are_no_address_are_refused(board: Board) -> None:
    for line in ("GET /é/ HTTP/1.1", "GET", "x" * 100_000, "GET http://[ HTTP/1.1", "\0\0"):
        with (
            contextlib.suppress(ConnectionError),  # it does not read all of a long one
            socket.create_connection(("127.0.0.1", board.server_port), timeout=60) as connection,
        ):
            connection.sendall(f"{line}\r\nHost: 127.0.0.1:{board.server_port}\r\n\r\n".encode())
            assert b"anna" not in connection.makefile("rb").read()
    assert ask(board, f"/{board.token}/")[0] == 200


def test_no_other_name_is_answered_to(board: Board) -> None:
    for host in ("evil.example.org", f"evil.example.org:{board.server_port}", "127.0.0.1", "<b>"):
        status, _, words = ask(board, f"/{board.token}/class.json", host)
        assert status == 421
        assert f"does not answer to the name {host!r}" in words
        assert "--base-url" in words


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "<b>"])
def test_nothing_but_get(method: str, board: Board) -> None:
    status, headers, words = ask(board, f"/{board.token}/", method=method)
    assert status == 501
    assert "<b>" not in words
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_behind_a_hub_with_or_without_the_path_in_front(behind_a_hub: Board) -> None:
    board = behind_a_hub
    assert board.address == f"https://Hub.example.org/user/anna/proxy/8642/{board.token}/"
    for front in ("", "/user/anna/proxy/8642"):
        for host in ("hub.example.org", f"127.0.0.1:{board.server_port}"):
            assert ask(board, f"{front}/{board.token}/", host)[0] == 200
            assert ask(board, f"{front}/{board.token}/class.json", host)[0] == 200
    assert ask(board, f"/{board.token}/", "other.example.org")[0] == 421
    assert ask(board, f"/user/bert/{board.token}/", "hub.example.org")[0] == 404


def test_only_this_machine_is_listened_to(board: Board) -> None:
    mine = {each for each in listening(psutil.Process()) if each.port == board.server_port}
    assert {each.host for each in mine} == {"127.0.0.1"}


def test_one_that_says_nothing_holds_up_nobody(board: Board) -> None:
    with socket.create_connection(("127.0.0.1", board.server_port)):
        assert ask(board, f"/{board.token}/")[0] == 200


# --- the command -------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    assert main(["board", str(gone)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"course board: {gone} cannot be read: No such file or directory; name the folder")
    assert f"mkdir {gone}" in said


def test_a_file_in_the_folders_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["board", str(tmp_path / "file")]) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_port_that_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["board", str(folder), "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be had (something else listens there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--port", "65536"],
        ["--port", "-1"],
        ["--port", "x"],
        ["--base-url", "/user/anna"],
        ["--base-url", "ftp://hub/"],
        ["--base-url", "https://anna:secret@hub/"],
        ["--base-url", "https://hub/?x"],
    ],
)
def test_an_option_that_cannot_be(
    option: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["board", str(folder), *option])
    assert ended.value.code == 2
    assert option[1] in capsys.readouterr().err


def test_ctrl_c_ends_it_with_a_page_open_and_leaves_nothing(folder: Path) -> None:
    command = [sys.executable, "-m", "course_lib", "board", str(folder), "--port", "0"]
    files = sorted(folder.iterdir())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().split()[-1])
        assert process.stdout.readline() == "Ctrl-C ends this.\n"
        with socket.create_connection((address.hostname, address.port)) as page:
            page.sendall(f"GET {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
            assert page.recv(12) == b"HTTP/1.0 200"
            with socket.create_connection((address.hostname, address.port)):
                os.kill(process.pid, signal.SIGINT)
                _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "course board: ended\n")
    assert sorted(folder.iterdir()) == files


def test_many_pages_ask_at_once(board: Board) -> None:
    """Thirty, as if every learner had it open; the folder is looked at once a second at most."""
    found: list[int] = []
    looks = []
    look = board.shared._look
    board.shared._look = lambda now: looks.append(now) or look(now)  # type: ignore[method-assign]
    began = time.monotonic()
    pages = [
        threading.Thread(target=lambda: found.append(ask(board, f"/{board.token}/class.json")[0]))
        for _ in range(30)
    ]
    for page in pages:
        page.start()
    wait_for(lambda: len(found) == len(pages), what="every answer")
    assert found == [200] * len(pages)
    assert len(looks) <= 1 + time.monotonic() - began
