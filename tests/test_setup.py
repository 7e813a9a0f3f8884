"""The commands of the Makefile, in a copy of the course whose .venv has a Python that only notes its calls.

What pip, pytest and JupyterLab do then is theirs; `make setup` with a real pip is the first that CI does.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.processes import processes_marked, wait_for

ROOT = Path(__file__).parents[1]
LIMIT = 240  # seconds, for any one command, on a busy machine
TESTED = (ROOT / "constraints.txt").read_text()
# .venv's Python: it notes `-m NAME …` and what pip may install, waits while there is a file `hold`, and fails
# where the test wants that
PYTHON = """#!/bin/sh
venv="${0%/bin/python}"
[ "$1" = -m ] && shift
case "$*" in compileall*) exit ;; esac
echo "$*" >>"$CALLS"
case "$*" in
"pip install"*)
    cp "$venv/course-setup/constraints.txt" "$CALLS.constraints"
    while [ -e hold ]; do touch held; sleep 0.02; done
    echo "$SAYS" >"$venv/course-setup/log" ;;
jupyterlab*) echo "JUPYTER_PATH=$JUPYTER_PATH" >>"$CALLS" ;;
esac
case "$*" in *"$FAILING"*) exit 1 ;; esac
"""
VENV = f"""
import os, shutil, sys
if __name__ == "__main__":
    if "--clear" in sys.argv:
        shutil.rmtree(sys.argv[-1], ignore_errors=True)
    programs = os.path.join(sys.argv[-1], "bin")
    os.makedirs(programs, exist_ok=True)
    for name in ("python", "pip"):
        with open(os.path.join(programs, name), "w") as program:
            program.write({PYTHON!r})
        os.chmod(program.name, 0o755)
"""
# A machine with this much disk, an old Python, or modules missing
MACHINE = """
import collections, os, shutil, sys
usage = collections.namedtuple("usage", "total used free")
shutil.disk_usage = lambda path: usage(10**12, 0, float(os.environ["FREE_GB"]) * 1e9)
if "OLD" in os.environ:
    sys.version, sys.version_info = os.environ["OLD"] + " (old)", (3, 9, 2, "final", 0)
if "MISSING" in os.environ:
    sys.modules[os.environ["MISSING"]] = None
"""


class Course:
    """A small copy of the course, and its commands run in a clean environment."""

    def __init__(self, root: Path) -> None:
        self.root, self.venv, self.stamp = root, root / ".venv", root / ".venv" / "course-setup-done"
        self.programs, self.calls_file = root.parent / "programs", root.parent / "calls"
        for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/setup.py", ".ci/run"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        self.add_program("python3", f'#!/bin/sh\nexec "{os.path.realpath(sys.executable)}" "$@"\n')
        (self.programs / "venv.py").write_text(VENV)
        (self.programs / "sitecustomize.py").write_text(MACHINE)

    def add_program(self, name: str, text: str = "#!/bin/sh\n") -> None:
        self.programs.mkdir(exist_ok=True)
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def start(self, *command: str, **extra: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.programs}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(self.programs),
            "CALLS": str(self.calls_file),
            "FAILING": "nothing",
            "FREE_GB": "100",
            **{name: value for name, value in os.environ.items() if name == "COURSE_TEST_MARK"},
            **extra,
        }
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, **extra: str) -> tuple[int, str]:
        process = self.start(*command, **extra)
        told, _ = process.communicate(timeout=LIMIT)
        return process.returncode, told

    def make(self, *arguments: str, **extra: str) -> str:
        status, told = self.run("make", *arguments, **extra)
        assert status == 0, told
        return told

    def fault(self, **extra: str) -> str:
        """The one sentence of a `make setup` that must fail."""
        status, told = self.run("make", "setup", **extra)
        assert status != 0, told
        sentences = [line for line in told.splitlines() if line.startswith("Set-up stopped: ")]
        assert len(sentences) == 1, told
        assert not self.stamp.exists()
        return sentences[0].removeprefix("Set-up stopped: ")

    def calls(self) -> list[str]:
        """What .venv's Python was called with since the last time."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.write_text("")
        return calls

    def constraints(self) -> list[str]:
        """What pip was last told to keep to."""
        return Path(f"{self.calls_file}.constraints").read_text().splitlines()

    def put(self, package: str, whole: bool = True) -> Path:
        """Install a package as pip does, or as a kill leaves it."""
        info = self.venv / "lib" / "python3.12" / "site-packages" / f"{package}.dist-info"
        info.mkdir(parents=True)
        if whole:
            (info / "RECORD").touch()
        return info


@pytest.fixture
def course(tmp_path: Path) -> Course:
    """A fresh clone: no .venv. People do have spaces in their folders."""
    return Course(tmp_path / "a course")


