"""`gpu_figure`: a machine's own figure of a GPU, else the recorded one, else nothing."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib import curves

LESSONS = Path(__file__).parents[2] / "lessons"
RECORDS = sorted((LESSONS / "recorded" / "gpu").glob("*.json"))
RECORD = {
    "alt": "Two points.",
    "device": "An Example GPU",
    "driver": "1.2",
    "torch": "2.11.0",
    "date": "2026-01-02",
    "numbers": {"x": [1, 2]},
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(LESSONS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("scripts.helpers")


@pytest.fixture
def shown(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a cell displays."""
    found: list[Any] = []
    monkeypatch.setattr(module, "display", found.append)
    return found


def test_without_a_gpu_the_recorded_figure_is_shown_with_its_device_and_date(
    module: Any, shown: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module.gpu_figure("99_example", records=tmp_path)
    assert (shown, capsys.readouterr().out) == ([], ""), "nothing was recorded"

    picture = curves({"line": ([1, 2], [3, 4])}, "Title", "x", "y")
    module.GpuFigure(RECORD, picture.png()).write(tmp_path / "99_example.json")
    module.gpu_figure("99_example", lambda: pytest.fail("there is no GPU"), records=tmp_path)

    said = capsys.readouterr().out
    assert said == "Recorded on 2026-01-02, on a GPU (An Example GPU, driver 1.2, torch 2.11.0):\n"
    data, metadata = shown.pop()._repr_mimebundle_()
    assert data["image/png"] == (tmp_path / "99_example.png").read_bytes()
    assert data["text/plain"] == "[picture:\nTwo points.]"
    assert metadata["image/png"] == {"alt": "Two points.", "width": 691}


def test_with_a_gpu_the_figure_is_its_own(
    module: Any, shown: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module.gpu_figure(RECORDS[0].stem, lambda: "its own")
    module.gpu_figure(RECORDS[0].stem)
    assert shown == ["its own"]
    assert capsys.readouterr().out == "This machine has a GPU: the figure above is its own.\n"


def test_each_recorded_figure_is_of_a_gpu_and_has_the_picture_of_its_run(module: Any) -> None:
    assert RECORDS
    for path in RECORDS:
        found = module.GpuFigure.read(path)
        assert found.record["figure"] == path.stem
        assert found.record["gpus"] >= 1
        assert found.record["picture_sha256"] == hashlib.sha256(found.png).hexdigest()
        assert sys.prefix not in path.read_text()
