"""Judge one submission: draw inputs, ask its code in the sandbox, and keep the score outside of it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from ...by_value import dumps
from .. import questions
from ..asking import QUESTIONS, Question, Refused, Work, read
from ..check import ALL_SECONDS, Feedback, Troubled, judged, seconds_for
from . import submissions
from .submissions import Exercise, Unreadable
from .walls import START_SECONDS, Ended, Session, Walls

GRACE_SECONDS = 30.0  # beyond a limit that the sandbox itself keeps, for reports and the end of ranks
CELL_SECONDS = 60.0  # for one cell
MOST_STARTS = 4  # of a notebook, when its cells end the process that runs them
MOST_ANSWER = 24 << 20  # characters of a pickled answer, in base64
MOST_PATH = 200  # characters
MOST_LETTERS = 4000  # characters of what is said about a ✗, or went wrong

Result = dict[str, Any]


def forms() -> dict[str, str]:
    """Return the name of each question's answer, by question."""
    questions.load()
    return {number: each.form.partition("(")[0] for number, each in QUESTIONS.items()}


def grade(text: bytes, name: str, seed: str, seconds: float, walls: Walls) -> Result:
    """Return points and feedback for each question of a notebook, as plain data.

    Parameters
    ----------
    text
        The notebook's bytes.
    name
        The name of its file.
    seed
        Determines what is drawn, together with the notebook's own bytes.
    seconds
        The limit for all of the notebook's cells, and again for each question.
    walls
        The sandbox in which its code runs.
    """
    try:
        exercise = submissions.read(text, name, forms())
    except Unreadable as why:
        return {"exercise": None, "trouble": [str(why)], "questions": {}}
    names = {number: of for number, of in forms().items() if number.startswith(exercise.number)}
    answers, notes = answers_of(exercise, names, seconds, walls)
    found = {}
    drawn = hashlib.sha256(text).hexdigest()
    cells = {each.name: each.source for each in exercise.cells}
    for number in names:
        dice = f"{seed} {drawn} {number}"
        found[number] = _plain(_of_a_question(number, answers.get(number, {}), cells, dice, seconds, walls))
    return {"exercise": exercise.number, "trouble": exercise.notes + notes, "questions": found}


def _plain(feedback: Feedback) -> Result:
    return {
        "points": feedback.points,
        "most": feedback.most,
        "trouble": feedback.trouble[:MOST_LETTERS],
        "findings": [
            {
                "what": each.what,
                "ok": each.ok,
                "points": each.points,
                "seen": each.seen[:MOST_LETTERS],
                "hint": each.hint[:MOST_LETTERS],
            }
            for each in feedback.findings
        ],
    }


# --- the notebook -----------------------------------------------------------------------------------------


