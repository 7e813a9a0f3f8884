"""The package as a wheel: every room is in it. (An editable install would hide one that is missing.)"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ["--no-index", "--no-deps", "--disable-pip-version-check", "--quiet"]
LAUNCHES = """
import course_lib
from course_lib import check, launch

if __name__ == "__main__":
    print(course_lib.__file__)
    print(launch(lambda: "a rank", nprocs=2, dashboard=False).results)
    print(check("02.1", lambda losses, sizes: 0.0))
    print(all(getattr(course_lib, name) for name in course_lib.__all__))
"""


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_in_an_empty_environment_imports_and_launches(tmp_path: Path) -> None:
    source, empty = tmp_path / "source", tmp_path / "empty"
    source.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(
        ROOT / "course_lib",
        source / "course_lib",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (source / "tests").mkdir()  # beside it, and no part of it
    (source / "tests" / "test_nothing.py").touch()
    run(sys.executable, "-m", "pip", "wheel", *PIP, "--no-build-isolation", ".", folder=source)
    (wheel,) = source.glob("*.whl")

    venv.create(empty, symlinks=True)
    python = empty / "bin" / "python"
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path)[:-1]
    )
    run(sys.executable, "-m", "pip", "--python", python, "install", *PIP, wheel, folder=tmp_path)
    (packages / "torch-and-the-like.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = tmp_path / "program.py"
    program.write_text(LAUNCHES)
    file, results, points, *_, all_names = run(python, program, folder=tmp_path).splitlines()

    assert Path(file).parent == packages / "course_lib"
    assert results == "['a rank', 'a rank']"
    assert points == "02.1: 0 of 2 points"
    assert all_names == "True"
    assert (packages / "course_lib" / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
    assert not (packages / "tests").exists()
