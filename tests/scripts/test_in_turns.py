"""`in_turns`: what lessons compare is measured in rounds, there and back."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

LESSONS = Path(__file__).parents[2] / "lessons"


def test_each_way_is_measured_once_a_round_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LESSONS)
    made: list[str] = []
    ways = {name: lambda name=name: made.append(name) or len(made) for name in "abc"}
    found = importlib.import_module("scripts.helpers").in_turns(ways, rounds=3)
    assert made == list("abccbaabc")
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
