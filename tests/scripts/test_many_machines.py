"""`scripts/many_machines.py`: what agents said is heard to the end."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(LESSONS)
    return importlib.import_module("scripts.many_machines")


def test_a_listener_waits_for_words_and_knows_the_last_ones(module: Any) -> None:
    program = "print('one', flush=True); print('[some/file.cc:12] ValueError: two'); print('three')"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    listener = module.Listener(process, time.monotonic())
    assert listener.wait_for("one")
    assert not listener.wait_for("never printed"), "its end is the end of waiting"
    assert listener.last_words().endswith(": ValueError: two")
    assert [line for _, line in listener.with_words("o")] == ["one", "ValueError: two"]
    assert listener.ended[1] == 0
