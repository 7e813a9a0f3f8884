"""`lessons/symptoms.md`: each row leads to a cell, and is found by words, an error and `course help`."""

from __future__ import annotations

import re

import pytest

from course_lib.__main__ import main
from course_lib.report import symptoms
from course_lib.report.symptoms import Symptom, about, found
from tests.notebooks.execute import CORE, read

ROWS = symptoms.symptoms()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.seen[:40])
def test_a_row_has_one_sentence_and_leads_to_a_cell(row: Symptom) -> None:
    (link,) = re.findall(r"\]\(([^)]*)\)", row.where)
    file, _, cell = link.partition("#cell-id=")
    assert cell in [each.id for each in read(CORE / file).cells]
    assert re.search("[\u4e00-\u9fff]", row.chinese)
    assert len(row.answer.split()) <= 25
    assert row.answer.endswith(".")


def test_an_error_is_told_with_the_row_that_fits_and_no_other() -> None:
    assert len(ROWS) >= 50
    assert [row for row in ROWS if "`" in row.seen] != []
    for row in ROWS:
        said = " … ".join(re.findall(r"`([^`]+)`", row.seen))
        assert about(f"RuntimeError: {said}, it says") == (row if said else None)
    assert (
        Symptom("`a`", "", "Do `b`.", "[04, c](x.ipynb#d)").text()
        == "Do b. See lesson 04, c: lessons/x.ipynb#d"
    )


def test_course_help_prints_what_fits_best_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["help", "address", "already", "in", "use"]) == 0
    assert capsys.readouterr().out.startswith("EADDRINUSE")
    assert main(["help", "端口被占用"]) == 0
    assert capsys.readouterr().out.startswith("EADDRINUSE")
    assert main(["help", "xyzzy"]) == 1
    assert "no symptom has the word xyzzy" in capsys.readouterr().err
    symptoms.symptoms.cache_clear()
    monkeypatch.setattr(symptoms, "PAGE", CORE / "no_such.md")
    assert list(found(["hangs"])) == []
    assert about("address already in use") is None, "a report does without the page"
    symptoms.symptoms.cache_clear()
