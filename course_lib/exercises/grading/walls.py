"""Walls around submissions: a sandboxed process that answers requests, with limits on all that it uses.

With bubblewrap it sees no network, no processes but its own and no files but Python, PyTorch and this library
without the judges. Without, the limits apply, and what it starts is killed; `open_without` says what is open.

The sandboxed process itself runs nothing of a submission. For each `Session` it makes a copy of itself, which
has PyTorch loaded already, in namespaces of its own (`apart`). Where it cannot, each session has a sandbox of
its own.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import re
import select
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from .denied import system_calls

HOUSE = Path(__file__).parents[2]  # course_lib
QUESTIONS = HOUSE / "exercises" / "questions"
MOST_PROCESSES = 768  # threads count, too: five ranks on a large machine have a few hundred
MOST_FILE_BYTES = 256 << 20
MOST_DISK_BYTES = 512 << 20  # in each of /tmp and /dev/shm, which are in memory
MOST_MEMORY_BYTES = min(8 << 30, psutil.virtual_memory().total // 2)  # of all processes together
MOST_DATA_BYTES = 6 << 30  # of one process; Python with PyTorch starts with 1 GiB or less
MOST_REPLY_BYTES = 96 << 20  # of one line: five ranks' answers, encoded as JSON once more
LOOK_SECONDS = 0.25  # between two looks at memory and processes
START_SECONDS = 180.0  # for Python and PyTorch in the sandbox, on a busy machine
END_SECONDS = 20.0  # for the processes in the sandbox to be gone
LEAST_FREE = 0.05  # of the machine's memory, whoever uses the rest
OWN = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+)", re.MULTILINE)  # in /proc/N/status, in KiB
PR_SET_CHILD_SUBREAPER = 36
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
OF_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "nsswitch.conf",
    "protocols",
)
WITHOUT = (
    "bubblewrap's bwrap {}: not closed are the network, the files that you can read or write (the judges, "
    "the solutions and other submissions among them), and your other processes. Install it (apt-get install "
    "bubblewrap), or grade on a machine that you can afford to lose."
)


class Ended(Exception):
    """The session is over before its time; the message tells the learner why."""


@contextmanager
def _file_of(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a file with this content, for a program that reads it once."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


class Unjudged(BaseException):
    """This machine cannot judge now; not an Exception, so that no judge takes it for an answer's fault."""


@functools.cache
def open_without() -> str:
    """Say in one line what stays open on this machine; empty where bubblewrap works."""
    if shutil.which("bwrap") is None:
        return WITHOUT.format("is not installed")
    done = subprocess.run(
        [*_bubblewrap(_a_user()), sys.executable, "-I", "-S", "-c", ""],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    said = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[0]
    return WITHOUT.format(f"does not work here ({said:.200})") if done.returncode else ""


def _a_user() -> int:
    """Return, for root, the id of a user who owns nothing, another one in each process; else 0."""
    if os.geteuid() != 0:
        return 0
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().split("\n")[0].split())
    own = 1 << 30 if first == 0 and count > 3 << 29 else max(1, first + count - 5000)
    return own + os.getpid() % 5000


def _bubblewrap(user: int, makes_worlds: bool = False, denied: int = -1) -> list[str]:
    """Return the bwrap command to put before another; ``denied`` is the descriptor of a seccomp filter."""
    command = [
        "bwrap",
        *(["--seccomp", str(denied)] if denied >= 0 else []),
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
    ]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--cap-drop", "ALL"] if user else ["--unshare-user", "--cap-drop", "ALL"]
    keeps = ["CAP_SETUID", "CAP_SETGID"] * bool(user)
    keeps += ["CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_KILL"] * makes_worlds
    for capability in keeps:  # until `lowered` or `apart` drops them
        command += ["--cap-add", capability]
    size = str(MOST_DISK_BYTES)
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev"]
    command += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
    for name in SYSTEM:
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for name in OF_ETC:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for place in _places():
        for parent in reversed(Path(place).parents[:-1]):  # those that bwrap makes are for root alone
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", place, place]
    if QUESTIONS.is_dir():
        command += ["--size", "4096", "--tmpfs", str(QUESTIONS), "--remount-ro", str(QUESTIONS)]
    command += ["--remount-ro", "/"]
    for name, value in _environment(Path("/tmp")).items():
        command += ["--setenv", name, value]
    return [*command, "--chdir", "/tmp", "--"]


