"""A launch where something of Linux is missing, as on macOS: imitated on Linux, in every process of a launch.

No Mac was asked. Each imitation hides something from all processes; the last hides everything at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.processes import processes_marked, wait_for
from tests.support.programs import all_at

if sys.platform != "linux":
    pytest.skip("what is hidden here is not there elsewhere", allow_module_level=True)

HIDDEN = {  # what: the lines of a `sitecustomize` that hide it
    "what forked ranks can do without": """
        import ctypes, os, signal, socket, sys, time
        from collections import namedtuple
        import psutil

        def hide(event, arguments):  # files, from the library; psutil has its own ways on each system
            if event in ("open", "os.listdir", "os.scandir") and asks(str(arguments[0])):
                raise FileNotFoundError(arguments[0])
        def asks(path):
            frame = sys._getframe(2) if path.startswith(("/proc", "/sys", "/dev/shm")) else None
            while frame is not None and "psutil" not in frame.f_code.co_filename:
                if "course_lib" in frame.f_code.co_filename:
                    return True
                frame = frame.f_back
            return False
        sys.addaudithook(hide)

        found = ctypes.CDLL.__getattr__
        def without(library, name):
            if name in ("prctl", "malloc_trim", "_ZSt13set_terminatePFvvE"):
                raise AttributeError(name)
            return found(library, name)
        ctypes.CDLL.__getattr__ = without

        info, fields = psutil.Process.memory_info, namedtuple("fields", "rss vms pfaults pageins")
        def denied(process):
            raise psutil.AccessDenied(process.pid)
        psutil.Process.memory_full_info = denied
        psutil.Process.memory_info = lambda process: fields(*info(process)[:2], 0, 0)
        del psutil.Process.io_counters, psutil.Process.cpu_affinity

        del os.pidfd_open, os.sched_getaffinity, os.sched_setaffinity
        del time.pthread_getcpuclockid, signal.SIGRTMIN, signal.SIGRTMAX
        socket.if_nameindex = lambda: [(1, "elsewhere")]
        """,
    "short paths of sockets": """
        import os, tempfile
        import multiprocessing.util
        multiprocessing.util.abstract_sockets_supported = False
        tempfile.tempdir = os.path.join(os.environ["COURSE_HOME"], "t" * 104)
        os.makedirs(tempfile.tempdir, exist_ok=True)
        """,
    "forks that live": """
        import os, sys
        os.register_at_fork(after_in_child=lambda: "torch" in sys.modules and os.abort())
        """,
    "forks that end": """
        import os, sys, time
        os.register_at_fork(after_in_child=lambda: "torch" in sys.modules and time.sleep(1000))
        """,
    "a fork server": """
        import multiprocessing
        multiprocessing.get_all_start_methods = lambda: ["spawn", "fork"]
        """,
}
HIDDEN["everything"] = "\n".join(dedent(each) for each in HIDDEN.values())
WHY_SPAWNED = {
    "short paths of sockets": "AF_UNIX path too long",
    "forks that live": "a forked process crashed: SIGABRT",
    "forks that end": "a forked process did not end within 1 s",
}

PROGRAM = """
import json, sys, time
import torch, torch.distributed as dist
from course_lib import RankTimeout, launch, place
from course_lib.record.trace import peak_bytes

def adds():
    device, backend = place()
    dist.init_process_group(backend)
    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    return number.item()

def stands():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(1000)  # rank 1
    dist.all_reduce(torch.ones(1))  # rank 0

if __name__ == "__main__":
    from course_lib.launcher import forkserver

    forkserver.PROBE_SECONDS, *lines = map(int, sys.argv[1:])
    run = launch(adds, nprocs=2, device="cpu", dashboard=False)
    held = [peak_bytes(run.trace(rank).ticks) for rank in range(2)]
    print(json.dumps({"results": run.results, "held": held}), flush=True)
    import pytest
    from tests.support.programs import Jump, all_at

    Jump(pytest.MonkeyPatch(), lambda: all_at(*lines))
    try:
        launch(stands, nprocs=2, device="cpu", timeout=120, dashboard=False)
    except RankTimeout as error:
        print(json.dumps({"report": str(error)}), flush=True)
    launch(stands, nprocs=2, device="cpu", dashboard=False)
"""
LINES = [
    next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith(f"# rank {rank}"))
    for rank in range(2)
]


def told_without(
    what: str, folder: Path, enough: Callable[[dict[str, Any]], object]
) -> tuple[dict[str, Any], str]:
    """Run the program until it has told enough, and kill it; return that, and all that was printed."""
    (folder / "sitecustomize.py").write_text(dedent(HIDDEN[what]))
    (folder / "program.py").write_text(PROGRAM)
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
    environment["COURSE_LEAN"] = "1"
    probe_seconds = 1 if what == "forks that end" else 600
    command = [sys.executable, str(folder / "program.py"), *map(str, (probe_seconds, *LINES))]

    def told() -> dict[str, Any]:
        lines = (folder / "said").read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return {name: value for each in whole for name, value in each.items()}

    with open(folder / "said", "w") as said:
        program = subprocess.Popen(command, env=os.environ | environment, stdout=said, stderr=said)
        try:
            wait_for(lambda: enough(told()) or program.poll() is not None, seconds=600)
        finally:
            program.kill()
            program.wait()
    print(text := (folder / "said").read_text())
    return told(), text


@pytest.mark.parametrize("what", ["what forked ranks can do without", "everything"])
def test_a_launch_without(what: str, tmp_path: Path, course_home: Path) -> None:
    """Ranks add up, one that stands still is found, and all end with a kernel that is killed."""
    told, text = told_without(what, tmp_path, lambda told: "report" in told and all_at(*LINES))

    assert told["results"] == [3.0, 3.0]
    assert all(0 < held < 2**40 for held in told["held"])  # a forked rank that ends at once has under 1 MiB
    missing = "not done after 120 s: rank 1 never called all_reduce (collective 1), in which rank 0 waited"
    assert told["report"].startswith(missing)
    assert f"rank 1 was at program.py, line {LINES[1]}: time.sleep" in told["report"]
    assert "sitecustomize" not in text, "it failed to hide something"
    assert "so each loads PyTorch by itself" not in text
    home = str(course_home)
    wait_for(lambda: not processes_marked("COURSE_HOME", home), what="the end of all that it has started")


@pytest.mark.parametrize("what", WHY_SPAWNED)
def test_why_ranks_are_spawned_is_told(what: str, tmp_path: Path) -> None:
    told, text = told_without(what, tmp_path, lambda told: told)
    assert told["results"] == [3.0, 3.0]
    why = f"ranks cannot be forked here ({WHY_SPAWNED[what]}"
    assert why in text
    assert ", so each loads PyTorch by itself" in text
