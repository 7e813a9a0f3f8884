"""What lesson 17 uses besides its subject: records for machines that lack something, agents, what they said.

from scripts.many_machines import Record  # in a notebook of the folder lessons
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import torch

CPP_FILE = re.compile(r"\[[^\]]*(\.cc|\.cpp|\.h):\d+\] ?")  # which errors of PyTorch's C++ begin with
LOG_HEAD = re.compile(r"^[EWI]\d{4} [\d:.]+ \d+ \S+\] ")  # day, second, process, file and line


class Record:
    """What cells returned where the lesson was made, for machines that cannot run them.

    It is made by the lesson's own run: ``COURSE_RECORD=1 make lesson N=17``.
    """

    def __init__(self, path):
        self.path = Path(path)

    def __call__(self, work, why_not):
        """What ``work()`` returns, as plain data: run here, or as recorded where there is a `why_not`."""
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        name = work.__name__
        if why_not:
            if name not in kept:
                raise RuntimeError(
                    f"{name} cannot be run here, and {self.path} has no record of it: {why_not}"
                )
            print(
                f"Not run here: {why_not}.\nRecorded on {kept[name]['date']}, on {kept[name]['machine']}:\n"
            )
            return kept[name]["returned"]
        returned = json.loads(_tidy(json.dumps(work())))
        if os.environ.get("COURSE_RECORD") == "1":
            machine = f"{os.cpu_count()} CPU cores, Linux {platform.release().split('-')[0]}, "
            machine += f"torch {torch.__version__.split('+')[0]}"
            kept[name] = {"date": date.today().isoformat(), "machine": machine, "returned": returned}
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        return returned


def _tidy(text):
    """Without the folders of this machine."""
    for path, short in ((sys.prefix, ".venv"), (str(Path.cwd()), "."), (tempfile.gettempdir(), "/tmp")):
        text = text.replace(path, short)
    return text


def free_port():
    """A port of this machine that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def shell(*command):
    """What a terminal shows of a command: the line that you type, and what it prints."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return f"$ {' '.join(command)}\n{done.stdout}".rstrip()


def wait_until(true, seconds=240):
    """Look ten times a second; TimeoutError if it does not come true."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {seconds} s in vain")
        time.sleep(0.1)


def lines_with(path, *words):
    """The lines of a file that have one of the words in them."""
    return [line for line in Path(path).read_text().splitlines() if any(word in line for word in words)]


def agent_says(*options):
    """The seconds that ``torchrun options…`` takes, and how it ends; a rank of `launch` calls this.

    The rank has loaded PyTorch already, so this takes no start. It forgets what `launch` has told it.
    """
    from torch.distributed import run

    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        os.environ.pop(name, None)
    begin, says = time.monotonic(), "started its ranks, and they ended well"
    try:
        run.main([str(option) for option in options])
    except Exception as error:
        cause = error.__cause__ or error  # the inner one, where there is one, says more
        says = f"{type(error).__name__}: {(str(cause).splitlines() or [''])[0]}"
    return time.monotonic() - begin, says


class Listener(threading.Thread):
    """Collect what a process prints, each line with the second in which it came, until it ends."""

    def __init__(self, process, since):
        super().__init__(daemon=True)
        self.process, self.since, self.lines, self.ended = process, since, [], None
        self._more = threading.Condition()
        self.start()

    def run(self):
        for line in self.process.stdout:
            with self._more:
                self.lines.append(
                    (time.monotonic() - self.since, CPP_FILE.sub("", LOG_HEAD.sub("", line.rstrip())))
                )
                self._more.notify_all()
        code = self.process.wait()
        with self._more:
            self.ended = (time.monotonic() - self.since, code)
            self._more.notify_all()

    def wait_for(self, words, times=1, seconds=200):
        """Wait until so many lines have these words in them; returns whether they came before the end."""
        with self._more:
            self._more.wait_for(lambda: self.ended or len(self.with_words(words)) >= times, seconds)
        return len(self.with_words(words)) >= times

    def last_words(self, seconds=200):
        """Wait for its end; the last line that names an error, or the last one, and when it came."""
        self.join(seconds)
        errors = self.with_words("Error") or self.lines or [(0.0, "nothing")]
        at, line = errors[-1]
        return f"after {at:.0f} s: {line}"

    def with_words(self, *words):
        """(second, line) of the lines that have one of the words in them."""
        return [(at, line) for at, line in self.lines if any(word in line for word in words)]
