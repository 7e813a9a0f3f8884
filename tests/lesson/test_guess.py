"""A guess: printed in plain Python; in a kernel, buttons that take one answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_lib import guess, guesses
from tests.support.front_end import FrontEnd

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["course_lib.lesson.guess"], "_asked", {})


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    found = FrontEnd(tmp_path)
    found.run("from course_lib import guess, guesses", "imports")
    yield found
    found.close()


def test_plain_python_prints_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    guess("same", "doubled")
    guess("yes", "no", "sometimes")
    assert capsys.readouterr().out == (
        "Your guess:  same  |  doubled\nYour guess:  yes  |  no  |  sometimes\n"
    )
    guesses("same", "no")
    assert capsys.readouterr().out.splitlines() == [
        "  1. it was: same                     you guessed: –",
        "  2. it was: no                       you guessed: –",
    ]


def test_fewer_questions_than_answers_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    guess("same", "doubled")
    capsys.readouterr()
    guesses("same", "no")
    assert capsys.readouterr().out == "This lesson asks 2 times, and you have run 1 of its questions.\n"


def test_an_answer_that_could_not_be_chosen_is_refused() -> None:
    guess("same", "doubled")
    with pytest.raises(ValueError, match="'halved' is none of question 1's options"):
        guesses("halved")


def test_the_first_click_is_final(front_end: FrontEnd) -> None:
    assert front_end.run("guess('same', 'doubled')", "a") == ""
    assert front_end.shown[-1]["data"]["text/plain"] == "Your guess:  same  |  doubled"
    assert VIEW in front_end.shown[-1]["data"]
    front_end.click("doubled")
    front_end.click("same")
    front_end.run("pass", "answer")
    locked = {"text/plain": "Your guess:  same  |  [doubled]"}
    assert [each["data"] for each in front_end.shown] == [locked]
    front_end.run("guess('same', 'doubled')", "a")
    assert [each["data"] for each in front_end.shown] == [locked, locked]

    front_end.run("guess('same', 'doubled')", "b")  # the same options in another cell: another question
    front_end.click("same")
    front_end.run("guess('yes', 'no')", "c")
    assert front_end.run("guesses('doubled', 'doubled', 'no')", "d").splitlines() == [
        "✓ 1. it was: doubled                  you guessed: doubled",
        "✗ 2. it was: doubled                  you guessed: same",
        "  3. it was: no                       you guessed: –",
    ]
    front_end.run("guess('same', 'halved')", "a")  # edited: asked anew
    assert VIEW in front_end.shown[-1]["data"]


def test_cells_without_an_id_are_told_apart(front_end: FrontEnd) -> None:
    """As nbclient runs them."""
    front_end.run("guess('same', 'doubled')", "")
    front_end.run("guess('same', 'doubled')", "")
    assert "you guessed" in front_end.run("guesses('same', 'same')", "")
