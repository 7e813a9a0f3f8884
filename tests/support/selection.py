"""Select the tests that a change touches (`--changed-since BASE`) and a third of the rest (`--third DAY`).

Those that matter most to the change come first, and none begins after `--until TIME`: a change that touches
everything may have more tests than CI has time. The run's last lines count what was left out so.

A file depends on what it imports, and on what its strings name: a module (``"course_lib.rank.preload"``), a
file (``ROOT / "lessons" / "scripts" / "train_ddp.py"``), the files of a folder that it reads
(``.glob("*.ipynb")``). A notebook depends on what its cells import and name. A test is touched when its file
depends on something that has changed, directly or not. A test with a lesson's number in its id is not touched
by the questions, answers and notebooks of other lessons.

This cannot see a dependency that no source names, such as a path or a module name that is put together at run
time, or a third-party package. A test with only such a dependency runs when its third does.
"""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import json
import os
import re
import subprocess
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.support.imports import imports
from tests.support.tiers import scope

FOLDERS = ("course_lib", "tests", "lessons", "solutions", "exercises", ".ci", ".binder")
LIBRARY = "course_lib/__init__.py"
SCRIPTS = "lessons/scripts"
THIS = "tests/support/selection.py"

# A change here touches every test.
FOR_ALL = re.compile(
    r"(.*/)?conftest\.py|tests/(support/(selection|imports|tiers)\.py|tiers\.toml)|pyproject\.toml|environment\.yml|constraints\.txt|Makefile|\.ci/.*(?<!\.md)"
)
# A change here touches the tests that name the file, or none.
PAGES = re.compile(r".*\.(md|png|cff)|LICENSE|\.github/.*")

TEST = re.compile(r"tests/(.*/)?test_\w+\.py")

# One lesson's files: notebooks, recorded figures, judges of its questions, and answers to try those on
OF_LESSON = re.compile(
    r"(?:lessons|solutions|exercises)/(\d\d)_.*\.ipynb|lessons/recorded/(?:gpu/)?(\d\d)_.*"
    r"|course_lib/exercises/questions/[a-z]+(\d\d)\.py|tests/exercises/answers/answers_(\d\d)\.py"
)
# Tests with a lesson's or a question's number in their ids
NAMES_LESSONS = re.compile(r"tests/(exercises|mutants|notebooks)/")
LESSON = re.compile(r"\b(\d\d)(?=\.\d|_[a-z])")

WORD = re.compile(r"[\w*./-]+\.\w+")
# Folders that count even if one is all that a string says
TOLD = {"lessons", "solutions", "exercises", ".ci", ".binder"}
TELLING = (
    *(ast.Import, ast.ImportFrom, ast.Expr, ast.Constant, ast.JoinedStr),
    *(ast.BinOp, ast.Attribute, ast.Call, ast.List, ast.Tuple),
)
KERNELS = {"ipykernel", "jupyter_client", "nbclient"}


@functools.cache
def lesson_of(path: str) -> str:
    """Return the lesson that a file belongs to, as in "07", or ""."""
    found = OF_LESSON.fullmatch(path)
    return next(filter(None, found.groups())) if found else ""


def lesson_in(nodeid: str) -> str:
    """Return the lesson that a test's id names, or that its notebook belongs to, or ""."""
    path, _, rest = nodeid.partition("::")
    if not NAMES_LESSONS.match(path):
        return lesson_of(path)
    found = LESSON.search(rest.partition("[")[2])
    return found[1] if found else ""


# --- which file depends on which --------------------------------------------------------------------------


@dataclass
class Source:
    """What one file names: imports, strings, and the literal parts of its paths."""

    names: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    globs: set[tuple[str, str]] = field(default_factory=set)  # the literal part of a path, and a pattern
    reads_all: bool = False


