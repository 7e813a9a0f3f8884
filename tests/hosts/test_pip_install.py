"""`pip install` of the course leaves the versions of Colab and Kaggle alone, and lessons run with them.

The lists beside this file have those versions, as far as the course or its dependencies touch them. Each test
installs one from the package index, which takes minutes, and 7 GB until it ends: only with COURSE_HOSTS=1.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS = sorted(Path(__file__).parent.glob("*.txt"))
COPIED = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "course_lib", "lessons")
LESSONS = ("00", "02", "06", "08", "10", "13")
NBVAL = ["--nbval-lax", "--nbval-cell-timeout=300", "--nbval-kernel-startup-timeout=300"]
OURS = {"JUPYTER_PATH", "PYTHONPATH", "VIRTUAL_ENV"}  # a host has none of this environment


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Return what a command prints; fail with all of it if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | environment
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, **both)
    assert done.returncode == 0, done.stdout
    return done.stdout


def python_with(version: str) -> str:
    """Return a Python of this version, from PATH or pyenv; without one, skip the test."""
    there = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for python in (f"python{version}", *glob.glob(f"{there}/versions/{version}.*/bin/python")):
        if shutil.which(python) and not subprocess.run([python, "-c", "import ensurepip"]).returncode:
            return python
    pytest.skip(f"no Python {version} here")


def versions(python: Path) -> dict[str, str]:
    listed = run(python, "-m", "pip", "list", "--format=json", folder=python.parent).splitlines()
    return {each["name"]: each["version"] for each in json.loads(listed[0])}


@pytest.mark.skipif(os.environ.get("COURSE_HOSTS") != "1", reason="COURSE_HOSTS=1 asks for it: 7 GB, minutes")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_a_host_keeps_its_versions_and_runs_lessons(path: Path, tmp_path: Path) -> None:
    (version,) = re.findall(r"Python (\d+\.\d+)\.\d+$", path.read_text().splitlines()[0])
    course, venv = tmp_path / "course", tmp_path / "venv"
    python = venv / "bin" / "python"
    course.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, course / name)
    try:
        run(python_with(version), "-m", "venv", venv, folder=tmp_path)
        run(python, "-m", "pip", "install", "--only-binary", ":all:", "-r", path, folder=tmp_path)
        before = versions(python)
        for packages in ([f"{course}[albert]"], ["pytest", "nbclient", "nbval"]):  # README's cells
            print(run(python, "-m", "pip", "install", *packages, folder=tmp_path))
        after = versions(python)
        assert {name: after.get(name) for name in before} == before
        print("added:", {name: after[name] for name in after if name not in before})

        kernel = tmp_path / "jupyter" / "kernels" / path.stem / "kernel.json"
        kernel.parent.mkdir(parents=True)
        command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel.write_text(json.dumps({"argv": command, "display_name": path.stem, "language": "python"}))
        lessons = [lesson for number in LESSONS for lesson in course.glob(f"lessons/{number}_*.ipynb")]
        told = run(
            *(sys.executable, "-m", "pytest", "-q", *NBVAL, f"--nbval-kernel-name={path.stem}", *lessons),
            folder=course,
            JUPYTER_PATH=str(tmp_path / "jupyter"),
            PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        )
        print(told)
    finally:
        shutil.rmtree(venv, ignore_errors=True)
