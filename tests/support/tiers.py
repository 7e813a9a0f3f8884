"""Pytest plugin that marks the short run, orders the tests, and records durations and failures.

`make test` runs the tests marked `short`, by the lists in tests/tiers.toml or in the test's file. Long tests
begin first, by tests/durations.json, which `make test-all ARGS=--record-durations` writes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
import zlib
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
TIERS = tomllib.loads((Path(__file__).parents[1] / "tiers.toml").read_text())
LONG_SECONDS = 1800
FIRST_SECONDS = 20  # tests that take this long begin first, so that no worker is left alone with one
MAX_CHARACTERS = 3000  # of each failure that CI repeats at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "the short run and the whole")
    group.addoption(
        "--again", action="store_true", help="what failed last time; of a notebook, all its cells"
    )
    group.addoption(
        "--record-durations",
        action="store_true",
        help=f"write tests/{DURATIONS.name}: what takes 1 s or more",
    )


def is_in(nodeid: str, patterns: str) -> bool:
    """Return whether a test, or its file, is in a list of tiers.toml."""
    names = nodeid, nodeid.partition("::")[0]
    return any(fnmatch(name, pattern) for name in names for pattern in TIERS[patterns])


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def scope(nodeid: str) -> str:
    """Return the group that one worker runs in a row: a notebook, a file, all browser tests, or one test."""
    if not is_in(nodeid, "together"):
        return nodeid
    path = nodeid.partition("::")[0]
    return "tests/browser" if path.startswith("tests/browser/") else path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by file; put those that take longest first, and mix the others."""
    for item in items:
        if is_in(item.nodeid, "short") and not is_in(item.nodeid, "not_short") and not is_alone(item):
            item.add_marker(pytest.mark.short)
        if is_in(item.nodeid, "long"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    if config.getoption("again"):
        failed = {
            scope(nodeid) for nodeid in config.cache.get("cache/lastfailed", {})
        }  # a file, if its collection failed
        again = [item for item in items if {scope(item.nodeid), item.nodeid.partition("::")[0]} & failed]
        config.hook.pytest_deselected(items=[item for item in items if item not in again])
        items[:] = again
    seconds: dict[str, float] = defaultdict(float)
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for item in items:
        seconds[scope(item.nodeid)] += known.get(item.nodeid, 0.0)

    def turn(item: pytest.Item) -> tuple[float, int]:
        """Sort long tests by time, and the others by hash: neighbours in a file wait for the same things."""
        name = scope(item.nodeid)
        return -seconds[name] if seconds[name] >= FIRST_SECONDS else 0.0, zlib.crc32(name.encode())

    items.sort(key=turn)  # stable, so the order within a scope stays


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # it would go by the number of tests
    return ByScope(config, log)


# --- reports ----------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Let a test that times out print the stacks of the processes it started before its own."""
    done = yield
    if settings.method == "signal" and (handler := signal.getsignal(signal.SIGALRM)):

        def dump_all(*arguments: Any) -> None:
            try:
                print(stacks_of_children(), file=sys.stderr)
            finally:
                handler(*arguments)

        signal.signal(signal.SIGALRM, dump_all)
    return done


def stacks_of_children() -> str:
    """Return the stacks of at most eight descendants, by py-spy, in up to 10 s for each."""
    py_spy, told = Path(sys.executable).parent / "py-spy", []
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    for process in psutil.Process().children(recursive=True)[:8]:
        try:
            told.append(
                subprocess.run([py_spy, "dump", "--pid", str(process.pid)], timeout=10, **both).stdout
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            told.append(f"process {process.pid}: {error}")
    return "\n".join(told)


class Told:
    """Plugin for the controller only that keeps durations and failures."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.keep_failure(report, report.when)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.keep_failure(report, "collection")

    def keep_failure(self, report: Any, phase: str) -> None:
        if report.failed and (path := os.environ.get("COURSE_FAILURES")):
            words = report.longreprtext
            if len(words) > MAX_CHARACTERS:
                words = "[…]\n" + words[-MAX_CHARACTERS:]
            with open(path, "a") as file:
                file.write(f"FAILED {report.nodeid} ({phase}):\n{words}\n\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.config.getoption("again") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # nothing failed last time
        if self.config.getoption("record_durations"):
            known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
            known |= {nodeid: round(seconds, 1) for nodeid, seconds in self.seconds.items() if seconds >= 1}
            lines = ",\n".join(f"{json.dumps(name)}: {known[name]}" for name in sorted(known))
            DURATIONS.write_text(f"{{\n{lines}\n}}\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Told(config), "course-told")
