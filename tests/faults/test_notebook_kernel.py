"""launch() in cells of a real notebook kernel: what the cell shows, ■, and a restart that kills."""

from __future__ import annotations

import ast
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.support.kernels import MARK
from tests.support.processes import processes_marked, wait_for


class Notebook:
    """A kernel as Jupyter starts it, and its cells."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        folders = {name: str(folder / name) for name in ("COURSE_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
        self.manager = KernelManager()
        self.manager.start_kernel(env={**os.environ, **folders, MARK: self.mark}, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)

    def send(self, code: str) -> str:
        return self.client.execute(code)

    def outputs(self, request: str) -> SimpleNamespace:
        """What a cell shows, once it is done."""
        shown = SimpleNamespace(stdout="", stderr="", error=None, result=None, displays=[])
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=300)
            except Empty:
                raise AssertionError(f"the cell is not done; so far: {shown}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
            elif message["msg_type"] == "error":
                text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
                shown.error = SimpleNamespace(name=content["ename"], value=content["evalue"], text=text)
            elif message["msg_type"] == "execute_result":
                shown.result = content["data"]["text/plain"]
            elif message["msg_type"] == "display_data":
                shown.displays.append(content["data"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return shown

    def run(self, code: str) -> SimpleNamespace:
        shown = self.outputs(self.send(code))
        assert shown.error is None, shown.error.text
        return shown

    def value(self, code: str) -> Any:
        return ast.literal_eval(self.run(code).result)

    def left(self) -> list[Any]:
        return processes_marked(MARK, self.mark)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    kernel = Notebook(tmp_path_factory.mktemp("notebook"))
    kernel.run(
        "import os, time\nfrom pathlib import Path\n"
        "import torch, torch.distributed as dist\n"
        "from course_lib import launch, log, track, RankError, Run"
    )
    yield kernel
    kernel.close()
    for process in kernel.left():
        process.kill()


def test_cells_define_what_the_ranks_run(notebook: Notebook) -> None:
    notebook.run("class Outcome:\n    def __init__(self, rank):\n        self.rank = rank\nFACTOR = 10")
    notebook.run("def helper(x):\n    return x * FACTOR")
    shown = notebook.run(
        "def work(x):\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.tensor(float(helper(x)))\n"
        "    dist.all_reduce(total)\n"
        "    print('printed by', dist.get_rank())\n"
        "    return Outcome(dist.get_rank()), total.item()\n"
        "run = launch(work, 2, dashboard=False)"
    )
    assert (shown.stdout, shown.stderr, shown.displays) == ("", "", [])
    assert notebook.value("[(type(o) is Outcome, o.rank, t) for o, t in run.results]") == [
        (True, 0, 40.0),
        (True, 1, 40.0),
    ]
    assert notebook.value("list(run.logs)") == ["printed by 0\n", "printed by 1\n"]
    notebook.run("FACTOR = 100\ndef helper(x):\n    return -x * FACTOR")
    assert notebook.value("[t for o, t in launch(work, 2, dashboard=False).results]") == [-400.0, -400.0]


def test_an_error_shows_the_cells_lines_and_nothing_of_the_launcher(notebook: Notebook) -> None:
    notebook.run("def step(x):\n    return torch.ones(2, 3) @ x   # 3 columns")
    shown = notebook.outputs(
        notebook.send(
            "def train():\n"
            "    dist.init_process_group('gloo')\n"
            "    log(loss=0.5)\n"
            "    if dist.get_rank() == 1:\n"
            "        step(torch.ones(4, 2))\n"
            "    while True:\n"
            "        dist.barrier()\n"
            "\n"
            "launch(train, dashboard=False)"
        )
    )
    error = shown.error
    assert error.name == "RankError"
    print(error.text)
    lines = error.text.splitlines()
    assert re.fullmatch(r"RankError: rank 1 raised RuntimeError: .*mat1 and mat2 shapes .*", lines[0])
    here = int(notebook.value("len(In) - 2"))
    assert lines[2] == f"Cell In[{here}], line 5, in train"
    assert "---->    5         step(torch.ones(4, 2))" in lines
    assert f"Cell In[{here - 1}], line 2, in step" in lines
    assert "---->    2     return torch.ones(2, 3) @ x   # 3 columns" in lines
    assert re.search(rf"^rank 0 .*Cell In\[{here}\], line 7: dist\.barrier\(\)\)$", lines[-1])
    for foreign in ("course_lib", "launch.py", "site-packages", "multiprocessing", "raise error"):
        assert foreign not in error.text
    assert (shown.stdout, shown.stderr) == ("", "")
    assert notebook.value("Run.open().state") == "failed"
    assert notebook.value("list(Run.open().metrics[1]['loss'].tolist())") == [0.5]


def test_the_interrupt_button_ends_the_ranks_and_keeps_the_figures(notebook: Notebook) -> None:
    notebook.run("there = Path.cwd()")
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
    wait_for(lambda: all((notebook.folder / f"ready-{rank}").exists() for rank in range(2)))
    began = time.monotonic()
    notebook.manager.interrupt_kernel()
    shown = notebook.outputs(request)
    print(f"■ to the end of the cell: {time.monotonic() - began:.2f} s")

    print(shown.error.text)
    assert shown.error.name in ("Stopped", "KeyboardInterrupt")
    assert shown.error.text.startswith("Stopped: stopped after ")
    assert len(shown.error.text.splitlines()) == 1
    assert (shown.stdout, shown.stderr) == ("", "")
    assert notebook.value("Run.open().state, [m['loss'].tolist() for m in Run.open().metrics]") == (
        "stopped",
        [[0.5], [0.5]],
    )
    assert notebook.value("launch(lambda: 1, dashboard=False).results") == [1, 1]


def test_much_output_and_many_points_stay_out_of_the_kernel(notebook: Notebook) -> None:
    """100 MiB printed, a million points logged, with the dashboard."""
    notebook.run(
        "import psutil\n"
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
    shown = notebook.run("run = launch(work, 100 * 1024, 1_000_000)")
    grown = notebook.value("psutil.Process().memory_info().rss - before")
    print(f"100 MiB of output, a million points: {grown / 2**20:.0f} MiB of memory")
    assert grown < 150 * 2**20
    assert len(shown.stdout) < 100_000
    assert notebook.value("run.trace(0).log_files()[0].stat().st_size, len(run.metrics[1]['i'])") == (
        100 << 20,
        1_000_000,
    )


def test_a_restart_that_kills_leaves_nothing(notebook: Notebook) -> None:
    """Jupyter kills the kernel's whole process group, the fork server with it (the last test here)."""
    notebook.run("from torch.utils.data import DataLoader, Dataset\nthere = Path.cwd()")
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
    wait_for(lambda: len(list(notebook.folder.glob("worker-*"))) == 4)
    assert len(notebook.left()) >= 7
    began = time.monotonic()
    assert notebook.manager.provisioner is not None
    os.killpg(notebook.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    try:
        wait_for(lambda: not notebook.left(), what="all of the kernel's processes to be gone")
    finally:
        print("left:", notebook.left())
    print(f"SIGKILL of the kernel's group: everything gone in {time.monotonic() - began:.2f} s")
