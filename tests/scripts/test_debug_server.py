"""`scripts/debug_server.py`: PyTorch's debug server, on the loopback address and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from course_lib import launch

LESSONS = Path(__file__).parents[2] / "lessons"


def served(lessons: str) -> dict[str, Any]:
    sys.path.insert(0, lessons)
    import psutil
    from scripts.debug_server import page, serve_on_loopback

    _servers, website = serve_on_loopback()
    sockets = psutil.Process().net_connections()
    return {
        "listens": sorted({each.laddr.ip for each in sockets if each.status == "LISTEN"}),
        "stacks": page(f"{website}/stacks"),
        "nothing": page(f"{website}/nothing"),
    }


def test_it_listens_to_this_machine_alone_and_shows_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LESSONS)
    from scripts.debug_server import why_not

    if why_not():
        pytest.skip(why_not())
    (seen,) = launch(served, str(LESSONS), nprocs=1, device="cpu", timeout=300, dashboard=False).results
    assert seen["listens"] == ["127.0.0.1"]
    status, text = seen["stacks"]
    assert status == 200
    assert "in served" in text
    assert seen["nothing"][0] == 404
