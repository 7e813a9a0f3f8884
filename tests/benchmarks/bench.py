"""Measure what the course promises about speed, in one table.

    make bench                                      all of it
    make bench ARGS="--rounds 3 --only starts"      some of it

Look at the ratios: each is the median over rounds that measure every contender once. The absolute numbers are
disturbed by other work on the machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

from course_lib.host.hardware import cores
from tests.benchmarks.grading import of_a_class
from tests.benchmarks.starts import from_cell_to_result
from tests.benchmarks.steps import cost
from tests.benchmarks.table import Section, text_of

PIECES: dict[str, Callable[[argparse.Namespace, Path], Section]] = {
    "starts": lambda asked, folder: from_cell_to_result(asked.rounds, folder),
    "steps": lambda asked, folder: cost(asked.rounds, folder, asked.steps),
    "grading": lambda asked, folder: of_a_class(30, folder),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What the course promises about speed, measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7, help="times that each contender is measured")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES), help="these parts alone")
    parser.add_argument("--steps", type=int, default=200_000, help="of a loop that does nothing")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    loads = [os.getloadavg()[0]]
    sections = []
    for name in asked.only:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # ranks may still write
            sections.append(PIECES[name](asked, Path(folder)))
    loads.append(os.getloadavg()[0])
    torch = importlib.metadata.version("torch")
    print(f"{cores()} cores, torch {torch}, Python {platform.python_version()}, {platform.system()}")
    print("load {:.1f} before and {:.1f} after; {} rounds\n".format(*loads, asked.rounds))
    print(text_of(sections))


if __name__ == "__main__":
    main()
