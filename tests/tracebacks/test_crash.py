"""Where the stacks of a crash in C are written. `report` finds them: see `test_failed`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CRASHES = """
import ctypes, faulthandler, json, sys
from pathlib import Path
from course_lib.tracebacks.stack_dumps import leave_at_a_crash

ours, own = map(Path, sys.argv[1:])
leave_at_a_crash(ours, lambda **facts: print(json.dumps(facts), flush=True))
SETUP
ctypes.string_at(0)
"""


@pytest.mark.parametrize(
    ("option", "setup", "noted"),
    [
        ([], "", None),
        ([], "faulthandler.enable()", False),
        ([], "faulthandler.enable(open(own, 'w'))", "own"),
        ([], "file = open(own, 'w'); faulthandler.enable(file=file.fileno())", "own"),
        (["-X", "faulthandler"], "", None),
    ],
)
def test_they_are_where_the_program_wants_them(
    option: list[str], setup: str, noted: object, tmp_path: Path
) -> None:
    ours, own = tmp_path / "ours", tmp_path / "own"
    command = [sys.executable, *option, "-c", CRASHES.replace("SETUP", setup), str(ours), str(own)]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert ended.returncode < 0
    place = ours if not (setup or option) else own if noted == "own" else None
    written = {path: "Segmentation fault" in path.read_text() for path in (ours, own) if path.exists()}
    assert [path for path, has in written.items() if has] == ([place] if place else [])
    assert ("Segmentation fault" in ended.stderr) == (place is None)
    facts = [json.loads(line) for line in ended.stdout.splitlines()]
    expected = str(own) if noted == "own" else noted
    assert facts == ([] if noted is None else [{"crash_file": expected}])
