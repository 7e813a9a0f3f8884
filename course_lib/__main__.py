"""The ``course`` command: ``course doctor``, ``help``, ``zh``, ``exercises``, ``grade`` and ``board``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from .host.hardware import machine
from .launcher.launch import launch


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments and return its exit status: 0 for success."""
    parser = argparse.ArgumentParser(prog="course", description="The course's own tools.")
    commands = parser.add_subparsers(required=True)

    def command(run: Callable[[argparse.Namespace], int], name: str, about: str) -> Callable[..., Any]:
        added = commands.add_parser(name, help=about)
        added.set_defaults(run=run)
        return added.add_argument

    command(doctor, "doctor", "what this machine offers, and whether the course runs on it")
    add = command(look_up, "help", "what you see, looked up in the symptoms of the lessons")
    add("words", nargs="+", metavar="WORD", help="of an error or a question")
    add = command(zh, "zh", "make or update the Chinese edition in zh/")
    add("--stale", action="store_true", help="write nothing; list the texts to renew; fail if there are any")
    command(exercises, "exercises", "generate exercises/ from solutions/")
    add = command(grade, "grade", "grade a class's notebooks, each behind walls")
    about = "of exercise notebooks, one a learner, or of folders, one a learner"
    add("folders", nargs="+", type=Path, metavar="FOLDER", help=about)
    add("--csv", type=Path, default=Path("grades.csv"), help="a row for each learner")
    about = "feedback for each learner, the class, and what a stopped grading resumes from"
    add("--html", type=Path, default=Path("report"), metavar="FOLDER", help=about)
    add("--jobs", type=_count, default=1, help="submissions at the same time")
    about = "for a notebook's cells, and again for each question"
    add("--timeout", type=_seconds, default=120.0, metavar="SECONDS", help=about)
    about = "those that count; by default each that anybody submitted"
    add("--exercises", nargs="+", default=[], metavar="NN", help=about)
    add("--seed", default="", help="draw other inputs; the same one gives the same grades")
    add = command(board, "board", "a class at work on one page, by the progress it shares")
    add("folder", type=Path, metavar="FOLDER", help="what learners give to `share_progress`")
    add("--html", type=Path, default=Path("board.html"), metavar="FILE", help="the page; not in that folder")
    options = parser.parse_args(arguments)
    return options.run(options)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {text}")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, a day at most; got {text}")
    return seconds


def look_up(options: argparse.Namespace) -> int:
    """Print the symptoms that match most of these words; the exit status is 1 if there are none."""
    from .report.symptoms import found

    rows = list(islice(found(options.words), 5))
    for row in rows:
        print(f"{row.seen}\n  {row.text()}\n")
    if not rows:
        words = " or ".join(options.words)
        print(f"course help: no symptom has the word {words}; try another one", file=sys.stderr)
    return 0 if rows else 1


def zh(options: argparse.Namespace) -> int:
    """Make the Chinese edition in the current folder; or list the texts to renew, with exit status 1."""
    from .exercises.generate import ExerciseError, blank
    from .lesson.chinese import build, outdated

    try:
        if options.stale:
            found = list(outdated(Path()))
            for texts in found:
                print(*texts, sep="\n\n", end="\n\n")
            return int(bool(found))
        for path in build(Path(), blank):
            print(f"{path} stays as you changed it: rename it, and `course zh` writes the new one")
    except (ExerciseError, OSError) as error:
        print(f"course zh: {error}", file=sys.stderr)
        return 2
    print("The Chinese edition begins with zh/lessons/00_start_here.ipynb")
    return 0


