"""Which notebooks are whose, and what stands in a file that a stranger wrote."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from course_lib.exercises.grading import submissions as module
from course_lib.exercises.grading.score import answer_names
from course_lib.exercises.grading.submissions import (
    MOST_BYTES,
    NoSubmissions,
    Submission,
    Unreadable,
    content,
    helpers,
    read,
    submissions,
)
from tests.exercises.grading.toys import cell, check, notebook

ROOT = Path(__file__).parents[3]
QUESTIONS = {"99.1", "99.2", "06.1"}


def refused(text: bytes, name: str = "99_toys.ipynb") -> str:
    with pytest.raises(Unreadable) as why:
        read(text, name, QUESTIONS)
    return str(why.value)


def test_a_form_begins_with_the_name_that_its_check_takes() -> None:
    names = answer_names()
    asked = {}
    for path in sorted((ROOT / "exercises").glob("*.ipynb")):
        exercise = read(content(path), "without a number.ipynb", names)
        assert exercise.number == path.name[:2]
        checks = [each for each in exercise.cells if each.number]
        asked |= {each.number: each.source for each in checks}
    assert asked == {number: f'check("{number}", {name})' for number, name in names.items()}


def test_whose_notebooks_they_are(tmp_path: Path) -> None:
    names = ["anna.ipynb", "bert/06_ddp.ipynb", "bert/deeper/07_x.ipynb", "cleo/x/06.ipynb", ".git/a.ipynb"]
    names += ["bert/.ipynb_checkpoints/06_ddp.ipynb", "notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(notebook())
    found = [(each.learner, str(each.path.relative_to(tmp_path))) for each in submissions([tmp_path])]
    assert found == [("anna", names[0]), ("bert", names[1]), ("bert", names[2]), ("cleo", names[3])]
    assert [each.learner for each in submissions([tmp_path / "bert"])] == ["bert", "deeper"]


def test_a_folder_that_cannot_be_read_costs_its_learner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("anna", "bert"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "06_ddp.ipynb").write_bytes(notebook())
    place = os.open(tmp_path, os.O_RDONLY)
    for name in ["cleo", *["x" * 250] * 40]:  # its path is longer than any that can be opened
        os.mkdir(name, dir_fd=place)
        above, place = place, os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(above)
    os.close(os.open("06_ddp.ipynb", os.O_CREAT, dir_fd=place))
    os.close(place)

    def refuses(path: str) -> None:
        """As the system does to others than root, in a folder of mode 444."""
        if str(path).startswith(f"{tmp_path}/bert/"):
            raise PermissionError(errno.EACCES, "Permission denied", path)

    for name in ("stat", "lstat"):
        usual = getattr(os, name)

        def asked(path: str, *given: Any, usual: Any = usual, **more: Any) -> Any:
            refuses(path)
            return usual(path, *given, **more)

        monkeypatch.setattr(os, name, asked)
    found = {each.learner: each for each in submissions([tmp_path])}
    assert sorted(found) == ["anna", "bert", "cleo"]
    assert content(found["anna"].path, tmp_path) == notebook()
    with pytest.raises(Unreadable, match="no notebook"):
        content(found["cleo"].path, tmp_path)
    assert [helpers(each) for each in found.values()] == [({}, [])] * 3


def test_folders_too_deep_in_folders_are_not_walked(tmp_path: Path) -> None:
    for depth in (0, module.MOST_DEPTH, module.MOST_DEPTH + 1):
        place = tmp_path / "anna" / "/".join("d" * depth)
        place.mkdir(parents=True, exist_ok=True)
        (place / "06_ddp.ipynb").write_bytes(notebook())
    assert len(submissions([tmp_path])) == 2


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "06_ddp.ipynb").write_bytes(notebook())
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "anna").symlink_to(secret)
    with pytest.raises(Unreadable, match="link"):
        content(tmp_path / "class" / "anna" / "06_ddp.ipynb", tmp_path / "class")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoSubmissions, match="nowhere': No such file or directory"):
        submissions([tmp_path / "nowhere"])


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(notebook())
    link = tmp_path / "class" / "anna.ipynb"
    link.parent.mkdir()
    link.symlink_to(secret)
    (link.parent / "all").symlink_to("/")
    found = submissions([link.parent])
    assert [each.learner for each in found] == ["all", "anna"]
    for each in found:
        with pytest.raises(Unreadable, match="a link to another file"):
            content(each.path)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "a.ipynb"
    os.mkfifo(pipe)
    with pytest.raises(Unreadable, match="not a file"):
        content(pipe)
    with pytest.raises(Unreadable, match=r"no notebook \(.ipynb\) in the folder"):
        content(tmp_path)


def test_100_mb_are_not_read(tmp_path: Path) -> None:
    long = tmp_path / "a.ipynb"
    with open(long, "wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(Unreadable, match="it has 100 MB, and 21 MB are the most"):
        content(long)
    assert MOST_BYTES < 100_000_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"\x00\xff" * 100, "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"1" * 10_000, "not JSON|no notebook"),
        (b"[]", "no notebook"),
        (b'{"cells": 3, "nbformat": 4}', "no notebook"),
        (b'{"cells": [], "nbformat": 3}', "version 4"),
        (b'{"cells": [1, null, {"cell_type": "code"}, {"cell_type": []}], "nbformat": 4}', ""),
    ],
)
def test_what_is_no_notebook_says_why(text: bytes, words: str) -> None:
    if words:
        assert any(each in refused(text) for each in words.split("|"))
    else:
        assert read(text, "99_toys.ipynb", QUESTIONS).cells == []


def test_odd_values_are_left_out() -> None:
    cells = [cell(7), cell(["a", 3, "b"]), cell("x", metadata=[]), cell("y", metadata={"nbgrader": 1}, id=3)]
    cells += [cell("z", execution_count="<b>"), cell("w", execution_count=12)]
    found = read(notebook(*cells, kernelspec=[], language_info={"name": 3}), "99.ipynb", QUESTIONS | {"99.3"})
    assert [each.source for each in found.cells] == ["ab", "x", "y", "z", "w"]
    assert found.cells[-1].name == "Cell In[12]"
    assert found.notes == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_other_encodings_are_read(encoding: str) -> None:
    text = json.dumps({"cells": [cell("# é")], "metadata": {}, "nbformat": 4}, ensure_ascii=False)
    found = read(text.encode(encoding), "99_toys.ipynb", QUESTIONS)
    assert found.cells[0].source == ("# \ufffd" if encoding == "latin-1" else "# é")
    assert found.notes == []


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ('check("99.1", first)', ""),
        ('# my answer\n\ncheck("99.1", first)\n', ""),
        ("def first(numbers):\n    return 3\ncheck('99.1', first)", "def first(numbers):"),
        ("first = sum", "first = sum"),
        ("import helper\nfrom course_lib import check\ncheck(\n    '99.1',\n    first,\n)  # mine", ""),
        ('check("99.1",\n      first)\nfirst = sum', "first = sum"),
        ('check("99.1", made(first))', ""),
        ("", ""),
    ],
)
def test_an_answer_in_the_cell_of_the_check_is_said(source: str, more: str) -> None:
    notes = read(notebook(cell(source, "e99-1-check")), "99_toys.ipynb", QUESTIONS).notes
    assert len(notes) == bool(more)
    assert not more or f"({more})" in notes[0]
    assert not more or "put your answer into the cell above" in notes[0]


def test_what_lies_beside_a_notebook_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the solution")
    place = tmp_path / "class"
    names = ["anna/helper.py", "anna/data/a.csv", "anna/.hidden", "anna/__pycache__/helper.pyc", "bert/b.py"]
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    for name in ("anna/99_toys.ipynb", "anna/old/98.ipynb", "bert/99_toys.ipynb", "cleo.ipynb"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(notebook())
    (place / "anna" / "old" / "another.py").write_text("of another notebook")
    (place / "anna" / "link").symlink_to(secret)
    (place / "anna" / "all").symlink_to("/")
    (place / "beside-cleo.py").write_text("of whom?")
    os.mkfifo(place / "anna" / "pipe")
    found = {str(each.path.relative_to(place)): helpers(each) for each in submissions([place])}
    files, notes = found["anna/99_toys.ipynb"]
    assert files == {"helper.py": b"anna/helper.py", "data/a.csv": b"anna/data/a.csv"}
    assert "notebook, all, link, pipe did not come along: at most 100 files of 16 MiB" in notes[0]
    assert found["bert/99_toys.ipynb"] == ({"b.py": b"bert/b.py"}, [])
    assert found["cleo.ipynb"] == ({}, [])
    monkeypatch.setattr(module, "MOST_BESIDE", 20)
    files, notes = helpers(Submission("anna", place / "anna" / "99_toys.ipynb", True))
    assert list(files) == ["helper.py"]
    assert "a.csv" in notes[0] or "…" in notes[0]


def test_which_exercise_it_is() -> None:
    assert read(notebook(check(1)), "anna.ipynb", QUESTIONS).number == "99"
    assert read(notebook(cell("x", id="e06-import")), "99_toys.ipynb", QUESTIONS).number == "06"
    assert read(notebook(cell("x", id="e55-import")), "06_ddp.ipynb", QUESTIONS).number == "06"
    pasted = [cell("x", id=name) for name in ("e06-import", "e99-import", "e99-1-check")]
    assert read(notebook(*pasted), "anna.ipynb", QUESTIONS).number == "99", "most cells are of it"
    assert "nothing in it says which exercise it is" in refused(notebook("x"), "anna.ipynb")


def test_a_check_is_known_by_its_mark_whatever_it_says() -> None:
    found = read(
        notebook(
            check(1, "print(100)"),
            'check("99.2", second)',
            "check('06.1', x)",
            'x = 3\ncheck("99.2", second)',
            cell("", "e99-7-check"),
        ),
        "99_toys.ipynb",
        QUESTIONS,
    )
    assert [each.number for each in found.cells] == ["99.1", "99.2", None, None, None]
