"""launch() in cells of a real notebook kernel: ■, much output, and a restart that kills."""

from __future__ import annotations

import ast
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.front_end import FrontEnd
from tests.support.processes import processes_marked, wait_for


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


def left(home: Path) -> list[Any]:
    return processes_marked("COURSE_HOME", str(home))


@pytest.fixture(scope="module")
def notebook(home: Path) -> Iterator[FrontEnd]:
    kernel = FrontEnd(home)
    kernel.run(
        "import os, psutil, time\nfrom pathlib import Path\n"
        "import torch, torch.distributed as dist\nfrom torch.utils.data import DataLoader, Dataset\n"
        "from course_lib import launch, log, track, Run\nthere = Path(os.environ['COURSE_HOME'])"
    )
    yield kernel
    kernel.close()
    for process in left(home):
        process.kill()


def value(notebook: FrontEnd, code: str) -> Any:
    return ast.literal_eval(notebook.run(f"print({code})"))


def test_the_interrupt_button_ends_the_ranks_and_keeps_the_figures(notebook: FrontEnd, home: Path) -> None:
    request = notebook.send(
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    log(loss=0.5)\n"
        "    points = Path(os.environ['COURSE_RUN']) / f'rank-{dist.get_rank()}.points'\n"
        "    while not (points.exists() and points.stat().st_size):\n"
        "        time.sleep(0.01)\n"
        "    (there / f'ready-{dist.get_rank()}').touch()\n"
        "    if dist.get_rank() == 0:\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "    time.sleep(1000)\n"
        "\n"
        "launch(train, dashboard=False)\n"
        "print('after it')"
    )
    wait_for(lambda: all((home / f"ready-{rank}").exists() for rank in range(2)))
    began = time.monotonic()
    notebook.manager.interrupt_kernel()
    told = notebook.outputs(request)
    print(f"■ to the end of the cell: {time.monotonic() - began:.2f} s")

    assert re.fullmatch(r"(Stopped|KeyboardInterrupt): stopped after .*", told), "one line, and nothing else"
    assert value(notebook, "(Run.open().state, [m['loss'].tolist() for m in Run.open().metrics])") == (
        "stopped",
        [[0.5], [0.5]],
    )
    assert value(notebook, "launch(lambda: 1, dashboard=False).results") == [1, 1]


def test_much_output_and_many_points_stay_out_of_the_kernel(notebook: FrontEnd) -> None:
    """100 MiB printed, a million points logged, with the dashboard."""
    notebook.run(
        "def work(lines, points):\n"
        "    if os.environ['RANK'] == '0':\n"
        "        for i in range(lines):\n"
        "            print('x' * 1023)\n"
        "        time.sleep(1)\n"
        "    else:\n"
        "        for i in track(range(points)):\n"
        "            log(i=i)\n"
        "launch(work, 1000, 1000)\n"
        "before = psutil.Process().memory_info().rss"
    )
    assert len(notebook.run("run = launch(work, 100 * 1024, 1_000_000)")) < 100_000
    grown = value(notebook, "psutil.Process().memory_info().rss - before")
    print(f"100 MiB of output, a million points: {grown / 2**20:.0f} MiB of memory")
    assert grown < 150 * 2**20
    kept = "(run.trace(0).log_files()[0].stat().st_size, len(run.metrics[1]['i']))"
    assert value(notebook, kept) == (100 << 20, 1_000_000)


def test_a_restart_that_kills_leaves_nothing(notebook: FrontEnd, home: Path) -> None:
    """Jupyter kills the kernel's whole process group, the fork server with it (the last test here)."""
    notebook.send(
        "class Slow(Dataset):\n"
        "    def __len__(self):\n"
        "        return 8\n"
        "    def __getitem__(self, i):\n"
        "        (there / f'worker-{os.getpid()}').touch()\n"
        "        while True:\n"
        "            time.sleep(0.05)\n"
        "def train():\n"
        "    for batch in DataLoader(Slow(), num_workers=2):\n"
        "        pass\n"
        "launch(train, dashboard=False)"
    )
    wait_for(lambda: len(list(home.glob("worker-*"))) == 4)
    assert len(left(home)) >= 7
    began = time.monotonic()
    assert notebook.manager.provisioner is not None
    os.killpg(notebook.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    try:
        wait_for(lambda: not left(home), what="all of the kernel's processes to be gone")
    finally:
        print("left:", left(home))
    print(f"SIGKILL of the kernel's group: everything gone in {time.monotonic() - began:.2f} s")