@dataclass
class Graph:
    """The dependencies between files; paths are relative to the root."""

    files: set[str]  # all existing files
    uses: dict[str, set[str]]
    passed: dict[str, set[str]]  # parent packages of a module: their own imports are not followed

    def closure(self, start: str, lesson: str = "") -> set[str]:
        """Return a file and all that it depends on; with a lesson, without what belongs to other lessons."""
        found, waiting = set(), [start]
        while waiting:
            path = waiting.pop()
            if path in found or (lesson and lesson_of(path) not in ("", lesson)):
                continue
            found.add(path)
            found |= self.passed.get(path, set())
            waiting += self.uses.get(path, ())
        return found


def said_by(nodes: Iterable[ast.AST], module: str, is_package: bool) -> Source:
    """Collect what a module's source names from its nodes, in the order of `ast.walk`, without docstrings."""
    nodes = [node for node in nodes if isinstance(node, TELLING)]
    said = Source(set(imports(nodes, module, is_package)))
    names = {"__name__": module, "__package__": module if is_package else module.rpartition(".")[0]}
    seen = set()  # ids of nodes that are part of an earlier one
    for node in nodes:
        if isinstance(node, ast.Expr):
            seen.add(id(node.value))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in seen:
                said.strings.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            said.strings.add(_text(node, names))
        elif isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Div) and id(node) not in seen:
                path, parts = _literal_end(node)
                said.paths.add(path)
                seen.update(parts)
        elif isinstance(node, ast.Attribute):
            said.reads_all |= node.attr == "copytree"
            if isinstance(node.value, ast.Name) and node.value.id == "course_lib":
                said.names.add(f"course_lib.{node.attr}")
                if node.attr == "__file__":
                    said.paths.add("course_lib")
        elif isinstance(node, (ast.List, ast.Tuple)):
            said.names |= set(_run_as_programs(node.elts))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("glob", "rglob"):
            at = _literal_end(node.func.value)[0]  # type: ignore[attr-defined]
            said.globs |= {(at, _text(word, names)) for word in node.args[:1]}
    said.reads_all |= ("", "*") in said.globs
    return said


def _text(node: ast.expr, names: dict[str, str]) -> str:
    """Return the text of a string or f-string, with ``*`` for what is known only at run time."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return names.get(getattr(getattr(node, "value", None), "id", ""), "*")


def _literal_end(node: ast.expr) -> tuple[str, list[int]]:
    """Return ``lessons/scripts`` for ``ROOT / "lessons" / "scripts"``, and the ids of the nodes used."""
    words: list[str] = []
    parts: list[int] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        if not (isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)):
            break
        words.insert(0, node.right.value)
        parts += [id(node), id(node.right)]
        node = node.left
    return "/".join(words), parts


def _run_as_programs(words: list[ast.expr]) -> Iterator[str]:
    """Yield ``course_lib.__main__`` for ``[sys.executable, "-m", "course_lib", "doctor"]``."""
    values = [word.value if isinstance(word, ast.Constant) else None for word in words]
    for option, name in itertools.pairwise(values):
        if option == "-m" and isinstance(name, str):
            yield f"{name}.__main__"


def cells_of(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells, with ``pass`` for lines for IPython and the shell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", each) for each in sources]


def files_of(root: Path) -> set[str]:
    """Return the course's files, relative to the root."""
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*")] + list(root.iterdir())
    inside = (path.relative_to(root) for path in paths if path.is_file())
    return {each.as_posix() for each in inside if not {"__pycache__", ".ipynb_checkpoints"} & {*each.parts}}


def module_of(path: str) -> str:
    """Return the name by which a file is imported."""
    return re.sub(r"/__init__$", "", path.removesuffix(".py").removeprefix("lessons/")).replace("/", ".")


def graph(root: Path) -> Graph:
    """Build the graph from all sources and notebooks."""
    return _Reader(root).graph()


