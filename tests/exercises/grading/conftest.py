"""The grader's tests have two questions of their own, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import cloudpickle
import psutil
import pytest

from course_lib.exercises import question as question_module
from course_lib.exercises.grading import score, supervisor
from tests.exercises.grading import toys
from tests.support.processes import wait_for


@pytest.fixture(scope="module", autouse=True)
def _no_session_starves() -> Iterator[None]:
    """Sessions come behind all other processes; behind other tests they would take ten times as long."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):  # root alone may raise a priority
        os.setpriority(os.PRIO_PROCESS, 0, before - supervisor.NICE)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """99.1 and 99.2, beside the course's own."""
    score.answer_names()
    before = dict(question_module.QUESTIONS)
    toys.register()
    cloudpickle.register_pickle_by_value(toys)
    yield
    cloudpickle.unregister_pickle_by_value(toys)
    question_module.QUESTIONS.clear()
    question_module.QUESTIONS.update(before)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process that the test has started is there afterwards."""
    before = set(psutil.Process().children(recursive=True))
    yield
    wait_for(lambda: not set(psutil.Process().children(recursive=True)) - before, what="their end")
