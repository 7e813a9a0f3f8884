"""`conversions`: what a conversion does to a number is found by trying it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.mark.parametrize(
    ("call", "source", "target", "expected"),
    [
        ("torch.tensor(v)", "number", "CPU tensor", (False, "float64 → float32", ["0.1"], "")),
        ("torch.Tensor(l)", "list", "CPU tensor", (False, "all → float32", ["2²⁴+1", "2⁵³+1", "0.1"], "")),
        ("torch.from_numpy(a)", "NumPy array", "CPU tensor", (True, "kept", [], "")),
        ("torch.from_numpy(a[::-1])", "NumPy array", "CPU tensor", (False, "", [], "ValueError")),
        ("list(t)", "CPU tensor", "list", (True, "kept", [], "")),
        ("t.clone()", "CPU tensor", "CPU tensor", (False, "kept", [], "")),
        ("d.tolist()", "device tensor", "list", (False, "kept", [], "")),
    ],
)
def test_a_conversion_is_tried(
    monkeypatch: pytest.MonkeyPatch, call: str, source: str, target: str, expected: tuple[Any, ...]
) -> None:
    monkeypatch.syspath_prepend(LESSONS)
    row = importlib.import_module("scripts.conversions").attempt(call, source, target, torch.device("cpu"))
    assert (row["call"], row["source"], row["target"]) == (call, source, target)
    assert (row["shares"], row["dtype"], row["lost"], row["error"]) == expected
