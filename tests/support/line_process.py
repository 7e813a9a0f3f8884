"""A process that answers questions, one line of JSON each; if one ends it, the next starts another."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class LineProcess:
    """A process that starts with the first question, and again with the next one after it has ended."""

    def __init__(self, command: list[str], home: str, most_seconds: float) -> None:
        self._command, self._home, self._most_seconds = command, home, most_seconds
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._lock = threading.Lock()  # another thread may close it while it starts

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None if the process ended without one, or was killed after ``most_seconds``.

        Raises
        ------
        ChildProcessError
            If the process cannot be started.
        """
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        timer = threading.Timer(self._most_seconds, process.kill)
        timer.start()
        line = _asked(process, json.dumps(question))
        timer.cancel()
        if line:
            return json.loads(line)
        self.end()
        return None

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise ChildProcessError("closed")
            self._process = process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=os.environ | {"COURSE_HOME": self._home, "PYTHONPATH": _path()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only the asking process, which ends this one
            )
        if not _asked(process, "{}"):
            raise ChildProcessError("a judge does not start: " + " ".join(self._command))

    def end(self) -> None:
        """Kill the process; the next question starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """Kill it for good, from another thread; its ranks end too (`course_lib.kill.end_with`)."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()


def _asked(process: subprocess.Popen[str], line: str) -> str:
    """Send a line to a process and return its answer; empty if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    return ""


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the lines on stdin, in the process, until it closes; all else that is printed goes to stderr."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        told.write(json.dumps(answer(question) if question else "ready") + "\n")
        told.flush()
