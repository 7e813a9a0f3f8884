"""`course grade`, from a folder of notebooks to the tables."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from course_lib.__main__ import main
from course_lib.exercises.grading import walls
from tests.exercises.grading.toys import cell, notebook
from tests.support.needs import missing
from tests.support.processes import unless_gone, wait_for

ROOT = Path(__file__).parents[3]
SOLUTION = (ROOT / "solutions" / "03_data_parallel.ipynb").read_bytes()
BLANK = (ROOT / "exercises" / "03_data_parallel.ipynb").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A class of five."""
    place = tmp_path / "class"
    for learner, text in {"anna": SOLUTION, "bert": BLANK, "cleo": b"no notebook"}.items():
        (place / learner).mkdir(parents=True)
        (place / learner / "03_data_parallel.ipynb").write_bytes(text)
    (place / "dora.ipynb").symlink_to(place / "anna" / "03_data_parallel.ipynb")
    (place / "emil.ipynb").write_bytes(notebook("x = 1"))
    return place


def command(folder: Path, *more: str) -> list[str]:
    outputs = ["--csv", str(folder.parent / "grades.csv"), "--html", str(folder.parent / "report")]
    return [sys.executable, "-m", "course_lib", "grade", str(folder), *outputs, *more]


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder.parent / "grades.csv", newline="", encoding="utf-8") as file:
        return {row["student_id"]: row for row in csv.DictReader(file)}


def results(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder.parent / "report").glob("submissions/*.json")}


def test_a_class_is_graded_and_goes_on_where_it_was_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # short: there are sockets in it
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.delenv("COURSE_LEAN", raising=False)
        _graded_and_stopped(folder)
        wait_for(lambda: not os.listdir(temporary), what="an empty temporary folder")


