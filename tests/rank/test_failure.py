"""Which killed workers an error is put down to."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from course_lib.rank import failure
from course_lib.record.layout import RankFiles


def blamed(folder: Path, error: BaseException) -> list[int]:
    failure.report_exception(folder, 0, error)
    return [pid for pid, _ in json.loads(RankFiles(folder, 0).failure.read_text()).get("workers", [])]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, float]]:
    found: dict[int, tuple[int, float]] = {}
    monkeypatch.setattr(failure, "_ended", found)
    return found


def test_a_worker_that_was_killed_long_ago_explains_only_an_error_that_names_it(
    ended: dict[int, tuple[int, float]], tmp_path: Path
) -> None:
    ended[71] = (-signal.SIGKILL, time.time() - 60)
    ended[72] = (-signal.SIGTERM, time.time())
    ended[73] = (0, time.time())
    assert blamed(tmp_path, ValueError("no such column")) == []
    assert blamed(tmp_path, RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly")) == [71]
    assert blamed(tmp_path, RuntimeError("after 1711 steps")) == []
    ended[74] = (-signal.SIGKILL, time.time())
    assert blamed(tmp_path, ValueError("no such column")) == [74]


def test_a_lost_connection_is_waited_for_wherever_it_is_in_the_chain(
    ended: dict[int, tuple[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker ends some moments later."""
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) % 2 == 0:
            ended[71] = (-signal.SIGKILL, time.time())

    monkeypatch.setattr(failure, "WORKER_SECONDS", 60)
    monkeypatch.setattr(failure.multiprocessing, "active_children", look)
    for error in (EOFError(), ValueError()):
        ended.clear()
        outer = RuntimeError("no batch")
        outer.__cause__ = error
        assert blamed(tmp_path, outer) == [71] * isinstance(error, EOFError)
        looks.clear()
