"""The checks judge right: solutions, blanks, and the wrong answers that people really give."""

from __future__ import annotations

import importlib
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import nbformat
import pytest
import torch

from course_lib import launch
from course_lib.exercises.check import QUESTIONS, Feedback, check
from course_lib.exercises.generate import blank
from tests.exercises.answers import RIGHT, WRONG

HERE = Path(__file__).parent
SOLUTIONS = sorted((HERE.parents[1] / "solutions").glob("*.ipynb"))

for path in sorted((HERE / "answers").glob("answers_*.py")):
    module = importlib.import_module(f"tests.exercises.answers.{path.stem}")
    cloudpickle.register_pickle_by_value(module)  # as a notebook's; no rank imports this file


# words of the solutions that no hint may have
SOLVES = (
    *("np.array", "from_numpy", ".clone(", "copy=True", "register_buffer", "named_modules"),
    *(".train(", ".eval(", ".item(", "no_grad", "state_dict", "get_world_size"),
    *("all_reduce", "isend", "irecv", "tensor_split"),
    *("init_process_group", "divmod", "//", "%"),
    *("set_epoch", "randperm", "manual_seed", "DistributedSampler", "Subset", "range(", "::"),
    *("polyfit", "median", "ReduceOp", "mpi", "perf_counter"),
    *("os.environ", "parse_known", ".index"),
    *("removeprefix", "os.replace", "barrier", "map_location", "weights_only"),
)


def answers(notebook: Any) -> dict[str, Any]:
    """What a notebook answers to each of its questions: its cells are run, all but those that launch."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and "launch(" not in cell.source:
            if asked := re.fullmatch(r'check\("(.+)", (\w+)\)', cell.source):
                found[asked[1]] = names[asked[2]]
            else:
                exec(cell.source, names)
    return found


SOLVED: dict[str, Any] = {}
BLANK: dict[str, Any] = {}
for source in SOLUTIONS:
    SOLVED |= answers(nbformat.read(source, as_version=4))
    BLANK |= answers(nbformat.reads(blank(source), as_version=4))


def test_every_question_is_asked_in_a_notebook_for_its_points() -> None:
    asked = {}
    for path in SOLUTIONS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.metadata.get("nbgrader", {}).get("grade"):
                asked[cell.source.split('"')[1]] = cell.metadata.nbgrader.points

    check("", None)  # registers the questions
    assert asked == {number: sum(each.properties.values()) for number, each in QUESTIONS.items()}


def test_every_question_has_its_wrong_and_its_other_right_answers() -> None:
    check("", None)  # registers the questions
    assert {number for number, *_ in WRONG} == {number for number, _ in RIGHT} == set(QUESTIONS)


@pytest.mark.parametrize("number", SOLVED)
def test_the_solution_has_full_points_ten_times_out_of_ten(number: str) -> None:
    for _ in range(10):
        feedback = check(number, SOLVED[number])
        assert feedback.points == feedback.most, str(feedback)


@pytest.mark.parametrize("number", BLANK)
def test_the_blank_has_none(number: str) -> None:
    feedback = check(number, BLANK[number])
    assert repr(feedback) == "0", str(feedback)
    assert "failed" not in feedback.trouble, "it runs"


def named(cases: list[Any]) -> list[Any]:
    return [pytest.param(*case, id=f"{case[0]} {case[1].__name__}") for case in cases]


@pytest.mark.parametrize(("number", "answer", "hold", "hint"), named(WRONG))
def test_a_wrong_answer_misses_what_it_should(number: str, answer: Any, hold: set[str], hint: str) -> None:
    feedback = check(number, answer)
    print(feedback)
    assert {each.what for each in feedback.findings if each.ok} == hold
    assert hint in str(feedback)
    assert all(each.seen and each.hint for each in feedback.findings if not each.ok) or feedback.trouble
    assert leaks_nothing(feedback)


@pytest.mark.parametrize(("number", "answer"), named(RIGHT))
def test_a_right_answer_of_another_style_has_full_points(number: str, answer: Any) -> None:
    feedback = check(number, answer)
    assert feedback.points == feedback.most, str(feedback)


DRAWS = 60
ON_RANKS = ("04.3", "05", "06", "07", "08.2", "08.3", "09.2", "10.2", "10.3")  # or through files


@pytest.mark.parametrize(
    ("number", "answer", "hold", "hint"), named([each for each in WRONG if not each[0].startswith(ON_RANKS)])
)
def test_no_draw_hides_what_is_wrong(number: str, answer: Any, hold: set[str], hint: str) -> None:
    """Many draws in one rank, which is fast, and keeps from the tests what an answer leaves behind."""
    if check(number, answer).trouble:
        pytest.skip("it is refused, or fails, before anything drawn matters")

    def draw() -> list[tuple[int, set[str], str]]:
        from course_lib.exercises.check import QUESTIONS, check  # the rank's own, not a copy of this module's

        check("", None)
        asked, found = QUESTIONS[number], []
        importlib.import_module(asked.judge.__module__).observe = lambda work, *args: [work(*args)]
        for seed in range(DRAWS):
            torch.set_grad_enabled(True)
            QUESTIONS[number] = replace(asked, judge=partial(seeded, asked.judge, seed))
            feedback = check(number, answer)
            found.append((seed, {each.what for each in feedback.findings if each.ok}, str(feedback)))
        return found

    def seeded(judge: Any, seed: int, answer: Any, _: random.Random) -> Any:
        return judge(answer, random.Random(seed))

    for seed, found, feedback in launch(draw, nprocs=1, device="cpu", dashboard=False).results[0]:
        assert found == hold, f"seed {seed}: {feedback}"
        assert hint in feedback, f"seed {seed}: {feedback}"


def leaks_nothing(feedback: Feedback) -> bool:
    """No hint has the lines that solve it."""
    hints = " ".join(each.hint for each in feedback.findings)
    return not any(word in hints for word in SOLVES)
