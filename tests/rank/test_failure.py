"""A failure is recorded, with the killed workers that explain it."""

from __future__ import annotations

import errno
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


def test_a_failure_is_recorded_once_another_rank_has_made_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks fill a small disk with their results: the first that gives up makes room."""
    full, write = [True, True], failure.write_whole

    def write_or_not(path: Path, text: str) -> None:
        if full and full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(failure, "write_whole", write_or_not)
    failure.write_failure(tmp_path, 1, type="OSError", message="no room")
    assert json.loads(RankFiles(tmp_path, 1).failure.read_text())["type"] == "OSError"
