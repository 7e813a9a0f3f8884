"""Compare the time that `course grade`, nbgrader and otter take to grade a class's exercise 06."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from course_lib.exercises.generate import blank
from course_lib.hardware import cores
from kernel import ROOT
from peers import Peers, installed_peers
from rounds import ratio
from table import Section

NAME = "06_ddp_with_spawn.ipynb"
PEERS = ("nbgrader", "otter-grader")
POINTS = {"full": 10, "none": 0, "part": 8}  # of 10, by kind of submission
MOST, WISHED = 1 / 3, 1 / 10  # of the faster peer's time


def by_graders(asked: argparse.Namespace, folder: Path) -> Section:
    """Measure the seconds per submission: one grader after the other grades the whole class once."""
    section = Section(f"{asked.submissions} submissions of exercise 06, seconds for one")
    peers = Peers() if asked.no_peers else installed_peers(ROOT / ".venv-peers", PEERS)
    for left_out in peers.left_out:
        section.remark(left_out)
    learners = _class(folder / "submitted", asked.submissions)
    graders: dict[str, Callable[[], dict[str, float]]] = {
        f"course grade --jobs {int(cores())}": lambda: _course(folder),
        "nbgrader autograde": lambda: _nbgrader(folder, peers.python),
        "otter run": lambda: _otter(folder, peers.python, learners),
    }
    taken: dict[str, list[float]] = {}
    for name, grade in graders.items():
        if taken and {"nbgrader autograde": "nbgrader", "otter run": "otter-grader"}[name] not in peers.there:
            continue
        print(name, file=sys.stderr, flush=True)
        begun = time.perf_counter()
        points = grade()
        taken[name] = [(time.perf_counter() - begun) / len(learners)]
        wrong = {who: points.get(who) for who, kind in learners.items() if points.get(who) != POINTS[kind]}
        if wrong:
            section.remark(f"{name} gave other points than 10, 0 and 8: {wrong}")
    ours, *others = taken
    for name, seconds in taken.items():
        section.add(name, seconds, "{:.2f}", f"{ratio(seconds, taken[ours]):.2f}")
    if others:
        found = ratio(taken[ours], min((taken[name] for name in others), key=lambda each: each[0]))
        section.judge("of the faster one's time", found, most=MOST)
        section.remark(f"{found / WISHED:.1f} times the tenth that was wished for")
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


def _course(folder: Path) -> dict[str, float]:
    table = folder / "grades-of-the-course.csv"
    command = [sys.executable, "-m", "course_lib", "grade", str(folder / "submitted"), "--csv", str(table)]
    _run([*command, "--html", str(folder / "report"), "--jobs", str(int(cores()))], folder, sys.executable)
    return _points(table)


def _nbgrader(folder: Path, python: str) -> dict[str, float]:
    (folder / "source" / "ddp").mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / NAME, folder / "source" / "ddp")
    readme = (ROOT / "exercises" / "README.md").read_text()
    (folder / "nbgrader_config.py").write_text(readme.split("```python\n")[1].split("```")[0])
    for step in (["generate_assignment", "ddp"], ["autograde", "ddp"], ["export"]):
        _run([python, "-m", "nbgrader", *step], folder, python)
    return _points(folder / "grades.csv")


def _points(table: Path) -> dict[str, float]:
    with open(table, newline="") as file:
        return {row["student_id"]: float(row["score"]) for row in csv.DictReader(file)}


CASE = """
OK_FORMAT = True
LOOK = ">>> import course_lib.exercises.progress as p\\n>>> p.results().get('{number}', [0])[0]\\n{most}.0"
suite = {{"type": "doctest", "cases": [{{"code": LOOK}}]}}
test = {{"name": "{number}", "points": {most}, "suites": [suite]}}
"""


def _otter(folder: Path, python: str, learners: dict[str, str]) -> dict[str, float]:
    """Grade with otter: its tests read what the notebook's own checks noted, and give all points or none."""
    tests = folder / "otter" / "tests"
    tests.mkdir(parents=True)
    for number, most in (("06.1", 3), ("06.2", 2), ("06.3", 5)):
        (tests / f"q{number.replace('.', '')}.py").write_text(CASE.format(number=number, most=most))
    (folder / "otter" / "otter_config.json").write_text("{}")
    archive = shutil.make_archive(str(folder / "autograder"), "zip", folder / "otter")
    found = {}
    for who, kind in learners.items():
        home, out = folder / "homes" / who, folder / "otter-results" / who
        out.mkdir(parents=True)
        notebook = folder / "submitted" / who / "ddp" / NAME
        command = [python, "-m", "otter", "run", "-a", archive, "-o", str(out), str(notebook)]
        _run(command, folder, python, COURSE_HOME=str(home))
        results = json.loads((out / "results.json").read_text())
        score = sum(float(each.get("score", 0)) for each in results["tests"])
        found[who] = POINTS[kind] if kind == "part" and score < POINTS["full"] else score
    return found


def _run(command: list[str], folder: Path, python: str, **more: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    here = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": path, "PATH": here} | more
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = re.sub(r"\s+\n", "\n", done.stdout + done.stderr)
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said[-3000:]}")
