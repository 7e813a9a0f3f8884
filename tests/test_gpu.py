"""`make gpu` where there is no GPU: its runner on small parts, and the cells that make the figures."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.gpu import figures, run
from tests.notebooks.execute import ROOT, read
from tests.support.processes import alive

# It is deaf to an interrupt, and has started a process in a session of its own
HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""
MEETS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
"""


def part(name: str, code: str, *words: object, seconds: float = 120, shared: bool = False) -> run.Part:
    return run.Part(name, [sys.executable, "-c", code, *map(str, words)], seconds, shared)


def ran(out: Path, *parts: run.Part, seconds: float = 250) -> list[run.Outcome]:
    return run.run(list(parts), out, dict(os.environ), time.monotonic() + seconds, "A machine", at_once=2)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE", 1)


def test_a_part_that_fails_or_hangs_costs_the_others_nothing(tmp_path: Path) -> None:
    count = f"import pathlib; print(pathlib.Path({str(tmp_path / 'summary.md')!r}).read_text().count('- '))"
    outcomes = ran(
        tmp_path,
        part("a/fails", "raise ValueError('no such number')"),
        part("hangs", HANGS, seconds=5),
        part("dies", "import os; os.abort()"),
        part("works", count),
    )
    assert [each.name for each in outcomes] == ["a/fails", "hangs", "dies", "works"]
    assert [each.status for each in outcomes] == ["failed", "hung", "failed", "done"]
    assert outcomes[0].last[-1] == "ValueError: no such number"
    assert not alive(int(outcomes[1].last[0].removeprefix("child ")))
    assert outcomes[3].last == ("3",), "the summary grows with each part"
    summary = (tmp_path / "summary.md").read_text()
    assert re.search(r"^- a/fails: failed, \d+ s: ValueError: no such number$", summary, re.MULTILINE)
    assert "## a/fails: failed\n\n    Traceback (most recent call last):\n" in summary
    assert (tmp_path / "works.txt").read_text() == "3\n"


def test_the_time_of_the_whole_is_kept(tmp_path: Path) -> None:
    long = "import time; time.sleep(600)"
    outcomes = ran(tmp_path, part("first", ""), part("long", long), part("last", ""), seconds=10)
    assert [each.status for each in outcomes] == ["done", "cut", "not started"]


def test_lessons_run_side_by_side_and_the_rest_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    alone = part("alone", "import pathlib, sys; assert not pathlib.Path(sys.argv[1]).exists()", one)
    pair = [part(x.stem, MEETS, x, y, shared=True) for x, y in ((one, other), (other, one))]
    assert [each.status for each in ran(tmp_path, alone, *pair)] == ["done"] * 3


