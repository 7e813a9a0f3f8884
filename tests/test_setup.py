"""The commands of the Makefile, in a copy of the course whose torch, pytest and ruff are a few lines each.

Each fault is caused: by a Python, a disk, a network or a package that is as broken as the learner's.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import types
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.needs import require
from tests.support.processes import listening, processes_marked, wait_for

ROOT = Path(__file__).parents[1]
LIMIT = 600  # seconds, for any one command, on a busy machine
# A package whose `python -m NAME …` writes down how it was called, and fails where the test wants that
RECORDER = """
import os, sys
call = " ".join([__package__, *sys.argv[1:]])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(call + "\\n")
sys.exit(os.environ.get("FAILING", "none") in call)
"""
TORCHVISION = {"torchvision/__init__.py": "", "torchvision/ops.py": "def nms(boxes, scores, threshold): pass"}
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "course-lib"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [
    "torch>=2.9",
    "torchvision>=0.24",
]

[project.optional-dependencies]
test = ["pytest", "ruff", "mypy", "check-jsonschema"]
albert = ["transformers"]

[tool.ruff]
line-length = 110
"""


def write_wheel(
    folder: str | Path, name: str, version: str, files: dict[str, str | bytes], needs: list[str] | None = None
) -> Path:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "Provides-Extra: albert\nProvides-Extra: test\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs or [])
    files = files | {f"{info}/METADATA": metadata}
    files |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    contents = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    record = ""
    for path, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    wheel = Path(folder) / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {**contents, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(path, content)
    return wheel


# A build backend that needs no package; a file named `hold` lets it wait, as a long download would
BACKEND = f"""
from __future__ import annotations
import base64, hashlib, time, tomllib, zipfile
from pathlib import Path

{inspect.getsource(write_wheel)}

def build_editable(folder, config_settings=None, metadata_directory=None):
    while Path("hold").exists():
        Path("held").touch()
        time.sleep(0.02)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    extras = [f"{{need}}; extra == '{{name}}'" for name, needs in extras for need in needs]
    needs = project["dependencies"] + extras
    return write_wheel(folder, "course_lib", "0.1.0", {{"course_lib.pth": str(Path.cwd())}}, needs).name
"""


class Course:
    """A small copy of the course, and its commands run in a clean environment."""

    def __init__(self, root: Path, wheels: Path) -> None:
        self.root, self.wheels, self.venv = root, wheels, root / ".venv"
        self.site = self.venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        self.stamp, self.log = self.venv / "course-setup-done", self.venv / "course-setup.log"

    def environment(self, **extra: str) -> dict[str, str]:
        programs = self.root.parent / f"{self.root.name}-programs"
        programs.mkdir(exist_ok=True)
        python = Path(os.path.realpath(sys.executable))
        (programs / "python3").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        (programs / "python3").chmod(0o755)
        home = self.root.parent / f"{self.root.name}-home"
        home.mkdir(exist_ok=True)
        plenty = self.root.parent / f"{self.root.name}-disk"  # the machine's own disk may be nearly full
        if not plenty.exists():
            disk_with(plenty, 100)
        path = os.pathsep.join([*filter(None, [extra.pop("PYTHONPATH", "")]), str(plenty)])
        return {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_REQUIRE_VIRTUALENV": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": path,
            **{name: value for name, value in os.environ.items() if name == "COURSE_TEST_MARK"},
            **extra,
        }

    def start(self, *command: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment(**extra),
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

    def fault(self, *command: str, **extra: str) -> str:
        """The one sentence that a command which must fail says."""
        status, told = self.run(*(command or ("make", "setup")), **extra)
        assert status != 0, told
        assert "Traceback" not in told, told
        sentences = [line for line in told.splitlines() if line.startswith("Set-up stopped: ")]
        assert len(sentences) == 1, told
        assert not self.stamp.exists()
        return sentences[0]

    def copy(self, root: Path) -> Course:
        shutil.copytree(self.root, root, symlinks=True)
        return Course(root, self.wheels)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "torch", "2.11.0", {"torch/__init__.py": "def zeros(*shape): pass"})
    for version, torch in {"0.26.0": "2.11.0", "0.24.5": "2.9.5"}.items():
        write_wheel(folder, "torchvision", version, TORCHVISION, [f"torch=={torch}"])
    for name in ("check_jsonschema", "mypy", "pytest", "ruff", "transformers"):
        write_wheel(folder, name, "1.0", {f"{name}/__init__.py": "", f"{name}/__main__.py": RECORDER})
    return folder


def new_course(root: Path, wheels: Path) -> Course:
    for name in ("Makefile", ".ci/setup.py", ".ci/run"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "lessons").mkdir()
    return Course(root, wheels)


@pytest.fixture
def course(tmp_path: Path, wheels: Path) -> Course:
    """A fresh clone: no .venv."""
    return new_course(tmp_path / "course", wheels)


@pytest.fixture(scope="session")
def first_runs(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> tuple[Course, str, str]:
    """A course after `make setup` without python3-venv, then with it; and what both said."""
    base = tmp_path_factory.mktemp("ready") / "a course"  # people do have spaces in their folders
    course = new_course(base, wheels)
    without = course.fault(PYTHONPATH=str(python_without_venv(base.parent)))
    return course, without, course.make("setup")


@pytest.fixture
def ready(first_runs: tuple[Course, str, str]) -> Course:
    """A course that is set up, shared: to be read, not changed."""
    return first_runs[0]


def python_without_venv(folder: Path) -> Path:
    """What Debian's python3 does where python3-venv is missing: half a .venv, these words, and status 1."""
    words = """
        The virtual environment was not created successfully because ensurepip is not
        available.  On Debian/Ubuntu systems, you need to install the python3-venv
        package using the following command.

            apt install python3.11-venv

        You may need to use sudo with that command.  After installing the python3-venv
        package, recreate your virtual environment.

        Failing command: /somewhere/.venv/bin/python3
        """
    code = f"""
        import os, sys
        os.makedirs(os.path.join(sys.argv[-1], "bin"))
        os.symlink(sys.executable, os.path.join(sys.argv[-1], "bin", "python"))
        sys.exit({textwrap.dedent(words)!r})
        """
    return module(folder / "debian", "venv", code)


def module(folder: Path, name: str, code: str) -> Path:
    """A folder for PYTHONPATH, with one module in it."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return folder


def disk_with(folder: Path, free_gigabytes: float) -> Path:
    code = f"""
        import collections, shutil
        usage = collections.namedtuple("usage", "total used free")
        shutil.disk_usage = lambda path: usage(10**12, 0, int({free_gigabytes} * 1e9))
        """
    return module(folder, "sitecustomize", code)


def load_setup(course: Course) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("course_setup", course.root / ".ci" / "setup.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# What set-up makes, and when it does nothing


def test_set_up_makes_the_venv_and_turns_the_news_off(ready: Course) -> None:
    used = "import torch, torchvision, transformers, pytest, sys; print(sys.prefix)"
    assert ready.run(str(ready.venv / "bin/python"), "-c", used) == (0, f"{ready.venv}\n")
    settings = json.loads((ready.venv / "share/jupyter/lab/settings/overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    server = json.loads((ready.venv / "etc/jupyter/jupyter_server_config.json").read_text())
    assert server == {"ServerApp": {"jpserver_extensions": {"nbgitpuller": False}}}
    assert not (ready.venv / "course-setup-downloads").exists()


def test_set_up_is_quick_when_nothing_changed(ready: Course) -> None:
    pyproject, log = ready.root / "pyproject.toml", ready.log.read_bytes()

    def work() -> float:
        """Seconds of CPU in the processes that were started: a busy machine makes them wait, not work."""
        times = os.times()
        return times.children_user + times.children_system

    for change in (PYPROJECT.replace("110", "99"), PYPROJECT + "# a comment\n", PYPROJECT):
        pyproject.write_text(change)
        before = work()
        assert ready.make("setup") == ""
        assert work() - before < 1, "it takes about 0.1 s of work"
    assert ready.log.read_bytes() == log, "pip has run"


def test_a_changed_dependency_is_installed_and_a_moved_folder_is_followed(
    ready: Course, tmp_path: Path
) -> None:
    moved = ready.copy(tmp_path / "moved")
    changed = PYPROJECT.replace('"torch>=2.9",', '"torch>=2.9", "extra>=1",')
    (moved.root / "pyproject.toml").write_text(changed)
    write_wheel(tmp_path, "extra", "1.0", {"extra.py": ""})
    moved.make("setup", PIP_FIND_LINKS=f"{moved.wheels} {tmp_path}")
    programs = [path for path in (moved.venv / "bin").iterdir() if path.is_file() and not path.is_symlink()]
    assert (moved.venv / "bin/pip") in programs
    assert [path for path in programs if os.fsencode(ready.venv) in path.read_bytes()] == []
    status, told = moved.run(str(moved.venv / "bin/pip"), "--version")
    assert (status, str(moved.site) in told) == (0, True)
    assert (moved.site / "course_lib.pth").read_text() == str(moved.root)
    assert (moved.site / "extra.py").exists()
    assert moved.make("setup") == ""


def test_set_up_goes_on_after_an_interrupt_and_a_kill(ready: Course, tmp_path: Path) -> None:
    course = ready.copy(tmp_path / "course")
    held, hold = course.root / "held", course.root / "hold"
    hold.touch()
    mark = {"SETUP_MARK": str(tmp_path)}
    first = course.start("make", "setup", **mark)
    wait_for(held.exists, LIMIT, "the first set-up to be in pip")
    second = course.start("make", "setup", **mark)
    assert "waiting for it" in second.stdout.readline()
    held.unlink()
    os.killpg(first.pid, signal.SIGINT)
    told, _ = first.communicate(timeout=LIMIT)
    assert first.returncode != 0
    assert "Set-up interrupted: run the same command again and it goes on." in told
    assert "Traceback" not in told
    wait_for(held.exists, LIMIT, "the second set-up to be in pip")
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate(timeout=LIMIT)
    wait_for(lambda: not processes_marked("SETUP_MARK", str(tmp_path)), LIMIT, "the end of the killed set-up")
    # what a kill leaves: a package without its last files, which pip takes for installed
    (course.site / "torch-2.11.0.dist-info" / "INSTALLER").unlink()
    (course.site / "torch" / "__init__.py").unlink()
    hold.unlink()
    course.make("setup")
    assert (course.site / "torch" / "__init__.py").exists()
    assert not (course.venv / "course-setup-downloads").exists()
    assert course.make("setup") == ""


def test_a_torch_that_is_there_is_kept_and_must_fit(ready: Course, tmp_path: Path) -> None:
    course = ready.copy(tmp_path / "course")
    cpu = write_wheel(tmp_path, "torch", "2.9.5+cpu", {"torch/__init__.py": "def zeros(*shape): pass"})
    status, told = course.run(str(course.venv / "bin/python"), "-m", "pip", "install", str(cpu))
    assert status == 0, told
    shutil.rmtree(course.site / "torchvision-0.26.0.dist-info")
    course.make("setup")  # the newest torchvision wants another torch
    assert (course.site / "torch-2.9.5+cpu.dist-info").exists()
    assert (course.site / "torchvision-0.24.5.dist-info").exists()
    (course.site / "torchvision/ops.py").write_text(
        "raise RuntimeError('operator torchvision::nms is not there')"
    )
    course.stamp.unlink()
    sentence = course.fault()
    assert "torch 2.9.5+cpu and torchvision 0.24.5 do not work together" in sentence
    assert "operator torchvision::nms is not there" in sentence
    assert "pip uninstall -y torch torchvision" in sentence


# The versions that were tested


def versions_in(course: Course, venv: str = ".venv") -> dict[str, str]:
    folder = course.root / venv / course.site.relative_to(course.venv)
    names = [path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info")]
    return dict(name.rsplit("-", 1) for name in names)


@pytest.fixture
def index(tmp_path: Path, wheels: Path) -> dict[str, str]:
    """A package index that has newer versions, too, and torch with a library that it needs."""
    folder = tmp_path / "index"
    folder.mkdir()
    for version in ("1.0", "1.2", "2.0"):
        write_wheel(folder, "ruff", version, {"ruff/__init__.py": "", "ruff/__main__.py": RECORDER})
    for version in ("13.0", "13.1"):
        write_wheel(folder, "nvidia_cublas", version, {"cublas.py": ""})
    zeros = {"torch/__init__.py": "def zeros(*shape): pass"}
    write_wheel(folder, "torch", "2.12.0", zeros, ["nvidia-cublas==13.1"])
    write_wheel(folder, "torch", "2.13.0", zeros, ["nvidia-cublas>=13"])
    write_wheel(folder, "torchvision", "0.27.0", TORCHVISION, ["torch==2.12.0"])
    write_wheel(folder, "torchvision", "0.28.0", TORCHVISION, ["torch==2.13.0"])
    return {"PIP_FIND_LINKS": f"{folder} {wheels}"}


TESTED = (
    "nvidia-cublas==13.1\nruff==1.2\ntorch==2.12.0\ntorchvision==0.27.0\ncolorama==0.4.6 ; os_name == 'nt'\n"
)


def test_set_up_installs_what_was_tested_and_follows_a_change_of_it(
    course: Course, index: dict[str, str]
) -> None:
    tested = course.root / "constraints.txt"
    tested.write_text(TESTED)
    told = course.make("setup", **index)
    assert "was tested" not in told
    assert versions_in(course).items() >= {"ruff": "1.2", "torch": "2.12.0", "torchvision": "0.27.0"}.items()
    assert course.make("setup", **index) == ""
    tested.write_text(TESTED.replace("ruff==1.2", "ruff==1.0"))
    course.make("setup", **index)
    assert versions_in(course)["ruff"] == "1.0"


def test_a_tested_version_that_the_index_no_longer_has_is_named_and_the_nearest_is_taken(
    course: Course, index: dict[str, str], tmp_path: Path
) -> None:
    (course.root / "constraints.txt").write_text(TESTED.replace("ruff==1.2", "ruff==1.3"))
    told = course.make("setup", **index)
    assert "ruff 1.3 was tested, but the package index does not have it: 1.2 instead.\n" in told
    assert versions_in(course).items() >= {"ruff": "1.2", "torch": "2.12.0"}.items()

    # the whole set of torch is gone
    (course.root / "constraints.txt").write_text(
        "ruff==0.9\ntorch==2.12.5\ntorchvision==0.27.5\nnvidia-cublas==13.2\n"
    )
    shutil.rmtree(course.venv)
    told = course.make("setup", **index)
    assert "torch 2.12.5 was tested, but the package index does not have it: 2.12.0 instead." in told
    assert "ruff 0.9 was tested, but the package index does not have it: 1.0 instead." in told
    assert versions_in(course).items() >= {"ruff": "1.0", "torch": "2.12.0", "torchvision": "0.27.0"}.items()


def test_somebodys_own_constraints_stand_over_ours(
    course: Course, index: dict[str, str], tmp_path: Path
) -> None:
    """As on a machine whose administrator keeps torch below a version, in pip's own settings."""
    (course.root / "constraints.txt").write_text(
        TESTED.replace("2.12.0", "2.13.0").replace("0.27.0", "0.28.0").replace("13.1", "13.0")
    )
    cap = tmp_path / "cap.txt"
    cap.write_text("torch<2.13\n")
    told = course.make("setup", PIP_CONSTRAINT=str(cap), **index)
    assert "torch 2.13.0 was tested" in told
    assert versions_in(course).items() >= {"ruff": "1.2", "torch": "2.12.0", "torchvision": "0.27.0"}.items()


def test_a_torch_that_is_there_keeps_what_it_was_built_with(ready: Course, tmp_path: Path) -> None:
    course = ready.copy(tmp_path / "course")  # torch 2.11.0
    write_wheel(tmp_path, "torch", "2.12.0", {"torch/__init__.py": "def zeros(*shape): pass"})
    (course.root / "constraints.txt").write_text("ruff==1.0\ntorch==2.12.0\ntorchvision==0.27.0\n")
    told = course.make("setup", PIP_FIND_LINKS=f"{course.wheels} {tmp_path}")
    assert "was tested" not in told
    assert versions_in(course).items() >= {"torch": "2.11.0", "torchvision": "0.26.0"}.items()


def test_the_newest_are_those_of_the_index_at_each_call(
    course: Course, index: dict[str, str], tmp_path: Path
) -> None:
    (course.root / "constraints.txt").write_text(TESTED)
    course.make("setup", "SETUP_ARGS=--newest", **index)
    assert versions_in(course, ".venv-newest").items() >= {"ruff": "2.0", "torch": "2.13.0"}.items()
    write_wheel(index["PIP_FIND_LINKS"].split()[0], "ruff", "2.1", {"ruff/__init__.py": ""})
    course.make("setup", "SETUP_ARGS=--newest", **index)
    assert versions_in(course, ".venv-newest")["ruff"] == "2.1"
    assert not course.venv.exists()


def test_the_tested_versions_are_names_and_versions_within_our_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    ranges = {canonicalize_name(each.name): each.specifier for each in map(Requirement, asked)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested: dict[str, list[str]] = {}
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[\w.!]+( ; .+)?", line), line
        requirement = Requirement(line)
        (pinned,) = requirement.specifier
        tested.setdefault(canonicalize_name(requirement.name), []).append(pinned.version)
    installed_by_set_up = ranges.keys() - {"nbgrader", "torchft"}
    assert installed_by_set_up <= tested.keys()
    for name in installed_by_set_up:
        assert [version for version in tested[name] if version not in ranges[name]] == [], name


# Faults, one sentence each


def test_a_missing_python3_venv_is_told_and_then_mended(first_runs: tuple[Course, str, str]) -> None:
    _, without, after = first_runs
    assert "`sudo apt install python3.11-venv`" in without
    assert "Set-up done" in after


def test_an_old_python_is_told(course: Course, tmp_path: Path) -> None:
    code = "import sys\nsys.version_info = (3, 9, 2, 'final', 0)"
    sentence = course.fault(PYTHONPATH=str(module(tmp_path / "old", "sitecustomize", code)))
    assert "this is Python 3.9.2 and the course needs 3.11 or newer" in sentence
    assert "`PYTHON=python3.12 make setup`" in sentence
    assert not course.venv.exists()


def test_an_old_python_can_read_the_set_up() -> None:
    ast.parse((ROOT / ".ci" / "setup.py").read_text(), feature_version=(3, 6))


def test_a_venv_of_an_old_python_is_told(course: Course) -> None:
    (course.venv / "bin").mkdir(parents=True)
    (course.venv / "bin/python").write_text("#!/bin/sh\necho 3 9\n")
    (course.venv / "bin/python").chmod(0o755)
    assert ".venv holds Python 3.9 and the course needs 3.11 or newer: remove the folder" in course.fault()


def test_no_python_at_all_is_told(course: Course, tmp_path: Path) -> None:
    for name in ("make", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name))
    assert "there is no python3 here: install Python 3.11 or newer" in course.fault(PATH=str(tmp_path))
    assert "there is no python3.99 here" in course.fault(PYTHON="python3.99")


def test_too_little_disk_space_is_told_before_anything_is_made(course: Course, tmp_path: Path) -> None:
    sentence = course.fault(PYTHONPATH=str(disk_with(tmp_path / "disk", 1.25)))
    assert re.search(r"the disk is too full: making \.venv takes about \d\.\d GB", sentence)
    assert "1.2 GB are free" in sentence
    assert not course.venv.exists()


def test_less_disk_space_is_enough_where_torch_is_there(
    ready: Course, course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1.25e9))
    assert load_setup(ready).check_the_space() == ["--no-cache-dir"]
    fresh = load_setup(course)
    with pytest.raises(fresh.Fault, match="CPU build"):
        fresh.check_the_space()


def test_a_disk_that_fills_up_is_told(ready: Course, tmp_path: Path) -> None:
    """A real small disk, in a mount namespace that ends with the command."""
    disk, mount = tmp_path / "disk", "mount -t tmpfs -o size=60m none"
    disk.mkdir()
    trial = subprocess.run([require("unshare", "a mount of its own"), "-m", "true"], capture_output=True)
    if trial.returncode != 0:
        pytest.skip("only root may mount a small disk")
    write_wheel(tmp_path, "torch", "2.11.0", {"torch/__init__.py": "", "torch/large": bytes(60_000_000)})
    script = f"""
        {mount} "{disk}" && cp -a "{ready.root}/." "{disk}" && cd "{disk}" || exit
        rm -r .venv/lib/python3*/site-packages/torch-*
        exec make setup
        """
    small = Course(disk, tmp_path)
    told = small.fault("unshare", "-m", "sh", "-c", script)
    assert "the disk is full: make room, then run the same command again" in told


def test_no_network_and_no_package_are_told(ready: Course, tmp_path: Path) -> None:
    course = ready.copy(tmp_path / "course")
    shutil.rmtree(course.site / "torchvision-0.26.0.dist-info")
    course.stamp.unlink()
    nowhere = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0"}
    sentence = course.fault(PIP_FIND_LINKS="", **nowhere)
    assert "pip could not reach the package index, is there a network?" in sentence
    assert "No matching distribution found for torchvision>=0.24" in sentence
    assert ".venv/course-setup.log" in sentence
    assert "127.0.0.1" in course.log.read_text()
    version = sysconfig.get_python_version()
    assert f"no package that fits Python {version} on this machine" in course.fault(PIP_FIND_LINKS="")


# make test, make lint, make lesson, make lab


def test_make_test_and_test_all_run_what_they_say_and_stop_at_what_fails(
    ready: Course, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    forms = ["workflows .github/workflows/*.yml", "actions .github/actions/*/action.yml"]
    lint = ["ruff check", "ruff format --check", "mypy"]
    lint += [f"check_jsonschema -qq --builtin-schema vendor.github-{each}" for each in forms]
    nbval = "--nbval-lax --nbval-current-env --nbval-cell-timeout=300 --nbval-kernel-startup-timeout=300"
    pytest_ = f"pytest -p tests.support.tiers -p tests.support.selection {nbval} --durations=10"
    short = f"{pytest_} -n 4 -m short lessons tests"
    change = "--changed-since auto --third auto"
    rest = [f"{pytest_} -m alone {change} tests"]
    rest += [f"{pytest_} -n 4 -m not short and not alone {change} lessons tests"]
    everything = [f"{pytest_} -m alone tests", f"{pytest_} -n 4 -m not alone lessons tests"]

    def called(*arguments: str, failing: str = "none") -> tuple[int, list[str], str]:
        calls.write_text("")
        status, told = ready.run("make", *arguments, CALLS=str(calls), FAILING=failing)
        return status, calls.read_text().splitlines(), (told.splitlines() or [""])[-1]

    status, made, last = called("test")
    assert (status, made) == (0, [*lint, short])
    assert "`make test-all` runs what was deselected" in last
    assert called("test", "LF=1")[1][-1] == short.replace("-m short", "-m short --again")
    assert called("test-change") == (0, rest, "make test-change: passed.")
    assert called("test-all") == (0, lint + everything, "make test-all: lint, tests and notebooks passed.")
    assert called("lint")[:2] == (0, lint)
    for failing, until in {"ruff format": 2, "github-actions": 5, "-n 4": 7, "-m alone": 7}.items():
        status, made, last = called("test-all", failing=failing)
        assert (status != 0, made, "passed" in last) == (True, (lint + everything)[:until], False)


def test_make_oldest_runs_in_an_environment_of_the_lowest_versions(course: Course, tmp_path: Path) -> None:
    (course.root / "pyproject.toml").write_text(PYPROJECT.replace('"ruff", ', '\n    "ruff>=1.0",\n'))
    write_wheel(tmp_path, "torch", "2.9.0", {"torch/__init__.py": "def zeros(*shape): pass"})
    write_wheel(tmp_path, "torchvision", "0.24.0", TORCHVISION, ["torch==2.9.0"])
    write_wheel(tmp_path, "ruff", "2.0", {})
    (course.root / "course_lib").mkdir()
    for name, code in {"__init__": "", "__main__": RECORDER, "broken": "def"}.items():
        (course.root / "course_lib" / f"{name}.py").write_text(code)
    for number in ("00", "01", "02", "06", "07", "08"):
        (course.root / "lessons" / f"{number}_topic.ipynb").touch()
    calls = tmp_path / "calls"

    def oldest(failing: str = "none") -> tuple[int, list[str], str]:
        calls.write_text("")
        both = f"{course.wheels} {tmp_path}"
        status, told = course.run("make", "oldest", CALLS=str(calls), FAILING=failing, PIP_FIND_LINKS=both)
        return status, calls.read_text().splitlines(), told

    status, (doctor, tests, notebooks), told = oldest()
    assert status == 0, told
    assert "Set-up done: the course is in .venv-oldest." in told
    assert told.endswith("make oldest: doctor, tests and notebooks passed with the lowest versions.\n")
    assert doctor == "course_lib doctor"
    compiled = {path.name.partition(".")[0] for path in (course.root / "course_lib").glob("*/*.pyc")}
    assert compiled == {"__init__", "__main__"}, "by set-up: PYTHONDONTWRITEBYTECODE is set here"
    files = [word for word in tests.split() if word.startswith("tests/")]
    assert len(files) > 3
    assert [path for path in files if not (ROOT / path).exists()] == []
    assert re.findall(r"\d\d_topic", notebooks) == ["00_topic", "02_topic", "06_topic", "08_topic"]
    assert not course.venv.exists()
    made = course.root / ".venv-oldest" / course.site.relative_to(course.venv)
    there = {path.name for path in made.glob("*.dist-info")}
    assert {f"{name}.dist-info" for name in ("torch-2.9.0", "torchvision-0.24.0", "ruff-1.0")} <= there
    for failing, until in {"doctor": 1, "launcher": 2, "00_topic": 3}.items():
        status, made_calls, told = oldest(failing)
        assert (status != 0, len(made_calls), "passed" in told) == (True, until, False)


def test_make_oldest_tries_every_lower_bound(course: Course) -> None:
    shutil.copy(ROOT / "pyproject.toml", course.root)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + extras["lab"] + extras["test"]
    pinned = load_setup(course).lowest_versions().splitlines()
    assert {bound.replace(">=", "==") for bound in asked} <= set(pinned)


def test_make_lesson_hands_the_numbers_on(ready: Course, tmp_path: Path) -> None:
    script = ready.root / "tests" / "notebooks" / "execute.py"
    script.parent.mkdir(parents=True)
    script.write_text("import sys; print(sys.prefix, sys.argv[1:])")
    assert ready.make("lesson", "N=00 02 06") == f"{ready.venv} ['00', '02', '06']\n"


def test_make_names_its_commands(course: Course) -> None:
    told = set(re.findall(r"^make ([\w-]+): ", course.make(), re.M))
    for page in ("README.md", "AGENTS.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / page).read_text(), re.M)) <= told, page
    assert {
        "setup",
        "lab",
        "update",
        "test",
        "oldest",
        "lint",
        "lesson",
        "look",
        "bench",
        "gpu",
    } <= told


def test_make_lab_opens_the_first_lesson_on_this_machine_alone(course: Course, tmp_path: Path) -> None:
    """The JupyterLab of this environment, in a .venv that borrows its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", course.venv], check=True, timeout=LIMIT)
    (course.site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    shared = Path(sys.prefix) / "share" / "jupyter"
    (course.venv / "share/jupyter/lab").mkdir(parents=True)
    for path in [*shared.iterdir(), *(shared / "lab").iterdir()]:
        if path.name not in ("lab", "settings"):
            (course.venv / "share/jupyter" / path.relative_to(shared)).symlink_to(path)
    (course.venv / "etc/jupyter").mkdir(parents=True)
    extensions = "etc/jupyter/jupyter_server_config.d"
    (course.venv / extensions).symlink_to(Path(sys.prefix) / extensions)
    setup = load_setup(course)
    setup.write(setup.LAB_SETTINGS, json.dumps(setup.NO_NEWS))
    setup.write(setup.SERVER_SETTINGS, json.dumps(setup.NO_PULLING_BY_LINK))
    setup.write(setup.STAMP, setup.wanted())
    lesson = course.root / "lessons" / "00_start_here.ipynb"
    lesson.write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    # a kernel of the same name elsewhere, and a taken port
    wrong = tmp_path / "wrong" / "kernels" / "python3" / "kernel.json"
    wrong.parent.mkdir(parents=True)
    wrong.write_text(json.dumps({"argv": ["false"], "display_name": "wrong", "language": "python"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        surroundings = {"JUPYTER_PATH": str(tmp_path / "wrong"), "JUPYTER_PREFER_ENV_PATH": "0"}
        lab = course.start("make", "lab", f"ARGS=--no-browser --port={port}", **surroundings)
        try:
            told = ""
            while not (found := re.search(r"http://127\.0\.0\.1:(\d+)(/lab\S*)\?token=(\w+)", told)):
                line = lab.stdout.readline()
                assert line, told
                told += line
            address, token = f"http://127.0.0.1:{found[1]}", found[3]
            assert int(found[1]) != port
            assert found[2] == "/lab/tree/lessons/00_start_here.ipynb"

            def ask(path: str, **options: str) -> object:
                request = urllib.request.Request(f"{address}{path}?token={token}", **options)
                with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                    return json.loads(answer.read() or "null")

            def answers() -> bool:
                try:
                    return ask("/api") is not None
                except OSError:
                    return False

            wait_for(answers, LIMIT, "JupyterLab to answer")
            assert ask("/api/contents/lessons/00_start_here.ipynb")["type"] == "notebook"
            news = ask("/lab/api/settings/@jupyterlab/apputils-extension:notification")["schema"][
                "properties"
            ]
            assert (news["fetchNews"]["default"], news["checkForUpdates"]["default"]) == ("false", False)
            assert ask("/api/kernelspecs")["kernelspecs"]["python3"]["spec"]["display_name"] != "wrong"
            with pytest.raises(urllib.error.HTTPError, match="404"):  # nbgitpuller's page
                ask("/git-pull")
            assert {each.host for each in listening(psutil.Process(lab.pid))} == {"127.0.0.1"}
            ask("/api/shutdown", method="POST")
            lab.communicate(timeout=LIMIT)
        finally:
            if lab.poll() is None:
                os.killpg(lab.pid, signal.SIGKILL)
                lab.communicate(timeout=LIMIT)


# .ci/run


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="CI runs on Linux")
@pytest.mark.parametrize(
    ("recipe", "change", "passes"),
    [
        ("true", "true", True),
        ("false", "true", False),
        ("true", "false", False),
        ("sleep 600 &", "true", False),
    ],
)
def test_ci_fails_with_the_tests_and_for_what_they_leave_behind(
    course: Course, tmp_path: Path, recipe: str, change: str, passes: bool
) -> None:
    programs = [tmp_path / "course-programs" / name for name in ("chromium", "sbatch", "bwrap", "ip", "tc")]
    told_of = 'echo "1 passed, all=$$COURSE_REQUIRE_ALL"'
    says = 'echo "tests/test_it.py::test (call): it is 2" >>"$$COURSE_FAILURES"'
    (course.root / "Makefile").write_text(
        f"test:\n\t@setsid {recipe}\n\t@{told_of}\ntest-change:\n\t@{says}\n\t@{change}\n"
    )
    environment = course.environment(COURSE_GRACE_SECONDS="1", WHO=str(tmp_path))
    for program in programs:
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", course.root / ".ci" / "run"],
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode == 0) == passes, done.stdout
    assert ("1 passed, all=1" in done.stdout) == (recipe != "false")
    assert done.stdout.endswith("What failed:\n\n\ntests/test_it.py::test (call): it is 2\n"), (
        "whatever came before"
    )
    assert ("left a process behind" in done.stdout) == ("sleep" in recipe)
    assert ("sleep 600" in done.stdout) == ("sleep" in recipe)
    assert processes_marked("WHO", str(tmp_path)) == []