class _Reader:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = files_of(root)
        self.modules = {module_of(each): each for each in sorted(self.files) if each.endswith(".py")}
        self.folders = {parent.as_posix() for each in self.files for parent in PurePosixPath(each).parents}
        self.named: dict[str, list[str]] = defaultdict(list)  # paths by file name
        for each in sorted(self.files):
            self.named[each.rpartition("/")[2]].append(each)
        library = ast.parse((root / LIBRARY).read_text(encoding="utf-8"))
        self.home_of: dict[str, str] = next(
            ast.literal_eval(node.value)
            for node in library.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME_OF"
        )

    def graph(self) -> Graph:
        uses: dict[str, set[str]] = {}
        passed: dict[str, set[str]] = {}
        in_kernels = set()
        collects = gc.isenabled()
        gc.disable()  # it would scan all the trees again and again, in twice the time
        try:
            for path in sorted(self.files - {THIS}):  # its strings name files that it does not load
                if path.endswith(".py"):
                    text = (self.root / path).read_text(encoding="utf-8")
                    nodes = ast.walk(ast.parse(text))
                elif path.endswith(".ipynb"):
                    nodes = _nodes(cells_of(self.root / path))
                else:
                    continue
                said = said_by(nodes, module_of(path), path.endswith("/__init__.py"))
                uses[path], passed[path] = self.meant(path, said)
                if path.endswith(".ipynb") or KERNELS & {name.partition(".")[0] for name in said.names}:
                    in_kernels.add(path)
        finally:
            if collects:
                gc.enable()
        for path in in_kernels:  # in a kernel, the import starts what `launch` needs
            uses[path] |= uses[LIBRARY]
        uses[LIBRARY] = {"course_lib/notebook.py"} & self.files  # which every import of the library loads
        for path in passed:
            if LIBRARY in uses[path] | passed[path]:
                passed[path] |= uses[LIBRARY]
        for path in uses:
            if path.startswith("tests/"):
                above = (f"{parent.as_posix()}/conftest.py" for parent in PurePosixPath(path).parents)
                uses[path] |= self.files.intersection(above) - {path}
        return Graph(self.files, uses, passed)

    def meant(self, path: str, said: Source) -> tuple[set[str], set[str]]:
        """Return the files that a source depends on, and the ``__init__.py`` of their parent packages."""
        folder = path.rpartition("/")[0]
        uses, passed = set(), set()
        for name in said.names | {each for text in said.strings for each in self.modules_in(text)}:
            for file in self.module(name, folder):
                uses.add(file)
                parents = PurePosixPath(file).parents
                passed |= self.files.intersection(f"{parent.as_posix()}/__init__.py" for parent in parents)
        named = self.named_in(path, folder, said)
        if not path.startswith(".ci/"):  # the test files that a source names are examples
            named = {each for each in named if not TEST.fullmatch(each)}
        return (uses | named) - {path}, passed - uses - {path}

    def named_in(self, path: str, folder: str, said: Source) -> set[str]:
        """Return the files that a source's strings and paths name."""
        words = {word for text in said.strings if "." in text for word in WORD.findall(text)}
        words |= said.strings & self.named.keys()  # such as LICENSE
        if path.startswith("course_lib/") or folder == SCRIPTS:  # these use no other folder of the repository
            return {file for name in words for file in self.file(name, {folder})}
        folders = {each for name in said.paths | (said.strings & TOLD) for each in self.folder(name, folder)}
        places = {folder, SCRIPTS, "", *folders}
        found = {file for name in words | said.paths for file in self.file(name, places)}
        for at, pattern in said.globs - {("", "*")}:
            ends = {each for each in self.folders if f"/{each}".endswith(f"/{at}")}
            found |= self.matching(pattern, ends if at else {folder, *folders})
        whole = tuple(f"{each}/" for each in folders if said.reads_all or "/" in each)
        return found | {each for each in self.files if each.startswith(whole)}

    def modules_in(self, text: str) -> Iterator[str]:
        """Yield the course's modules that a string names, as dotted names or in embedded source."""
        for base, names in re.findall(
            r"from ((?:course_lib|tests|scripts)[\w.]*) import (\([^)]*|[^\n;]*)", text
        ):
            yield from (f"{base}.{name}" for name in re.findall(r"\w+", names))
        yield from re.findall(r"(?<![\w.])(?:course_lib|tests|scripts)(?:\.\w+)+(?:\.\*)?", text)

    def module(self, name: str, folder: str) -> Iterator[str]:
        """Yield the file of a module, or of the longest module name that a dotted name begins with."""
        parts = name.split(".")
        if parts[-1] == "*":  # all modules of a package
            package = "/".join(parts[:-1])
            yield from (each for each in self.files if PurePosixPath(each).match(f"{package}/*.py"))
            return
        if parts[0] == "course_lib" and len(parts) > 1 and parts[1] in self.home_of:
            parts = ["course_lib", *self.home_of[parts[1]].split(".")]
        for end in range(len(parts), 0, -1):
            start = ".".join(parts[:end])
            found = self.modules.get(start) or self.modules.get(f"scripts.{start}")
            if found is None and folder.startswith(("tests", ".ci")):
                found = self.modules.get(f"{folder.replace('/', '.')}.{start}")  # a script beside it
            if found:
                yield found
                return

    def folder(self, name: str, beside: str) -> set[str]:
        """Return the folders that the end of a path may mean."""
        there = {name, f"{beside}/{name}"} & self.folders
        if not there and "/" in name:
            there = {each for each in self.folders if each.endswith(f"/{name}")}
        return there

    def file(self, name: str, places: Iterable[str]) -> set[str]:
        """Return the files that the end of a path may mean; a bare name means files in the given folders."""
        there = self.named.get(name.rpartition("/")[2], [])
        if "/" in name:
            whole = name.removeprefix("../").removeprefix("./")
            return {each for each in there if each == whole or each.endswith(f"/{whole}")}
        return {each for each in there if each.rpartition("/")[0] in places}

    def matching(self, pattern: str, places: Iterable[str]) -> set[str]:
        """Return the files in and below these folders that match a pattern of names or paths."""
        if "/" not in pattern:
            starts = tuple(f"{place}/" for place in places)
            named = (self.named[name] for name in self.named if fnmatch(name, pattern))
            return {file for files in named for file in files if file.startswith(starts)}
        patterns = [f"{place}/{pattern}" for place in places]
        if re.match(r"[\w.-]+/", pattern):  # a leading wildcard means the folders of a run, not the course
            patterns.append(pattern)
        patterns = [each.replace("**/", "*") for each in patterns]
        return {file for file in self.files if any(fnmatch(file, each) for each in patterns)}


