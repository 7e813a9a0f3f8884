"""The engine of the checks: it never raises, and tells trouble as feedback."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib import RankError, RankTimeout, Run, check
from course_lib import progress as progress_card
from course_lib.exercises import question as question_module
from course_lib.exercises.question import Ask, Finding, question
from course_lib.report.facts import Failure, Position, RankState, Report

CHECK = importlib.import_module("course_lib.exercises.check")  # the module, not the function of its name
GOOD = "it is the number that was drawn"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question: return the number that you are given."""
    check("", None)
    monkeypatch.setattr(CHECK, "QUESTIONS", dict(CHECK.QUESTIONS))
    monkeypatch.setattr(question_module, "QUESTIONS", CHECK.QUESTIONS)

    @question("99.1", "same(number)", {GOOD: 1, "twice": 0.5})
    def judge(ask: Ask, rng: Any) -> Any:
        number = rng.randrange(1000, 10_000)
        found = ask(called, number, nprocs=2)
        yield Finding(
            GOOD, found[0] == number, f"for {number} it returned {found[0]}", "Look at the argument."
        )
        yield Finding("twice", found[1] == number, f"<b>{found[1]}</b>", "Look again.")


def called(answer: Any, number: int) -> Any:
    return answer(number)


def feedback_of(answer: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    feedback = check("99.1", answer)
    written = capsys.readouterr()
    assert written.err == "", "nbgrader scores 0 on any"
    assert written.out == ""
    return feedback


def test_points_are_the_repr_and_words_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    right = feedback_of(lambda number: number, capsys)
    assert (repr(right), right.points, right.most) == ("1.5", 1.5, 1.5)
    assert str(right) == f"99.1: 1.5 of 1.5 points\n  ✓ {GOOD}\n  ✓ twice"

    half = feedback_of(lambda number: number if os.environ["RANK"] == "0" else -1, capsys)
    assert repr(half) == "1"
    assert str(half).splitlines()[2:] == ["  ✗ twice", "      <b>-1</b>", "      Look again."]
    assert "&lt;b&gt;-1&lt;/b&gt;" in half._repr_html_()
    assert "<b>-1</b>" not in half._repr_html_()


def raises(number: int) -> None:
    raise KeyError(f"no {number}")


def is_killed(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prints(number: int) -> int:
    print("a word")
    os.write(2, b"and another\n")
    return number


def is_sparse(number: int) -> Any:
    return torch.ones(3).to_sparse()


class Unpickled:
    """Whoever unpickles it writes its process's id into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.path)!r}, 'a').write(str(__import__('os').getpid()) + ' ')",)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (raises, "your code failed: rank "),
        (is_killed, "was killed (SIGKILL)"),
        (lambda number: exit(0), "ended its process before it was done"),
        (None, "same(number) is a function; this is None, a NoneType"),
    ],
)
def test_trouble_is_feedback(answer: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    feedback = feedback_of(answer, capsys)
    assert repr(feedback) == "0"
    assert words in feedback.trouble
    assert words in str(feedback)


def test_nothing_that_comes_back_is_unpickled_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither what the answer returns, nor what it plants in the places that the kernel reads."""
    trap = tmp_path / "who"

    def returns_it(number: int) -> Any:
        return Unpickled(trap)

    def plants_it(number: int) -> int:
        folder = Path(os.environ["COURSE_RUN"])
        from course_lib.rank import entry_function  # the rank's own

        entry_function._save_result = lambda result, path: torch.save(Unpickled(trap), path)
        (folder / f"rank-{os.environ['RANK']}.answer").write_bytes(pickle.dumps(Unpickled(trap)))
        return number

    for answer in (returns_it, plants_it):
        feedback_of(answer, capsys)
        assert not trap.exists() or str(os.getpid()) not in trap.read_text().split()


LEARNERS = {"file": "/course/answer.py", "line": 3, "function": "answer", "source": [[3, "all_reduce(x)"]]}
JUDGES = f"{Path(CHECK.__file__).parent}/questions/q07.py"


def in_rank(rank: int, file: str = "/course/answer.py") -> RankState:
    position = Position(LEARNERS, None, waits=False) if file != JUDGES else None
    return RankState(rank, "at work", [(file, 3, "answer")], position)


GLOO = ["terminate called after throwing an instance of 'gloo::EnforceNotMet'", "  what(): 12 vs. 4000"]
NO_MEMORY = Failure(1, "raised", 0.0, exception="MemoryError", short_of_memory=True)
KILLED = Failure(1, "signal", 0.0, signal="SIGKILL", short_of_memory=True)
HINTS = {
    "none": (Failure(1, "raised", 0.0, exception="ValueError", message="SIGABRT MemoryError"), []),
    "memory": (NO_MEMORY, [CHECK.TOO_MUCH]),
    "the machine's memory, not the check's limit": (KILLED, []),
    "an abort of gloo": (Failure(1, "signal", 0.0, signal="SIGABRT", last_lines=GLOO), [CHECK.ABORTED]),
    "another abort": (Failure(1, "signal", 0.0, signal="SIGABRT", last_lines=["free(): invalid"]), []),
}


@pytest.mark.parametrize("kind", HINTS)
def test_a_failure_is_told_with_a_hint(kind: str) -> None:
    failure, hint = HINTS[kind]
    states = [in_rank(0), RankState(1, "failed", failure=failure)]
    run = Run.create("answer", 2)
    for cause in (failure, Failure(0, "raised", 0.0, exception="OSError")):  # the rank need not fail first
        said = CHECK.in_words(RankError(run, Report(cause, states)))
        assert said.startswith(f"your code failed: rank {cause.rank} ")
        assert [known for known in (CHECK.TOO_MUCH, CHECK.ABORTED, CHECK.ENDLESS) if known in said] == hint


def test_what_takes_long_to_read_is_told_by_where_the_rank_was() -> None:
    for file, told in ((JUDGES, True), ("/course/answer.py", False)):
        report = Report(states=[in_rank(0), in_rank(1, file)], timeout=20)
        said = CHECK.in_words(RankTimeout(Run.create("answer", 2), report))
        assert said.startswith("your code was not done after 20 s; the ranks were ended\n\nrank 0 was at ")
        assert said.endswith(f"\n\n{CHECK.ENDLESS}") == told


def test_output_of_the_answer_stays_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(feedback_of(prints, capsys)) == "1.5"


def test_warnings_about_what_came_back_stay_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(feedback_of(is_sparse, capsys)) == "0"


def test_an_unknown_question(capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("42.1", None, 6.1):
        feedback = check(number, prints)  # type: ignore[arg-type]
        assert repr(feedback) == "0"
        assert "there is no question" in str(feedback)
        assert "06.1" in str(feedback)


def test_progress_keeps_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"99 +0 of 1.5 +–", repr(progress_card()))
    feedback_of(raises, capsys)
    assert re.search(r"99 +0 of 1.5 +begun", repr(progress_card()))
    feedback_of(prints, capsys)
    feedback_of(raises, capsys)
    assert re.search(r"99 +1.5 of 1.5 +✓", repr(progress_card()))
    assert "<table>" in progress_card()._repr_html_()


@pytest.mark.parametrize("damage", ["", "[]", '{"99.1": [null, 1]}'])
def test_a_damaged_progress_file_is_none(
    damage: str, course_home: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    course_home.mkdir()
    (course_home / "progress.json").write_text(damage)
    assert re.search(r"99 +0 of 1.5 +–", repr(progress_card()))
    feedback_of(prints, capsys)
    assert "1.5 of 1.5" in repr(progress_card())


def test_a_folder_that_cannot_be_written_spoils_no_check(
    course_home: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (course_home / "progress.json").mkdir(parents=True)
    assert repr(feedback_of(prints, capsys)) == "1.5"
