"""All answers whose feedback is known, and a process that judges them on forked ranks.

`python -m tests.exercises.judge` takes one per line (see `line_process`): its key in `answer_of`, and a seed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle

from course_lib.exercises import questions
from course_lib.exercises.check import judged
from course_lib.exercises.question import QUESTIONS
from tests.exercises.answers import RIGHT, WRONG
from tests.support import forked
from tests.support.line_process import serve

MOST_SECONDS = 300.0  # for an answer; a limit that is met on no machine by one that comes to an end
SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions").glob("*.ipynb"))
CHECK = re.compile(r'check\("(.+)", (\w+)\)')

questions.load()
for path in sorted(Path(__file__).with_name("answers").glob("answers_*.py")):
    module = importlib.import_module(f"tests.exercises.answers.{path.stem}")
    cloudpickle.register_pickle_by_value(module)  # as a notebook's; no rank imports this file


def answer_of(number: str, kind: str, index: int = 0) -> Any:
    """An answer of the list WRONG or RIGHT, or of a notebook: the "solution", or the "blank" made of it."""
    listed = {"wrong": WRONG, "right": RIGHT}
    return listed[kind][index][1] if kind in listed else _of_lesson(number.split(".")[0], kind)[number]


@functools.cache
def _of_lesson(lesson: str, kind: str) -> dict[str, Any]:
    """What a notebook answers to each of its questions: its cells are run, all but those that launch."""
    from course_lib.exercises.generate import blank  # which loads nbformat, in seconds

    (source,) = [path for path in SOLUTIONS if path.name.startswith(lesson)]
    names: dict[str, Any] = {"__name__": "__main__"}
    found: dict[str, Any] = {}
    for cell in code_cells(source.read_text() if kind == "solution" else blank(source)):
        if asked := CHECK.fullmatch(cell["source"]):
            found[asked[1]] = names[asked[2]]
        elif "launch(" not in cell["source"]:
            exec(cell["source"], names)
    return found


def code_cells(notebook: str) -> list[dict[str, Any]]:
    cells = json.loads(notebook)["cells"]
    return [each | {"source": "".join(each["source"])} for each in cells if each["cell_type"] == "code"]


class _Door(forked.Door):
    """Like `forked.Door`; it keeps what came back each time."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.report: list[list[Any]] = []

    def __call__(self, *asked: Any, **how: Any) -> list[Any]:
        told = super().__call__(*asked, **how)
        self.report.append(told)
        return told


def judge(asked: dict[str, Any]) -> dict[str, Any]:
    """The feedback, or what the ranks reported, and whether one failed: `check` alone can say how."""
    number = asked["number"]
    door = _Door(QUESTIONS[number], answer_of(number, asked["kind"], asked["index"]))
    seconds = MOST_SECONDS if asked.get("report") else forked.LIMIT_SECONDS  # a report has no second try
    with mock.patch.object(forked, "LIMIT_SECONDS", seconds):
        feedback = judged(number, door, random.Random(asked["seed"]))
    told = {"report": door.report} if asked.get("report") else dataclasses.asdict(feedback)
    return told | {"failed": door.failed}


if __name__ == "__main__":
    forked.get_ready()
    serve(judge)
