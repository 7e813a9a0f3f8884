"""tests/support/selection.py: a change selects the tests that it touches, and a third of the others runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.selection import Graph, Plan, changed_since, graph, in_third, lesson_in, plan_of, planned

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def whole() -> Graph:
    return graph(ROOT)


def is_test(path: str) -> bool:
    return selection.TEST.fullmatch(path) is not None


def touched(plan: Plan) -> set[str]:
    """The test files and lessons of which something runs."""
    assert plan.everything == ""
    return {path for path, by_lesson in plan.touched_by.items() if any(by_lesson.values())}


# --- on the course as it is -------------------------------------------------------------------------------


@pytest.mark.short
@pytest.mark.parametrize(
    "changed",
    [
        "course_lib/exercises/questions/q07.py",
        "tests/exercises/answers/answers_07.py",
        "solutions/07_sharding_the_data.ipynb",
        "exercises/07_sharding_the_data.ipynb",
        "lessons/07_sharding_the_data.ipynb",
    ],
)
def test_what_belongs_to_a_lesson_is_selected_together(changed: str, whole: Graph) -> None:
    plan = plan_of(whole, [changed])
    for nodeid in (
        "tests/exercises/test_questions.py::test_the_solution_has_full_points[07.2]",
        "tests/exercises/test_questions.py::test_a_wrong_answer_misses_what_it_should[07.1 by_halves]",
        "tests/notebooks/test_form.py::test_a_cell_is_short[solutions 07_sharding_the_data]",
        "tests/notebooks/test_rank_counts.py::test_another_number_of_ranks[07_sharding_the_data 4]",
        "lessons/07_sharding_the_data.ipynb::Cell 3",
    ):
        assert plan.touches(nodeid), nodeid
        assert not plan.touches(nodeid.replace("07", "06").replace("sharding_the_data", "ddp_with_spawn"))
    assert not plan.touches("tests/run/test_run.py::test_anything")


@pytest.mark.short
def test_all_that_launches_hears_of_the_launcher(whole: Graph) -> None:
    plan = plan_of(whole, ["course_lib/launcher/watch.py"])
    found = touched(plan)
    launching = {
        path
        for path in whole.uses
        if is_test(path)
        and "course_lib/launcher/launch.py"
        in whole.uses[path] | whole.uses.get("tests/support/cells.py", set())
        and ("import launch" in (text := (ROOT / path).read_text()) or "quiet_launch" in text)
    }
    assert len(launching) > 10
    for path in whole.uses:
        if path.startswith(("tests/launcher/test_", "tests/faults/test_")) or path in launching:
            assert path in found | {"tests/launcher/test_network.py"}, path
    assert "tests/figures/test_charts.py" not in found
    assert "tests/test_environment.py" not in found


@pytest.mark.short
def test_a_change_selects_no_more_than_what_may_depend_on_it(whole: Graph) -> None:
    charts = touched(plan_of(whole, ["course_lib/figures/charts.py"]))
    assert {"tests/figures/test_charts.py", "tests/run/test_compare.py"} <= charts
    assert "lessons/14_scaling.ipynb" in charts, "it draws bars"
    assert not {"tests/launcher/test_launch.py", "lessons/04_processes_and_ranks.ipynb"} & charts
    script = touched(plan_of(whole, ["lessons/scripts/train_ddp.py"]))
    assert {"tests/scripts/test_train_ddp.py", "lessons/08_ddp_with_torchrun.ipynb"} <= script
    assert not {"tests/scripts/test_train_resume.py", "lessons/05_collectives.ipynb"} & script
    assert "lessons/05_collectives.ipynb" not in touched(plan_of(whole, ["lessons/06_ddp_with_spawn.ipynb"]))


@pytest.mark.short
@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("course_lib/rank/entry_script.py", "tests/faults/test_torchrun.py"),  # by its name as a module
        (
            "course_lib/rank/preload.py",
            "tests/launcher/test_launch.py",
        ),  # PRELOAD = "course_lib.rank.preload"
        (
            "course_lib/exercises/grading/answer_server.py",
            "tests/exercises/grading/test_walls.py",
        ),  # {__package__}.supervisor
        ("lessons/scripts/train_spawn.py", "tests/scripts/test_train_ddp.py"),
        ("course_lib/exercises/board/page.html", "tests/exercises/board/test_serve.py"),
        ("course_lib/__main__.py", "tests/test_main.py"),  # -m course_lib
        ("tests/mutants/judge.py", "tests/mutants/test_run.py"),
        ("tests/mutants/equivalent.toml", "tests/mutants/test_mutants.py"),
        ("tests/benchmarks/by_spawn.py", "tests/benchmarks/test_benchmarks.py"),
        ("lessons/scripts/helpers.py", "tests/scripts/test_records.py"),  # import_module("scripts.helpers")
        ("lessons/scripts/slurm_keeper.py", "tests/launcher/test_slurm.py"),
        ("lessons/recorded/17_many_machines.json", "tests/scripts/test_records.py"),  # .glob("*.json")
        (".binder/README.md", "tests/test_hosts.py"),
        ("course_lib/notebook.py", "tests/figures/test_charts.py"),  # the library asks it when imported
        ("exercises/README.md", "tests/notebooks/test_minutes.py"),
    ],
)
def test_what_is_only_named_is_a_dependency(changed: str, test: str, whole: Graph) -> None:
    assert test in touched(plan_of(whole, [changed]))


@pytest.mark.short
@pytest.mark.parametrize(
    "changed",
    [
        *(
            "pyproject.toml",
            "Makefile",
            ".ci/run",
            "tests/conftest.py",
            "tests/exercises/grading/conftest.py",
        ),
        *("tests/support/selection.py", "tests/support/imports.py", "new.txt", "course_lib/gone.py"),
        *("tests/run/test_gone.py", "GONE.md"),  # tests may have named them
    ],
)
def test_a_change_that_may_touch_all_selects_all(changed: str, whole: Graph) -> None:
    plan = plan_of(whole, ["README.md", changed])
    assert changed in plan.everything
    assert plan.touches("tests/run/test_compare.py::test_anything")
    assert plan.touches("lessons/00_start_here.ipynb::Cell 0")


@pytest.mark.short
def test_what_no_test_reads_selects_nothing(whole: Graph) -> None:
    assert touched(plan_of(whole, [".github/workflows/short.yml", ".github/gone.yml"])) == set()


@pytest.mark.short
def test_every_module_is_tested(whole: Graph) -> None:
    modules = [path for path in whole.uses if path.startswith("course_lib/")]
    assert len(modules) > 100
    by_file = plan_of(whole, modules).touched_by
    tested = {path for file in filter(is_test, by_file) for paths in by_file[file].values() for path in paths}
    assert set(modules) - tested == set()


@pytest.mark.short
def test_every_test_is_touched_by_more_than_itself(whole: Graph) -> None:
    for path in filter(is_test, whole.uses):
        others = whole.closure(path) - {path}
        assert [each for each in others if "conftest" not in each], path


# --- thirds, and lessons in ids ---------------------------------------------------------------------------


def test_three_days_are_all_tests_and_no_test_twice() -> None:
    cells = [f"lessons/{n:02}_x.ipynb::Cell {cell}" for n in range(18) for cell in range(40)]
    tests = [f"tests/test_{name}.py::test[{n}]" for name in ("a", "setup") for n in range(300)]
    days = [{each for each in cells + tests if in_third(each, 20_000 + day)} for day in range(3)]
    assert sum(map(len, days)) == len(set().union(*days)) == len(cells + tests)
    for day in days:
        assert len({each.partition("::")[0] for each in day if "ipynb" in each}) * 40 == sum(
            "ipynb" in each for each in day
        ), "a notebook's cells stay together"
        assert sum("setup" in each for each in day) in (0, 300), "so do the tests of some files"
        assert 60 < sum("test_a" in each for each in day) < 140


@pytest.mark.parametrize(
    ("nodeid", "lesson"),
    [
        ("lessons/07_sharding_the_data.ipynb::Cell 0", "07"),
        ("tests/exercises/test_questions.py::test_the_blank_has_none[12.1]", "12"),
        ("tests/exercises/test_questions.py::test_a_wrong_answer[12.1 of_10_ranks]", "12"),
        ("tests/notebooks/test_form.py::test_a_cell_is_short[lessons 00_start_here]", "00"),
        ("tests/exercises/test_question.py::test_a_number[3-3.0]", ""),
        ("tests/exercises/test_check.py::test_07_1", ""),
        ("tests/data/test_digits.py::test_x[10.1]", ""),
    ],
)
def test_the_lesson_of_a_test(nodeid: str, lesson: str) -> None:
    assert lesson_in(nodeid) == lesson


# --- in a repository of its own ---------------------------------------------------------------------------

LIBRARY = """\
import importlib

