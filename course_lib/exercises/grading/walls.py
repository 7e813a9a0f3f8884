"""Walls around submissions: a sandboxed process that answers requests, with limits on all that it uses.

With bubblewrap it sees no network, no processes but its own, and no files but `SYSTEM`, `OF_ETC`, Python, its
packages, and this library without the judges. Without bubblewrap, only the limits apply (see `unprotected`).

A `session.Session` runs a submission's code in Linux namespaces of its own, which the sandbox's `supervisor`
makes and ends. If it cannot make any, each session has a sandbox of its own.
"""

from __future__ import annotations

import functools
import os
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil

from ...host import hardware
from ...kill import PR_SET_CHILD_SUBREAPER, prctl
from .seccomp import seccomp_filter
from .session import CannotJudge, Session, SessionEnded
from .usage import own_bytes, proportional_bytes, tasks_of_this_user

HOUSE = Path(__file__).parents[2]  # course_lib
QUESTIONS = HOUSE / "exercises" / "questions"
# Threads count, too. The solutions of 05, 09, 13 and 15, on up to five ranks, have at most 39 on two cores; a
# thread pool of torch or NumPy has one for each core of the machine. An answer may start six times as many.
MOST_PROCESSES = 6 * (40 + (os.cpu_count() or 1))
MOST_FILE_BYTES = 256 << 20
MOST_DISK_BYTES = 512 << 20  # in each of /tmp and /dev/shm, which are in memory
MOST_MEMORY_BYTES = min(8 << 30, hardware.memory()[0] // 2)  # of all processes together
MOST_DATA_BYTES = 6 << 30  # of one process; Python with PyTorch starts with 1 GiB or less
START_SECONDS = 180.0  # for Python and PyTorch in the sandbox, on a busy machine
END_SECONDS = 20.0  # for the processes in the sandbox to be gone
LEAST_FREE = 0.05  # of the machine's memory, whoever uses the rest
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
OF_ETC = ["ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "nsswitch.conf"]
OF_ETC += ["protocols"]
WITHOUT = (
    "bubblewrap's bwrap {}: not closed are the network, the files that you can read or write (the judges, "
    "the solutions and other submissions among them), and your other processes. Install it (apt-get install "
    "bubblewrap), or grade on a machine that you can afford to lose."
)


@functools.cache
def unprotected() -> str:
    """Say in one line what stays open on this machine; empty where bubblewrap works."""
    if shutil.which("bwrap") is None:
        return WITHOUT.format("is not installed")
    command = [*_bubblewrap(_a_user()), sys.executable, "-I", "-S", "-c", ""]
    done = subprocess.run(command, env=_environment("/tmp"), input="", capture_output=True, errors="replace")
    said = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[0]
    return WITHOUT.format(f"does not work here ({said:.200})") if done.returncode else ""


def _a_user() -> int:
    """Return the id of a user who owns nothing, another one in each process; 0 if this is not root."""
    if os.geteuid() != 0:
        return 0
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().split("\n")[0].split())
    own = 1 << 30 if first == 0 and count > 3 << 29 else max(1, first + count - 5000)
    return own + os.getpid() % 5000


def _bubblewrap(user: int, namespaces: bool = False, seccomp: int | None = None) -> list[str]:
    """Return the bwrap command that goes before a program's; unless ``user`` is 0, the program can become it.

    With ``namespaces``, it can make namespaces. ``seccomp`` is the file descriptor of a seccomp filter.
    """
    kinds = ["pid", "net", "ipc", "uts", "cgroup-try", *["user"] * (not user)]
    command = [shutil.which("bwrap") or "bwrap", *(f"--unshare-{kind}" for kind in kinds)]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    command += [] if seccomp is None else ["--seccomp", str(seccomp)]
    capabilities = ["SETUID", "SETGID"] * bool(user) + ["SYS_ADMIN", "NET_ADMIN", "KILL"] * namespaces
    for capability in capabilities:  # until the supervisor drops them
        command += ["--cap-add", f"CAP_{capability}"]
    for place in ("/dev/shm", "/tmp"):
        command += ["--perms", "1777", "--size", str(MOST_DISK_BYTES), "--tmpfs", place]
    command += ["--remount-ro", "/dev"]
    for name in SYSTEM:
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for name in OF_ETC:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for place in _places():
        for parent in reversed(Path(place).parents[:-1]):  # if bwrap made them, only root could enter
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", place, place]
    if QUESTIONS.is_dir():
        command += ["--size", "4096", "--tmpfs", str(QUESTIONS), "--remount-ro", str(QUESTIONS)]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _places() -> list[str]:
    """Return the folders of this Python, its packages and this library that are not in `SYSTEM`."""
    program = Path(sys.executable).resolve().parents[1]
    places = {sys.prefix, sys.base_prefix, str(program), *site.getsitepackages(), str(HOUSE)}
    places |= {site.getusersitepackages()} if site.ENABLE_USER_SITE else set()
    shown = places.union(SYSTEM)  # with all that is below them
    below = {place for place in places if shown.intersection(map(str, Path(place).parents))}
    return sorted(filter(os.path.isdir, places - below - set(SYSTEM)))


def _environment(folder: str) -> dict[str, str]:
    """Return the sandbox's environment, which says where Python finds what it needs."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "PYTHONPATH": str(HOUSE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "HOME": folder,
        "USER": "learner",
        "LANG": "C.UTF-8",
        "TMPDIR": folder,
        "COURSE_HOME": f"{folder}/course-home",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
        "COURSE_LEAN": "1",  # no exercise needs torchvision, and without it the sandbox starts sooner
    }


class Walls(AbstractContextManager["Walls"]):
    """A sandboxed process and all that it starts; a context manager that leaves nothing of them.

    The calling process adopts orphans and kills them, so it must start nothing else meanwhile.

    Parameters
    ----------
    cores
        The only cores that they may use; by default, all of the calling process. With bubblewrap, they cannot
        change that.
    patience
        The factor by which all time limits are multiplied.
    """

    def __init__(self, cores: Collection[int] = (), patience: float = 1.0) -> None:
        self._cores, self.patience = cores, patience
        self.struck = False  # whether a limit was reached in any session
        self._bubblewrap = not unprotected()
        hidden = any(place.startswith(("/tmp/", "/dev/shm/")) for place in _places())  # by its own /tmp
        self._namespaces = self._bubblewrap and not hidden  # False once a start has failed
        self._process: subprocess.Popen[bytes] | None = None
        self._others: set[psutil.Process] = set()  # what this process had started before

    def __exit__(self, *_: object) -> None:
        self._end()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a session: a sandboxed process that has seen nothing yet and leaves nothing behind.

        `CannotJudge` is raised if it does not start.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                if not self._supervisor_does(theirs):
                    self._end()
                    self._namespaces = False
                    if not self._supervisor_does(theirs):
                        raise CannotJudge("the process behind the walls did not start")
            session = Session(ours, self._check_limits)
            try:
                yield session
            finally:
                self.struck |= session.struck
                if not (self._namespaces and self._supervisor_does()):
                    self._end()

    def _supervisor_does(self, *passed: socket.socket) -> bool:
        """End the session, or start one on a socket; return whether the supervisor did."""
        self._begin()
        with suppress(OSError):
            socket.send_fds(self._control, [b"!"], [end.fileno() for end in passed])
            return self._control.recv(1) == b"!"
        return False

    def _begin(self) -> None:
        if self._process is not None:
            return
        user = _a_user() if self._bubblewrap else 0
        processes = MOST_PROCESSES + (0 if user else tasks_of_this_user())
        limits = processes, MOST_FILE_BYTES, MOST_DATA_BYTES, MOST_DISK_BYTES * self._namespaces
        program = f"from {__package__}.supervisor import main; main({user}, *{limits})"
        command = [sys.executable, "-c", program]
        self._others = set(psutil.Process().children(recursive=True))
        _inherit(True)
        self._folder = None if self._bubblewrap else tempfile.TemporaryDirectory(prefix="course-grade-")
        folder = self._folder.name if self._folder else "/tmp"
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        with theirs, tempfile.TemporaryFile() as file:
            calls = file.write(seccomp_filter())
            file.seek(0)
            if self._bubblewrap:
                command = _bubblewrap(user, self._namespaces, file.fileno() if calls else None) + command
            with _on(self._cores):
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(folder),
                    cwd=folder,
                    start_new_session=True,
                    pass_fds=[file.fileno()],
                )

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._control.close()
        until = time.monotonic() + END_SECONDS
        while left := self._family():
            if time.monotonic() > until:
                raise RuntimeError(f"{len(left)} processes of a submission could not be ended: {left}")
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=0.1)
        _inherit(False)
        if self._folder:
            self._folder.cleanup()

    def _family(self) -> set[psutil.Process]:
        """Return the sandbox's processes: this process's descendants, except those from before."""
        return set(psutil.Process().children(recursive=True)) - self._others

    def _check_limits(self) -> None:
        """Raise SessionEnded if all processes in the sandbox together exceed a limit.

        If the machine has hardly any memory left, nobody knows whose fault that is: raise CannotJudge.
        """
        family = self._family()
        if len(family) > MOST_PROCESSES:
            raise SessionEnded(f"your code started more than {MOST_PROCESSES} processes")
        if sum(map(own_bytes, family)) > MOST_MEMORY_BYTES < sum(map(proportional_bytes, family)):
            raise SessionEnded(f"your code took more than {MOST_MEMORY_BYTES / 2**30:.1f} GiB of memory")
        total, available = hardware.memory()
        if available < LEAST_FREE * total:
            raise CannotJudge(f"{available / 2**20:.0f} MiB of this machine's memory are left")


@contextmanager
def _on(cores: Collection[int]) -> Iterator[None]:
    """Let what is started inside the block run on these cores only, if there are any (Linux)."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _inherit(orphans: bool) -> None:
    """Set whether this process adopts those of its descendants that lose their parent (Linux)."""
    prctl(PR_SET_CHILD_SUBREAPER, int(orphans))
