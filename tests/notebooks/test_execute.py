"""`make lesson`: what is saved, and that nothing is saved when a cell fails."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from tests.notebooks import execute


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, execute.__file__, "--even-if-disturbed", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def notebook_of(path: Path, *sources: str, tags: dict[int, list[str]] | None = None) -> Path:
    """Write a notebook as an author might leave it: old format, no ids, traces of an earlier run."""
    cells = [new_markdown_cell("# A lesson"), *map(new_code_cell, sources)]
    for at, cell in enumerate(cells):
        del cell["id"]
        cell.metadata["tags"] = (tags or {}).get(at, [])
        cell.metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
        if cell.cell_type == "code":
            cell["execution_count"] = 40 - at
    metadata = {"widgets": {"state": {}}, "kernelspec": {"name": "mine", "display_name": "Mine"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}
    path.write_text(json.dumps(notebook))
    return path


def test_a_lesson_is_saved_fit_to_be_committed(tmp_path: Path) -> None:
    path = notebook_of(
        tmp_path / "06_lesson.ipynb",
        "import pathlib, sys, warnings, course_lib\nprint(course_lib.__file__, pathlib.Path.home() / 'x')",
        "warnings.warn('look'); print('one'); print('two')",
        "1 / 0",
        "import ipywidgets; ipywidgets.IntSlider()",
        "pathlib.Path.cwd().name, len(sys.prefix) > 1",
        tags={3: ["raises-exception"]},
    )
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert "cell 5: left out a live widget" in done.stdout
    text = path.read_text()
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert len({cell.id for cell in notebook.cells}) == 6
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5]
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info
    assert "widgets" not in notebook.metadata
    assert "iopub" not in text
    assert "widget-view" not in text
    assert code[0].outputs[0].text == "course_lib/__init__.py ~/x\n"
    streams = {output.name: output.text for output in code[1].outputs}
    assert len(code[1].outputs) == 2
    assert streams["stdout"] == "one\ntwo\n"
    assert streams["stderr"].startswith("<cell>:1: UserWarning: look")
    assert code[2].outputs[0].ename == "ZeroDivisionError"
    assert code[3].outputs == []
    assert code[4].outputs[0].data["text/plain"] == repr((tmp_path.name, True))  # it ran in its own folder
    for name in (str(execute.ROOT), str(Path.home()) + os.sep, "ipykernel_"):
        assert name not in text
    assert list(tmp_path.glob(".*.new")) == []


def test_a_cell_that_fails_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    good = notebook_of(tmp_path / "good.ipynb", "1 + 1")
    raises = notebook_of(tmp_path / "raises.ipynb", "a = 1", "# divide\na / 0", "a")
    before = raises.read_bytes(), good.read_bytes()
    done = run(raises, good)
    assert done.returncode == 1
    assert (
        "raises.ipynb was not saved: cell 3 of 4, which begins '# divide': ZeroDivisionError" in done.stderr
    )
    assert raises.read_bytes() == before[0]
    assert good.read_bytes() != before[1], "a lesson after one that fails is executed all the same"


GUESSES = """\
from ipywidgets import Button
from IPython.display import display
for text in ("Your guess:  a  |  b", "Button(description='a')"):
    display(Button(description="a")._repr_mimebundle_() | {"text/plain": text}, raw=True)
