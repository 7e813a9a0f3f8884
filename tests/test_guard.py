"""The guard: what a kernel has protected ends with it, and nothing else does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from conftest import wait_for
from course_lib.guard import end_families
from kernels import Kernel, alive

# A family: the leader of a session of its own, and its child.
START = """
    import array, fcntl, subprocess, termios
    from course_lib import guard

    LEADER = "sleep 1000 & echo $!; wait"

    def family(name):
        leader = subprocess.Popen(["sh", "-c", LEADER], stdout=subprocess.PIPE, start_new_session=True)
        child = int(leader.stdout.readline())
        say(name, f"{leader.pid} {child}")
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


def kernel_of(folder: Path, source: str) -> Kernel:
    return Kernel(folder, START + source)


def family(kernel: Kernel, name: str) -> list[psutil.Process]:
    """Leader and child; of those that are gone already, none."""
    pids = map(int, (kernel.there / name).read_text().split())
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def guards(kernel: Kernel) -> list[psutil.Process]:
    return [each for each in kernel.left() if each.cmdline()[-2:-1] and "guard.py" in each.cmdline()[-2]]


def kill(kernel: Kernel) -> None:
    kernel.process.send_signal(signal.SIGKILL)


def gone(processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(map(alive, processes)), seconds=20, what=f"{processes} to be gone")


def test_families_end_with_their_kernel_and_released_ones_do_not(tmp_path: Path) -> None:
    source = """
    protected, headless, released = family("protected"), family("headless"), family("released")
    guard.protect([protected.pid, headless.pid, released.pid])
    guard.release([released.pid])
    stay()
    """
    with kernel_of(tmp_path, source) as kernel:
        kernel.wait_for("ready")
        (guard,) = guards(kernel)
        both, (leader, orphan), free = (family(kernel, each) for each in ("protected", "headless", "released"))
        leader.kill()  # a group outlives its leader
        wait_for(lambda: not alive(leader))
        assert len(both) == len(free) == 2
        kill(kernel)
        gone([*both, orphan, guard])
        assert all(map(alive, free))


def test_a_group_whose_leader_is_gone_altogether_ends(tmp_path: Path) -> None:
    source = """
    leader, other = family("family"), family("other")
    for each in (leader, other):  # the guard, which has to begin first, knows the leader when it reads on
        guard.protect([each.pid])
        told()
    say("started")
    leader.wait()
    stay()
    """
    with kernel_of(tmp_path, source) as kernel:
        kernel.wait_for("started")
        leader, orphan = family(kernel, "family")
        leader.kill()
        kernel.wait_for("ready")
        assert not psutil.pid_exists(leader.pid)
        assert alive(orphan)
        kill(kernel)
        gone([orphan])


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
    with kernel_of(tmp_path, source) as kernel:
        kernel.wait_for("ready")
        kill(kernel)
        gone(family(kernel, "first") + family(kernel, "second"))
        wait_for(lambda: not kernel.left(), what="the guard to end")


def test_a_fork_of_the_kernel_has_its_own(tmp_path: Path) -> None:
    source = """
    mine = family("kernel's")
    guard.protect([mine.pid])
    if os.fork() == 0:
        guard.release([mine.pid])  # of a list that it has from the kernel: not its to release
        guard.protect([family("fork's").pid])
        say("fork", str(os.getpid()))
    stay()
    """
    with kernel_of(tmp_path, source) as kernel:
        kernel.wait_for("fork", "ready")
        fork = psutil.Process(int((kernel.there / "fork").read_text()))
        of_kernel, of_fork = family(kernel, "kernel's"), family(kernel, "fork's")
        assert len(guards(kernel)) == 2
        kill(kernel)
        gone(of_kernel)  # though the fork holds the kernel's pipe open
        assert all(map(alive, of_fork))
        fork.kill()
        gone(of_fork)
        wait_for(lambda: not kernel.left(), what="both guards to end")


def test_a_process_that_has_a_dead_ones_number_is_not_meant() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    dead, living = (subprocess.Popen(sleep, start_new_session=True) for _ in range(2))
    try:
        reused = psutil.Process(dead.pid)
        dead.kill()
        dead.wait()
        reused._pid = living.pid  # as if the system had given the number anew

        end_families([reused])
        assert living.poll() is None

        end_families([psutil.Process(living.pid)])
        assert living.wait(20) == -signal.SIGKILL, "the test's own weapon is blunt"
    finally:
        living.kill()
        living.wait()
