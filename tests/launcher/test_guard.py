"""The guard: what a kernel has protected ends with it, and nothing else does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from course_lib import python
from tests.support.cells import quiet_launch
from tests.support.kernels import Kernel
from tests.support.processes import alive, unless_gone, wait_for

# A family: the leader of a session, a child in its process group, and one in a session of its own.
START = """
    import array, fcntl, subprocess, termios
    from course_lib.launcher import guard

    LEADER = "sleep 1000 & child=$!; setsid sleep 1000 & echo $child $!; wait"

    def family(name):
        leader = subprocess.Popen(["sh", "-c", LEADER], stdout=subprocess.PIPE, start_new_session=True)
        say(name, f"{leader.pid} {leader.stdout.readline().decode()}")
        return leader

    def told():
        unread = array.array("i", [1])
        while unread[0]:
            fcntl.ioctl(guard._guard.stdin, termios.FIONREAD, unread)

    def stay():
        say("ready")
        while True:
            time.sleep(60)
    """


# A psutil that leaves word of who found it, and makes way for the real one
FINDABLE = """
import os, sys
from pathlib import Path

(Path(os.environ["THERE"]) / f"{os.getpid()} found it").touch()
sys.path.remove(os.path.dirname(__file__))
del sys.modules["psutil"]
import psutil
"""


def family(kernel: Kernel, name: str) -> list[psutil.Process]:
    """The leader and its two children; of those that are gone already, none."""
    pids = map(int, (kernel.there / name).read_text().split())
    found = [unless_gone(lambda pid=pid: psutil.Process(pid), None) for pid in pids]
    return [process for process in found if process]


def guards(kernel: Kernel) -> list[psutil.Process]:
    return [each for each in kernel.left() if "kill.py" in " ".join(unless_gone(each.cmdline, [])[-2:-1])]


def kill(kernel: Kernel) -> None:
    kernel.process.send_signal(signal.SIGKILL)


def gone(processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(map(alive, processes)), what=f"{processes} to be gone")


def test_families_end_with_their_kernel_and_released_ones_do_not(tmp_path: Path) -> None:
    """A group outlives its leader, also one that is gone altogether."""
    source = """
    protected, headless, forgotten, released = map(family, ("protected", "headless", "forgotten", "released"))
    for each in (forgotten, protected):  # the guard, which has to begin first, knows one when it reads on
        guard.protect([each.pid])
        told()
    guard.protect([headless.pid, released.pid])
    guard.release([released.pid])
    say("started")
    forgotten.wait()
    stay()
    """
    with Kernel(tmp_path, START + source) as kernel:
        kernel.wait_for("started")
        (guard,) = guards(kernel)
        whole, headless, forgotten, free = (
            family(kernel, each) for each in ("protected", "headless", "forgotten", "released")
        )
        for leader in (headless[0], forgotten[0]):
            leader.kill()
            wait_for(lambda leader=leader: not alive(leader))
        kernel.wait_for("ready")
        assert not psutil.pid_exists(forgotten[0].pid)
        assert len(whole) == len(free) == 3
        kill(kernel)
        gone([*whole, *headless[:2], forgotten[1], guard])
        assert all(map(alive, free))


def test_the_guard_finds_packages_where_the_kernel_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PYTHONPATH, or in the user's own folder: on such machines there was no guard, and a traceback."""
    (tmp_path / "psutil.py").write_text(FINDABLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    source = """
    guard.protect([])
    stay()
    """
    with Kernel(tmp_path, START + source) as kernel:
        kernel.wait_for("ready")
        (guard,) = guards(kernel)
        kernel.wait_for(f"{guard.pid} found it")


def test_a_guard_that_was_killed_is_replaced_and_knows_all(tmp_path: Path) -> None:
    source = """
    first, second = family("first"), family("second")
    guard.protect([first.pid])
    guard._guard.kill()
    guard._guard.wait()
    guard.release([])  # nobody reads: that is no error
    guard.protect([second.pid])
    stay()
    """
    with Kernel(tmp_path, START + source) as kernel:
        kernel.wait_for("ready")
        kill(kernel)
        gone(family(kernel, "first") + family(kernel, "second"))
        wait_for(lambda: not kernel.left(), what="the guard to end")


def test_a_fork_of_the_kernel_has_its_own(tmp_path: Path) -> None:
    source = """
    mine = family("kernel's")
    guard.protect([mine.pid])
    if (idle := os.fork()) == 0:
        time.sleep(1000)  # holds the kernel's pipe open
    say("idle", str(idle))
    if os.fork() == 0:
        guard.release([mine.pid])  # of a list that it has from the kernel: not its to release
        guard.protect([family("fork's").pid])
        say("fork", str(os.getpid()))
    stay()
    """
    with Kernel(tmp_path, START + source) as kernel:
        kernel.wait_for("fork", "ready")
        idle, fork = (psutil.Process(int((kernel.there / each).read_text())) for each in ("idle", "fork"))
        of_kernel, of_fork = family(kernel, "kernel's"), family(kernel, "fork's")
        assert len(guards(kernel)) == 2
        kill(kernel)
        gone(of_kernel)
        assert all(map(alive, of_fork))
        fork.kill()
        gone(of_fork)
        idle.kill()
        wait_for(lambda: not kernel.left(), what="both guards to end")


AT_ONCE = """
import multiprocessing.forkserver
real = multiprocessing.forkserver.ensure_running
def ensure_running():
    real()
    os.kill(os.getpid(), 9)
multiprocessing.forkserver.ensure_running = ensure_running
"""


@pytest.mark.parametrize("dies_at_once", [False, True], ids=["it loads already", "it has just been started"])
def test_a_fork_server_that_is_still_loading_ends_with_its_kernel(
    dies_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk, say; it would listen only when it has loaded all."""
    slow = tmp_path / "slow" / "torchvision"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text(
        "import os, time\nopen(os.environ['THERE'] + '/loading', 'w')\ntime.sleep(1000)"
    )
    monkeypatch.setenv("PYTHONPATH", str(slow.parent))
    source = "import os\nfrom course_lib.launcher.forkserver import warm_up\n"
    source += AT_ONCE * dies_at_once + "warm_up()\ntime.sleep(1000)"
    with Kernel(tmp_path, source) as kernel:
        if dies_at_once:
            kernel.process.wait()
        else:
            kernel.wait_for("loading")
        kernel.kill()


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux alone chooses by a score")
def test_where_memory_runs_out_a_rank_is_killed_and_not_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score() -> int:
        return int(Path("/proc/self/oom_score_adj").read_text())

    program = tmp_path / "program.py"
    program.write_text("""
import os, time
while (score := open("/proc/self/oom_score_adj").read()) == os.environ["SCORE_OF_THE_KERNEL"]:
    time.sleep(0.02)  # it is set as soon as the program has started
print("score", score)
""")

    mine = score()
    monkeypatch.setenv("SCORE_OF_THE_KERNEL", f"{mine}\n")
    of_ranks = quiet_launch(score).results
    of_a_program = python(program, dashboard=False).output

    assert score() == mine
    assert of_ranks == [mine + 500] * 2
    assert f"score {mine + 500}\n" in of_a_program