_HOME_OF = {"one": "first"}


def __getattr__(name):
    if name not in _HOME_OF:
        raise AttributeError(name)
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
"""
NOTEBOOK = {
    "cells": [
        {
            "cell_type": "code",
            "source": ["%pip list\n", "from course_lib import one"],
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
    ],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "nbformat": 4,
    "nbformat_minor": 4,
}
COMMIT = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=x"]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two modules, two tests and two lessons, of which one each knows `one`."""
    for name in ("COURSE_BASE", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "course"
    for folder in ("course_lib", "tests/support", "lessons"):
        (root / folder).mkdir(parents=True)
    for name in ("tiers.toml", "support/selection.py", "support/imports.py", "support/tiers.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n")
    (root / "course_lib/__init__.py").write_text(LIBRARY)
    (root / "course_lib/first.py").write_text("one = 1\n")
    (root / "course_lib/second.py").write_text("two = 2\n")
    (root / "tests/test_one.py").write_text("def test_a():\n    from course_lib import one\n")
    (root / "tests/test_two.py").write_text("def test_b():\n    import course_lib.second\n")
    (root / "lessons/01_one.ipynb").write_text(json.dumps(NOTEBOOK))
    (root / "lessons/02_two.ipynb").write_text(json.dumps(NOTEBOOK).replace("import one", "import second"))
    selection.git(root, "init", "--quiet")
    selection.git(root, "add", ".")
    selection.git(root, *COMMIT)
    return root


def pytest_in(course: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", selection.__name__, *words]
    done = subprocess.run(command, cwd=course, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_has_changed_is_what_is_new_and_what_differs_from_the_base(course: Path) -> None:
    assert changed_since(course, "HEAD") == []
    (course / "course_lib/first.py").rename(course / "course_lib/ä b.py")
    (course / ".gitignore").write_text("ignored\n")
    (course / "ignored").touch()
    assert changed_since(course, "HEAD") == [".gitignore", "course_lib/first.py", "course_lib/ä b.py"]
    selection.git(course, "add", ".")
    selection.git(course, *COMMIT)
    assert changed_since(course, "HEAD") == []
    assert changed_since(course, "HEAD~1") == [".gitignore", "course_lib/first.py", "course_lib/ä b.py"]


def test_the_base(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (course / "course_lib/first.py").write_text("one = 3\n")
    assert "no commit is 4 hours old" in planned(course, "auto").everything
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z")
    selection.git(course, *COMMIT, "--amend")
    monkeypatch.delenv("GIT_COMMITTER_DATE")
    plan = planned(course, "auto")
    assert "4 hours old" in plan.base
    assert plan.changed == ["course_lib/first.py"]
    selection.git(course, "clone", "--quiet", ".", str(tmp_path / "clone"))
    clone = tmp_path / "clone"
    (clone / "course_lib/second.py").write_text("two = 3\n")
    selection.git(clone, *COMMIT, "--all")
    plan = planned(clone, "auto")
    assert "ahead of its upstream" in plan.base
    assert plan.changed == ["course_lib/second.py"]
    monkeypatch.setenv("COURSE_BASE", "HEAD")
    assert planned(clone, "auto").base == "HEAD (COURSE_BASE)"


def test_where_git_or_a_source_cannot_say_everything_runs(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "git cannot say" in planned(course, "0" * 40).everything
    (course / "course_lib/first.py").write_text("one =\n")
    assert "invalid syntax" in planned(course, "HEAD").everything
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git cannot say" in planned(course, "HEAD").everything


@pytest.mark.parametrize("side_by_side", [[], ["-n", "2"]], ids=["alone", "side by side"])
def test_pytest_runs_what_is_touched_and_says_why(course: Path, side_by_side: list[str]) -> None:
    (course / "course_lib/first.py").write_text("one = 3\n")
    told = pytest_in(course, *side_by_side, "-v", "--changed-since=HEAD", "tests")
    assert "files changed since HEAD (as asked): 1" in told
    assert told.count("tests that course_lib/first.py touches: 1") == 1
    assert told.count("tests touched: 1; left out: 1") == 1
    assert "tests/test_one.py::test_a" in told
    assert "test_b" not in told
    day = next(day for day in range(3) if in_third("tests/test_two.py::test_b", day))
    told = pytest_in(course, *side_by_side, "-v", "--changed-since=HEAD", f"--third={day}", "tests")
    assert (
        told.count(
            f"tests touched: 1; 1 more: every lesson, a third of the rest by date (day {day}); left out: 0"
        )
        == 1
    )
    assert "tests/test_two.py::test_b" in told


@pytest.mark.parametrize("side_by_side", [[], ["-n", "1"]], ids=["alone", "side by side"])
def test_what_is_nearest_to_the_change_comes_first_and_nothing_begins_too_late(
    course: Path, side_by_side: list[str]
) -> None:
    (course / "pyproject.toml").open("a").write("\n")
    (course / "tests/test_selection.py").write_text(  # whose tests are run in a row, by tiers.toml
        "import time\ndef test_b():\n    time.time = lambda: 2e9\ndef test_c(): pass\n"
    )
    told = pytest_in(course, *side_by_side, "-v", "--changed-since=HEAD", "--until=1999999999", "tests")
    assert "every test runs: pyproject.toml" in told
    assert "2 passed, 2 skipped" in told, "what has begun goes on"
    assert "left out, because time was up: 2 tests, 0 near the change" in told


def test_a_notebooks_cells_are_selected_too(course: Path) -> None:
    (course / "course_lib/first.py").write_text("one = 3\n")
    collected = ["--nbval-lax", "--collect-only", "-q", "--changed-since=HEAD"]
    told = pytest_in(course, *collected, "lessons")
    assert "lessons/01_one.ipynb::Cell 0" in told
    assert "02_two" not in told
    told = pytest_in(course, *collected, "--third=0", "lessons")
    assert "02_two" in told, "every lesson, on each day that has its third"