# What set-up makes, and when it does nothing


def test_set_up_installs_the_tested_versions_once(course: Course) -> None:
    assert "Set-up done: the course is in .venv." in course.make("setup")
    (call,) = course.calls()
    assert call.startswith("pip install ")
    assert call.endswith(" -e .[lab,albert,test,site]")
    assert course.constraints() == TESTED.splitlines()
    settings = json.loads((course.venv / "share/jupyter/lab/settings/overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    server = json.loads((course.venv / "etc/jupyter/jupyter_server_config.json").read_text())
    assert server == {"ServerApp": {"jpserver_extensions": {"nbgitpuller": False}}}
    assert not (course.venv / "course-setup").exists(), "pip's log and downloads"
    assert course.make("setup") == ""
    assert course.calls() == []
    (course.root / "constraints.txt").write_text("ruff==1.0\n")
    course.make("setup")
    assert course.constraints() == ["ruff==1.0"]


def test_set_up_goes_on_after_an_interrupt(course: Course) -> None:
    (course.root / "hold").touch()
    first = course.start("make", "setup")
    wait_for((course.root / "held").exists, LIMIT, "the set-up to be in pip")
    assert course.fault() == "another set-up is at work in this folder: wait until it has ended."
    os.killpg(first.pid, signal.SIGINT)
    told, _ = first.communicate(timeout=LIMIT)
    assert first.returncode != 0
    assert "Set-up interrupted: run the same command again and it goes on." in told
    assert "Traceback" not in told
    half, whole = course.put("torch-2.14.1", whole=False), course.put("numpy-2.4.6")
    (course.root / "hold").unlink()
    course.make("setup")
    assert (half.exists(), whole.exists()) == (False, True)
    assert course.make("setup") == ""


def test_a_venv_whose_python_is_gone_is_made_anew(course: Course) -> None:
    course.make("setup")
    (course.venv / "bin" / "python").unlink()
    (course.venv / "bin" / "python").symlink_to("/gone")
    assert "Set-up done" in course.make("setup")


@pytest.mark.parametrize("version", ["{tested}+cpu", "2.11.0+cpu", "2.9.1"])
def test_a_torch_that_is_there_stays(course: Course, version: str) -> None:
    version = version.format(tested=re.search(r"(?m)^torch==(.*)$", TESTED)[1])
    course.run("python3", "-m", "venv", ".venv")  # as lessons/README.md says
    info = course.put(f"torch-{version}")
    course.make("setup", FREE_GB="1.3")  # far less than torch with CUDA needs
    assert info.exists()
    assert "--no-cache-dir" in course.calls()[0]
    if version == "2.11.0+cpu":
        own = re.compile(r"(torch|torchvision|triton|cuda-.*|nvidia-(?!ml-py).*)==")
        others = [line for line in TESTED.splitlines() if not own.match(line)]
        assert course.constraints() == [*others, "torch==2.11.0+cpu"]
        assert "nvidia-ml-py" in "".join(others)
    else:  # the tested one, which `+cpu` fits, is allowed; 2.9 is too old for the course
        assert course.constraints() == TESTED.splitlines()


def test_oldest_and_newest_have_their_own_folders_and_versions(course: Course) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + extras["lab"] + extras["test"]
    course.make("setup", "SETUP_ARGS=--oldest")
    assert {bound.replace(">=", "==") for bound in asked} <= set(course.constraints())
    assert "--only-binary :all:" in course.calls()[0]
    for _ in range(2):  # only the index knows whether there is something newer
        course.make("setup", "SETUP_ARGS=--newest")
        assert "--upgrade --upgrade-strategy eager" in course.calls()[0]
        assert course.constraints() == []
    assert {path.name for path in course.root.glob(".venv*")} == {".venv-oldest", ".venv-newest"}


# Faults, one sentence each


FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device: '/x'"
NO_NETWORK = """WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after
connection broken by 'NewConnectionError('<…>: Failed to establish a new connection: [Errno 111]')'"""
CONFLICT = """2026-11-29T01:00:00,000 ERROR: Cannot install torch because of conflicting dependencies.
2026-11-29T01:00:00,000 ERROR: ResolutionImpossible: for help visit a page"""


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ({"OLD": "3.9.2"}, "Python 3.9.2 is too old: name 3.11 or newer, as in `PYTHON=python3.12 make"),
        ({"MISSING": "ensurepip"}, f"on Debian, `sudo apt install python3.{sys.version_info[1]}-venv`."),
        ({"FREE_GB": "1.25"}, "9.4 GB of disk are needed, 1.2 are free: make room, or see "),
        ({"FAILING": "pip install", "SAYS": FULL}, "the disk is full: make room, and run this again."),
        ({"FAILING": "pip install", "SAYS": NO_NETWORK}, "pip reaches no package index: is there a network?"),
        ({"FAILING": "pip install", "SAYS": CONFLICT}, "pip failed: Cannot install torch because of"),
    ],
)
def test_what_is_missing_is_told_in_one_sentence(
    course: Course, machine: dict[str, str], sentence: str
) -> None:
    assert sentence in course.fault(**machine)
    assert course.venv.exists() == ("FAILING" in machine)
    assert "Set-up done" in course.make("setup")


