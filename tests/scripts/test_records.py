"""`Record`: a cell's work is run where it can be, and shown from its record elsewhere."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

LESSONS = Path(__file__).parents[2] / "lessons"
RECORDS = sorted([*(LESSONS / "recorded").glob("*.json"), *(LESSONS / "recorded" / "deeper").glob("*.json")])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(LESSONS)
    monkeypatch.delenv("COURSE_RECORD", raising=False)
    return importlib.import_module("scripts.helpers")


def test_a_record_is_made_only_on_request_and_shown_where_the_work_cannot_be_done(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = module.Record(tmp_path / "folder" / "x.json")

    def work() -> dict[str, Any]:
        return {"pair": (1, 2.5), "in": sys.prefix + "/bin"}

    assert record(work, "") == {"pair": [1, 2.5], "in": ".venv/bin"}, "as it comes from a record"
    with pytest.raises(RuntimeError, match=r"work cannot be run here, and .*no record of it: no root"):
        record(work, "no root")
    monkeypatch.setenv("COURSE_RECORD", "1")
    record(work, "")
    monkeypatch.delenv("COURSE_RECORD")

    def work() -> None:  # type: ignore[misc]
        raise AssertionError("it cannot be run here")

    capsys.readouterr()
    assert record(work, "no root") == {"pair": [1, 2.5], "in": ".venv/bin"}
    kept = json.loads((tmp_path / "folder" / "x.json").read_text())["work"]
    said = capsys.readouterr().out
    assert said.startswith("Not run here: no root.\nRecorded on ")
    assert kept["date"] in said
    assert "CPU cores" in said


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_lesson_has_a_record_of_all_that_may_be_missing(path: Path) -> None:
    kept = json.loads(path.read_text())
    name = path.relative_to(LESSONS / "recorded")
    notebook = json.loads((LESSONS / name.with_suffix(".ipynb")).read_text())
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    its = rf"here_or_recorded|Record\(\"(?:\.\./)?recorded/{name}\"\)"
    asked = re.findall(rf"(?:{its})\((\w+),", code)
    assert asked
    assert sorted(asked) == sorted(kept)
    folders = re.findall(r"(?<![\w.<>/])/[a-z]\w*/[^\s\"]+", json.dumps(kept))
    assert folders == [], "of the machine on which it was made"
