"""`gpu_figure`: a machine's own figure of a GPU, else the recorded one, else nothing; what a record is."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib import curves

LESSONS = Path(__file__).parents[2] / "lessons"
RECORDS = sorted((LESSONS / "recorded" / "gpu").glob("*.json"))
RECORD = {
    "figure": "99_example",
    "alt": "Two points.",
    "device": "An Example GPU",
    "gpus": 1,
    "driver": "1.2",
    "cuda": "13.0",
    "torch": "2.11.0",
    "python": "3.12.1",
    "course": "0.1.0",
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


@pytest.fixture
def record(module: Any, tmp_path: Path) -> Path:
    """The file of a record, with its picture beside it."""
    picture = curves({"line": ([1, 2], [3, 4])}, "Title", "x", "y")
    path = tmp_path / "folder" / "99_example.json"
    module.GpuFigure(RECORD, picture.png()).write(path)
    return path


def test_without_a_record_nothing_is_shown(
    module: Any, shown: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module.gpu_figure("99_example", records=tmp_path)
    assert (shown, capsys.readouterr().out) == ([], "")


def test_a_record_is_shown_with_its_device_and_date(
    module: Any, shown: list[Any], record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def own() -> None:
        raise AssertionError("there is no GPU")

    module.gpu_figure("99_example", own, records=record.parent)

    said = capsys.readouterr().out
    assert said == "Recorded on 2026-01-02, on a GPU (An Example GPU, driver 1.2, torch 2.11.0):\n"
    data, metadata = shown.pop()._repr_mimebundle_()
    assert data["image/png"] == record.with_suffix(".png").read_bytes()
    assert data["text/plain"] == "[picture: Two points.]"
    assert metadata["image/png"] == {"alt": "Two points.", "width": 691}
    assert sorted(path.name for path in record.parent.iterdir()) == ["99_example.json", "99_example.png"]


def test_with_a_gpu_the_figure_is_its_own(
    module: Any,
    shown: list[Any],
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module.gpu_figure("99_example", lambda: "its own", records=record.parent)
    module.gpu_figure("99_example", records=record.parent)
    assert shown == ["its own"]
    assert capsys.readouterr().out == "This machine has a GPU: the figure above is its own.\n"


def without(key: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        del content[key]
        path.write_text(json.dumps(content))

    return change


DAMAGES = {
    "cut off": (lambda path: path.write_text(path.read_text()[:100]), "99_example.json is no JSON, cut off"),
    "empty": (lambda path: path.write_text(""), "99_example.json is no JSON, cut off"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "99_example.json is no JSON, cut off"),
    "a list": (lambda path: path.write_text("[]"), "a list where a record is a dict"),
    "no device": (without("device"), "it has no 'device'"),
    "no number": (
        lambda path: path.write_text(path.read_text().replace('"gpus": 1', '"gpus": "one"')),
        "its 'gpus' is no int",
    ),
    "no picture": (lambda path: path.with_suffix(".png").unlink(), "99_example.png, is missing"),
    "half a picture": (
        lambda path: path.with_suffix(".png").write_bytes(path.with_suffix(".png").read_bytes()[:500]),
        "99_example.png is not the picture of 99_example.json, or was cut off",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_a_line(
    module: Any, shown: list[Any], record: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = DAMAGES[name]
    damage(record)
    module.gpu_figure("99_example", records=record.parent)
    assert shown == []
    said = capsys.readouterr().out
    assert said.startswith("On a GPU: the recorded figure cannot be shown (")
    assert words in said
    assert said.count("\n") == 1


def test_what_is_no_record_is_not_written(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match="it has no 'driver'"):
        module.GpuFigure({key: value for key, value in RECORD.items() if key != "driver"}, b"").write(path)
    with pytest.raises(ValueError, match="JSON"):
        module.GpuFigure(RECORD | {"numbers": {"x": float("nan")}}, b"").write(path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_recorded_can_be_shown_and_is_of_a_gpu(module: Any) -> None:
    for path in RECORDS:
        found = module.GpuFigure.read(path).record
        assert found["figure"] == path.stem
        assert found["gpus"] >= 1
        assert sys.prefix not in json.dumps(found)
