"""The house: which room may know of which, and what a rank has to load. The rule stands in `MAY_IMPORT`."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import course_lib
from tests.support.imports import imports
from tests.support.tiers import TIERS, scope

HOUSE = Path(course_lib.__file__).parent
ROOT = Path(__file__).parents[1]
GROUND = {"host", "files", "kill", "compat", "tracebacks", "pickling"}
MAY_IMPORT = {
    **{room: set() for room in ("host", "files", "kill", "compat")},
    "tracebacks": {"host"},
    "pickling": {"compat", "tracebacks"},
    "figures": set(),  # draws, and knows no run
    "data": GROUND,
    "measure": GROUND,
    "lesson": GROUND | {"figures"},
    "checkpoint": GROUND,
    "record": GROUND,  # the files of a run: their layout, who writes them, who reads them
    "rank": GROUND | {"record"},  # all below it is loaded in every rank
    "run": GROUND | {"record", "figures"},
    "report": GROUND | {"record", "figures", "run"},
    "launcher": GROUND | {"record", "figures", "run", "report", "rank"},
    "exercises": GROUND | {"record", "figures", "run", "report", "launcher"},
}
ALL = set(MAY_IMPORT)
MAY_IMPORT |= {"__init__": ALL, "__main__": ALL | {"__init__"}}  # the face, and the command


def room_of(module: str) -> str:
    """Of ``course_lib.rank.api``: ``rank``."""
    return [*module.split("."), "__init__"][1]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(HOUSE.rglob("*.py")):
        parts = ("course_lib", *path.relative_to(HOUSE).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts), path


def wrong_ways(module: str, source: str, is_package: bool = False) -> list[str]:
    room = room_of(module)
    found = imports(ast.walk(ast.parse(source)), module, is_package)
    known = {room_of(each) for each in found if each.split(".")[0] == "course_lib"} - {room}
    return [f"{module} imports {each}" for each in sorted(known - MAY_IMPORT[room])]


def test_imports_go_one_way() -> None:
    found = [
        wrong
        for module, path in modules()
        for wrong in wrong_ways(module, path.read_text(), path.name == "__init__.py")
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from ..launcher.launch import launch",
        "from .. import launcher",
        "import course_lib.launcher.launch",
        "from course_lib import launcher",
        "def f():\n    from ..launcher import launch",
        "if TYPE_CHECKING:\n    from ..launcher.launch import launch",
    ],
)
def test_an_import_that_goes_the_wrong_way_is_seen(line: str) -> None:
    assert wrong_ways("course_lib.rank.api", line) == ["course_lib.rank.api imports launcher"]
    assert wrong_ways("course_lib.exercises.check", line) == []


def test_every_room_has_its_rule_and_no_public_name() -> None:
    rooms = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    files = {path.stem for path in HOUSE.glob("*.py")}
    assert rooms | files == set(MAY_IMPORT)
    assert not (rooms | files) & set(course_lib.__all__), "a module would stand for the function"


def test_every_public_name_is_there() -> None:
    assert all(getattr(course_lib, name).__name__ == name for name in course_lib.__all__)
    assert set(course_lib.__all__) <= set(dir(course_lib))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = course_lib.nothing


# --- what is loaded, asked in a fresh process -------------------------------------------------------------

LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def loaded_by(*steps: str) -> list[set[str]]:
    """What one process has loaded after each step of its code."""
    code = "\n".join(f"{step}\n{LOADED}" for step in steps)
    environment = {name: value for name, value in os.environ.items() if name != "COURSE_RUN"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in run.stdout.splitlines()]


def rooms_in(loaded: set[str]) -> set[str]:
    return {room_of(each) for each in loaded if each.startswith("course_lib.")} - GROUND


def test_a_rank_loads_what_it_uses_alone() -> None:
    of_torchrun, around_a_program, in_the_fork_server = loaded_by(
        "from course_lib import log, place, track",
        "import course_lib.rank.entry_script",
        "import course_lib.rank.preload",
    )
    for heavy in ("torch", "IPython", "ipywidgets"):
        assert heavy not in of_torchrun
    assert "torch.distributed" in in_the_fork_server
    for loaded in (of_torchrun, around_a_program, in_the_fork_server):
        assert rooms_in(loaded) == {"rank", "record"}
        assert "matplotlib" not in loaded


def test_a_judges_work_loads_no_launcher_and_no_other_judge() -> None:
    """Each rank of a check would pay for it."""
    package = "course_lib.exercises.questions"
    of_one, of_all = loaded_by(f"import {package}.q05", f"import {package}; {package}.load()")
    assert {each for each in of_one if each.startswith(package)} == {package, f"{package}.q05"}
    assert {f"{package}.q05", f"{package}.q06"} <= of_all
    for loaded in (of_one, of_all):
        assert rooms_in(loaded) == {"exercises"}


# --- the lists of the tests -------------------------------------------------------------------------------


def test_each_entry_of_the_tiers_is_there() -> None:
    for entries in TIERS.values():
        for entry in entries:
            path, _, name = entry.partition("::")
            files = list(ROOT.glob(path)) or list(ROOT.glob(f"*/{path}")) or list(ROOT.glob(f"{path}.ipynb"))
            assert files, entry
            assert re.split(r"[?*]", name)[0] in "".join(file.read_text() for file in files if name), entry


def test_what_a_file_makes_for_all_its_tests_is_made_once() -> None:
    """One worker runs them in a row: tests of other files in between would end what is made for a module."""
    for path in ROOT.glob("tests/**/test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        if re.search(r'^@pytest\.fixture\(.*scope="module"', path.read_text(), re.MULTILINE):
            assert scope(f"{name}::test") != f"{name}::test" or name.startswith("tests/gpu/"), name


# --- how large it is --------------------------------------------------------------------------------------

MOST_LINES = {
    "course_lib": 10_500,
    "course_lib/exercises": 8_390,
    "tests": 26_702,
    ".ci": 600,
    "lessons/scripts": 4_097,
}


@pytest.mark.parametrize("folder", MOST_LINES)
def test_it_grows_no_larger(folder: str) -> None:
    """Whoever makes a part smaller lowers its ceiling; course_lib is counted without its exercises."""
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".json", ".toml", ".txt")]
    own = [path for path in files if folder != "course_lib" or "exercises" not in path.parts]
    lines = sum(path.read_text().count("\n") for path in own if not path.is_symlink())
    assert lines <= MOST_LINES[folder]


def test_the_librarys_page_lists_every_public_name() -> None:
    listed = re.findall(r"^- `(\w+)`: ", (HOUSE / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(course_lib.__all__)
