"""The minutes that teachers read are those that the rule gives for lessons and exercises."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.notebooks.execute import ROOT
from tests.notebooks.minutes import of_all, rounded, table, teach

README = (ROOT / "exercises" / "README.md").read_text()


def test_the_table_is_that_of_the_notebooks() -> None:
    assert table() in README, "python -m tests.notebooks.minutes prints it"


def test_the_heads_of_the_notebooks_say_the_same() -> None:
    for each in of_all():
        of_each = dict(each.deeper)
        for folder, minutes in (("lessons", each.teach), ("exercises", each.solve)):
            of_each |= dict.fromkeys((ROOT / folder).glob(f"{each.name}_*.ipynb"), minutes)
        for path, minutes in of_each.items():
            head = nbformat.read(path, as_version=4).cells[0].source
            assert f"**Time:** {rounded(minutes)} minutes" in head, path.name


def test_each_lesson_has_its_week_and_fits_into_it() -> None:
    minutes = {each.name: each.teach + each.solve for each in of_all()}
    plan = README.partition("| week |")[2].partition("\n\n")[0]
    weeks = re.findall(r"^\| \d+ \| ([\d, ]+) \|", plan, re.MULTILINE)
    named = [number for week in weeks for number in re.findall(r"\d\d", week)]
    assert sorted(named) == sorted(minutes)
    longest = max(sum(minutes[number] for number in re.findall(r"\d\d", week)) for week in weeks)
    assert longest <= 300, "of a week, in class and at home"


def test_folded_code_is_not_read_and_a_guess_takes_its_time(tmp_path: Path) -> None:
    shown, folded, guess = map(new_code_cell, ["a\n" * 40, "b\n" * 40, "guess('a', 'b')"])
    folded.metadata["jupyter"] = {"source_hidden": True}
    nbformat.write(new_notebook(cells=[shown, folded, guess]), tmp_path / "lesson.ipynb")
    assert teach(tmp_path / "lesson.ipynb") == pytest.approx(41 / 20 + 1.5)
