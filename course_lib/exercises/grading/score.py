"""Score one submission: draw inputs, ask its code in the sandbox, and keep the score outside of it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from ...pickling import dumps
from .. import questions
from ..check import ALL_SECONDS, Feedback, Troubled, judged, seconds_for
from ..in_rank.work import MOST_NUMBERS
from ..judging import read
from ..question import QUESTIONS, Finding, Question, Refused, Work
from . import submissions
from .session import Session, SessionEnded
from .submissions import Exercise, Submission, Unreadable
from .walls import START_SECONDS, Walls

GRACE_SECONDS = 30.0  # after a limit that the sandbox itself keeps, for reports and the end of ranks
CELL_SECONDS = 60.0  # for one cell
MOST_STARTS = 6  # of a notebook, when its cells end the process that runs them
AGAIN = 0.25  # of the first start's time limit, for each further start
MOST_ANSWER = 24 << 20  # characters of a pickled answer, in base64
MOST_PARTS = 2 * MOST_NUMBERS  # commas and brackets in what a rank reports
MOST_PATH = 200  # characters
MOST_LETTERS = 4000  # characters about a ✗, or about what went wrong

Message = dict[str, Any]


@dataclass
class Score:
    """The points and the feedback of one submission."""

    exercise: str | None = None  # "06"; None where the file could not be read
    trouble: list[str] = field(default_factory=list)
    feedback: dict[str, Feedback] = field(default_factory=dict)  # by question
    ungraded: str = ""  # why there is no grade, if that is not the learner's fault
    struck: bool = field(default=False, compare=False)  # points were lost, and a limit was reached

    @property
    def points(self) -> float:
        return sum(feedback.points for feedback in self.feedback.values())

    @property
    def most(self) -> float:
        return sum(feedback.most for feedback in self.feedback.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Score:
        """Read what `to_json` wrote; raise ValueError, TypeError or KeyError if it did not."""
        found = json.loads(text)
        feedback = {
            number: Feedback(number, [Finding(**finding) for finding in known["findings"]], known["trouble"])
            for number, known in found["feedback"].items()
        }
        return cls(**found | {"feedback": feedback})


def answer_names() -> dict[str, str]:
    """Return the name of each question's answer, by question."""
    questions.load()
    return {number: asked.signature.partition("(")[0] for number, asked in QUESTIONS.items()}


def score_submission(submitted: Submission, seed: str, seconds: float, walls: Walls) -> Score:
    """Score a submission, as `score_notebook` does."""
    try:
        text = submissions.content(submitted.path, submitted.root)
        files, notes = submissions.helpers(submitted)
        score = score_notebook(text, submitted.path.name, seed, seconds, walls, files)
    except Unreadable as why:
        return Score(trouble=[str(why)])
    score.trouble += notes
    return score


def score_notebook(
    text: bytes,
    name: str,
    seed: str,
    seconds: float,
    walls: Walls,
    files: dict[str, bytes] | None = None,
) -> Score:
    """Run the notebook with these bytes and this file name in the sandbox, and return its score.

    Seed and bytes determine what is drawn. `Unreadable` is raised if it is no notebook of an exercise.

    Parameters
    ----------
    seconds
        The limit for all cells together, and for each question, which has at most `ALL_SECONDS`. All limits
        are multiplied by ``walls.patience``.
    files
        The files beside the notebook, by path.
    """
    exercise = submissions.read(text, name, answer_names())
    names = {number: name for number, name in answer_names().items() if number.startswith(exercise.number)}
    beside = {path: base64.b64encode(content).decode() for path, content in (files or {}).items()}
    walls.struck = False
    answers, notes = answers_of(exercise, names, seconds, walls, beside)
    score = Score(exercise.number, exercise.notes + notes)
    hashed = hashlib.sha256(text).hexdigest()
    sources = {cell.name: cell.source for cell in exercise.cells}
    for number in names:
        kept = {"do": "keep", "cells": sources, "files": beside} | answers.get(number, {})
        score.feedback[number] = _feedback(number, kept, f"{seed} {hashed} {number}", seconds, walls)
    score.struck = walls.struck and score.points < score.most
    return score


# --- the notebook -----------------------------------------------------------------------------------------


