from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its path, from the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a script.py").touch()
    return "a script.py"
