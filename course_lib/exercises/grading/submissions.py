"""Find the notebooks that a class submitted, by learner, and read them, whatever is in the files."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

MOST_BYTES = 20 << 20  # of a notebook, with the pictures in it
MOST_CELLS = 2000
MOST_FILES = 100  # beside a notebook
MOST_BESIDE = 16 << 20  # bytes of them together
MOST_DEPTH = 30  # folders in folders
SAVE_IT = "open it in JupyterLab, save it there and hand it in again"
OF_AN_EXERCISE = re.compile(r"e?(\d\d)(?=[-_.])")  # "06_ddp_with_spawn", and cells "e06-1-check"
A_CHECK = re.compile(r"""check\(\s*["'](\d\d\.\d)["']\s*,""")
A_WHOLE_CHECK = re.compile(A_CHECK.pattern + r"[^()]*\)")  # over two lines, too
NOTHING_MORE = re.compile(r"#|import |from |" + A_CHECK.pattern)  # beside a check
OF_TOOLS = re.compile(r"\.(git|ipynb_checkpoints|Trash.*|venv|cache|vscode)|__MACOSX|__pycache__")  # folders


class Unreadable(Exception):
    """The file is not a notebook that can be graded; the message says why, and what to do."""


@dataclass(frozen=True)
class Submission:
    """A notebook that a learner submitted."""

    learner: str
    path: Path
    is_alone: bool = False  # in a folder of the learner's own
    root: Path | None = None  # the folder in which it was found, which learners cannot replace

    @property
    def name(self) -> str:
        """Its file's name, in characters that can be written anywhere."""
        return _in_letters(self.path.name)


@dataclass
class Cell:
    """A code cell: its name in reports, its source, and the question that it checks, if any."""

    name: str
    source: str
    number: str | None


@dataclass
class Exercise:
    """A notebook: the number of its exercise, its code cells, and what was odd when it was read."""

    number: str  # "06"
    cells: list[Cell]
    notes: list[str] = field(default_factory=list)


class NoSubmissions(Exception):
    """There is nothing to grade; the message names the folders."""


def submissions(folders: Sequence[Path], outputs: Collection[Path] = ()) -> list[Submission]:
    """Find all notebooks in the folders, sorted by learner and path.

    A notebook directly in a folder is named after its learner; if it has an exercise's name, the folder is.
    Further down, the subfolder is. The list includes links, and subfolders without a notebook, so that they
    are refused by name; links to folders are not followed. It leaves out ``outputs``, which the grader
    writes. `NoSubmissions` is raised if a folder cannot be read, or if there is no notebook.
    """
    submitted: dict[tuple[str, str], Submission] = {}
    written = set(map(os.path.realpath, outputs))
    for folder in folders:
        try:
            entries = sorted(path for path in folder.iterdir() if os.path.realpath(path) not in written)
        except OSError as error:
            raise NoSubmissions(f"{str(folder)!r}: {error.strerror}") from None
        for path in entries:
            if _is_notebook(path):
                learner = folder.resolve().name if OF_AN_EXERCISE.match(path.name) else path.stem
                submitted[learner, str(path)] = Submission(_in_letters(learner), path, False, folder)
            elif os.path.isdir(path) and not OF_TOOLS.fullmatch(path.name):
                for notebook in [*_notebooks_in(path)] or [path]:
                    found = Submission(_in_letters(path.name), notebook, True, folder)
                    submitted[path.name, str(notebook)] = found
    if not any(map(_is_notebook, (each.path for each in submitted.values()))):
        where = ", ".join(map(str, folders))
        raise NoSubmissions(f"there is no notebook (.ipynb) in {where}: name the folder with the submissions")
    return [submitted[key] for key in sorted(submitted)]


def _is_notebook(path: Path) -> bool:
    return path.suffix.lower() == ".ipynb" and not path.name.startswith(".") and not os.path.isdir(path)


def _notebooks_in(folder: Path) -> Iterator[Path]:
    for place, _, found in _walk(folder):
        yield from filter(_is_notebook, (Path(place, name) for name in found))


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk like `os.walk`, but not too deep, into no hidden folder, and not from a link.

    Folders that cannot be listed are skipped.
    """
    for place, names, found in os.walk(folder) if not os.path.islink(folder) else ():
        is_deep = len(Path(place).parts) - len(folder.parts) >= MOST_DEPTH
        names[:] = sorted(name for name in names if not is_deep and not _is_hidden(name))
        yield place, names, found


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or bool(OF_TOOLS.fullmatch(name))


def helpers(submission: Submission) -> tuple[dict[str, bytes], list[str]]:
    """Return the files beside a notebook in the learner's own folder, and a note on those left out.

    Notebooks, hidden files and the targets of links are not among them, nor are folders with notebooks, which
    may be another learner's.
    """
    files: dict[str, bytes] = {}
    left_out = []
    folder, size = submission.path.parent, 0
    may_have_some = submission.is_alone and _is_notebook(submission.path)
    for path in islice(_beside(folder), 10 * MOST_FILES * may_have_some):
        with suppress(OSError, Unreadable):
            if len(files) < MOST_FILES and size + path.lstat().st_size <= MOST_BESIDE:
                files[str(path.relative_to(folder))] = found = content(path, submission.root)
                size += len(found)
                continue
        left_out.append(_in_letters(path.name))
    if not left_out:
        return files, []
    names = ", ".join(left_out[:3]) + ", …" * (len(left_out) > 3)
    most = f"at most {MOST_FILES} files of {MOST_BESIDE >> 20} MiB together do, and no links"
    return files, [f"of the files beside the notebook, {names} did not come along: {most}"]


def _beside(folder: Path) -> Iterator[Path]:
    """Yield the files beside a notebook, and then those below."""
    for place, names, found in _walk(folder):
        found += [name for name in names if os.path.islink(Path(place, name))]
        if place == str(folder):
            names[:] = [name for name in names if not any(_notebooks_in(Path(place, name)))]
        paths = (Path(place, name) for name in sorted(found) if not name.startswith("."))
        yield from (path for path in paths if not _is_notebook(path))


def _in_letters(name: str) -> str:
    """Return a file's name as text, with bytes that are not UTF-8 escaped; different names stay different."""
    return os.fsencode(name.replace("\\", "\\\\")).decode("utf-8", "backslashreplace")


def content(path: Path, root: Path | None = None) -> bytes:
    """Return a file's bytes; raise `Unreadable` if it is a link, a pipe or a folder, or too long.

    No folder between ``root`` and the file may be a link, either.
    """
    root = root or path.parent
    try:
        file = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        for part in path.relative_to(root).parts:
            above = file
            try:
                file = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
            finally:
                os.close(above)
    except OSError as error:
        why = f"it cannot be opened: {error.strerror}"
        if error.errno == errno.ELOOP:
            why = "it is a link to another file, which is not followed: hand in the file itself"
        raise Unreadable(why) from None
    about = os.fstat(file)
    if stat.S_ISDIR(about.st_mode):
        os.close(file)
        raise Unreadable("there is no notebook (.ipynb) in the folder: hand in the one that you worked in")
    with open(file, "rb") as opened:
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("it is not a file, but a folder, a pipe or a device")
        if about.st_size > MOST_BYTES:
            sizes = f"it has {about.st_size / 1e6:,.0f} MB, and {MOST_BYTES / 1e6:.0f} MB are the most"
            outputs = "clear its outputs (Edit, Clear Outputs of All Cells)"
            raise Unreadable(f"{sizes}: {outputs} and hand it in again")
        return opened.read(MOST_BYTES + 1)


def read(text: bytes, name: str, questions: Collection[str]) -> Exercise:
    """Read an exercise from a notebook's bytes; the file's name may help to tell which exercise it is.

    `Unreadable` is raised if it is not a notebook, or not of an exercise of this course.
    """
    try:
        whole = json.loads(text.decode(json.detect_encoding(text), "replace"))
        cells = whole["cells"]
        if not isinstance(cells, list) or whole.get("nbformat", 4) != 4:
            raise TypeError
    except RecursionError:
        raise Unreadable("its JSON is nested too deep") from None
    except ValueError as error:
        raise Unreadable(f"it is not JSON, as notebooks are ({error!s:.100}): {SAVE_IT}") from None
    except (KeyError, TypeError, AttributeError):
        raise Unreadable(f"it is JSON, but no notebook of version 4: {SAVE_IT}") from None
    if len(cells) > MOST_CELLS:
        raise Unreadable(f"it has {len(cells)} cells, and {MOST_CELLS} are the most")
    code = [cell for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    number = _exercise(code, name, {question[:2] for question in questions})
    found = list(_cells(code, number, questions))
    return Exercise(number, found, list(filter(None, map(_more_than_a_check, found))))


def _marks(cell: dict[str, Any]) -> Iterator[str]:
    """Yield a cell's names, which may say what exercise it comes from."""
    about = cell.get("metadata")
    nbgrader = about.get("nbgrader") if isinstance(about, dict) else None
    for mark in (nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None, cell.get("id")):
        if isinstance(mark, str):
            yield mark


def _exercise(code: list[dict[str, Any]], name: str, known: set[str]) -> str:
    """Return the exercise that most of the cells name, or else the file's name."""
    for marks in ((mark for cell in code for mark in _marks(cell)), [name]):
        named = Counter(found[1] for mark in marks if (found := OF_AN_EXERCISE.match(mark)))
        if numbers := [number for number, _ in named.most_common() if number in known]:
            return numbers[0]
    keep = "keep the file's name (06_….ipynb), or the cells with the checks"
    raise Unreadable(f"nothing in it says which exercise it is: {keep}")


def _cells(code: list[dict[str, Any]], number: str, questions: Collection[str]) -> Iterator[Cell]:
    for place, cell in enumerate(code, 1):
        source, count = cell.get("source"), cell.get("execution_count")
        if isinstance(source, list):
            source = "".join(line for line in source if isinstance(line, str))
        if not isinstance(source, str):
            continue
        shown = count if isinstance(count, int) and 0 < count < 10**6 else place
        checked = _checked(cell, source, number)
        yield Cell(f"Cell In[{shown}]", source, checked if checked in questions else None)


def _more_than_a_check(cell: Cell) -> str:
    """Say so if a cell with a check contains more than the check, which does not run."""
    if cell.number is None:
        return ""
    lines = [line.strip() for line in A_WHOLE_CHECK.sub("", cell.source).splitlines()]
    more = next((line for line in lines if line and not NOTHING_MORE.match(line)), "")
    where = f"{cell.name}, which checks {cell.number}, has more in it than its check ({more:.40})"
    return more and f"{where}: cells with checks are not run, so put your answer into the cell above it"


def _checked(cell: dict[str, Any], source: str, number: str) -> str | None:
    """Return the question that a cell checks, by the cell's name or else by its only line."""
    for mark in _marks(cell):
        if named := re.fullmatch(rf"e{number}-(\d)-check", mark):
            return f"{number}.{named[1]}"
    line = source.strip()
    asked = A_CHECK.match(line)
    return asked[1] if asked and len(line.splitlines()) == 1 and asked[1].startswith(number) else None
