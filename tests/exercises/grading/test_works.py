"""What of a question's own file crosses the walls."""

from __future__ import annotations

import ast
import base64
import inspect
import sys
import types
from typing import Any

import pytest

from course_lib import pickling
from course_lib.exercises.grading import score
from course_lib.exercises.question import QUESTIONS, Question

IN_WORDS = {"_some"}  # functions that put a result in words, for works and judges alike


def crossing(asked: Question, function: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, set[str]]:
    """What crosses with a function of a question's file, and the names of that file's functions in it."""
    names = set()
    reduces = pickling.Pickler.reducer_override

    def notes(self: pickling.Pickler, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and obj.__module__ == asked.judge.__module__:
            names.add(obj.__qualname__)
        return reduces(self, obj)

    with monkeypatch.context() as patch:
        patch.setattr(pickling.Pickler, "reducer_override", notes)
        sent = base64.b64decode(score.sent(asked, function))
    return sent, {name for name in names if "<" not in name}


def works_in(module: types.ModuleType) -> set[str]:
    """The functions of a file that are asked for by name, or that take an answer."""
    tree = ast.parse(inspect.getsource(module))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "ask"}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.args.args]
    return names.intersection(vars(module)) | {f.name for f in functions if f.args.args[0].arg == "answer"}


@pytest.mark.parametrize("number", sorted(score.answer_names()))
def test_a_work_brings_no_judge_with_it(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever crosses for any question of a file, it cannot tell what this question's judge expects."""
    asked = QUESTIONS[number]
    module = sys.modules[asked.judge.__module__]
    crossed = {name: crossing(asked, getattr(module, name), monkeypatch) for name in works_in(module)}
    judging = crossing(asked, asked.judge, monkeypatch)[1]
    for name in judging.intersection(crossed):
        judging = judging - crossed[name][1]
    assert asked.judge.__name__ in judging
    for sent, names in crossed.values():
        assert len(sent) > 100
        assert b"Finding" not in sent
        assert not names & judging - IN_WORDS
