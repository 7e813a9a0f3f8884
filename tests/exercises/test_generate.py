"""The exercises are what their solutions make of them, for us and for nbgrader."""

from __future__ import annotations

import csv
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course_lib.__main__ import main
from course_lib.exercises.generate import ExerciseError, blank, generate
from tests.support.needs import missing

ROOT = Path(__file__).parents[2]


def solution(folder: Path, source: str, **marks: Any) -> Path:
    cell = nbformat.v4.new_code_cell(
        source, execution_count=3, metadata={"nbgrader": marks, "tags": ["nbval-x"]}
    )
    cell.outputs = [nbformat.v4.new_output("stream", text="the answer is 42")]
    path = folder / "solutions" / "01_topic.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    return path


def test_the_exercises_are_those_of_the_solutions() -> None:
    assert generate(ROOT / "solutions", ROOT / "exercises", check=True) == [], "run `course exercises`"
    assert {path.name for path in (ROOT / "exercises").glob("*.ipynb")} <= {
        path.name for path in (ROOT / "lessons").glob("*.ipynb")
    }


def test_a_solution_goes_with_its_outputs(tmp_path: Path) -> None:
    marked = "### BEGIN SOLUTION\n        return 'a secret'\n\n        ### END SOLUTION"
    source = f"def f():\n    if 1:\n        {marked}\n    return 0"
    path = solution(tmp_path, source, solution=True, grade_id="a")

    made = nbformat.reads(blank(path), as_version=4)
    nbformat.validate(made)
    (cell,) = made.cells
    assert cell.source == "def f():\n    if 1:\n        # YOUR CODE HERE\n        ...\n    return 0"
    assert (cell.outputs, cell.execution_count, "tags" in cell.metadata) == ([], None, False)
    assert "a secret" not in blank(path)


def test_a_locked_cell_cannot_be_edited(tmp_path: Path) -> None:
    path = solution(tmp_path, "check()", locked=True, grade=True, points=1)
    (cell,) = nbformat.reads(blank(path), as_version=4).cells
    assert (cell.metadata.deletable, cell.metadata.editable) == (False, False)


def test_an_answer_without_a_marked_solution_is_refused(tmp_path: Path) -> None:
    path = solution(tmp_path, "x = 42  # BEGIN SOLUTION", solution=True, grade_id="mine")
    with pytest.raises(ExerciseError, match=r"01_topic\.ipynb: the answer 'mine' marks no solution"):
        blank(path)
    path.write_text("{")
    with pytest.raises(ExerciseError, match=r"01_topic\.ipynb cannot be read as a notebook"):
        blank(path)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["exercises"]) == 2
    assert "there is no folder solutions" in capsys.readouterr().err
    solution(tmp_path, "1")
    assert main(["exercises"]) == 0
    (tmp_path / "exercises" / "99_gone.ipynb").write_text("{}")
    assert main(["exercises"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == ["changed: exercises/01_topic.ipynb", "changed: exercises/99_gone.ipynb"]
    assert [path.name for path in (tmp_path / "exercises").iterdir()] == ["01_topic.ipynb"]


@pytest.mark.night
def test_nbgrader_makes_the_same_exercise_and_gives_the_same_points(tmp_path: Path) -> None:
    name = "06_ddp_with_spawn.ipynb"
    source = ROOT / "solutions" / name
    text = source.read_text()
    half = text.replace("parameter.grad /= total", "pass", 1)
    assert half != text
    (tmp_path / "source" / "ddp").mkdir(parents=True)
    shutil.copy(source, tmp_path / "source" / "ddp")
    stub = (ROOT / "exercises" / "grading.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "nbgrader_config.py").write_text(stub)

    nbgrader = functools.partial(run_nbgrader, tmp_path, python_with_nbgrader(ROOT / ".venv-nbgrader"))
    nbgrader("generate_assignment", "ddp")
    made = nbformat.read(tmp_path / "release" / "ddp" / name, as_version=4)
    ours = nbformat.reads(blank(source), as_version=4)
    assert [cell.source for cell in made.cells] == [cell.source for cell in ours.cells]
    for student, handed_in in {"full": text, "none": blank(source), "part": half}.items():
        (tmp_path / "submitted" / student / "ddp").mkdir(parents=True)
        (tmp_path / "submitted" / student / "ddp" / name).write_text(handed_in)
    assert "Success" in nbgrader("validate", f"submitted/full/ddp/{name}")
    nbgrader("autograde", "ddp")
    nbgrader("export")
    with open(tmp_path / "grades.csv") as grades:
        points = {
            row["student_id"]: (float(row["score"]), float(row["max_score"]))
            for row in csv.DictReader(grades)
        }
    assert points == {"full": (10, 10), "none": (0, 10), "part": (8, 10)}


def python_with_nbgrader(folder: Path) -> str:
    """Return a Python with the course's packages, too: in .venv, nbgrader would add to JupyterLab."""
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import nbgrader, torch"]).returncode:
        venv.create(folder, clear=True, with_pip=False, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "course.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-input"]
        done = subprocess.run([*pip, "nbgrader"], capture_output=True, text=True)
        if done.returncode:
            missing(f"nbgrader cannot be installed: {done.stderr.strip()}")
    return str(python)


def run_nbgrader(folder: Path, python: str, *arguments: str) -> str:
    """Run it in its course's folder; it looks for its helpers on the PATH."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # the course is not in it
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [python, "-m", "nbgrader", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
