"""What lesson 17 uses besides its subject: agents, what they said, and when.

from scripts.many_machines import Listener  # in a notebook of the folder lessons
"""

import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

from .helpers import CPP_FILE

LOG_HEAD = re.compile(r"^[EWI]\d{4} [\d:.]+ \d+ \S+\] ")  # day, second, process, file and line


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
    """How ``torchrun options…`` ends; a rank of `launch` calls this.

    The rank has loaded PyTorch already, so this takes no start. It forgets what `launch` has told it.
    """
    from torch.distributed import run

    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        os.environ.pop(name, None)
    says = "started its ranks, and they ended well"
    try:
        run.main([str(option) for option in options])
    except Exception as error:
        cause = error.__cause__ or error  # the inner one, where there is one, says more
        says = f"{type(error).__name__}: {(str(cause).splitlines() or [''])[0]}".rstrip(": ")
    return says


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
