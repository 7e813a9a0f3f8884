"""A process that judges answers on forked ranks, for all tests of a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.exercises.judge import MOST_SECONDS
from tests.support.line_process import LineProcess

JUDGE = [sys.executable, "-W", "ignore", "-m", "tests.exercises.judge"]


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineProcess]:
    process = LineProcess(JUDGE, str(tmp_path_factory.mktemp("judge")), MOST_SECONDS)
    yield process
    process.end()
