"""Find the notebooks that a class submitted, by learner, and read one, whatever it turns out to be."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_BYTES = 20 << 20  # of a notebook, with the pictures in it
MOST_CELLS = 2000
OF_AN_EXERCISE = re.compile(r"e?(\d\d)(?=[-_.])")  # "06_ddp_with_spawn", and cells "e06-1-check"
A_CHECK = re.compile(r"""check\(\s*["'](\d\d\.\d)["']\s*,""")


class Unreadable(Exception):
    """The file is not a notebook that can be graded; the message says why, and what to do."""


@dataclass(frozen=True)
class Submission:
    """A notebook that a learner submitted."""

    learner: str
    path: Path

    @property
    def name(self) -> str:
        """The name of its file, in characters that can be written anywhere."""
        return _in_letters(self.path.name)


@dataclass
class Cell:
    """A code cell: its name in reports, its source, and the question that it checks, if any."""

    name: str
    source: str
    number: str | None


@dataclass
class Exercise:
    """A notebook as it was read: its exercise's number, its code cells, and what was odd about it."""

    number: str  # "06"
    cells: list[Cell]
    notes: list[str] = field(default_factory=list)


class NoSubmissions(Exception):
    """There is nothing to grade; the message says where it was looked for."""


def submissions(folders: Sequence[Path]) -> list[Submission]:
    """Find all notebooks in the folders, sorted by learner and path; include links, to be refused by name.

    A notebook directly in a folder belongs to the learner that its file name gives, or, if it is named as an
    exercise is, to the one that the folder's name gives. A notebook further down belongs to the learner that
    the subfolder's name gives. Links to folders are not followed. `NoSubmissions` is raised if a folder does
    not exist, or if there is no notebook in any.
    """
    submitted: dict[tuple[str, str], Submission] = {}
    for folder in folders:
        if not folder.is_dir():
            raise NoSubmissions(f"there is no folder {str(folder)!r}")
        for path in folder.rglob("*.ipynb"):
            parts = path.relative_to(folder).parts
            if path.is_dir() or any(part.startswith(".") for part in parts):
                continue
            learner = parts[0]
            if len(parts) == 1:
                learner = folder.resolve().name if OF_AN_EXERCISE.match(path.name) else path.stem
            submitted[learner, str(path)] = Submission(_in_letters(learner), path)
    if not submitted:
        where = ", ".join(map(str, folders))
        raise NoSubmissions(f"there is no notebook (.ipynb) in {where}: name the folder with the submissions")
    return [submitted[key] for key in sorted(submitted)]


def _in_letters(name: str) -> str:
    """Return a file's name as text, with the bytes escaped that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def content(path: Path) -> bytes:
    """Return a file's bytes; raise `Unreadable` if it is a link, a pipe or a folder, or too long."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        why = f"it cannot be opened: {error.strerror}"
        if error.errno == errno.ELOOP:
            why = "it is a link to another file, which is not followed: hand in the file"
        raise Unreadable(why) from None
    with open(file, "rb") as opened:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("it is no file, but a folder, a pipe or a device")
        if about.st_size > MOST_BYTES:
            sizes = f"it has {about.st_size / 1e6:,.0f} MB, and {MOST_BYTES / 1e6:.0f} MB are the most"
            outputs = "clear its outputs (Edit, Clear Outputs of All Cells)"
            raise Unreadable(f"{sizes}: {outputs} and hand it in again")
        return opened.read(MOST_BYTES + 1)


def read(text: bytes, name: str, questions: Collection[str]) -> Exercise:
    """Read the exercise from a notebook's bytes; the file's name, too, may say which of the exercises it is.

    `Unreadable` is raised if it is not a notebook, or not one of an exercise of this course.
    """
    notes = []
    try:
        words = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        notes.append(f"it is not in UTF-8 (byte {text[error.start]:#x}), and was read as Latin-1")
        words = text.decode("latin-1")
    try:
        whole = json.loads(words)
        cells = whole["cells"]
        if not isinstance(cells, list) or whole["nbformat"] != 4:
            raise TypeError
    except RecursionError:
        raise Unreadable("its JSON is nested too deep") from None
    except ValueError as error:
        raise Unreadable(f"it is not JSON, as notebooks are ({error!s:.100})") from None
    except (KeyError, TypeError):
        raise Unreadable("it is JSON, but no notebook of version 4: open and save it in JupyterLab") from None
    if len(cells) > MOST_CELLS:
        raise Unreadable(f"it has {len(cells)} cells, and {MOST_CELLS} are the most")
    if (language := _language(whole)) != "python":
        notes.append(f"its kernel is for {language:.30}, and its cells were run as Python")
    code = [cell for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    number = _exercise(code, name, {question[:2] for question in questions})
    return Exercise(number, list(_cells(code, number, questions)), notes)


def _language(whole: dict[str, Any]) -> str:
    for part, key in (("language_info", "name"), ("kernelspec", "language")):
        language = _within(whole, "metadata", part, key)
        if isinstance(language, str):
            return language.lower()
    return "python"


def _within(whole: Any, *keys: str) -> Any:
    """Return what stands under these keys, one in the other; None if it does not."""
    for key in keys:
        whole = whole.get(key) if isinstance(whole, dict) else None
    return whole


def _marks(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the names in a cell that say where it comes from."""
    for mark in (_within(cell, "metadata", "nbgrader", "grade_id"), cell.get("id")):
        if isinstance(mark, str):
            yield mark


def _exercise(code: list[dict[str, Any]], name: str, known: set[str]) -> str:
    """Return which exercise it is, by what most of its cells say, or else by the file's name."""
    votes: Counter[str] = Counter()
    for cell in code:
        votes.update({named[1] for mark in _marks(cell) if (named := OF_AN_EXERCISE.match(mark))} & known)
    number = max(sorted(votes), key=votes.__getitem__, default="")
    if not number and (named := OF_AN_EXERCISE.match(name)):
        number = named[1]
    if number not in known:
        keep = "keep the file's name (06_….ipynb), or the cells with the checks"
        raise Unreadable(f"nothing in it says which exercise it is: {keep}")
    return number


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


def _checked(cell: dict[str, Any], source: str, number: str) -> str | None:
    """Return the question that a cell is there to check, by its own name or else by its only line."""
    for mark in _marks(cell):
        if named := re.fullmatch(rf"e{number}-(\d)-check", mark):
            return f"{number}.{named[1]}"
    line = source.strip()
    asked = A_CHECK.match(line)
    return asked[1] if asked and len(line.splitlines()) == 1 and asked[1].startswith(number) else None