"""


def test_a_guess_is_kept_as_text_and_folding_survives(tmp_path: Path) -> None:
    path = notebook_of(tmp_path / "guess.ipynb", GUESSES, "1 + 1")
    notebook = json.loads(path.read_text())
    notebook["cells"][2]["metadata"]["jupyter"] = folded = {"source_hidden": True, "outputs_hidden": True}
    path.write_text(json.dumps(notebook))
    execute.execute(path, even_if_disturbed=True)
    code = nbformat.read(path, as_version=4).cells[1:]
    assert [output.data for output in code[0].outputs] == [{"text/plain": "Your guess:  a  |  b"}]
    assert code[1].metadata.jupyter == folded


def test_a_deeper_notebook_is_found_by_its_number_or_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "CORE", tmp_path)
    (tmp_path / "deeper").mkdir()
    for name in ("06_ddp", "07_data", "deeper/06_buckets", "deeper/06_buckets_and_compile", "deeper/07_more"):
        (tmp_path / f"{name}.ipynb").touch()
    for name, found in {
        "06": "06_ddp",
        "deeper/07": "deeper/07_more",
        "deeper/06_buckets": "deeper/06_buckets",
    }.items():
        assert execute.find(name) == (tmp_path / f"{found}.ipynb").resolve()
    with pytest.raises(execute.LessonError, match="is 2 lessons"):
        execute.find("deeper/06")


HANGS = """\
import threading
print("rank 0 is late")
shown = display("rank 1 works", display_id=True)
shown.update("rank 1 waits for rank 0")
threading.Event().wait()"""


def test_a_cell_that_hangs_is_named_with_what_it_had_shown(tmp_path: Path) -> None:
    path = notebook_of(tmp_path / "hangs.ipynb", HANGS)
    before = path.read_bytes()
    where = r"cell 2 of 2.*'import threading': not done after 15 s\nrank 0 is late\n'rank 1 waits for rank 0'"
    with pytest.raises(execute.LessonError, match=where):
        execute.execute(path, seconds_per_cell=15, even_if_disturbed=True)
    assert path.read_bytes() == before


def test_a_lesson_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half.ipynb").write_text('{"cells": [')
    arguments = ["99", str(tmp_path / "none.ipynb"), str(tmp_path / "half.ipynb")]
    monkeypatch.setattr(sys, "argv", ["execute", *arguments])
    assert execute.main() == 1
    told = capsys.readouterr().err
    assert "half.ipynb was not saved: it is no notebook" in told
    assert "no lesson '99'" in told
    assert "none.ipynb'" in told
    monkeypatch.setattr(sys, "argv", ["execute"])
    assert execute.main() == 2
    assert "make lesson N=06" in capsys.readouterr().err


def test_a_lesson_that_the_machine_disturbed_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a process that spins; and where the cores work for nobody else, however busy the lesson is."""
    path = notebook_of(tmp_path / "times.ipynb", "import time\nuntil = time.monotonic() + 3")
    path.write_text(path.read_text().replace("+ 3", "+ 3\\nwhile time.monotonic() < until: pass"))
    before, own_core = path.read_bytes(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own_core)})
    try:
        told = r"other processes took \d+% of the cores"
        with spinning(), pytest.raises(execute.LessonError, match=told):
            execute.execute(path)
        assert path.read_bytes() == before
        monkeypatch.setattr(execute, "busy_seconds", execute.own_seconds)
        execute.execute(path)
    finally:
        os.sched_setaffinity(0, own_core)
    assert "other processes took 0% of the cores" in capsys.readouterr().out
    assert path.read_bytes() != before


def test_a_process_of_the_lesson_that_nobody_waits_for_disturbs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the ranks on lesson 17's two hosts, which end with their namespace."""
    spin = "import time\nwhile time.process_time() < 3: pass"
    code = "import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    code += f"subprocess.Popen([sys.executable, '-c', {spin!r}]).wait()"
    unwaited = 0.0
    monkeypatch.setattr(execute, "busy_seconds", lambda: execute.own_seconds() + unwaited)
    with execute.cores_of_others() as share:
        began, before = time.monotonic(), execute.own_seconds()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
        assert execute.own_seconds() - before < 3, "the kernel has counted it as waited for"
        cores, unwaited = len(os.sched_getaffinity(0)), 3.0
        all_of_it = unwaited / cores / (time.monotonic() - began)
    assert share() < all_of_it / 3


@contextmanager
def spinning() -> Iterator[None]:
    """A process that was here before the lesson, on the same cores; this one adopts it, as `main` does."""
    ctypes.CDLL(None).prctl(execute.PR_SET_CHILD_SUBREAPER, 1)
    spin = "while True: pass"
    code = "import subprocess, sys; quiet = subprocess.DEVNULL\n"
    code += f"print(subprocess.Popen([sys.executable, '-c', {spin!r}], stdout=quiet, stderr=quiet).pid)"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        ctypes.CDLL(None).prctl(execute.PR_SET_CHILD_SUBREAPER, 0)


def test_an_empty_code_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(execute.LessonError, match="cell 3"):
        execute.execute(notebook_of(tmp_path / "empty.ipynb", "1", " "))


def test_machine_names_are_hidden_and_words_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_HOME", "/data/course-7")
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.lab")
    monkeypatch.setattr(sys, "prefix", "/data/elsewhere/.venv")
    hide, root, home = execute.hide, execute.ROOT, Path.home()
    assert hide(f"{root}/course_lib/run.py in {root}") == "course_lib/run.py in ."
    assert hide(f"{root}-2/x") == f"{root}-2/x".replace(str(home) + os.sep, "~" + os.sep)
    assert hide("of binary: /data/elsewhere/.venv/bin/python") == "of binary: .venv/bin/python"
    assert hide("/data/course-7/runs/1") == "~/.cache/multi-gpu-course/runs/1"
    assert hide(f"{home}/.cache/a, {home}") == "~/.cache/a, ~"
    assert hide(f"{tempfile.gettempdir()}/ipykernel_12/345.py:3: UserWarning") == "<cell>:3: UserWarning"
    assert hide("host: node-17.lab, rank 0") == "host: localhost, rank 0"
    monkeypatch.setattr(socket, "gethostname", lambda: "rank")
    assert hide("rank 0") == "rank 0"
