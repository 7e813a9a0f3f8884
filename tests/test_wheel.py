"""The package as a wheel: every room is in it. (An editable install would hide one that is missing.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
LAUNCHES = """
import course_lib
from course_lib import check, launch

if __name__ == "__main__":
    print(course_lib.__file__)
    print(launch(lambda: "a rank", nprocs=2, dashboard=False).results)
    print(check("02.1", lambda losses, sizes: 0.0))
    print(all(getattr(course_lib, name) for name in course_lib.__all__))
"""


def run(*arguments: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_imports_and_launches(tmp_path: Path) -> None:
    source, packages = tmp_path / "source", tmp_path / "packages"
    source.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(
        ROOT / "course_lib",
        source / "course_lib",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (source / "lessons").mkdir()
    shutil.copy(ROOT / "lessons" / "symptoms.md", source / "lessons")
    (source / "tests").mkdir()  # beside it, and no part of it
    (source / "tests" / "test_nothing.py").touch()
    run("-m", "pip", "wheel", *PIP, ".", folder=source)
    (wheel,) = source.glob("*.whl")

    zipfile.ZipFile(wheel).extractall(packages)
    program = tmp_path / "program.py"
    program.write_text(LAUNCHES)
    file, results, points, *_, all_names = run(
        program, folder=tmp_path, PYTHONPATH=str(packages)
    ).splitlines()

    assert Path(file).parent == packages / "course_lib"
    assert results == "['a rank', 'a rank']"
    assert points == "02.1: 0 of 4 points"
    assert all_names == "True"
    assert (packages / "course_lib" / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
    assert (packages / "course_lib" / "symptoms.md").is_file(), "for course help, and for reports"
    assert not (packages / "tests").exists()
