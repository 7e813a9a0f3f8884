"""The benchmarks still run: the cheapest part of each, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
ROOT = Path(__file__).parents[2]


def said(*words: str) -> str:
    command = [sys.executable, "-m", *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_cheapest_part_ends_in_a_table() -> None:
    table = said("tests.benchmarks.bench", "--rounds", "1", "--only", "steps", "--steps", "1000")
    for what in ("bare loop", "track", "log(loss=0.5)"):
        (row,) = [line for line in table.splitlines() if line.strip().startswith(what + "  ")]
        assert float(row.split(what)[1].split()[0]) > 0, row


def test_what_a_learner_takes_of_a_servers_memory_ends_in_a_table() -> None:
    table = said("tests.benchmarks.host")
    taken = {
        what: [int(number.replace(",", "")) for number in line.removeprefix(what).split()]
        for what in ("a kernel that has run nothing", "a kernel between two launches")
        for line in table.splitlines()
        if line.startswith(what)
    }
    fresh, launched = taken.values()
    assert all(more > less > 0 for more, less in zip(launched, fresh, strict=True)), "its fork server"
