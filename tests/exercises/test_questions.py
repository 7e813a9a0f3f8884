"""The checks judge right: solutions, blanks, and the wrong answers that people really give.

`check` meets each solution, each blank, one wrong answer to each question, and all with which a rank fails:
the report that a learner reads then is the launch's. All others are judged on forked ranks
(`tests.exercises.judge`) or, where a question needs no ranks, many times in a row in one.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import time
import types
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from course_lib import Run, launch
from course_lib.exercises.check import Feedback, check, judged
from course_lib.exercises.in_rank.work import run_work
from course_lib.exercises.judging import read
from course_lib.exercises.question import QUESTIONS, Finding, Work
from course_lib.exercises.questions import q03
from tests.exercises.judge import (
    CHECK,
    MOST_SECONDS,
    RIGHT,
    SOLUTIONS,
    WRONG,
    Answer,
    answer_of,
    code_cells,
)
from tests.support.line_process import LineProcess
from tests.support.programs import Jump, running

check_module = importlib.import_module("course_lib.exercises.check")  # not the function of its name
ON_RANKS = (  # or through files
    *("00", "04.2", "05", "06", "07", "08", "10.2", "10.3"),
    *("11.2", "11.3", "12", "13", "15.2", "16.2", "18", "19", "20.2"),
)
HANGS = re.compile(r"never called (all_reduce|barrier)|waited in")  # what is said of an answer that does

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
    *("reduce_scatter", ".numel(", "square(", "vector_norm", "zeros_like"),
    *("scontrol", "ntasks", "SLURM_JOB_ID", "NODEID", "new_group", "nproc"),
    *("comm_hook", "async_op", "get_future", "collect_all", "packbits", "exp_avg", ".buffers("),
    "repeat_interleave",
)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each run draws the same numbers as the one before; with COURSE_DRAWS=1 (2, 3, …) it draws others."""
    seed = f"{os.environ.get('COURSE_DRAWS', '0')} {request.node.name}"
    monkeypatch.setattr(check_module, "random", types.SimpleNamespace(Random=lambda: random.Random(seed)))
    monkeypatch.setattr(check_module, "LIMIT_SECONDS", MOST_SECONDS)
    monkeypatch.setattr(check_module, "ALL_SECONDS", MOST_SECONDS)
    return seed


@pytest.fixture
def by_forks(process: LineProcess, seed: str) -> Callable[..., Feedback]:
    """`check` on forked ranks, and on those of a launch where one fails, or the process that judges."""

    def judge(number: str, kind: str, index: int = 0) -> Feedback:
        told = process.ask({"number": number, "kind": kind, "index": index, "seed": seed})
        if told is None or told.pop("failed"):
            return check(number, answer_of(number, kind, index))
        return Feedback(**told | {"findings": [Finding(**each) for each in told["findings"]]})

    return judge


def test_every_question_is_asked_in_a_notebook_for_its_points() -> None:
    asked = {}
    for path in SOLUTIONS:
        for cell in code_cells(path.read_text()):
            if (grading := cell["metadata"].get("nbgrader", {})).get("grade"):
                asked[CHECK.fullmatch(cell["source"])[1]] = grading["points"]

    assert asked == {number: sum(each.properties.values()) for number, each in QUESTIONS.items()}


def test_every_question_has_its_wrong_and_its_other_right_answers() -> None:
    assert {each.number for each in WRONG} == {each.number for each in RIGHT} == set(QUESTIONS)


@pytest.mark.parametrize("number", [number for number, each in QUESTIONS.items() if each.hints])
def test_each_hint_is_reached_by_a_wrong_answer_and_there_are_few(number: str) -> None:
    """Each wrong answer names the fault that it must be told, so a hint for another fault fails its test."""
    asked = QUESTIONS[number]
    assert asked.hints.keys() <= asked.properties.keys()
    assert all(len(table) <= 4 for table in asked.hints.values())
    told = {each.hint for each in WRONG if each.number == number}
    assert {fault for table in asked.hints.values() for fault in table} <= told


# --- on the ranks of a launch -----------------------------------------------------------------------------


@pytest.mark.short
@pytest.mark.parametrize("number", QUESTIONS)
def test_the_solution_has_full_points(number: str) -> None:
    has_full_points(check(number, answer_of(number, "solution")))


@pytest.mark.short
@pytest.mark.parametrize("number", QUESTIONS)
def test_the_blank_has_none(number: str) -> None:
    feedback = check(number, answer_of(number, "blank"))
    assert repr(feedback) == "0", str(feedback)
    assert "failed" not in feedback.trouble, "it runs"


def the_first_to_end(number: str) -> int:
    return next(i for i, each in enumerate(WRONG) if each.number == number and not HANGS.match(each.hint))


@pytest.mark.short
@pytest.mark.parametrize("number", QUESTIONS)
def test_a_wrong_answer_to_each_question_misses_what_it_should(number: str) -> None:
    index = the_first_to_end(number)
    misses_what_it_should(check(number, answer_of(number, "wrong", index)), WRONG[index])


def those(listed: list[Answer], chosen: Callable[[Answer], Any]) -> list[Any]:
    return [pytest.param(i, id=f"{each.number} {each.name}") for i, each in enumerate(listed) if chosen(each)]


