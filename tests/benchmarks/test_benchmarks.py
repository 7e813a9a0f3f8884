"""The benchmarks still run: their cheapest part, once, with nothing installed to compare with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
BENCH = Path(__file__).parent / "bench.py"


def test_the_cheapest_part_ends_in_a_table() -> None:
    options = ["--rounds", "1", "--only", "steps", "--steps", "1000", "--no-peers"]
    run = subprocess.run([sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=600)

    assert run.returncode == 0, run.stderr
    for what in ("bare loop", "track", "log(loss=0.5)"):
        (row,) = [line for line in run.stdout.splitlines() if line.strip().startswith(what + "  ")]
        assert float(row.split(what)[1].split()[0]) > 0, row
