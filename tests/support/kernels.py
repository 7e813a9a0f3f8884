"""Kernels to interrupt and to kill: a Python process that launches ranks, and all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil

from tests.support.processes import alive, processes_marked, wait_for

MARK = "COURSE_FAULT_MARK"


class Kernel:
    """A script that runs in its own process and session; everything it starts carries its mark.

    The script and its ranks send word through the folder ``THERE``: ``say("name")`` makes a file in it.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.there, self.mark = folder / "there", uuid.uuid4().hex
        self.there.mkdir()
        script = folder / "kernel.py"
        script.write_text(PREAMBLE + textwrap.dedent(source))
        self.log = folder / "kernel.log"
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            cwd=folder,
            env={**os.environ, MARK: self.mark, "THERE": str(self.there)},
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self.left():
            process.kill()
        self.process.kill()
        self.process.wait()
        if kind is not None:
            print("the kernel's output:", self.log.read_text(), sep="\n")

    def wait_for(self, *words: str, seconds: float = 240) -> None:
        """Wait until the script or its ranks have said each word."""

        def said() -> bool:
            if self.process.poll() not in (None, 0):
                raise AssertionError(f"the kernel ended: {self.log.read_text()}")
            return all((self.there / word).exists() for word in words)

        wait_for(said, seconds, what=f"{words}")

    def left(self) -> list[psutil.Process]:
        return processes_marked(MARK, self.mark)

    def ranks(self) -> list[psutil.Process]:
        """Return the living descendants of the kernel's fork server."""
        started = []
        for server in self.left():
            with contextlib.suppress(psutil.Error):
                if "forkserver" in " ".join(server.cmdline()) and server.ppid() == self.process.pid:
                    started += server.children(recursive=True)
        return [each for each in started if alive(each)]

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as Jupyter's ■ and Ctrl-C do."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self, with_its_group: bool = False) -> tuple[float, float]:
        """Kill the kernel, or like a restart its group; return seconds until no rank, and nothing, is left.

        The kernel stays a zombie meanwhile.
        """
        ranks = self.ranks()
        began = time.monotonic()
        if with_its_group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.send_signal(signal.SIGKILL)
        try:
            wait_for(lambda: not any(map(alive, ranks)), what="its ranks to be gone")
            ranks_gone = time.monotonic() - began
            wait_for(lambda: not self.left(), what="all its processes to be gone")
        finally:
            for each in self.left():
                print("left:", each)
        return ranks_gone, time.monotonic() - began


PREAMBLE = """
import os, sys, threading, time
from pathlib import Path

THERE = Path(os.environ["THERE"])

def say(word, text=""):
    part = THERE / f"{word}-{os.getpid()}.part"
    part.write_text(text)
    part.replace(THERE / word)
"""