def _nodes(cells: Iterable[str]) -> Iterator[ast.AST]:
    for source in cells:
        try:
            yield from ast.walk(ast.parse(source))
        except SyntaxError:  # a cell that demonstrates one, or another language
            yield ast.Constant(source)


# --- what has changed -------------------------------------------------------------------------------------


class NoGit(Exception):
    """Git cannot say what has changed."""


def git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise NoGit(str(said).strip().splitlines()[0]) from error


def base_of(root: Path, asked: str) -> tuple[str, str]:
    """Return the commit to compare with, and why it is that one."""
    if asked != "auto":
        return asked, "as asked"
    if named := os.environ.get("COURSE_BASE"):
        return named, "COURSE_BASE"
    try:
        upstream = git(root, "rev-parse", "--abbrev-ref", "--symbolic-full-name", "@{upstream}").strip()
        if int(git(root, "rev-list", "--count", "@{upstream}..HEAD")):
            return upstream, "HEAD is ahead of its upstream branch"
    except NoGit:
        pass  # there is no upstream branch
    old = git(root, "rev-list", "-1", "--first-parent", "--before=4 hours ago", "HEAD").strip()
    if not old:
        raise NoGit("no commit is 4 hours old")
    if old == git(root, "rev-parse", "HEAD").strip() and not git(root, "status", "--porcelain").strip():
        raise NoGit("HEAD is 4 hours old, nothing has changed since, and no other base is known")
    return old[:12], "the newest commit that is 4 hours old"


def changed_since(root: Path, base: str) -> list[str]:
    """Return the files that differ from where HEAD left base, including uncommitted and untracked ones."""
    differ = git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", "--merge-base", base, "--")
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*differ.split("\0"), *untracked.split("\0")} - {""})


