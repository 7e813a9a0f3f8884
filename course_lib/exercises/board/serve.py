"""Serve the board: one page and its data, on the loopback address, to anybody who has the URL.

The URL contains a token, since others may work on the same machine, and the page's links are relative, since
a hub's proxy prefixes a path.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .. import questions
from ..question import QUESTIONS
from .shared import ClassFolder

LOOPBACK = "127.0.0.1"
DATA = "class.json"  # as page.html asks for it
PATIENCE_SECONDS = 20.0  # with a browser that sends nothing


class BoardError(Exception):
    """The board cannot be shown; the message says why and what to do."""


class Board(ThreadingHTTPServer):
    """The server of one class's board; it serves once `serve_forever` is called.

    Parameters
    ----------
    folder
        The folder that learners give to `share_progress`.
    port
        The port to listen on; 0 for any free one.
    base_url
        The URL of this port behind a hub's proxy: ``https://hub.example.org/user/anna/proxy/8642/``.

    Raises
    ------
    BoardError
        The folder does not exist or cannot be read, or the port is not available.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int, base_url: str | None = None) -> None:
        questions.load()
        most = {number: sum(asked.properties.values()) for number, asked in QUESTIONS.items()}
        titles = {number: asked.form.partition("(")[0] for number, asked in QUESTIONS.items()}
        self.shared = ClassFolder(folder.expanduser().absolute(), most, titles)
        if trouble := self.shared.view().get("trouble"):
            raise BoardError(
                f"{trouble}; name the folder that learners give to `share_progress`, or make one with "
                f"`mkdir {folder} && chmod 1733 {folder}`"
            )
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "something else listens there, another board perhaps" if taken else error.strerror
            raise BoardError(
                f"port {port} of {LOOPBACK} cannot be had ({why}): take another one with `--port`, or "
                "`--port 0` for any that is free"
            ) from None
        own = f"http://{LOOPBACK}:{self.server_port}/"
        outside = urlsplit(base_url or own)
        self.prefix = outside.path.strip("/")
        self.token = secrets.token_urlsafe(16)
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}
        self.hosts.add(outside.netloc.lower())
        self.address = f"{(base_url or own).rstrip('/')}/{self.token}/"
        self.page = Path(__file__).with_name("page.html").read_bytes()
        self.policy = _policy(self.page.decode())

    def server_bind(self) -> None:
        """Bind without looking up the machine's name, for which a name server may take seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of a browser that is gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _policy(page: str) -> str:
    """Return a policy that lets only what is in the page run, and contact only this server."""
    allowed = {
        kind: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, text in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL)
    }
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )


class Handler(BaseHTTPRequestHandler):
    """A request handler that answers GET, for the page and for its data."""

    server: Board
    server_version, sys_version = "course-board", ""
    timeout = PATIENCE_SECONDS

    def do_GET(self) -> None:
        """Send the page, its data, or the reason why not."""
        host = self.headers.get("Host", "")
        if host.lower() not in self.server.hosts:
            self._say(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"This board does not answer to the name {host[:100]!r}. Behind a hub, start it with "
                f"--base-url and the address that your browser shows, up to the number of the port.",
            )
            return
        path = self.path.partition("?")[0].strip("/").removeprefix(self.server.prefix).strip("/")
        token, _, wanted = path.partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._say(HTTPStatus.NOT_FOUND, "Open the whole address that `course board` has printed.")
        elif wanted == DATA:
            data = json.dumps(self.server.shared.view(), allow_nan=False)
            self._send(HTTPStatus.OK, "application/json", data.encode())
        elif wanted or not self.path.partition("?")[0].endswith("/"):
            self._say(HTTPStatus.NOT_FOUND, "There is no such page; the board's address ends with a slash.")
        else:
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def _say(self, status: HTTPStatus, words: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{words}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Add the headers of every response, errors included."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing: the page asks every few seconds."""
