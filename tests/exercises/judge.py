"""All answers whose feedback is known, and a process that judges them on forked ranks.

Those that people give are in `answers/answers_NN.txt`: shared code, then each question after "===",
with short names for its properties. An answer's first line says what it does, which properties hold all the
same, and words of a hint, or of the trouble. Below are the lines in place of the solution's, or a whole
function, or an edit of the solution: lines with a -, which it has once, become those with a +.

`python -m tests.exercises.judge` takes one per line (see `line_process`): its key in `answer_of`, and a seed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from course_lib.exercises import questions
from course_lib.exercises.check import judged
from course_lib.exercises.question import QUESTIONS
from tests.support import forked
from tests.support.line_process import serve

MOST_SECONDS = 300.0  # for an answer; a limit that is met on no machine by one that comes to an end
SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions").glob("*.ipynb"))
CHECK = re.compile(r'check\("(.+)", (\w+)\)')
ANSWER = re.compile(r"(right|wrong): (.+?)(?:; holds: (.+?))?(?:; hint: (.+))?")
EDIT = re.compile(r"((?:^-.*\n)+)((?:^\+.*\n)*)", re.MULTILINE)


class Answer(NamedTuple):
    number: str  # of the question
    kind: str  # "right", in another style than the solution's, or "wrong"
    name: str
    hold: set[str]
    hint: str
    lines: str


def _listed(path: Path) -> Iterator[Answer]:
    for part in re.split("^=== ", path.read_text(), flags=re.MULTILINE)[1:]:
        about, *answers = re.split(r"\n(?=(?:right|wrong): )", part)
        properties = dict(re.findall("^([A-Z0-9_]+): (.+)", about, re.MULTILINE))
        for each in answers:
            first, lines = each.split("\n", 1)
            kind, name, hold, hint = ANSWER.fullmatch(first).groups("")
            holds = {properties[short] for short in hold.split(", ") if short}
            yield Answer(about.split("\n")[0], kind, name, holds, hint, lines.strip("\n") + "\n")


ANSWERS = Path(__file__).with_name("answers")
LISTED = [each for path in sorted(ANSWERS.glob("*.txt")) for each in _listed(path)]
WRONG = [each for each in LISTED if each.kind == "wrong"]
RIGHT = [each for each in LISTED if each.kind == "right"]
questions.load()


def answer_of(number: str, kind: str, index: int = 0) -> Any:
    """An answer of the list WRONG or RIGHT, or of a notebook: the "solution", or the "blank" made of it."""
    lesson, listed = number.split(".")[0], {"wrong": WRONG, "right": RIGHT}
    names, found, cells = _of_lesson(lesson, "solution" if kind in listed else kind)
    if kind not in listed:
        return found[number]
    own = dict(names)
    exec((ANSWERS / f"answers_{lesson}.txt").read_text().split("=== ")[0], own)
    exec(_code_of(listed[kind][index], cells[number]), own)
    return own[found[number].__name__]


def _code_of(answer: Answer, solution: str) -> str:
    if answer.lines.startswith(("def ", "class ")):
        return answer.lines
    if not answer.lines.startswith("-"):
        begin, end = solution.index("### BEGIN SOLUTION"), solution.rindex("### END SOLUTION\n")
        return solution[:begin].rstrip(" ") + answer.lines + solution[end:].split("\n", 1)[1]
    assert not EDIT.sub("", answer.lines), answer
    code = "\n" + re.sub(" *### (BEGIN|END) SOLUTION\n", "", solution)
    for edit in EDIT.finditer(answer.lines):
        old, new = ("\n" + re.sub("^.", "", each, flags=re.MULTILINE) for each in edit.groups())
        if code.count(old) != 1:
            raise ValueError(f"{answer.number}, {answer.name}: not once in the solution:{old}")
        code = code.replace(old, new)
    return code


@functools.cache
def _of_lesson(lesson: str, kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Run a notebook's cells, all but those that launch: its names, its answers, and their cells."""
    from course_lib.exercises.generate import blank  # which loads nbformat, in seconds

    (source,) = [path for path in SOLUTIONS if path.name.startswith(lesson)]
    names: dict[str, Any] = {"__name__": "__main__"}
    found: dict[str, Any] = {}
    cells: dict[str, str] = {}
    for cell in code_cells(source.read_text() if kind == "solution" else blank(source)):
        if asked := CHECK.fullmatch(cell["source"]):
            found[asked[1]] = names[asked[2]]
        elif "launch(" not in cell["source"]:
            exec(cell["source"], names)
        grade_id = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if named := re.fullmatch(r"e(\d\d)-(\d)-answer", grade_id):
            cells[f"{named[1]}.{named[2]}"] = cell["source"] + "\n"
    return names, found, cells


def code_cells(notebook: str) -> list[dict[str, Any]]:
    cells = json.loads(notebook)["cells"]
    return [each | {"source": "".join(each["source"])} for each in cells if each["cell_type"] == "code"]


class _RankRunner(forked.RankRunner):
    """Like `forked.RankRunner`; it keeps what came back each time."""

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
    door = _RankRunner(QUESTIONS[number], answer_of(number, asked["kind"], asked["index"]))
    seconds = MOST_SECONDS if asked.get("report") else forked.LIMIT_SECONDS  # a report has no second try
    with mock.patch.object(forked, "LIMIT_SECONDS", seconds):
        feedback = judged(number, door, random.Random(asked["seed"]))
    told = {"report": door.report} if asked.get("report") else dataclasses.asdict(feedback)
    return told | {"failed": door.failed}


if __name__ == "__main__":
    forked.get_ready()
    serve(judge)
