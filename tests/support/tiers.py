"""Pytest plugin: which tests are the short run, their order, when none begins, and what is kept of failures.

`make test` runs the tests marked `short`, by the lists in tests/tiers.toml or in the test's file. They begin
first, then the lessons, then what one worker runs in a row, and all others by hash: neighbours in a file wait
for the same things.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
import zlib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import pytest

TIERS = tomllib.loads((Path(__file__).parents[1] / "tiers.toml").read_text())
TOO_LATE = "left out: it would begin after COURSE_UNTIL"
MAX_CHARACTERS = 3000  # of each failure that CI repeats at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "the short run and the whole")
    group.addoption(
        "--again", action="store_true", help="what failed last time; of a notebook, all its cells"
    )


def is_in(nodeid: str, patterns: str) -> bool:
    """Return whether a test, or its file, is in a list of tiers.toml."""
    names = nodeid, nodeid.partition("::")[0]
    return any(fnmatch(name, pattern) for name in names for pattern in TIERS[patterns])


def scope(nodeid: str) -> str:
    """Return the group that one worker runs in a row: a notebook, a file, all browser tests, or one test."""
    if not is_in(nodeid, "together"):
        return nodeid
    path = nodeid.partition("::")[0]
    return "tests/browser" if path.startswith("tests/browser/") else path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the short run by file, and put the tests in order."""
    for item in items:
        listed = is_in(item.nodeid, "short") and not is_in(item.nodeid, "not_short")
        if listed and not item.get_closest_marker("alone") and not item.get_closest_marker("night"):
            item.add_marker(pytest.mark.short)
    if config.getoption("again"):
        failed = {
            scope(nodeid) for nodeid in config.cache.get("cache/lastfailed", {})
        }  # a file, if its collection failed
        again = [item for item in items if {scope(item.nodeid), item.nodeid.partition("::")[0]} & failed]
        config.hook.pytest_deselected(items=[item for item in items if item not in again])
        items[:] = again
    short = {scope(item.nodeid) for item in items if item.get_closest_marker("short")}

    def turn(item: pytest.Item) -> tuple[bool, bool, bool, int]:
        name = scope(item.nodeid)
        hashed = zlib.crc32(name.encode())
        return name not in short, not name.startswith("lessons/"), name == item.nodeid, hashed

    items.sort(key=turn)  # stable, so the order within a scope stays


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # it would go by the number of tests
    return ByScope(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin no test after COURSE_UNTIL (seconds since 1970), which CI sets: it is cut off some time later."""
    if time.time() > float(os.environ.get("COURSE_UNTIL", "inf")):
        pytest.skip(TOO_LATE)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    late = [each for each in terminalreporter.stats.get("skipped", ()) if TOO_LATE in str(each.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests were left out: CI's time was over", red=True)


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


class Failures:
    """Plugin for the controller only that appends each failure to the file COURSE_FAILURES."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.keep(report, report.when)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.keep(report, "collection")

    def keep(self, report: Any, phase: str) -> None:
        if report.failed and (path := os.environ.get("COURSE_FAILURES")):
            words = report.longreprtext
            if len(words) > MAX_CHARACTERS:
                words = "[…]\n" + words[-MAX_CHARACTERS:]
            with open(path, "a") as file:
                file.write(f"FAILED {report.nodeid} ({phase}):\n{words}\n\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if session.config.getoption("again") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # nothing failed last time


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(), "course-failures")
