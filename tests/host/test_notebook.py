"""Where a process runs."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from course_lib.host.notebook import in_kernel, shell


def test_a_plain_python_is_no_notebook() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "from course_lib.host.notebook import *; print(shell(), in_kernel())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "None False\n"


def test_a_terminals_ipython_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = types.ModuleType("IPython")
    terminal.get_ipython = lambda: types.SimpleNamespace(compile=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert shell() is not None
    assert not in_kernel()
