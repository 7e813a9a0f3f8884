"""Where each rank stood at the end, as data. (From a real hang: tests/faults/test_launch_faults.py.)"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from course_lib import Run, stalls

TORCH = "/venv/site-packages/torch/distributed/distributed_c10d.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("course_lib.report.stacks.is_learners", lambda file: file.startswith("/course/"))
    return Run.create("train", 1, started=time.time() - 10)


def record(run: Run, *stack: tuple[str, str], **more: Any) -> None:
    places = [(file, 12, function) for file, function in stack]
    text = json.dumps({"since": run.started + 4, "stack": places, "pending": []} | more)
    (run.folder / "rank-0.where").write_text(text)


COLLECTIVE = [(TORCH, "all_reduce"), (TORCH, "wrapper"), ("/course/cell.py", "train")]


@pytest.mark.parametrize(
    ("stack", "more", "doing"),
    [
        (COLLECTIVE, {}, "waits in all_reduce"),
        ([("/torch/_t.py", "backward"), ("/course/cell.py", "f")], {"pending": [1]}, "waits in backward"),
        ([("/torch/serialization.py", "save"), ("/course/cell.py", "train")], {}, "is in save"),
        ([("/course/cell.py", "train")], {}, "is at a line of its own"),
    ],
)
def test_where_a_rank_stood(run: Run, stack: Any, more: Any, doing: str) -> None:
    record(run, *stack, **more)
    run.record.end("failed")

    (stall,) = stalls(Run.open(run.folder))
    assert (stall.rank, stall.doing) == (0, doing)
    assert stall.since == pytest.approx(4)
    assert stall.until == pytest.approx(10, abs=0.5)
    assert stall.line == "cell.py, line 12"


@pytest.mark.parametrize(
    ("file", "doing"),
    [("rank-0.result", "has returned"), ("rank-0.failure.json", "has failed"), ("other", "is gone")],
)
def test_a_rank_that_stood_nowhere(run: Run, file: str, doing: str) -> None:
    record(run, ("/course/cell.py", "train"))
    if file == "other":
        (run.folder / "rank-0.where").unlink()
    (run.folder / file).touch()
    run.record.end("failed")

    (stall,) = stalls(run)
    assert (stall.doing, stall.line) == (doing, "")
    assert 0 <= stall.since <= stall.until
