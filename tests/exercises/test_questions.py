"""The checks judge right: solutions, blanks, and the wrong answers that people really give."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import types
from pathlib import Path
from typing import Any

import cloudpickle
import nbformat
import pytest
import torch

from course_lib import launch
from course_lib.exercises import questions
from course_lib.exercises.asking import QUESTIONS, Work, answered, read
from course_lib.exercises.check import Feedback, check
from course_lib.exercises.generate import blank
from tests.exercises.answers import RIGHT, WRONG

HERE = Path(__file__).parent
check_module = importlib.import_module("course_lib.exercises.check")  # not the function of its name
SOLUTIONS = sorted((HERE.parents[1] / "solutions").glob("*.ipynb"))

questions.load()
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
    *("no_sync", "require_backward", "clip_grad", "isfinite"),
    *("next_functions", "requires_grad_", "autograd.grad", "running_mean", "all_gather"),
    *("sorted(", "max(", "argmax"),
    *("hash(", "Generator(", ".ndim", "reduction=", "ceil("),
    *("get_worker_info", "topk", "Queue", "Thread("),
    *("scontrol", "ntasks", "SLURM_JOB_ID", "NODEID", "new_group", "nproc"),
)


@pytest.fixture(autouse=True)
def drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run draws the same numbers as the one before; with COURSE_DRAWS=1 (2, 3, …) it draws others."""
    dice = random.Random(f"{os.environ.get('COURSE_DRAWS', '0')} {request.node.name}")
    monkeypatch.setattr(
        check_module, "random", types.SimpleNamespace(Random=lambda: random.Random(dice.random()))
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

    assert asked == {number: sum(each.properties.values()) for number, each in QUESTIONS.items()}


def test_every_question_has_its_wrong_and_its_other_right_answers() -> None:
    assert {number for number, *_ in WRONG} == {number for number, _ in RIGHT} == set(QUESTIONS)


ON_RANKS = (  # or through files
    *("04.3", "05", "06", "07", "08.2", "08.3", "09.2", "10.2", "10.3"),
    *("11.1", "11.2", "12", "13", "14.3", "15", "16.1", "17.1", "17.2"),
)


@pytest.mark.parametrize("number", SOLVED)
def test_the_solution_has_full_points_each_time(number: str) -> None:
    """The others are drawn many times below."""
    for _ in range(3 if number.startswith(ON_RANKS) else 1):
        feedback = check(number, SOLVED[number])
        assert feedback.points == feedback.most, str(feedback)


@pytest.mark.parametrize("number", BLANK)
def test_the_blank_has_none(number: str) -> None:
    feedback = check(number, BLANK[number])
    assert repr(feedback) == "0", str(feedback)
    assert "failed" not in feedback.trouble, "it runs"


def named(cases: list[Any]) -> list[Any]:
    return [pytest.param(*case, id=f"{case[0]} {name_of(case[1])}") for case in cases]


def name_of(answer: Any) -> str:
    return getattr(answer, "__name__", type(answer).__name__)  # a partial has none


@pytest.mark.parametrize(("number", "answer", "hold", "hint"), named(WRONG))
def test_a_wrong_answer_misses_what_it_should(
    number: str, answer: Any, hold: set[str], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if re.match(r"never called (all_reduce|barrier)|waited in", hint):  # it hangs
        monkeypatch.setattr(check_module, "LIMIT_SECONDS", 8.0)
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


DRAWS = 20


@pytest.mark.parametrize("number", [each for each in SOLVED if not each.startswith(ON_RANKS)])
def test_no_draw_hides_what_is_wrong_or_blames_what_is_right(number: str) -> None:
    """Each answer is drawn for many times in a rank of its own: what it leaves behind meets no other."""
    everything = set(QUESTIONS[number].properties)
    cases = [(answer, hold, hint) for asked, answer, hold, hint in WRONG if asked == number]
    cases += [(answer, everything, "") for asked, answer in RIGHT if asked == number]
    cases.append((SOLVED[number], everything, ""))

    def draw() -> list[tuple[int, list[str], str]]:
        answer, found = cases[int(os.environ["RANK"])][0], []
        asked = QUESTIONS[number]

        def ask_here(work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
            return [read(answered((asked.takes, asked.form), work, answer, json.loads(json.dumps(args))))]

        for seed in range(DRAWS):
            torch.set_grad_enabled(True)
            try:
                findings = list(asked.findings(ask_here, random.Random(seed)))
            except (Exception, SystemExit):  # refused, or failed, before anything drawn matters
                return found
            feedback = Feedback(number, findings)
            found.append((seed, [each.what for each in findings if each.ok], str(feedback)))
        return found

    drawn = launch(draw, nprocs=len(cases), device="cpu", dashboard=False).results
    for (answer, hold, hint), found in zip(cases, drawn, strict=True):
        assert found or hold == set(), f"{name_of(answer)} could not be judged"
        for seed, holding, feedback in found:
            assert set(holding) == hold, f"{name_of(answer)}, seed {seed}: {feedback}"
            assert hint in feedback, f"{name_of(answer)}, seed {seed}: {feedback}"


def leaks_nothing(feedback: Feedback) -> bool:
    """No hint has the lines that solve it."""
    hints = " ".join(each.hint for each in feedback.findings)
    return not any(word in hints for word in SOLVES)