# --- what that touches ------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What has changed and which tests that touches: plain data, which xdist sends to its workers."""

    base: str = ""  # the commit to compare with, and why it is that one
    changed: list[str] = field(default_factory=list)
    everything: str = ""  # why every test is touched
    touched_by: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by test file and lesson
    day: int | None = None  # decides which third of the other tests runs
    until: float | None = None  # seconds since 1970: no test, or group that runs in a row, begins later

    def reasons(self, nodeid: str) -> list[str]:
        """Return the changed files that touch a test: all of them, if its file is not known."""
        by_lesson = self.touched_by.get(nodeid.partition("::")[0])
        if by_lesson is None:
            return self.changed
        return by_lesson.get(lesson_in(nodeid), by_lesson[""])

    def touches(self, nodeid: str) -> bool:
        return bool(self.everything or self.reasons(nodeid))

    def has_its_turn(self, nodeid: str) -> bool:
        """Return whether it is a test's turn: a third each day, and all lessons, which we promise to run."""
        return self.day is not None and (nodeid.startswith("lessons/") or in_third(nodeid, self.day))

    def turn(self, nodeid: str) -> int:
        """Return 0 for what has changed, 1 for lessons, 2 for what is touched, 3 for today's third, or 4."""
        path = nodeid.partition("::")[0]
        if path in self.changed or lesson_in(nodeid) in {lesson_of(each) for each in self.changed} - {""}:
            return 0
        if nodeid.startswith("lessons/"):
            return 1
        if not self.everything and self.touches(nodeid):
            return 2
        return 3 if self.has_its_turn(nodeid) else 4


def plan_of(whole: Graph, changed: Collection[str]) -> Plan:
    """Plan which tests run, given the changed files."""
    plan = Plan(changed=sorted(changed))
    known = {*whole.uses}.union(*whole.uses.values(), *whole.passed.values())
    support = {each for each in whole.closure("tests/conftest.py") if each.startswith("tests/support/")}
    for path in plan.changed:
        if FOR_ALL.fullmatch(path) or path in support:
            plan.everything = f"{path} touches every test"
            return plan
        if path not in whole.files and not path.startswith(".github/"):
            plan.everything = f"{path} is gone: nobody knows which tests it touched"
            return plan
        if path not in known and not PAGES.fullmatch(path) and not TEST.fullmatch(path):
            plan.everything = f"{path}: nobody knows which tests it touches"
            return plan
    lessons = sorted({lesson_of(each) for each in whole.uses} - {""})
    of_family = {lesson: {each for each in whole.uses if lesson_of(each) == lesson} for lesson in lessons}
    for start in whole.uses:
        if start.startswith("lessons/") and start.endswith(".ipynb"):
            of_start = ["", lesson_of(start)]
        elif TEST.fullmatch(start):
            of_start = ["", *(lessons if NAMES_LESSONS.match(start) else ())]
        else:
            continue
        plan.touched_by[start] = {}
        for lesson in of_start:
            reached = whole.closure(start, lesson)
            plan.touched_by[start][lesson] = [
                path
                for path in plan.changed
                if (reached & of_family[lesson] if lesson and lesson_of(path) == lesson else path in reached)
            ]
    return plan


def in_third(nodeid: str, day: int) -> bool:
    """Return whether a test runs on this day, one of three; what one worker runs in a row stays together."""
    return zlib.crc32(scope(nodeid).encode()) % 3 == day % 3


def planned(root: Path, asked: str) -> Plan:
    """Plan for what has changed since a commit; every test is touched if that is not known."""
    try:
        base, why = base_of(root, asked)
        changed = changed_since(root, base)
        plan = plan_of(graph(root), changed)
    except NoGit as error:
        return Plan(everything=f"git cannot say what has changed ({error})")
    except (SyntaxError, ValueError) as error:  # in a source or a notebook
        return Plan(everything=f"what depends on what is not known ({error})")
    plan.base = f"{base} ({why})"
    return plan


# --- pytest -----------------------------------------------------------------------------------------------

