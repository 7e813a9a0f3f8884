"""Measure the time that `course grade` takes for a class's exercise 06."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

from course_lib.exercises.generate import blank
from course_lib.host.hardware import cores
from tests.benchmarks.kernel import ROOT, environment
from tests.benchmarks.table import Section

NAME = "06_ddp_with_spawn.ipynb"
POINTS = {"full": 10.0, "none": 0.0, "part": 8.0}  # of 10, by kind of submission


def of_a_class(count: int, folder: Path) -> Section:
    """Measure the seconds per submission: the whole class is graded once."""
    learners = _class(folder / "submitted", count)
    table, jobs = folder / "grades.csv", str(int(cores()))
    command = [sys.executable, "-m", "course_lib", "grade", str(folder / "submitted"), "--csv", str(table)]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, "--html", str(folder / "report"), "--jobs", jobs],
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    seconds = (time.perf_counter() - begun) / count
    if done.returncode:
        raise RuntimeError(done.stderr)
    with open(table, newline="") as file:
        points = {row["student_id"]: float(row["score"]) for row in csv.DictReader(file)}
    if points != {who: POINTS[kind] for who, kind in learners.items()}:
        raise RuntimeError(f"other points than 10, 0 and 8: {points}")
    section = Section(f"{count} submissions of exercise 06, for one")
    section.add(f"course grade --jobs {jobs}", [seconds], "{:.2f} s")
    return section


def _class(folder: Path, count: int) -> dict[str, str]:
    """Write notebooks as learners submit them, no two the same; return each learner's kind of notebook."""
    text = (ROOT / "solutions" / NAME).read_text()
    texts = {
        "full": text,
        "none": blank(ROOT / "solutions" / NAME),
        "part": text.replace("parameter.grad /= total", "pass", 1),
    }
    learners = {f"learner{i:02}": list(texts)[i % len(texts)] for i in range(count)}
    for who, kind in learners.items():
        notebook = json.loads(texts[kind])
        notebook["metadata"]["learner"] = who
        (folder / who / "ddp").mkdir(parents=True)
        (folder / who / "ddp" / NAME).write_text(json.dumps(notebook))
    return learners