def answers_of(
    exercise: Exercise, names: dict[str, str], seconds: float, walls: Walls
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Run a notebook; return its answer to each question, pickled and never opened, or why there is none.

    A cell that ends the process, or never comes to an end, is left out, and the notebook is run again.
    """
    skip: set[int] = set()
    notes: list[str] = []
    found: dict[str, dict[str, str]] = {}
    until = time.monotonic() + START_SECONDS + seconds
    a_cell = min(CELL_SECONDS, seconds)
    left = dict(names)  # questions, less those whose answer has ended the process that runs it
    cells = exercise.cells
    for _ in range(MOST_STARTS):
        at = -1
        request = {
            "do": "run",
            "names": left,
            "seconds": a_cell,
            "cells": [[each.name, each.source, each.number, i in skip] for i, each in enumerate(cells)],
        }
        try:
            with walls.session() as session:
                session.until = until
                for reply in _said(session, request):
                    if (place := _place(reply, at, len(cells) + len(left))) > at:
                        at, session.until = place, min(until, time.monotonic() + a_cell + GRACE_SECONDS)
                    number = reply.get("answer")
                    if isinstance(number, str) and number in left:
                        found[number] = _answer(reply)
                    if reply.get("done"):
                        return found, notes
        except Ended as why:
            places = [*(each.number for each in cells), *left, None]
            number = places[at] if at >= 0 else None
            if number in left:
                del left[number]
                found[number] = {"refused": f"your answer cannot be sent to the ranks: {why}"}
            else:
                name = cells[at].name if 0 <= at < len(cells) else "what is around the cells"
                notes.append(f"{name} was left out: {why}")
                skip.add(at)
            until = time.monotonic() + START_SECONDS / MOST_STARTS + seconds / MOST_STARTS
    notes.append(f"the notebook was started {MOST_STARTS} times and did not come to its end")
    return found, notes


def _place(reply: Result, at: int, count: int) -> int:
    place = reply.get("at")
    return place if isinstance(place, int) and at <= place <= count else at


def _answer(reply: Result) -> dict[str, str]:
    pickled, refused = reply.get("pickled"), reply.get("refused")
    if isinstance(pickled, str) and len(pickled) <= MOST_ANSWER:
        with contextlib.suppress(ValueError):
            base64.b64decode(pickled, validate=True)
            return {"pickled": pickled}
    if isinstance(refused, str):
        return {"refused": refused[:MOST_LETTERS]}
    return {"refused": f"your answer cannot be sent to the ranks: it has more than {MOST_ANSWER >> 20} MiB"}


def _said(session: Session, request: Result) -> Iterator[Result]:
    """Send a request and yield the replies to it, and to no other."""
    asked = secrets.token_hex(8)
    session.send(request | {"id": asked})
    for reply in session.replies():
        if reply.get("id") == asked:
            yield reply


# --- a question -------------------------------------------------------------------------------------------


def _of_a_question(
    number: str, answer: dict[str, str], cells: dict[str, str], seed: str, seconds: float, walls: Walls
) -> Feedback:
    """Return the feedback on a question; the same seed draws the same inputs.

    Each question has a session of its own, so no answer meets what another one has left behind or seen there.
    """
    if "pickled" not in answer:
        refused = answer.get("refused", "the notebook did not come as far as this question")
        return judged(number, Refuses(refused), random.Random(seed))
    with _same_dice(seed), walls.session() as session:
        ask = Through(session, QUESTIONS[number], answer["pickled"], cells, seconds)
        return judged(number, ask, random.Random(seed))


@contextlib.contextmanager
def _same_dice(seed: str) -> Iterator[None]:
    """Seed the global RNGs, for what a judge draws without the generator that it is given."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    yield


class Refuses:
    """An `asking.Ask` without an answer: it refuses, and says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        raise Refused(self._why)


class Through:
    """The grader's `asking.Ask`: the answer is in the sandbox, and JSON comes back.

    A work goes there by value, with what it needs from its own file: the judges, the expected values and the
    points stay here.
    """

    def __init__(
        self, session: Session, asked: Question, pickled: str, cells: dict[str, str], seconds: float
    ) -> None:
        self._session, self._asked, self._pickled, self._cells = session, asked, pickled, cells
        self._left = min(ALL_SECONDS, seconds)
        self._held = False

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        self._hold()
        limit, began = seconds_for(self._left), time.monotonic()
        request = {"do": "ask", "work": sent(self._asked, work), "args": json.loads(json.dumps(args))}
        try:
            reply = self._reply(request | {"nprocs": nprocs, "seconds": limit}, limit + GRACE_SECONDS)
        finally:
            self._left -= time.monotonic() - began
        return _seen(reply, nprocs)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Provide an empty folder in the sandbox; for this process it does not exist."""
        self._hold()
        yield Path(str(self._reply({"do": "folder"}, START_SECONDS).get("folder"))[:MOST_PATH])

    def _hold(self) -> None:
        if not self._held:
            self._reply({"do": "hold", "pickled": self._pickled, "cells": self._cells}, START_SECONDS)
            self._held = True

    def _reply(self, request: Result, seconds: float) -> Result:
        """Send a request and return the first reply."""
        self._session.until = time.monotonic() + seconds
        try:
            for reply in _said(self._session, request):
                return reply
            raise Ended("it said nothing")
        except Ended as why:
            raise Troubled(f"your code failed: {why}") from None


def _seen(reply: Result, nprocs: int) -> list[Any]:
    """Return what the works saw, by rank, from a reply that may be anything."""
    texts = reply.get("texts")
    if isinstance(texts, list) and len(texts) == nprocs and all(isinstance(each, str) for each in texts):
        return [read(each) for each in texts]
    for kind, error in (("refused", Refused), ("trouble", Troubled)):
        if isinstance(words := reply.get(kind), str):
            raise error(words[:MOST_LETTERS])
    raise Refused("what your code left behind cannot be read")


def sent(asked: Question, work: Work) -> str:
    """Pickle a work for the sandbox, with the functions that it calls and no others."""
    cloudpickle.register_pickle_by_value(questions)
    try:
        return base64.b64encode(dumps(((asked.takes, asked.form), work))).decode()
    finally:
        cloudpickle.unregister_pickle_by_value(questions)


def main(path: str, name: str, seed: str, seconds: float, walls: Walls) -> Result:
    """Grade the notebook in a file."""
    try:
        text = submissions.content(Path(path))
    except Unreadable as why:
        return {"exercise": None, "trouble": [str(why)], "questions": {}}
    return grade(text, name, seed, seconds, walls)
