"""What a sandbox's processes lack of their cores, by what Linux says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from course_lib.exercises.grading import usage


class Process:
    """A process with one thread, that has used its core, and waited for it, for so many seconds."""

    def __init__(self, pid: int, proc: Path) -> None:
        self.pid, self._thread = pid, proc / str(pid) / "task" / str(pid)
        self._thread.mkdir(parents=True)
        self.has(0.0, 0.0)

    def has(self, used: float, waited: float) -> None:
        self._used = used
        (self._thread / "schedstat").write_text(f"{used * 1e9:.0f} {waited * 1e9:.0f} 7")

    def cpu_times(self) -> tuple[float, ...]:
        return self._used / 2, self._used / 4, self._used / 4, 0.0, 99.0


@pytest.mark.parametrize(
    ("cores", "each", "lost"),
    [
        (1, [(10.0, 0.0)], 0.0),  # as if alone
        (1, [(0.0, 0.0)], 0.0),  # a hang
        (1, [(5.0, 5.0)], 5.0),  # another one had half of the core
        (1, [(5.0, 5.0), (5.0, 5.0)], 0.0),  # the other one is its own
        (1, [(0.1, 9.9)] * 100, 0.0),  # so are all of these
        (1, [(0.01, 9.99)] * 100, 9.0),  # which others left a tenth of the core
        (2, [(5.0, 5.0)], 5.0),  # one that could use one of two
        (2, [(2.0, 8.0), (2.0, 8.0)], 8.0),
    ],
)
def test_what_others_had_is_lost(
    cores: int, each: list[tuple[float, float]], lost: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(usage, "PROC", tmp_path)
    monkeypatch.setattr(usage.time, "monotonic", lambda: now)
    waiting = usage.Waiting(cores)
    family: list[Any] = [Process(pid, tmp_path) for pid in range(len(each))]
    for process, (used, waited) in zip(family, each, strict=True):
        process.has(used, waited)
    now += 10.0
    waiting.look(family)
    assert waiting.seconds == pytest.approx(lost)
    now += 10.0
    waiting.look(family[1:])  # one has ended, the others slept
    assert waiting.seconds == pytest.approx(lost)
