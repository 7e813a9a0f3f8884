"""The file of solved exercises, written by several kernels at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from course_lib import progress, share_progress
from course_lib.exercises import questions
from course_lib.exercises.progress import note
from course_lib.exercises.question import QUESTIONS

NOTES = """
import sys
from course_lib.exercises.progress import note
from course_lib.exercises.sharing import note_try

for i in range(40):
    note(f"{sys.argv[1]}.{i}", i, 40.0)
    note_try("06.1", 1)
"""


def test_kernels_that_note_at_once_lose_nothing(course_home: Path, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    share_progress(tmp_path / "class", "anna")
    kernels = [subprocess.Popen([sys.executable, "-c", NOTES, str(which)]) for which in range(4)]
    assert [each.wait(120) for each in kernels] == [0] * 4
    kept = json.loads((course_home / "progress.json").read_text())
    assert kept == {f"{which}.{i}": [i, 40.0] for which in range(4) for i in range(40)}
    (shared,) = (tmp_path / "class").iterdir()
    assert json.loads(shared.read_text())["questions"]["06.1"]["tries"] == 4 * 40
    left = sorted(path.name for path in course_home.iterdir())
    assert left == ["progress.json", "progress.lock", "sharing.json"]


def test_a_part_is_done_when_each_of_its_questions_has_all_points(course_home: Path) -> None:
    questions.load()
    second = {number: asked.most for number, asked in QUESTIONS.items() if "09" <= number < "14"}
    for number, most in second.items():
        note(number, most, most)
    note("08.1", 1, QUESTIONS["08.1"].most)
    ends = re.findall(r"(?m)^(\D+), (\d\d) to (\d\d) +(\d+) of (\d+) *(.*?) *$", repr(progress()))
    names = [(name.strip(), first, last) for name, first, last, *_ in ends]
    assert names == [("First ranks", "00", "08"), ("Right and robust", "09", "13"), ("Scale", "14", "20")]
    points = f"{sum(second.values()):g}"
    assert [each[3:] for each in ends][1] == (points, points, "✓ done")
    assert [(each[3], each[5]) for each in ends][::2] == [("1", ""), ("0", "")]