SHOWN = 12  # changed files in the report, at most
NO_TIME = "no time is left for it (--until)"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "which tests run")
    group.addoption(
        "--changed-since",
        metavar="BASE",
        help="only tests that a change since this commit touches; auto: since COURSE_BASE, or the upstream "
        "branch, or the newest commit that is 4 hours old",
    )
    group.addoption(
        "--third",
        metavar="DAY",
        help="of the tests that no change touches, those whose turn is on this day (a number; auto: today)",
    )
    group.addoption("--until", metavar="TIME", type=float, help="no test begins later (seconds since 1970)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("changed_since") or config.getoption("third"):
        config.pluginmanager.register(Selection(config), "course-selection")


class Selection:
    """Plugin that deselects what is not in the plan. xdist's controller plans for all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.lines: list[str] = []
        self.begun: set[str] = set()  # groups of tests that run in a row
        if from_controller := getattr(config, "workerinput", {}).get("course_plan"):
            self.plan, self.report = Plan(**json.loads(from_controller[0])), Path(from_controller[1])
            return
        self.report = Path(tempfile.gettempdir()) / f"course-selection-{os.getpid()}"
        since, day = config.getoption("changed_since"), config.getoption("third")
        self.plan = planned(config.rootpath, since) if since else Plan()
        if day:
            self.plan.day = int(time.time() // 86400) if day == "auto" else int(day)
        self.plan.until = config.getoption("until")

    def pytest_report_header(self) -> list[str]:
        plan = self.plan
        lines = [f"files changed since {plan.base}: {len(plan.changed)}"] if plan.base else []
        return lines + ([f"every test runs: {plan.everything}"] if plan.everything else [])

    @pytest.hookimpl(trylast=True)  # after -m and -k have deselected theirs
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, left_out, touched, by = [], [], 0, Counter(dict.fromkeys(self.plan.changed, 0))
        for item in items:
            by.update(self.plan.reasons(item.nodeid))
            if self.plan.touches(item.nodeid):
                touched += 1
                kept.append(item)
            elif self.plan.has_its_turn(item.nodeid):
                kept.append(item)
            else:
                left_out.append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
        turns: dict[str, int] = {}
        for item in kept:
            name, turn = scope(item.nodeid), self.plan.turn(item.nodeid)
            turns[name] = min(turn, turns.get(name, turn))
        items[:] = sorted(kept, key=lambda item: turns[scope(item.nodeid)])
        if not self.plan.everything:
            self.lines = [f"  tests that {path} touches: {count}" for path, count in by.most_common(SHOWN)]
            self.lines += [f"  and {len(by) - SHOWN} more changed files"] if len(by) > SHOWN else []
        day, others = self.plan.day, len(kept) - touched
        third = (
            "" if day is None else f"; {others} more: every lesson, a third of the rest by date (day {day})"
        )
        self.lines.append(f"tests touched: {touched}{third}; left out: {len(left_out)}")
        if getattr(config, "workerinput", {}).get("workerid") == "gw0":
            self.report.write_text("\n".join(self.lines))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        group = scope(item.nodeid)
        if self.plan.until and time.time() > self.plan.until and group not in self.begun:
            pytest.skip(NO_TIME)
        self.begun.add(group)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        late = [self.plan.turn(each.nodeid) for each in skipped if NO_TIME in str(each.longrepr)]
        if late:
            near = sum(turn < 3 for turn in late)
            told = f"left out, because time was up: {len(late)} tests, {near} near the change"
            terminalreporter.write_line(told)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # the plan has none
            session.exitstatus = pytest.ExitCode.OK

    def pytest_report_collectionfinish(self) -> list[str]:
        return self.lines

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["course_plan"] = [json.dumps(asdict(self.plan)), str(self.report)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        """Print the first worker's report, once; the controller itself collects nothing."""
        if node.gateway.id == "gw0" and self.report.exists():
            reporter = node.config.pluginmanager.get_plugin("terminalreporter")
            for line in self.report.read_text().splitlines():
                reporter.write_line(line)
            self.report.unlink()