def test_a_moved_course_is_told(course: Course, tmp_path: Path) -> None:
    course.make("setup")
    course.root.rename(tmp_path / "moved")
    course.root = tmp_path / "moved"
    told = f".venv was made in {tmp_path / 'a course'} and only works there: remove it"
    assert course.fault().startswith(told)


def test_an_old_python_can_read_the_set_up_and_knows_which_is_needed() -> None:
    code = (ROOT / ".ci" / "setup.py").read_text()
    ast.parse(code, feature_version=(3, 6))
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
    assert "sys.version_info < (3, 11)" in code


def test_no_python_at_all_is_told(course: Course, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for name in ("make", "sh"):
        (tmp_path / "nothing" / name).symlink_to(shutil.which(name))
    needed = "there is no python3 here: install Python 3.11 or newer"
    assert needed in course.fault(PATH=str(tmp_path / "nothing"))
    assert "there is no python3.99 here" in course.fault(PYTHON="python3.99")


# The other commands


def test_make_test_all_runs_both_parts_whatever_fails_and_says_so(course: Course) -> None:
    course.make("setup")
    passed = "make test-all: lint passed, and all tests and notebooks that ran."
    for failing, parts in {"nothing": 2, "ruff format": 0, "-n 4": 2, "and alone": 2}.items():
        course.calls()
        status, told = course.run("make", "test-all", FAILING=failing)
        assert sum(call.startswith("pytest ") for call in course.calls()) == parts
        assert (status == 0) == (passed in told) == (failing == "nothing")
    course.make("test", "LF=1")
    assert course.calls()[-1].endswith(" -n 4 -m short --again lessons tests")


def test_make_lesson_and_lab_hand_their_words_on(course: Course) -> None:
    course.make("setup")
    course.calls()
    course.make("lesson", "N=00 02 06")
    assert course.calls() == ["tests/notebooks/execute.py 00 02 06"]
    course.make("lab", "ARGS=--no-browser", JUPYTER_PATH="/another/kernel")
    lab, path = course.calls()
    root = f"--ServerApp.root_dir={course.root} --LabApp.default_url=/lab/tree/lessons/00_start_here.ipynb"
    assert lab.replace(" --allow-root", "") == f"jupyterlab --ServerApp.ip=127.0.0.1 {root} --no-browser"
    assert path == f"JUPYTER_PATH={course.venv}/share/jupyter:/another/kernel", "its own kernel comes first"
    course.make("lab", "LANGUAGE=zh")
    made, lab, _ = course.calls()
    assert made == "course_lib zh"
    assert "default_url=/lab/tree/zh/lessons/00_start_here.ipynb" in lab


def test_make_names_its_commands(course: Course) -> None:
    told = set(re.findall(r"^make ([\w-]+): ", course.make(), re.M))
    for page in ("README.md", "lessons/README.md", "AGENTS.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / page).read_text(), re.M)) <= told, page


# .ci/run


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="CI runs on Linux")
@pytest.mark.parametrize("recipe", ["true", "false", "sleep 600 &"])
def test_ci_fails_with_the_tests_and_for_what_they_leave_behind(
    course: Course, tmp_path: Path, recipe: str
) -> None:
    says = 'echo "tests/test_it.py::test (call): it is 2" >>"$$COURSE_FAILURES"'
    told_of = 'echo "1 passed, all=$$COURSE_REQUIRE_ALL"'
    (course.root / "Makefile").write_text(f"test-all:\n\t@{says}\n\t@setsid {recipe}\n\t@{told_of}\n")
    for program in ("chromium", "sbatch", "bwrap", "ip", "tc"):
        course.add_program(program)
    # its `python3 -c 'import ensurepip, venv'` asks the real ones
    status, told = course.run("bash", ".ci/run", COURSE_GRACE_SECONDS="1", WHO=str(tmp_path), PYTHONPATH="")
    assert (status == 0) == (recipe == "true"), told
    assert ("1 passed, all=1" in told) == (recipe != "false")
    assert told.endswith("What failed:\n\n\ntests/test_it.py::test (call): it is 2\n"), "whatever came before"
    assert ("left a process behind" in told) == ("sleep 600" in told) == ("sleep" in recipe)
    assert processes_marked("WHO", str(tmp_path)) == []
