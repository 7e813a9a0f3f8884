"""`four_moves`: the pictures of lesson 03 have a box for each replica, and say what they show."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.mark.parametrize("name", ["forward_picture", "backward_picture"])
@pytest.mark.parametrize("replicas", [2, 4, 5])
def test_a_picture_has_each_replica(monkeypatch: pytest.MonkeyPatch, name: str, replicas: int) -> None:
    monkeypatch.syspath_prepend(LESSONS)
    module: Any = importlib.import_module("scripts.four_moves")
    shown: list[tuple[Any, str]] = []
    monkeypatch.setattr(module, "show", lambda figure, alt: shown.append((figure, alt)))
    getattr(module, name)(replicas)
    ((figure, alt),) = shown
    texts = [each.get_text() for each in figure.axes[0].texts]
    assert sum(text.startswith("replica ") for text in texts) == replicas
    assert f"replica {replicas - 1}\non device {replicas - 1}" in texts
    assert "device 0" in alt
