"""`in_turns` measures in rounds, there and back; `reason` and `show` of the same file."""

from __future__ import annotations

import importlib
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from IPython.display import Image

LESSONS = Path(__file__).parents[2] / "lessons"


def test_each_way_is_measured_once_a_round_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LESSONS)
    made: list[str] = []
    ways = {name: lambda name=name: made.append(name) or len(made) for name in "abc"}
    found = importlib.import_module("scripts.helpers").in_turns(ways, rounds=3)
    assert made == list("abccbaabc")
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_the_reason_of_an_nccl_error_is_its_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LESSONS)
    reason = importlib.import_module("scripts.helpers").reason
    lines = ["NCCL error in: /pytorch/torch/csrc/NCCLUtils.cpp:93, invalid usage", "ncclInvalidUsage: …"]
    duplicate = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    said = reason(RuntimeError("\n".join([*lines, "Last error:", duplicate])))
    assert said == f"{duplicate} NCCL error invalid usage"
    assert reason(RuntimeError("[/a/b.cpp:1] no room\nmore")) == "no room"


def test_a_drawing_is_shown_as_a_png_on_any_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LESSONS)
    helpers = importlib.import_module("scripts.helpers")
    shown: list[Image] = []
    monkeypatch.setattr(helpers, "display", shown.append)
    figure, _ = plt.subplots()
    helpers.show(figure, "an empty square", width=300)
    assert shown[0].data.startswith(b"\x89PNG")
    assert (shown[0].width, shown[0].alt) == (300, "an empty square")
    assert not plt.fignum_exists(figure.number)
