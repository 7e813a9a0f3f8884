"""Measure what the course promises about speed, side by side with other people's tools, in one table.

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

from course_lib.hardware import cores
from grading import by_graders
from kernel import ROOT
from peers import Peers, installed_peers
from starts import by_ranks, from_cell_to_result
from steps import cost
from table import Section, text_of
from training import throughput

PIECES: dict[str, Callable[[argparse.Namespace, Path, Peers], Section]] = {
    "starts": lambda asked, folder, peers: from_cell_to_result(asked.rounds, folder, peers),
    "ranks": lambda asked, folder, peers: by_ranks(asked.rounds, folder, asked.most_ranks),
    "steps": lambda asked, folder, peers: cost(asked.rounds, folder, peers, asked.steps),
    "training": lambda asked, folder, peers: throughput(asked.rounds, folder, asked.epochs),
    "grading": lambda asked, folder, peers: by_graders(asked, folder),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What the course promises about speed, measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7, help="times that each contender is measured")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES), help="these parts alone")
    parser.add_argument("--no-peers", action="store_true", help="nothing is installed to compare with")
    parser.add_argument("--most-ranks", type=int, default=64, help="of a launch")
    parser.add_argument("--steps", type=int, default=200_000, help="of a loop that does nothing")
    parser.add_argument("--epochs", type=int, default=3, help="of lesson 06's training")
    parser.add_argument("--submissions", type=int, default=30, help="of exercise 06, graded once")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    peers = Peers() if asked.no_peers else installed_peers(ROOT / ".venv-peers")
    loads = [os.getloadavg()[0]]
    sections = []
    for name in asked.only:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # ranks may still write
            sections.append(PIECES[name](asked, Path(folder), peers))
    loads.append(os.getloadavg()[0])
    torch = importlib.metadata.version("torch")
    print(f"{cores()} cores, torch {torch}, Python {platform.python_version()}, {platform.system()}")
    print("load {:.1f} before and {:.1f} after; {} rounds\n".format(*loads, asked.rounds))
    print(text_of(sections), *peers.left_out, sep="\n")


if __name__ == "__main__":
    main()
