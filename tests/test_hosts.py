"""The image in `.binder` and the hosts' page name only what is there."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BINDER = ROOT / ".binder"
DOCKERFILE = (BINDER / "Dockerfile").read_text()
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
PAGE = (BINDER / "README.md").read_text()
FIRST = "lessons/00_start_here.ipynb"
NOTEBOOKS = "/opt/course/notebooks/"


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in INSTRUCTIONS if line.startswith(name + " ")]


def copied() -> list[tuple[str, str]]:
    """What the image gets from the repository, and where to."""
    found = []
    for line in instructions("COPY"):
        *sources, target = [part for part in line.split() if not part.startswith("--")]
        found += [(source, target) for source in sources]
    return found


def test_the_image_copies_what_is_there_and_no_answers() -> None:
    assert [source for source, _ in copied() if not (ROOT / source).exists()] == []
    for source, target in copied():
        assert "solutions" not in source
        assert "tests" not in source
        if (ROOT / source).is_dir():
            assert target.rstrip("/").endswith(source), "COPY copies what is in a folder, not the folder"


def test_the_image_installs_extras_that_there_are_with_all_that_a_build_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = re.findall(r'"/tmp/course\[([\w,]+)\]"', DOCKERFILE)
    assert set(asked.split(",")) <= set(project["optional-dependencies"])
    there = {source for source, target in copied() if target.startswith("/tmp/course")}
    assert {"pyproject.toml", "constraints.txt", "LICENSE", "course_lib", project["readme"]} <= there


def test_the_image_is_not_roots_and_every_argument_has_a_default() -> None:
    arguments = dict(line.split("=", 1) for line in instructions("ARG"))
    assert instructions("USER") == ["$NB_USER"] or instructions("USER") == ["$NB_UID"]
    assert int(arguments["NB_UID"]) >= 1000
    assert ":" in instructions("FROM")[0], "Binder wants a base with a tag"
    assert not instructions("FROM")[0].endswith(":latest")
    assert not re.search(r"(?i)token|password|secret", "".join(INSTRUCTIONS))
    for name in re.findall(r"--build-arg (\w+)=", DOCKERFILE + PAGE):
        assert name in arguments


def test_what_starts_in_the_image_is_in_it() -> None:
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    in_path = {Path(target).name for _, target in copied() if target.startswith("/opt/course/bin/")}
    assert entry[0] == "tini"
    assert " tini " in " ".join(instructions("RUN"))
    assert entry[-1] in in_path
    assert os.access(BINDER / "entrypoint", os.X_OK)
    assert json.loads((BINDER / "overrides.json").read_text())
    ast.parse((BINDER / "jupyter_server_config.py").read_text())
    for name in ("entrypoint", "jupyter_server_config.py"):
        assert f"course/{FIRST}" in (BINDER / name).read_text()
    assert (ROOT / FIRST).exists()
    assert ("lessons", f"{NOTEBOOKS}lessons/") in copied()


@pytest.mark.skipif(shutil.which("sh") is None, reason="the image is Linux")
@pytest.mark.parametrize("copies", [True, False])
def test_a_learner_gets_a_copy_once_and_keeps_it(tmp_path: Path, copies: bool) -> None:
    image, home = tmp_path / "image", tmp_path / "home"
    (image / "lessons").mkdir(parents=True)
    (image / FIRST).write_text("new")
    home.mkdir()
    script = tmp_path / "entrypoint"
    script.write_text((BINDER / "entrypoint").read_text().replace(NOTEBOOKS.rstrip("/"), str(image)))

    def start() -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "COURSE_COPY": str(int(copies))}
        command = ["sh", script, "sh", "-c", 'echo "opens $JUPYTERHUB_DEFAULT_URL"']
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert run.stderr == ""
        return run.stdout

    mine = home / "course" / FIRST
    if not copies:
        assert start() == "opens \n"
        assert list(home.iterdir()) == []
        return
    assert start() == f"opens /lab/tree/course/{FIRST}\n"
    assert mine.read_text() == "new"
    mine.write_text("mine")
    start()
    assert mine.read_text() == "mine"
    assert [path.name for path in home.iterdir()] == ["course"]


def test_a_home_that_cannot_be_written_is_told_and_the_server_starts(tmp_path: Path) -> None:
    run = subprocess.run(
        ["sh", BINDER / "entrypoint", "echo", "started"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "started\n"
    assert "could not be copied" in run.stderr


def test_the_page_names_what_is_there() -> None:
    targets = set(re.findall(r"(?m)^(\w+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"`make (\w+)", PAGE)) <= targets
    assert {"host"} <= targets
    for path in re.findall(r"-f (\S+)", DOCKERFILE + PAGE):
        assert (ROOT / path).exists(), path
    library = "".join(path.read_text() for path in (ROOT / "course_lib").rglob("*.py"))
    for variable in set(re.findall(r"COURSE_\w+", PAGE)):
        assert variable in library or variable in (BINDER / "entrypoint").read_text(), variable
    for path in re.findall(r"\]\((?!https?:|#)([^)]+)\)", PAGE):
        assert (BINDER / path).exists(), path
    for path in ("README.md", "exercises/README.md"):
        assert ".binder/README.md" in (ROOT / path).read_text(), "the page is linked"