def _graded_and_stopped(folder: Path) -> None:
    shutil.copy(ROOT / "solutions" / "06_ddp_with_spawn.ipynb", folder / "anna")
    last = folder / "zoe.ipynb"  # who is not done before it is stopped
    last.write_bytes(notebook(cell("import time\ntime.sleep(600)", "e03-1")))
    grade = command(folder, "--timeout", "300")
    first = subprocess.Popen(grade, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: results(folder), what="the first result")
    family = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=120)[1]
    assert first.returncode == 130, said
    assert "the same command goes on from here" in said
    assert "Traceback" not in said
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1], what="the end of all that it started")
    before = results(folder)
    last.unlink()

    done = subprocess.run([*grade, "--jobs", "2"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert f"{len(before)} of 6 submissions were graded before" in done.stderr
    assert before.items() <= results(folder).items()
    assert {name: (row["score"], row["max_score"]) for name, row in rows(folder).items()} == {
        "anna": ("20", "20"),
        **dict.fromkeys(["bert", "cleo", "dora", "emil"], ("0", "20")),
    }
    assert rows(folder)["anna"]["trouble"] == ""
    assert "link to another file" in rows(folder)["dora"]["trouble"]
    assert "which exercise" in rows(folder)["emil"]["trouble"]

    table = (folder.parent / "grades.csv").read_bytes()
    again = subprocess.run(grade, capture_output=True, text=True, timeout=600)
    assert "6 of 6 submissions were graded before" in again.stderr
    assert (folder.parent / "grades.csv").read_bytes() == table
    assert {path.name for path in folder.rglob("*")} == {
        *("anna", "bert", "cleo", "dora.ipynb", "emil.ipynb"),
        *("03_data_parallel.ipynb", "06_ddp_with_spawn.ipynb"),
    }


@pytest.mark.night
def test_the_solutions_have_full_points_behind_the_walls(tmp_path: Path) -> None:
    """What a work takes along, and what it finds there, is not what it has in a notebook."""
    if reason := walls.unprotected():
        missing(reason)
    folder = tmp_path / "class"
    (folder / "anna").mkdir(parents=True)
    solutions = list((ROOT / "solutions").glob("*.ipynb"))
    for path in solutions:
        shutil.copy(path, folder / "anna")
    subprocess.run(command(folder, "--jobs", "2", "--timeout", "300"), check=True, timeout=1800)
    row = rows(folder)["anna"]
    assert (row["score"], row["trouble"]) == (row["max_score"], ""), row
    assert len(row["assignment"].split()) == len(solutions)


def is_sandbox(process: psutil.Process) -> bool:
    """Whether it is bubblewrap, and not only to see whether that works."""
    command = " ".join(unless_gone(process.cmdline, []))
    return unless_gone(process.name, "") == "bwrap" and "supervisor import main" in command


def test_a_grader_that_is_killed_leaves_nothing_at_work(folder: Path) -> None:
    grader = subprocess.Popen(command(folder), stderr=subprocess.DEVNULL, start_new_session=True)

    def family() -> list[psutil.Process]:
        return psutil.Process(grader.pid).children(recursive=True)

    wait_for(lambda: any(is_sandbox(process) for process in family()) or results(folder), what="the walls")
    left = family()
    os.kill(grader.pid, signal.SIGKILL)
    grader.wait()
    wait_for(lambda: not psutil.wait_procs(left, timeout=0)[1], what="the end of all that it started")


def test_a_worker_that_dies_twice_leaves_an_empty_field_and_costs_no_other_submission(folder: Path) -> None:
    if reason := walls.unprotected():
        missing(reason)  # a worker is known by its bubblewrap
    (folder / "bert" / "03_data_parallel.ipynb").unlink()
    (folder / "anna" / "03_data_parallel.ipynb").write_bytes(notebook("import time\ntime.sleep(600)"))
    grader = subprocess.Popen(command(folder), stderr=subprocess.PIPE, text=True, start_new_session=True)

    def workers() -> list[psutil.Process]:
        family = psutil.Process(grader.pid).children(recursive=True)
        parents = {unless_gone(process.parent, None) for process in filter(is_sandbox, family)}
        return [each for each in parents.intersection(family) if unless_gone(each.name, "bwrap") != "bwrap"]

    killed: list[psutil.Process] = []
    for _ in range(2):  # the second time it is judged alone
        (worker,) = wait_for(lambda: set(workers()).difference(killed), what="a worker")
        worker.kill()
        killed.append(worker)
    said = grader.communicate(timeout=600)[1]
    assert grader.returncode == 1, said
    assert "1 of them have no grade yet ('anna')" in said
    anna = rows(folder)["anna"]
    assert (anna["score"], anna["raw_score"]) == ("", "")
    assert "exit code -9" in anna["trouble"]
    assert "link to another file" in rows(folder)["dora"]["trouble"]
    assert "no notebook (.ipynb) in the folder" in rows(folder)["bert"]["trouble"]
    assert len(results(folder)) == 4, "what failed on this side is tried again another time"


SPINS = """
import os
for _ in range(600):
    try:
        if os.fork() == 0:
            os.setsid()
            while True:
                pass
    except OSError:
        break
while True:
    pass
"""


@pytest.mark.alone
def test_a_submission_that_spins_costs_its_neighbour_nothing(tmp_path: Path) -> None:
    if reason := walls.unprotected():
        missing(reason)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core, one submission is judged at a time")
    folder = tmp_path / "class"
    for learner, text in {"anna": notebook(SPINS), "bert": SOLUTION}.items():
        (folder / learner).mkdir(parents=True)
        (folder / learner / "03_data_parallel.ipynb").write_bytes(text)
    done = subprocess.run(
        command(folder, "--jobs", "2", "--timeout", "10"), capture_output=True, text=True, timeout=1200
    )
    bert = rows(folder)["bert"]
    assert (bert["score"], bert["trouble"]) == ("10", ""), done.stderr
    assert rows(folder)["anna"]["score"] == "0", "alone, and with more time, too"


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", str(tmp_path)]) == 2
    assert "there is no notebook (.ipynb) in" in capsys.readouterr().err
    for wrong in (["--jobs", "0"], ["--timeout", "-1"], ["--timeout", "nan"]):
        with pytest.raises(SystemExit):
            main(["grade", str(tmp_path), *wrong])
    assert "must be" in capsys.readouterr().err
