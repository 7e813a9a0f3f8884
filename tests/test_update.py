"""`make update` in a clone whose learner and whose teacher both have changed something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.support.needs import require

ROOT = Path(__file__).parents[1]
LESSON, EXERCISE = "lessons/06_ddp.ipynb", "exercises/06_ddp.ipynb"


def write(path: Path, *cells: nbformat.NotebookNode) -> None:
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=list(cells)), path)


def text(source: str, id: str = "goal") -> nbformat.NotebookNode:
    return new_markdown_cell(source, id=id)


def code(source: str, printed: str = "", id: str = "run") -> nbformat.NotebookNode:
    outputs = [new_output("stream", text=printed)] if printed else []
    return new_code_cell(source, id=id, outputs=outputs, execution_count=1 if printed else None)


class Copy:
    """A learner's clone, and the teacher's repository that it came from."""

    def __init__(self, folder: Path) -> None:
        self.git = require("git", "the course comes by it")
        self.teacher, self.learner = folder / "teacher", folder / "learner"
        (self.teacher / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci/update.py", self.teacher / ".ci")
        self.call(folder, "init", "--quiet", "--initial-branch", "main", str(self.teacher))
        self.teach(
            lesson=(text("# DDP"), code("launch(train)", "loss 0.51\n")),
            exercise=(text("Write it."), code("...", id="answer"), code('check("06.1")', id="check")),
        )
        self.call(folder, "clone", "--quiet", str(self.teacher), str(self.learner))

    def call(self, folder: Path, *arguments: str) -> str:
        who = ["-c", "user.name=teacher", "-c", "user.email=teacher@localhost"]
        run = subprocess.run([self.git, *who, *arguments], cwd=folder, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def teach(
        self, lesson: tuple = (), exercise: tuple = (), change: Callable[[Path], object] = lambda folder: None
    ) -> None:
        """The teacher commits a new version."""
        for name, cells in ((LESSON, lesson), (EXERCISE, exercise)):
            if cells:
                write(self.teacher / name, *cells)
        change(self.teacher)
        self.call(self.teacher, "add", "--all")
        self.call(self.teacher, "commit", "--quiet", "-m", "a new version")

    def cells(self, name: str) -> list[tuple[str, list]]:
        cells = nbformat.read(self.learner / name, as_version=4).cells
        return [(cell.source, [output.text for output in cell.get("outputs", [])]) for cell in cells]

    def learn(self, name: str, **by_id: tuple[str, str]) -> None:
        """What JupyterLab saves: cells that were changed or run, and which Python ran them."""
        notebook = nbformat.read(self.learner / name, as_version=4)
        for cell in notebook.cells:
            if cell.id in by_id:
                new = code(*by_id[cell.id], id=cell.id)
                cell.update(new if cell.cell_type == "code" else {"source": new.source})
        notebook.metadata.language_info = {"name": "python", "version": "3.11.9"}
        nbformat.write(notebook, self.learner / name)

    def update(self, **environment: str) -> tuple[int, str]:
        run = subprocess.run(
            [sys.executable, ".ci/update.py"],
            cwd=self.learner,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return run.returncode, run.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_changed_answer_and_a_changed_lesson(copy: Copy) -> None:
    copy.learn(EXERCISE, answer=("return 42", ""), check=('check("06.1")', "5 of 10 points\n"))
    copy.learn(LESSON, run=("launch(train)", "loss 0.77\n"))
    copy.teach(
        lesson=(text("# DDP, told better"), code("launch(train, 3)", "loss 0.50\n")),
        exercise=(text("In ten lines."), code("...", id="answer"), code('check("06.1")', id="check")),
    )

    status, said = copy.update()

    assert status == 0, said
    assert said.splitlines()[0] == f"{EXERCISE}: what you wrote is kept, the rest is new."
    assert copy.cells(EXERCISE) == [("In ten lines.", []), ("return 42", []), ('check("06.1")', [])]
    assert copy.cells(LESSON) == [("# DDP, told better", []), ("launch(train, 3)", ["loss 0.50\n"])]
    assert copy.update() == (0, "This is the newest version of the course.\n")


def test_a_lesson_that_does_not_change_keeps_its_own_outputs(copy: Copy) -> None:
    copy.learn(LESSON, run=("launch(train)", "loss 0.77\n"))
    copy.teach(change=lambda folder: (folder / "README.md").write_text("new"))

    assert copy.update()[0] == 0

    assert copy.cells(LESSON)[1] == ("launch(train)", ["loss 0.77\n"])
    assert (copy.learner / "README.md").read_text() == "new"


def test_both_changed_the_same_lines_twice_in_a_row(copy: Copy) -> None:
    copy.learn(LESSON, run=("launch(mine)", "loss 0.77\n"))
    for nprocs in (3, 4):
        copy.teach(lesson=(text(f"# {nprocs}"), code(f"launch(train, {nprocs})", "loss 0.50\n")))

        status, said = copy.update()

        assert status == 0, said
        assert copy.cells(LESSON) == [(f"# {nprocs}", []), ("launch(mine)", ["loss 0.77\n"])]


def test_a_file_of_ones_own_and_a_removed_lesson(copy: Copy) -> None:
    (copy.learner / "notes.txt").write_text("mine")
    (copy.learner / LESSON).unlink()
    copy.teach(lesson=(text("# New"),), change=lambda folder: (folder / "notes.txt").write_text("theirs"))

    status, said = copy.update()

    assert status == 0, said
    assert copy.cells(LESSON) == [("# New", [])]
    assert (copy.learner / "notes.txt").read_text() == "theirs"
    (kept,) = copy.learner.glob("notes__*.txt")
    assert kept.read_text() == "mine"
    assert kept.name in said


def test_a_cell_that_one_moved_and_the_other_changed(copy: Copy) -> None:
    """git's merge has it twice."""
    copy.learn(LESSON, goal=("# My DDP", ""))
    copy.teach(lesson=(code("launch(train)", "loss 0.51\n"), text("# DDP")))

    status, said = copy.update()

    assert status == 0, said
    assert "could not be merged (a cell stands twice)" in said
    assert [source for source, _ in copy.cells(LESSON)] == ["launch(train)", "# DDP"]
    assert ("# My DDP", []) in copy.cells(LESSON.replace(".ipynb", ".mine.ipynb"))


def test_what_cannot_be_updated_is_told(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    status, said = copy.update(PATH=str(tmp_path / "nothing"))
    assert status == 1
    assert "Update stopped" in said
    assert "git" in said

    copy.call(copy.learner, "checkout", "--quiet", "--detach")
    assert copy.update()[1].startswith("Update stopped: fatal: HEAD does not point to a branch")
    copy.call(copy.learner, "checkout", "--quiet", "main")

    copy.teach(lesson=(text("# New"),))
    (copy.learner / ".git" / "index.lock").touch()  # of another git
    assert "nothing was merged" in (said := copy.update()[1])
    assert "index.lock" in said.splitlines()[-1]

    copy.teacher.rename(tmp_path / "gone")
    status, said = copy.update()
    assert status == 1
    assert said.startswith("Update stopped: ")
    assert "Traceback" not in said

    shutil.rmtree(copy.learner / ".git")
    assert copy.update()[1].startswith("Update stopped: this folder is no git clone")