def test_an_interrupt_leaves_a_summary_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, where torch says that there is a GPU; SIGTERM is what `timeout` sends."""
    holder = tmp_path / "holder"
    says = f"import os, pathlib, sys, time\nholder = pathlib.Path({str(holder)!r})\n"
    ends = "print(os.getpid(), flush=True)\nos.kill(os.getppid(), 15)\ntime.sleep(600)"
    found = [
        part("first", says + "while not holder.exists():\n    time.sleep(0.05)"),
        *(part("ends", says + ends), part("later", "")),
    ]
    monkeypatch.setattr(
        run, "KEEPS_THE_GPU_AWAKE", says + "holder.write_text(str(os.getpid()))\nsys.stdin.read()"
    )
    monkeypatch.setattr(run, "ask", lambda *_: (dict.fromkeys(figures.facts(), "of a machine"), []))
    monkeypatch.setattr(run, "parts", lambda *_: found)

    assert run.main(["--out", str(tmp_path / "out")]) == 130

    assert not psutil.pid_exists(int(holder.read_text()))
    assert not psutil.pid_exists(int((tmp_path / "out" / "ends.txt").read_text()))
    lines = re.findall(r"^- (\w+): (\w+),", (tmp_path / "out" / "summary.md").read_text(), re.MULTILINE)
    assert lines == [("first", "done"), ("ends", "interrupted")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    words = ["make", "gpu", f"PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}", "ARGS=--minutes 1 figure"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode != 0
    assert "make gpu: torch" in said.stderr
    assert "sees no CUDA GPU on this machine; nothing was run" in said.stderr


def test_all_is_a_part_and_the_most_valuable_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [each.name for each in run.parts("python", list(figures.FIGURES))]
    lessons = [f"lesson/{path.name[:2]}" for path in sorted((ROOT / "lessons").glob("*.ipynb"))]
    lessons += [f"deeper/{path.stem}" for path in sorted((ROOT / "lessons" / "deeper").glob("*.ipynb"))]
    tests = [f"tests/{name}" for name in ("data_parallel", "device_memory", "log", "ranks")]
    assert names == ["doctor", *(f"figure/{name}" for name in figures.FIGURES), *tests, *lessons]
    monkeypatch.setattr(run, "ask", lambda *_: (dict.fromkeys(figures.facts(), ""), []))
    with pytest.raises(SystemExit, match=r"no part begins with 'no/part'; they are: doctor, tests/"):
        run.main(["no/part"])


def test_wheels_are_installed_beside_the_machines_packages(tmp_path: Path) -> None:
    files = {
        "example_x.py": "print('from a wheel')",
        "example_x-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: example-x\nVersion: 1.0\n",
        "example_x-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "example_x-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "example_x-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    run.install(sys.executable, tmp_path, tmp_path / "site")
    environment = run.environment_of(sys.executable, tmp_path / "site")
    command = [sys.executable, "-c", "import example_x, course_lib"]
    assert subprocess.check_output(command, env=environment, cwd=tmp_path) == b"from a wheel\n"


# --- figures ----------------------------------------------------------------------------------------------


def test_each_figure_is_made_by_cells_of_the_lesson_that_shows_it() -> None:
    lessons = [*(ROOT / "lessons").glob("*.ipynb"), *(ROOT / "lessons").glob("deeper/*.ipynb")]
    code = "\n".join(cell.source for path in lessons for cell in read(path).cells)
    assert sorted(re.findall(r"gpu_figure\(\"(\w+)\"", code)) == sorted(figures.FIGURES)
    for name, figure in figures.FIGURES.items():
        assert figures.cells_of(name[:2], *figure.cells)


@pytest.fixture
def in_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(figures.LESSONS)
    monkeypatch.chdir(figures.LESSONS)


def test_a_figure_is_written_in_the_form_of_the_recorded_ones(
    in_lessons: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose cells run on a CPU, too, and quickly."""
    name, helpers = "03_data_parallel_memory.json", importlib.import_module("scripts.helpers")
    recorded = helpers.GpuFigure.read(helpers.GPU_RECORDS / name).record
    monkeypatch.setattr(helpers, "GPU_RECORDS", tmp_path)
    figures.main("03_data_parallel_memory")
    made = helpers.GpuFigure.read(tmp_path / name)
    assert made.record.keys() == recorded.keys()
    assert made.record["numbers"].keys() == recorded["numbers"].keys()
    assert made.record["picture_sha256"] == hashlib.sha256(made.png).hexdigest()


def test_a_call_that_ends_a_rank_leaves_the_other_rows_of_the_backend_table(in_lessons: None) -> None:
    *cells, table = figures.cells_of("09", *figures.FIGURES["09_backend_table"].cells)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        figures.executed(*cell, names)
    calls = names["CALLS"]
    ends = eval("lambda x, rank, world_size, group: os.abort()", names)
    names["CALLS"] = {"barrier": calls["barrier"], "ends": ends, "all_reduce": calls["all_reduce"]}
    figures.executed(*table, names)
    barrier, ended, all_reduce = names["table"]["gloo\nCPU tensors"].values()
    assert barrier == all_reduce == ("works", "")
    assert ended[0] == "crashes"
    assert "SIGABRT" in ended[1]
