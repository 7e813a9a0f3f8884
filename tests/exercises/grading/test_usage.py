"""What a sandbox's processes lack of their cores, by what Linux says of them."""

from __future__ import annotations

import os
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
    ("cores", "idle", "each", "lost"),
    [
        (1, 0, [(10.0, 0.0)], 0.0),  # as if alone
        (1, 10, [(0.0, 0.0)], 0.0),  # a hang
        (1, 0, [(5.0, 5.0)], 5.0),  # another one had half of the core
        (1, 0, [(5.0, 5.0), (5.0, 5.0)], 0.0),  # the other one is its own
        (1, 0, [(0.1, 9.9)] * 100, 0.0),  # so are all of these
        (1, 0, [(0.01, 9.99)] * 100, 9.0),  # which others left a tenth of the core
        (2, 10, [(5.0, 5.0)], 5.0),  # one that could use one of two
        (2, 0, [(2.0, 8.0), (2.0, 8.0)], 8.0),
        (1, 9, [(0.04, 0.48)] * 25, 0.0),  # they wake together, and wait for each other only
        (2, 15, [(4.0, 6.0)], 1.0),  # others cannot have had more than they used
    ],
)
@pytest.mark.parametrize("ignores", [False, True])
def test_what_others_had_is_lost(
    cores: int,
    idle: int,
    each: list[tuple[float, float]],
    lost: float,
    ignores: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0

    def idles(seconds: float) -> None:
        """The first core; so does the last one of this machine, which is not theirs."""
        ticks = int(seconds * os.sysconf("SC_CLK_TCK"))
        first, others = f"cpu0 7 7 7 {ticks // 2} {ticks // 2} 7\n", "cpu1 7 7 7 0 0 7\n"
        (tmp_path / "stat").write_text(f"cpu 7 7 7 99 99 7\n{first}{others}cpu7 7 7 7 {ticks} 0 7\n")

    idles(0)
    monkeypatch.setattr(usage, "PROC", tmp_path)
    monkeypatch.setattr(usage.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(usage.time, "monotonic", lambda: now)
    waiting = usage.Waiting(range(cores))
    family: list[Any] = [Process(pid, tmp_path) for pid in range(len(each))]
    (tmp_path / "0" / "status").write_text(f"SigBlk:\t0\nSigIgn:\t{ignores << 16:016x}\n")
    lost *= not ignores  # those whose use nobody knows have lost nothing
    idles(idle)
    for process, (used, waited) in zip(family, each, strict=True):
        process.has(used, waited)
    now += 10.0
    waiting.look(family)
    assert waiting.seconds == pytest.approx(lost)
    now += 10.0
    waiting.look(family[1:])  # one has ended, the others slept
    assert waiting.seconds == pytest.approx(lost)