def board(options: argparse.Namespace) -> int:
    """Keep a class's page up to date until Ctrl-C."""
    from .exercises.board import show

    try:
        show(options.folder, options.html)
    except OSError as error:
        print(f"course board: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("course board: ended", file=sys.stderr)
    return 0


def grade(options: argparse.Namespace) -> int:
    """Grade a class, or resume that; the exit status is 130 if interrupted, 1 if somebody has no grade."""
    from .exercises.grading import tables
    from .exercises.grading.batch import grade_class
    from .exercises.grading.submissions import NoSubmissions

    limits = options.jobs, options.timeout, options.seed
    try:
        graded = grade_class(options.folders, options.html, *limits, outputs=[options.csv])
    except NoSubmissions as error:
        print(f"course grade: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("course grade: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    everyone = tables.learners(graded)
    exercises = tables.exercises_of(everyone, options.exercises)
    tables.write_csv(options.csv, everyone, exercises)
    tables.write_report(options.html, everyone, exercises)
    print(f"{len(everyone)} learners: {options.csv}, {options.html / 'index.html'}")
    if without := [learner.name for learner in everyone if learner.has_no_grade]:
        names = ", ".join(map(ascii, without[:10])) + ", …" * (len(without) > 10)
        again = "the same command grades them, best while this machine has nothing else to do"
        print(f"course grade: {len(without)} of them have no grade yet ({names}): {again}", file=sys.stderr)
    return int(bool(without))


def exercises(_: argparse.Namespace) -> int:
    """Generate the exercises from the solutions in the current folder."""
    from .exercises.generate import ExerciseError, generate

    try:
        changed = generate(Path("solutions"), Path("exercises"))
    except ExerciseError as error:
        print(f"course exercises: {error}", file=sys.stderr)
        return 2
    for path in changed:
        print(f"changed: {path}")
    return 0


def doctor(_: argparse.Namespace) -> int:
    """Print what this machine offers and check the installation; one check runs two ranks."""
    print(f"{machine()}\n\n  Versions: {versions()}")
    missing = 0
    for name, check in CHECKS.items():
        try:
            print(f"✓ {name}: {check()}")
        except Exception as error:
            missing += 1
            print(f"✗ {name}: {type(error).__name__}: {error}")
    print()
    print(f"{missing} of {len(CHECKS)} checks failed; see ✗ above." if missing else "Everything is there.")
    return 1 if missing else 0


def versions() -> str:
    """Say which of the main packages differ in version from those that the course was tested with.

    A difference is not a fault: pyproject.toml has the version ranges that the course allows.
    """
    tested = re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", TESTED.read_text())  # some twice, by Python
    found = []
    for name in MAIN_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(name).partition("+")[0]  # without its build
            passed = [version for each, version in tested if each == name]
            if passed and installed not in passed:  # none where constraints.txt was emptied
                found.append(f"{name} {installed} (tested: {' or '.join(passed)})")
    return f"these differ from the tested versions: {', '.join(found)}" if found else "all as tested"


def _pair() -> str:
    import torch
    import torchvision
    from torchvision.ops import nms

    nms(torch.zeros(1, 4), torch.zeros(1), 0.5)  # torchvision's own operator: fails where they do not fit
    return f"torch {torch.__version__} and torchvision {torchvision.__version__} match"


def _data() -> str:
    from .data.digits import digits

    return f"{len(digits(train=True)):,} digits to train on, {len(digits(train=False)):,} to test"


def _two_ranks() -> str:
    run = launch(_sum_over_ranks, nprocs=2, device="cpu", timeout=60, dashboard=False)
    if run.results != [3.0, 3.0]:
        raise RuntimeError(f"two ranks summed 1 and 2 to {run.results}")
    return f"they met over gloo and summed 1 and 2 to 3 in {run.seconds:.2f} s"


def _sum_over_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    return number.item()


TESTED = Path(__file__).parent / "constraints.txt"  # in a checkout, a link to the one beside pyproject.toml
MAIN_PACKAGES = "torch", "torchvision", "numpy", "matplotlib", "ipykernel", "ipywidgets", "jupyterlab"
CHECKS: dict[str, Callable[[], str]] = {
    "torch and torchvision": _pair,
    "Jupyter": lambda: " and ".join(import_module(name).__name__ for name in ("ipykernel", "ipywidgets")),
    "data": _data,
    "two ranks": _two_ranks,
}

if __name__ == "__main__":
    sys.exit(main())