@pytest.mark.parametrize("index", those(WRONG, lambda each: HANGS.match(each.hint)))
def test_an_answer_that_hangs_misses_what_it_should(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Jump(monkeypatch, all_wait)
    number = WRONG[index].number
    misses_what_it_should(check(number, answer_of(number, "wrong", index)), WRONG[index])


def all_wait() -> bool:
    """Whether all ranks that have not returned wait: one that is in the answer itself may lack a core."""
    run = running()
    there = [rank for rank in range(run.world_size) if not run.trace(rank).has_returned] if run else []
    return bool(there) and all(waits(run, rank) for rank in there)


def waits(run: Run, rank: int) -> bool:
    stack = run.trace(rank).standstill.get("stack")
    return bool(stack) and ("/torch/" in stack[0][0] or "/course_lib/" in stack[0][0]) and sleeps(run, rank)


def sleeps(run: Run, rank: int) -> bool:
    """Whether its main thread asks for no core, again and again: one that loads PyTorch is in it, too."""
    process = psutil.Process(run.facts(rank)["pid"])
    for _ in range(10):
        if process.status() != psutil.STATUS_SLEEPING:
            return False
        time.sleep(0.02)
    return True


# --- on forked ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["04.2", "05.2", "10.3", "12.1", "16.2"])
def test_forked_ranks_say_what_those_of_a_launch_do(
    number: str, by_forks: Callable[..., Feedback], process: LineProcess, seed: str
) -> None:
    index = the_first_to_end(number)
    told = process.ask({"number": number, "kind": "wrong", "index": index, "seed": seed})
    assert (told or {"failed": True})["failed"] is False, "otherwise by_forks asks a launch"
    assert str(by_forks(number, "wrong", index)) == str(check(number, answer_of(number, "wrong", index)))


@pytest.mark.parametrize(
    "index", those(WRONG, lambda each: each.number.startswith(ON_RANKS) and not HANGS.match(each.hint))
)
def test_a_wrong_answer_misses_what_it_should(index: int, by_forks: Callable[..., Feedback]) -> None:
    misses_what_it_should(by_forks(WRONG[index].number, "wrong", index), WRONG[index])


@pytest.mark.parametrize("index", those(RIGHT, lambda each: each.number.startswith(ON_RANKS)))
def test_a_right_answer_of_another_style_has_full_points(
    index: int, by_forks: Callable[..., Feedback]
) -> None:
    has_full_points(by_forks(RIGHT[index].number, "right", index))


# --- many times in one rank -------------------------------------------------------------------------------

DRAWS = 5  # others each night, by COURSE_DRAWS


@pytest.mark.parametrize("number", [each for each in QUESTIONS if not each.startswith(ON_RANKS)])
def test_no_draw_hides_what_is_wrong_or_blames_what_is_right(number: str) -> None:
    """Each answer is drawn for many times in a rank of its own: what it leaves behind meets no other.

    One that raises says so without a launch's report, for which it is judged by `check` as well.
    """
    wrong = [each for each in WRONG if each.number == number]
    answers = [answer_of(number, "wrong", i) for i, each in enumerate(WRONG) if each.number == number]
    answers += [answer_of(number, "right", i) for i, each in enumerate(RIGHT) if each.number == number]
    answers.append(answer_of(number, "solution"))
    first = DRAWS * int(os.environ.get("COURSE_DRAWS", "0"))
    in_a_row = [i for i, each in enumerate(wrong) if each.hint == "one after the other"]

    def draw() -> list[Feedback]:
        rank, found = int(os.environ["RANK"]), []
        answer, asked = answers[rank], QUESTIONS[number]
        if rank in in_a_row:
            q03.PATIENCE = 0.1  # its replicas never meet

        def ask_here(work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
            try:
                kind = asked.accepts, asked.signature
                return [read(run_work(kind, work, answer, json.loads(json.dumps(args))))]
            except SystemExit as end:
                raise RuntimeError("it ends its process") from end

        for seed in range(first, first + DRAWS):
            torch.set_grad_enabled(True)
            found.append(judged(number, ask_here, random.Random(seed)))
        return found

    drawn = launch(draw, nprocs=len(answers), device="cpu", dashboard=False).results
    for feedback in [each for found in drawn[len(wrong) :] for each in found]:
        has_full_points(feedback)
    for answer, expected, found in zip(answers, wrong, drawn, strict=False):
        raised = any(feedback.trouble.startswith("your code failed") for feedback in found)
        for feedback in found:
            misses_what_it_should(feedback, expected._replace(hint="") if raised else expected)
        if raised:
            misses_what_it_should(check(number, answer), expected)


# --- what is expected -------------------------------------------------------------------------------------


def has_full_points(feedback: Feedback) -> None:
    assert feedback.points == feedback.most > 0, str(feedback)


def misses_what_it_should(feedback: Feedback, expected: Answer) -> None:
    assert {each.what for each in feedback.findings if each.ok} == expected.hold, str(feedback)
    tables = QUESTIONS[feedback.question].hints.values()
    told = "\n".join([feedback.trouble, *(f"{each.seen}\n{each.hint}" for each in feedback.findings)])
    hint = expected.hint
    assert next((each[hint] for each in tables if hint in each), hint) in told, told
    assert feedback.trouble or all(each.seen and each.hint for each in feedback.findings if not each.ok)
    hints = " ".join(each.hint for each in feedback.findings)
    assert not [word for word in SOLVES if word in hints], "no hint has the lines that solve it"
