from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its path, from the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a script.py").touch()
    return "a script.py"


@pytest.fixture
def nobody() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
