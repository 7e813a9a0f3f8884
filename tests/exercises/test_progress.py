"""The file of solved exercises, written by several kernels at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOTES = """
import sys
from course_lib.exercises.progress import note

for i in range(40):
    note(f"{sys.argv[1]}.{i}", i, 40.0)
"""


def test_kernels_that_note_at_once_lose_nothing(course_home: Path) -> None:
    kernels = [subprocess.Popen([sys.executable, "-c", NOTES, str(which)]) for which in range(4)]
    assert [each.wait(120) for each in kernels] == [0] * 4
    kept = json.loads((course_home / "progress.json").read_text())
    assert kept == {f"{which}.{i}": [i, 40.0] for which in range(4) for i in range(40)}
    assert sorted(path.name for path in course_home.iterdir()) == ["progress.json", "progress.lock"]