def _places() -> list[str]:
    """Return the folders of this Python, its packages and this library, without those of the system."""
    places = [sys.prefix, sys.base_prefix, *site.getsitepackages()]
    places += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    places += [str(Path(sys.executable).resolve().parents[1])]
    found: list[str] = []
    for place in sorted(set(places), key=len):
        if os.path.isdir(place) and not any(Path(place).is_relative_to(each) for each in (*found, *SYSTEM)):
            found.append(place)
    return [*found, str(HOUSE)]


def _environment(place: Path) -> dict[str, str]:
    """Return the sandbox's environment; of ours it has only where Python finds what it needs."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "PYTHONPATH": str(HOUSE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "HOME": str(place),
        "USER": "learner",
        "LANG": "C.UTF-8",
        "TMPDIR": str(place),
        "COURSE_HOME": str(place / "course-home"),
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
        "COURSE_LEAN": "1",  # no exercise needs torchvision, and without it the sandbox starts sooner
    }


class Walls:
    """A sandboxed process and all that it starts; a context manager that leaves nothing of them.

    The calling process adopts their orphans, and kills them: it must start nothing else meanwhile.
    """

    def __init__(self) -> None:
        self._closed = not open_without()
        own = any(place.startswith(("/tmp/", "/dev/shm/")) for place in _places())  # a session hides those
        self._apart = self._closed and not own  # whether sessions share the sandbox; a failed start ends that
        self._process: subprocess.Popen[bytes] | None = None
        self._others: set[psutil.Process] = set()  # what this process had started before

    def __enter__(self) -> Walls:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a session: a sandboxed process that has seen nothing yet, and that leaves nothing behind.

        Raises
        ------
        Unjudged
            It did not start.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                if not self._opened(theirs):
                    self._end()
                    self._apart = False
                    if not self._opened(theirs):
                        raise Unjudged("the process behind the walls did not start")
            try:
                yield Session(ours, self._look)
            finally:
                if not (self._apart and self._asked(b"c")):
                    self._end()

    def _opened(self, theirs: socket.socket) -> bool:
        self._begin()
        return self._asked(b"o", theirs)

    def _asked(self, word: bytes, *passed: socket.socket) -> bool:
        """Send a command; return whether the sandboxed process, which runs only our code, obeyed it."""
        with suppress(OSError):
            socket.send_fds(self._control, [word], [each.fileno() for each in passed])
            return self._control.recv(1) == word
        return False

    def _begin(self) -> None:
        if self._process is not None:
            return
        user = _a_user() if self._closed else 0
        most = MOST_PROCESSES + (0 if user else _tasks_of_this_user())
        python = [sys.executable, "-I", "-S", str(Path(__file__).with_name("lowered.py"))]
        command = [*python, str(0 if self._apart else user)]
        command += [str(most), str(MOST_FILE_BYTES), str(MOST_DATA_BYTES)]
        how = f"user={user}, disk_bytes={MOST_DISK_BYTES}" if self._apart else ""
        command += [sys.executable, "-c", f"from {__package__}.inside import main; main({how})"]
        self._others = set(psutil.Process().children(recursive=True))
        _inherit(True)
        place = None if self._closed else tempfile.TemporaryDirectory(prefix="course-grade-")
        self._place = place
        self._control, its = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        calls = system_calls()
        with its, _file_of(calls) as denied:
            if self._closed:
                command = [*_bubblewrap(user, self._apart, denied if calls else -1), *command]
            self._process = subprocess.Popen(
                command,
                stdin=its,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=None if place is None else _environment(Path(place.name)),
                cwd=None if place is None else place.name,
                start_new_session=True,
                pass_fds=[denied],
            )

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._control.close()
        self._end_all()
        _inherit(False)
        if self._place is not None:
            self._place.cleanup()

    def _family(self) -> set[psutil.Process]:
        """Return what is left in the sandbox: it descends from this process, or will when its parent ends."""
        return set(psutil.Process().children(recursive=True)) - self._others

    def _look(self) -> None:
        """Check that everything in the sandbox together keeps within its limits.

        Raises
        ------
        Ended
            It does not.
        Unjudged
            The machine has hardly any memory left, and nobody knows whose fault that is.
        """
        family = self._family()
        if len(family) > MOST_PROCESSES:
            raise Ended(f"your code started more than {MOST_PROCESSES} processes")
        if sum(map(_own_bytes, family)) > MOST_MEMORY_BYTES < sum(map(_proportional_bytes, family)):
            raise Ended(f"your code took more than {MOST_MEMORY_BYTES / 2**30:.1f} GiB of memory")
        memory = psutil.virtual_memory()
        if memory.available < LEAST_FREE * memory.total:
            raise Unjudged(f"{memory.available / 2**20:.0f} MiB of this machine's memory are left")

    def _end_all(self) -> None:
        until = time.monotonic() + END_SECONDS
        while left := self._family():
            if time.monotonic() > until:
                raise RuntimeError(f"{len(left)} processes of a submission could not be ended: {left}")
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            time.sleep(0.01)


class Session:
    """A connection to a sandboxed process: messages there and back, until a deadline that can be moved."""

    def __init__(self, way: socket.socket, look: Callable[[], None]) -> None:
        way.setblocking(False)
        self._way, self._look = way, look
        self._buffer = bytearray()
        self._looked = 0.0
        self.until = math.inf  # the deadline, by time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        """Write a message.

        Raises
        ------
        Ended
            The process does not read any more, or not in time.
        """
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            self._wait([], [self._way])
            try:
                rest = rest[self._way.send(rest[: 1 << 16]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Ended("your code ended the process that runs it") from None

    def replies(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that come; they are untrusted, whatever they contain.

        Raises
        ------
        Ended
            They end, are too long or too late, or the sandbox exceeds its limits.
        """
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                line, searched = bytes(self._buffer[:end]), 0
                del self._buffer[: end + 1]
                with suppress(ValueError, RecursionError):
                    if isinstance(message := json.loads(line), dict):
                        yield message
                continue
            searched = len(self._buffer)
            if searched > MOST_REPLY_BYTES:
                raise Ended(f"more than {MOST_REPLY_BYTES >> 20} MiB came back from your code")
            self._wait([self._way], [])
            try:
                data = self._way.recv(1 << 20)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                raise Ended("your code ended the process that runs it")
            self._buffer += data

    def _wait(self, read: list[Any], write: list[Any]) -> None:
        while True:
            left = self.until - time.monotonic()
            if left <= 0:
                raise Ended("your code was not done in time")
            if time.monotonic() - self._looked > LOOK_SECONDS:
                self._look()
                self._looked = time.monotonic()
            if any(select.select(read, write, [], min(left, LOOK_SECONDS))):
                return


def _own_bytes(process: psutil.Process) -> int:
    """Return a process's memory but for files' pages; quick, but counts what copies share once for each."""
    with suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        return 1024 * sum(map(int, OWN.findall(status)))
    with suppress(psutil.Error):  # not Linux
        return process.memory_info().rss
    return 0


def _proportional_bytes(process: psutil.Process) -> int:
    """Return memory, with shared pages divided among their users (PSS) where that is known; slow."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        try:
            return process.memory_full_info().pss
        except (psutil.AccessDenied, AttributeError):
            return _own_bytes(process)
    return 0


def _inherit(orphans: bool) -> None:
    """Set whether this process adopts those of its descendants that lose their parent (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans))


def _tasks_of_this_user() -> int:
    """Count this user's processes and threads, which the system counts together."""
    count, own = 0, os.geteuid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == own else 0
    return count
