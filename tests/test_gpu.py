"""`make gpu` where there is no GPU: parts that fail or hang, the time that is up, and what it reports."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import psutil
import pytest
import torch

from tests.gpu import figures
from tests.gpu.claims import CLAIMS
from tests.gpu.lesson import doubts, executed
from tests.notebooks.execute import ROOT, find, read
from tests.support.gpu_records import PICTURE, made
from tests.support.processes import alive, wait_for

OK = "print('all is well')"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`.ci/gpu.py`, at work in a folder of the test."""
    specification = importlib.util.spec_from_file_location("gpu_command", ROOT / ".ci" / "gpu.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu_command", module)  # its dataclass looks there
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "WORK", tmp_path / "work")
    monkeypatch.setattr(module, "GRACE", 1)
    return module


def course_of(gpu: ModuleType, tmp_path: Path, minutes: float = 5) -> Any:
    return gpu.Course(sys.executable, None, tmp_path / "out", minutes)


def part(gpu: ModuleType, name: str, code: str, seconds: float = 60) -> Any:
    return gpu.Part(name, [sys.executable, "-c", code], seconds)


# --- parts ------------------------------------------------------------------------------------------------

# It is deaf to an interrupt, and has started a process in a session of its own
HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_the_reports_have_no_colours_in_a_notebooks_kernel_either(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # as ipykernel sets them
        monkeypatch.setenv(name, "1")
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert False\n")
    course = course_of(gpu, tmp_path)
    course.run(gpu.Part("fails", [sys.executable, "-m", "pytest", str(tmp_path / "test_it.py")], 120))
    assert "\nFAILED " in (gpu.WORK / "parts" / "fails" / "log.txt").read_text()


def test_a_part_that_fails_or_hangs_costs_the_others_nothing(gpu: ModuleType, tmp_path: Path) -> None:
    course = course_of(gpu, tmp_path)
    for each in (
        part(gpu, "fails", "raise ValueError('no such number')"),
        part(gpu, "hangs", HANGS, seconds=10),
        part(gpu, "dies", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        gpu.Part("missing", ["/no/such/program"], 60),
        part(gpu, "cannot", f"print('skipped: there is no GPU'); raise SystemExit({gpu.SKIPPED})"),
        part(gpu, "works", OK),
    ):
        course.run(each)
        written = json.loads((tmp_path / "out" / "state.json").read_text())["parts"]
        assert list(written)[-1] == each.name, "its result is written as it comes"

    became = {name: (each["status"], each["words"]) for name, each in course.state.items()}
    assert became["fails"] == ("failed", "ValueError: no such number")
    status, words = became["hangs"]
    assert status == "hung"
    child = re.fullmatch(r"ended after 10 s; before: child (\d+)", words)
    assert not alive(int(child[1]))
    assert became["dies"] == ("failed", "it said nothing")
    assert became["missing"][0] == "failed"
    assert "/no/such/program" in became["missing"][1]
    assert became["cannot"] == ("skipped", "there is no GPU")
    assert became["works"] == ("done", "all is well")
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "Skipped: cannot." in summary
    assert "3 failed, 1 hung, 1 skipped, 1 done" in summary
    with zipfile.ZipFile(tmp_path / "out" / "gpu.zip") as archive:
        assert archive.testzip() is None
        assert archive.read("parts/works/log.txt") == b"all is well\n"
        assert archive.read("summary.md").decode() == summary
        assert {"differences.md", "state.json"} <= set(archive.namelist())


def test_the_time_of_the_whole_is_kept_and_the_next_call_goes_on(gpu: ModuleType, tmp_path: Path) -> None:
    course = course_of(gpu, tmp_path, minutes=10 / 60)
    for name, code in {"first": OK, "long": "import time; time.sleep(600)", "last": OK}.items():
        course.run(part(gpu, name, code))
    assert [each["status"] for each in course.state.values()] == ["done", "cut", "not started"]
    assert {name for name, each in course.state.items() if each["status"] not in gpu.ENDED} == {
        "long",
        "last",
    }


# The command in a process of its own, at work in a folder of the test
COMMAND = """
import importlib.util, sys
from pathlib import Path

there, path = sys.argv[1:3]
specification = importlib.util.spec_from_file_location("gpu_command", path)
gpu = importlib.util.module_from_spec(specification)
sys.modules["gpu_command"] = gpu
specification.loader.exec_module(gpu)
gpu.WORK = Path(there) / "work"
"""
MAIN = "sys.exit(gpu.main(sys.argv[3:]))"
TWO_LONG_PARTS = """
def parts(python, figures):
    command = [python, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    return [gpu.Part(name, command, 500, group="lessons") for name in ("long", "later")]

facts = '{"gpus": 0, "torch": "2.14.1", "python": "3.12.1"}'
gpu.parts, gpu.side_by_side, gpu.Course.ask = parts, lambda: 1, lambda *_: facts
"""


def command(there: Path, *words: str, change: str = "") -> list[str]:
    code = "\n".join([COMMAND, change, MAIN])
    path = str(ROOT / ".ci" / "gpu.py")
    return [sys.executable, "-c", code, str(there), path, "--out", str(there / "out"), *words]


def test_the_command_itself(tmp_path: Path) -> None:
    run = subprocess.run(command(tmp_path, "doctor"), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "doctor: done" in run.stdout
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    if not torch.cuda.is_available():
        written.remove("rehearsed.json")
        assert "A rehearsal without a GPU" in (tmp_path / "out" / "summary.md").read_text()
    assert written == ["differences.md", "gpu.zip", "state.json", "summary.md"]

    run = subprocess.run(command(tmp_path, "no/part"), capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert "no part begins with 'no/part'; they are: doctor, claims, figure/01_" in run.stderr


def test_an_interrupt_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    log = tmp_path / "work" / "parts" / "long" / "log.txt"
    words = command(tmp_path, change=TWO_LONG_PARTS)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"), what="the part")
        process.send_signal(signal.SIGTERM)  # as `timeout` sends it
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "Interrupted: what is there so far is in" in said
    assert not psutil.pid_exists(int(log.read_text()))
    state = json.loads((tmp_path / "out" / "state.json").read_text())["parts"]
    assert {name: each["status"] for name, each in state.items()} == {"long": "cut"}


def test_resume_goes_on_and_half_a_state_is_none(tmp_path: Path) -> None:
    quick = TWO_LONG_PARTS.replace("600", "0")
    done = {"status": "done", "seconds": 1, "words": "before", "at": "then"}
    state = tmp_path / "work" / "state.json"
    state.parent.mkdir()
    for text, words in {json.dumps({"parts": {"long": done}}): "before", '{"parts": {"lo': None}.items():
        state.write_text(text)
        subprocess.run(command(tmp_path, "--resume", change=quick), check=True, timeout=60)
        became = json.loads((tmp_path / "out" / "state.json").read_text())["parts"]
        assert {name: each["status"] for name, each in became.items()} == {"long": "done", "later": "done"}
        assert (became["long"]["words"] == "before") == (words == "before")

    state.write_text(json.dumps({"parts": {"other": done, "long": done}}))
    subprocess.run(command(tmp_path, "long", change=quick), check=True, timeout=60)
    became = json.loads((tmp_path / "out" / "state.json").read_text())["parts"]
    assert became["other"]["words"] == "before", "what is not named stays"
    assert became["long"]["words"] != "before", "what is named is done again"


def test_a_python_without_torch_is_said_at_once(tmp_path: Path) -> None:
    without = tmp_path / "without"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", without], check=True)
    change = f"gpu.default_python = lambda: {str(without / 'bin' / 'python')!r}"
    run = subprocess.run(command(tmp_path, change=change), capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "No module named 'torch'" in run.stdout
    assert "has no torch that works: name one that has, by PYTHON" in run.stderr
    assert not (tmp_path / "out").exists()


def test_what_an_install_takes_is_part_of_the_time(gpu: ModuleType, tmp_path: Path) -> None:
    course = gpu.Course(sys.executable, None, tmp_path / "out", 5, began=time.monotonic() - 299)
    course.run(part(gpu, "late", OK))
    assert course.state["late"]["status"] == "not started"


def test_the_gpu_is_held_while_the_parts_run(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, holds = tmp_path / "told", "open({!r}, 'w').write(str(os.getpid()) + '.'); sys.stdin.read()"
    monkeypatch.setattr(gpu, "KEEPS_THE_GPU_AWAKE", "import os, sys; " + holds.format(str(told)))
    course = course_of(gpu, tmp_path)
    course.facts = {"gpus": 0}
    with course.awake():
        pass
    assert not told.exists(), "there is none to hold"
    course.facts = {"gpus": 1}
    with course.awake():
        wait_for(lambda: told.exists() and told.read_text().endswith("."), what="its process")
        pid = int(told.read_text().strip("."))
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_fetch_leaves_no_wheel_of_another_day(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        for name in ("pytest-9.2-py3-none-any.whl", "numpy-2.4-cp312-cp312-linux.whl"):
            (tmp_path / name).touch()
        return subprocess.CompletedProcess(command, 0)

    (tmp_path / "pytest-9.1-py3-none-any.whl").touch()
    monkeypatch.setattr(gpu.subprocess, "run", download)
    assert gpu.fetch(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pytest-9.2-py3-none-any.whl"]


def test_a_folder_without_wheels_is_said(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not gpu.install(sys.executable, tmp_path, tmp_path / "site")
    assert f"there are no wheels in {tmp_path}" in capsys.readouterr().out
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("cut off")
    assert not gpu.install(sys.executable, tmp_path, tmp_path / "site")
    assert "going on with what the machine has" in capsys.readouterr().out


def test_what_a_gpu_recorded_is_kept(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is refused, and why: tests/test_gpu_records.py."""
    monkeypatch.setattr(gpu, "RECORDED", tmp_path / "recorded")
    path = tmp_path / "gpu.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("02_batch_size", "01_transfer_bandwidth", "09_backend_table"):
            record = made(name) | ({"gpus": 0} if name == "09_backend_table" else {})
            archive.writestr(f"parts/figure/{name}/{name}.json", json.dumps(record))
            archive.writestr(f"parts/figure/{name}/log.txt", "recorded")
            archive.writestr(f"parts/figure/{name}/{name}.png", PICTURE)

    assert gpu.main(["--keep", str(path)]) == 0

    said = capsys.readouterr().out
    assert "09_backend_table: not kept: a rehearsal made it, without a GPU" in said
    kept = sorted(each.name for each in (tmp_path / "recorded").iterdir())
    assert kept == [
        f"{name}.{kind}" for name in ("01_transfer_bandwidth", "02_batch_size") for kind in ("json", "png")
    ]
    monkeypatch.syspath_prepend(ROOT / "lessons")
    shown = importlib.import_module("scripts.helpers").GpuFigure.read(tmp_path / "recorded" / kept[0])
    assert shown.record == made("01_transfer_bandwidth")
    path.write_bytes(path.read_bytes()[:100])
    assert gpu.main(["--keep", str(path)]) == 1
    assert "is kept: it cannot be read, cut off perhaps" in capsys.readouterr().err


def test_the_makefile_hands_the_words_on() -> None:
    words = ["WHEELS=some wheels", "OUT=/there", "ARGS=--minutes 9 figure", f"PYTHON={sys.executable}"]
    told = subprocess.run(["make", "-n", "gpu", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert '.ci/gpu.py --wheels "some wheels" --out "/there" --minutes 9 figure' in told.stdout


def test_everything_is_a_part(gpu: ModuleType) -> None:
    names = [each.name for each in gpu.parts("python", list(figures.FIGURES))]
    assert len(names) == len(set(names))
    lessons = sorted((ROOT / "lessons").glob("[0-9]*.ipynb"))
    assert {f"lesson/{path.name[:2]}" for path in lessons} <= set(names)
    assert {f"figure/{name}" for name in figures.FIGURES} <= set(names)
    assert "tests/ranks" in names


# --- reports ----------------------------------------------------------------------------------------------

FACTS = {"device": "An Example GPU", "driver": "1.2", "cuda": "13.0", "torch": "2.11.0", "python": "3.12.1"}


def test_what_differs_is_listed_and_half_a_file_is_passed_by(gpu: ModuleType, tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)

    claims = [
        {"lesson": "01", "quote": "both copy", "so": True, "seen": "two copies"},
        {"lesson": "02", "quote": "begins at zero", "so": False, "seen": "512 bytes"},
    ]
    write("claims/differs.json", json.dumps({"claims": claims}))
    write(
        "tests/ranks/log.txt", "...\nFAILED tests/gpu/test_ranks.py::test_x - assert 1 == 2\n1 failed in 2s\n"
    )
    lesson = {"lesson": "05_collectives", "cells": 3, "executed": 3, "stopped": "its kernel died"}
    differs = [{"cell": "a", "begins": "x = 1", "saved": "sum: 3", "here": "sum: 4"}]
    unsure = [{"cell": "b", "text": "It is so. (Not run here.)"}]
    write("lesson/05/differs.json", json.dumps(lesson | {"differs": differs, "unsure": unsure}))
    write("lesson/06/differs.json", '{"lesson": "06_')

    without = gpu.rehearsed(FACTS, tmp_path)
    assert without == {"torch": "2.11.0", "cells": {"05_collectives": ["a"]}}
    facts = FACTS | {"gpus": 1, "date": "2026-01-02"}
    assert "also without" not in gpu.differences(facts, tmp_path, without | {"torch": "2.12.0"})
    told = gpu.differences(facts, tmp_path, without)

    assert "An Example GPU, driver 1.2, CUDA 13.0, torch 2.11.0, Python 3.12.1, 2026-01-02" in told
    assert told.index("**NOT SO**, lesson 02") < told.index("so, lesson 01")
    assert "test_x - assert 1 == 2" in told
    assert "05_collectives: 3 of 3 cells executed, 1 differ; its kernel died" in told
    assert "`a`, which begins `x = 1` (also without a GPU, with torch 2.11.0)" in told
    assert "saved: sum: 3" in told
    assert "here:  sum: 4" in told
    assert "05, `b`: It is so. (Not run here.)" in told
    assert "None was tried." in gpu.differences({}, tmp_path / "nowhere")


def test_a_lesson_goes_on_after_cells_that_fail_or_hang(tmp_path: Path) -> None:
    cell, tag = nbformat.v4.new_code_cell, {"metadata": {"tags": ["nbval-check-output"]}}
    sources = ["import time\ntime.sleep(600)", "1 / 0", "print('same')\nprint('here')", "print('same')"]
    notebook = nbformat.v4.new_notebook(cells=[cell(source, **tag) for source in sources])
    for each, text in zip(notebook.cells, ["", "", "same\nsaved\n", "same\n"], strict=True):
        each.outputs = [nbformat.v4.new_output("stream", text=text)]
    notebook.cells.append(nbformat.v4.new_markdown_cell("It is fast. Surely. (Not run here.) Go on."))
    path = tmp_path / "lesson.ipynb"
    nbformat.write(notebook, path)
    before, out = path.read_bytes(), tmp_path / "out"
    out.mkdir()

    executed(path, out, seconds_per_cell=10)

    assert path.read_bytes() == before, "the lesson stays as it is"
    found = json.loads((out / "differs.json").read_text())
    assert (found["executed"], found["cells"], found["stopped"]) == (4, 4, "")
    assert [(each["saved"], each["here"]) for each in found["differs"]] == [
        ("ends", "took too long, and was interrupted"),
        ("no error", "raises ZeroDivisionError: division by zero"),
        ("saved", "here"),
    ]
    assert [each["text"] for each in found["unsure"]] == ["Surely. (Not run here.)"]
    assert read(out / "lesson.ipynb").cells[3].outputs[0].text == "same\n"


def test_a_lesson_that_is_interrupted_says_so_and_lets_no_cell_fail(tmp_path: Path) -> None:
    waits = f"open({str(tmp_path / 'begun')!r}, 'w')\nimport time\ntime.sleep(600)"
    sources = ["ready = True", waits, "ready"]
    path = tmp_path / "lesson.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources))), path)
    command = [sys.executable, "-m", "tests.gpu.lesson", str(path), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        wait_for((tmp_path / "begun").exists, 120)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=120)
    assert told.endswith("1 of 3 cells executed, 0 differ; interrupted\n"), told
    assert process.returncode == 1
    assert (tmp_path / "out" / "lesson.ipynb").exists()


# --- figures and claims -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_made_by_cells_of_its_lesson_and_shown_there(name: str) -> None:
    assert figures.cells_of(name)
    code = [cell.source for cell in read(find(name[:2])).cells if cell.cell_type == "code"]
    assert sum(f'gpu_figure("{name}"' in source for source in code) == 1


def test_no_lesson_shows_a_figure_that_nobody_makes() -> None:
    shown = re.findall(
        r"gpu_figure\(\"(\w+)\"",
        "\n".join(cell.source for path in (ROOT / "lessons").glob("*.ipynb") for cell in read(path).cells),
    )
    assert sorted(shown) == sorted(figures.FIGURES)


def test_a_call_that_ends_a_rank_leaves_the_other_rows_of_the_backend_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(figures.LESSONS)
    monkeypatch.chdir(figures.LESSONS)
    *cells, table = figures.cells_of("09_backend_table")
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


def test_a_cell_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for cells, words in {("nowhere",): "has no cell 'nowhere'", ("ways: thing",): "does not bind"}.items():
        monkeypatch.setitem(figures.FIGURES, "01_x", figures.Figure(cells, "None"))
        with pytest.raises(LookupError, match=words):
            figures.cells_of("01_x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: it would record")
def test_a_rehearsal_makes_a_figure_and_records_nothing(tmp_path: Path) -> None:
    recorded = ROOT / "lessons" / "recorded" / "gpu"
    before = sorted(recorded.glob("*"))
    command = [sys.executable, "-m", "tests.gpu.figures", "03_data_parallel_memory", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "rehearsed on the CPU, nothing recorded: Device 0 carries more" in run.stdout
    made = json.loads((tmp_path / "03_data_parallel_memory.json").read_text())
    assert made["device"] == "a CPU, in a rehearsal"
    assert set(made["numbers"]["live bytes"]) == {"device 0", "device 1"}
    assert sorted(recorded.glob("*")) == before


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.lesson} {claim.trial.__name__}")
def test_a_claim_quotes_its_lesson(claim: Any) -> None:
    texts = [cell.source for cell in read(find(claim.lesson)).cells if cell.cell_type == "markdown"]
    assert sum(claim.quote in text for text in texts) == 1


def test_sentences_that_were_not_run_are_found_in_every_lesson_that_speaks_of_gpus() -> None:
    found = {path.stem[:2] for path in (ROOT / "lessons").glob("*.ipynb") if doubts(read(path))}
    assert {"01", "02", "03", "05", "09", "13"} <= found
