"""What a batch leaves: rows, pages, and nothing in them that a name or an answer could turn into code."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from course_lib.exercises.check import Feedback
from course_lib.exercises.grading import tables
from course_lib.exercises.grading.batch import Graded
from course_lib.exercises.grading.score import Score, answer_names
from course_lib.exercises.grading.submissions import Submission, submissions
from course_lib.exercises.question import QUESTIONS, Finding

EVIL = "<script>alert(1)</script>"


def score(points: float, trouble: str = "") -> Score:
    """Of exercise 06: so many points for its last question."""
    answer_names()
    feedback = {}
    for number in ("06.1", "06.2", "06.3"):
        most = QUESTIONS[number].properties
        findings = [Finding(what, False, EVIL, "Look.", most[what]) for what in most]
        if number == "06.2":
            findings = [Finding("reached", True, EVIL, "Look.", points)]
            findings += [Finding("missed", False, EVIL, "Look.", sum(most.values()) - points)] * (points < 5)
        feedback[number] = Feedback(number, findings, trouble)
    return Score("06", [], feedback)


def graded(learner: str, points: float | None, name: str = "06_ddp.ipynb") -> Graded:
    nothing = Score(trouble=["it is not JSON, as notebooks are"])
    return Graded(
        Submission(learner, Path(learner, name)), nothing if points is None else score(points, EVIL)
    )


@pytest.fixture
def everyone() -> list[tables.LearnerGrades]:
    return tables.learners(
        [
            graded("=1+1", 5.0),
            graded("bert", None),
            graded(f"a{EVIL}/../x", 2.0),
            graded("dora", 1.0, "06_old.ipynb"),
            graded("dora", 5.0),
        ]
    )


def test_one_row_a_learner_in_nbgraders_columns(everyone: list[tables.LearnerGrades], tmp_path: Path) -> None:
    tables.write_csv(tmp_path / "grades.csv", everyone, tables.exercises_of(everyone, []))
    with open(tmp_path / "grades.csv", newline="", encoding="utf-8") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["'=1+1", f"a{EVIL}/../x", "bert", "dora"]
    dora = rows["dora"]
    assert (dora["raw_score"], dora["score"], dora["max_score"], dora["06.2"]) == ("5", "5", "10", "5")
    assert (dora["assignment"], dora["late_submission_penalty"]) == ("06", "0")
    assert (rows["bert"]["score"], rows["bert"]["06.1"]) == ("0", "")
    assert "not JSON" in rows["bert"]["trouble"]


def test_exercises_that_count_may_be_named(everyone: list[tables.LearnerGrades], tmp_path: Path) -> None:
    tables.write_csv(tmp_path / "grades.csv", everyone, tables.exercises_of(everyone, ["07"]))
    with open(tmp_path / "grades.csv", newline="", encoding="utf-8") as file:
        assert {(row["score"], row["max_score"]) for row in csv.DictReader(file)} == {("0", "10")}


def test_the_pages_say_who_and_what_and_run_nothing(
    everyone: list[tables.LearnerGrades], tmp_path: Path
) -> None:
    tables.write_report(tmp_path, everyone, ["06"])
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.html")}
    assert len(pages) == 5
    assert all("<script" not in page for page in pages.values())
    assert all("default-src 'none'" in page for page in pages.values())
    index = pages["index.html"]
    assert tables.most_missed(everyone)[0]["learners"] == "3"
    assert "What goes wrong most" in index
    for name in pages:
        assert name == "index.html" or f'href="{name}"' in index
    dora = next(page for name, page in pages.items() if name.startswith("learner-dora"))
    assert "06.2: 5 of 5 points" in dora
    assert "It does not count." in dora
    assert "<td>5</td><td>0</td><td>5</td><td>0</td>" in index


def test_half_letters_and_names_in_other_bytes_spoil_no_report(tmp_path: Path) -> None:
    for name in (b"caf\xe9.ipynb", b"new\nline.ipynb"):
        (tmp_path / os.fsdecode(name)).write_text("{}")
    odd = score(1.0, "half a letter: \ud800")
    odd.feedback["06.1"].findings[0].seen = "\udfff \x00 \x1b[31m"
    found = [Graded(each, odd) for each in submissions([tmp_path])]
    everyone = tables.learners(found)
    assert [each.name for each in everyone] == ["caf\\xe9", "new\nline"]
    tables.write_csv(tmp_path / "grades.csv", everyone, ["06"])
    tables.write_report(tmp_path / "report", everyone, ["06"])
    assert "half a letter: \\ud800" in "".join(each.read_text() for each in tmp_path.glob("report/*.html"))
    assert len((tmp_path / "grades.csv").read_text().splitlines()) == 3


def test_a_score_is_read_as_it_was_written() -> None:
    written = score(2.0, EVIL)
    assert Score.from_json(written.to_json()) == written
    assert (written.points, written.most) == (2, 10)
    with pytest.raises((ValueError, TypeError, KeyError)):
        Score.from_json('{"feedback": {"06.1": {}}}')


NAMES = ["a\uff0fb", "a\u2215b", "a\\b", "a\nb", "a\tb", "a\u2028b", "a b", 'a"b', 'a","b', "=1+1", "..."]
NAMES += ["caf\udce9", "\u202ea", " a", "x" * 255, "a;b", "'a", "Müller, Anna", "-rf"]
NAMES += ["a\u201db", "a\\nb", "'=1+1", "caf\\xe9"]


def test_every_folder_has_a_row_whatever_its_name_is_and_has_in_it(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "06_ddp.ipynb").write_text("{}")
    for name in ("empty", "another ending", "hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "another ending" / "06_ddp.py").write_text("")
    (tmp_path / "hidden" / ".06_ddp.ipynb").write_text("{}")
    (tmp_path / "a link").symlink_to("/")
    for name in (".git", "__MACOSX", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "06_ddp.ipynb").write_text("{}")
    found = [Graded(each, Score()) for each in submissions([tmp_path])]
    tables.write_csv(tmp_path / "grades.csv", tables.learners(found), ["06"])
    text = (tmp_path / "grades.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert len({row["student_id"] for row in rows}) == len(rows) == len(NAMES) + 4
    assert {row["max_score"] for row in rows} == {"10"}
    assert {"a\uff0fb", "a\\nb", "a\u201db", "'=1+1", "...", "empty", "a link"} <= {
        row["student_id"] for row in rows
    }
    # Readers that know nothing of doubled quotation marks
    assert {line.count('","') for line in text.splitlines()} == {len(rows[0]) - 1}


def test_who_has_no_grade_has_an_empty_field_and_not_0(tmp_path: Path) -> None:
    found = [graded("anna", 5.0), graded("bert", 5.0)]
    found.append(Graded(Submission("bert", Path("07.ipynb")), Score(ungraded="too little memory")))
    everyone = tables.learners(found)
    assert [learner.has_no_grade for learner in everyone] == [False, True]
    tables.write_csv(tmp_path / "grades.csv", everyone, ["06"])
    anna, bert = csv.DictReader((tmp_path / "grades.csv").read_text().splitlines())
    assert (anna["score"], bert["score"], bert["raw_score"]) == ("5", "", "")
    assert "07.ipynb: it has no grade yet: too little memory. The same command" in bert["trouble"]
    tables.write_report(tmp_path, everyone, ["06"])
    assert "<td>–</td>" in (tmp_path / "index.html").read_text()
    (page,) = tmp_path.glob("learner-bert-*.html")
    assert "07.ipynb: no grade" in page.read_text()