def answers_of(
    exercise: Exercise,
    names: dict[str, str],
    seconds: float,
    walls: Walls,
    files: dict[str, str],
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Run a notebook; return its answer to each question, pickled and never opened, or why there is none.

    If a cell ends the process, or does not end, the notebook runs again with only this cell's definitions,
    and then without it. In the last start, only the definitions of all cells run.
    """
    steps: list[Message] = [{"cell": cell.name, "source": cell.source} for cell in exercise.cells]
    asked = {number: {"question": number, "name": name} for number, name in names.items()}
    steps = [asked.get(cell.number or "", step) for cell, step in zip(exercise.cells, steps, strict=True)]
    steps += asked.values()  # once more at the end, for answers that were not there at their check
    notes: list[str] = []
    answers: dict[str, dict[str, str]] = {}
    left = most = (START_SECONDS + seconds) * walls.patience
    a_cell = min(CELL_SECONDS, seconds) * walls.patience
    request = {"do": "run", "seconds": a_cell, "files": files}
    for start in range(1, MOST_STARTS + 1):
        at = -1
        if start == MOST_STARTS:
            steps = [step | {"definitions": True} for step in steps]
            notes.append(f"at the last of {start} starts, only what its cells define was run")
        try:
            with walls.session() as session:
                until = time.monotonic() + left
                session.limit(left)
                for reply in session.ask(request | {"steps": steps}):
                    place, number = reply.get("at"), reply.get("answer")
                    if isinstance(place, int) and at < place < len(steps):
                        if at >= 0:
                            session.note_limit(a_cell)
                        at = place
                        session.limit(min(until - time.monotonic(), a_cell + GRACE_SECONDS))
                    if isinstance(number, str) and number in names:
                        _note(answers, number, _answer(reply))
                    if reply.get("done"):
                        return answers, notes
        except SessionEnded as why:
            step = steps[at] if at >= 0 else {"cell": "what is around the cells"}
            if "question" in step:
                refused = f"your answer cannot be sent to the ranks: {why}"
                _note(answers, step["question"], {"refused": refused})
            else:
                but = "" if "definitions" in step else ", but for what it defines"
                notes.append(f"{step['cell']} was left out{but}: {why}")
            without = [{**step, "definitions": True}] if step.keys() == {"cell", "source"} else []
            place = max(at, 0)
            steps = steps[:place] + without + steps[place + (at >= 0) :]
            left = AGAIN * most
    notes.append(f"the notebook was started {MOST_STARTS} times and never ran to its end")
    return answers, notes


def _note(answers: dict[str, dict[str, str]], number: str, found: dict[str, str]) -> None:
    """Note an answer, unless an earlier start pickled one, which stays."""
    if "pickled" not in answers.get(number, {}):
        answers[number] = found


def _answer(reply: Message) -> dict[str, str]:
    pickled, refused = reply.get("pickled"), reply.get("refused")
    if isinstance(pickled, str) and len(pickled) <= MOST_ANSWER:
        return {"pickled": pickled}
    if isinstance(refused, str):
        return {"refused": refused[:MOST_LETTERS]}
    return {"refused": f"your answer cannot be sent to the ranks: it has more than {MOST_ANSWER >> 20} MiB"}


# --- a question -------------------------------------------------------------------------------------------


def _feedback(number: str, kept: Message, seed: str, seconds: float, walls: Walls) -> Feedback:
    """Return the feedback on a question; the same seed draws the same inputs.

    Each question has a session of its own: no answer finds what another one left behind, or saw what it saw.
    """
    # A judge may draw from the global generators, too
    seed_number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed_number)
    if "pickled" not in kept:
        why = kept.get("refused", "the notebook did not get as far as this question")
        feedback = judged(number, NoAnswer(why), random.Random(seed))
    else:
        with walls.session() as session:
            ask = SandboxAsk(session, QUESTIONS[number], kept, seconds, walls.patience)
            feedback = judged(number, ask, random.Random(seed))
    feedback.trouble = feedback.trouble[:MOST_LETTERS]
    for finding in feedback.findings:
        finding.seen, finding.hint = finding.seen[:MOST_LETTERS], finding.hint[:MOST_LETTERS]
    return feedback


class NoAnswer:
    """A `question.Ask` where there is no answer: it says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise Refused(self._why)

    folder = __call__


class SandboxAsk:
    """The grader's `question.Ask`: the answer is in the sandbox, and JSON comes back.

    A work is sent by value, with what it needs from its own file: the judges, the expected values and the
    points stay here.
    """

    def __init__(
        self, session: Session, asked: Question, kept: Message, seconds: float, patience: float
    ) -> None:
        self._session, self._asked, self._patience = session, asked, patience
        self._kept: Message | None = kept  # the request to keep the answer; None once it is sent
        self._left = min(ALL_SECONDS, seconds)

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        if self._kept:
            self._reply(self._kept, START_SECONDS)
            self._kept = None
        limit, began = seconds_for(self._left) * self._patience, time.monotonic()
        request = {"do": "ask", "work": sent(self._asked, work), "args": json.loads(json.dumps(args))}
        request |= {"nprocs": nprocs, "seconds": limit}
        try:
            reply = self._reply(request, limit + GRACE_SECONDS)
        finally:
            self._session.note_limit(limit)
            self._left -= (time.monotonic() - began) / self._patience
        return _seen(reply, nprocs)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Provide an empty folder in the sandbox; this process cannot see it."""
        yield Path(str(self._reply({"do": "folder"}, START_SECONDS).get("folder"))[:MOST_PATH])

    def _reply(self, request: Message, seconds: float) -> Message:
        """Send a request and return the first reply."""
        self._session.limit(seconds)
        try:
            return next(self._session.ask(request))
        except SessionEnded as why:
            raise Troubled(f"your code failed: {why}") from None


def _seen(reply: Message, nprocs: int) -> list[Any]:
    """Return what the work saw on each rank, from a reply that may be anything."""
    texts = reply.get("texts")
    if isinstance(texts, list) and len(texts) == nprocs and all(isinstance(text, str) for text in texts):
        if any(sum(map(text.count, ",[{")) > MOST_PARTS for text in texts):
            raise Refused(f"your code returned more than {MOST_NUMBERS:,} numbers; far fewer are asked for")
        return [read(text) for text in texts]
    for kind, error in (("refused", Refused), ("trouble", Troubled)):
        if isinstance(words := reply.get(kind), str):
            raise error(words[:MOST_LETTERS])
    raise Refused("the check's report cannot be read")


def sent(asked: Question, work: Work) -> str:
    """Pickle a work for the sandbox, with the functions that it calls and no others."""
    cloudpickle.register_pickle_by_value(questions)
    try:
        return base64.b64encode(dumps(((asked.accepts, asked.signature), work))).decode()
    finally:
        cloudpickle.unregister_pickle_by_value(questions)
