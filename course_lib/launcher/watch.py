"""Watch what was started until it ends, or must be ended."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from ..report import failed, waiting
from ..report.facts import Report
from ..run.run import Run
from ..run_folder import RankFiles
from .dashboard import SafeView, View
from .forkserver import WAKE_SECONDS
from .processes import Execution
from .retention import clear_now_and_then

LINGER_SECONDS = 5.0  # once all ranks have returned their results, they may take this long to end
CONSEQUENCE_SECONDS = 0.5  # how much later than its consequence a cause may come to light


def watch(run: Run, start: Callable[[threading.Event], Execution], timeout: float | None, view: View) -> None:
    """Start the processes, follow them to their end, record how it went, and raise what went wrong."""
    error: BaseException | None = None
    view = SafeView(view)
    with _interrupts_held(view.stop):
        try:
            ranks = start(view.stop)
        except Exception as reason:
            run.record.end("failed", f"the ranks could not be started: {reason}")
            view.finish()
            raise
        try:
            error = _follow(run, ranks, timeout, view)
            text = "" if error is None else str(error)
        except BaseException as reason:
            error, text = reason, f"the launcher itself failed, so the ranks were ended: {reason!r}"
        try:
            ranks.kill()
        except Exception as reason:
            print(f"course_lib: a process of this run may still be there: {reason!r}", file=sys.stderr)
        state = "done" if error is None else "stopped" if isinstance(error, failed.Stopped) else "failed"
        run.record.end(state, text)
        if error is None and run.unpickles:
            error = _load_results(run)
        if error is None and (doubts := waiting.doubts(run)):
            view.tell(doubts)
        view.finish()
        clear_now_and_then()
    if error is not None:
        raise error from None


def _load_results(run: Run) -> failed.RankError | None:
    """Read the results while interrupts are held off, so that none is left half read."""
    try:
        _ = run.results
    except Exception as error:
        text = f"the ranks are done, but a result cannot be read here: {type(error).__name__}: {error}"
        run.record.end("failed", text)
        return failed.RankError(run, Report(message=text))
    return None


def _follow(
    run: Run, ranks: Execution, timeout: float | None, view: View
) -> failed.RankError | failed.Stopped | None:
    """Wait for the end; return what went wrong, if anything did."""
    deadline = all_returned_at = math.inf
    while True:
        if timeout is not None and deadline == math.inf and ranks.began():
            deadline = time.monotonic() + timeout
        ranks.wait(WAKE_SECONDS)
        if view.stop.is_set():
            return failed.Stopped(run)
        codes = ranks.exit_codes()
        if failures := failed.failures_of(run, codes, {}):
            if failed.first_failure(failures).consequence:  # its cause may be recorded a little later
                time.sleep(CONSEQUENCE_SECONDS)
                failures = failed.failures_of(run, ranks.exit_codes(), failures) or failures
            return failed.RankError(run, waiting.report_on(run, ranks.exit_codes(), failures))
        if all(code is not None for code in codes.values()):
            return None
        now = time.monotonic()  # before the look: what is there then came in time
        if all(RankFiles(run.folder, rank).result.exists() for rank in codes):
            all_returned_at = min(all_returned_at, now)
            if now > all_returned_at + LINGER_SECONDS:
                left = [rank for rank, code in codes.items() if code is None]
                view.tell(waiting.what_lingers(run, left, LINGER_SECONDS))
                return None
            if now > deadline:
                return None  # its processes may take long to end, on a busy machine
        elif now > deadline:
            return failed.RankTimeout(run, waiting.report_on(run, ranks.exit_codes(), {}, timeout))
        view.update()


@contextlib.contextmanager
def _interrupts_held(stop: threading.Event) -> Iterator[None]:
    """Make Ctrl-C and the kernel's interrupt only set ``stop``: neither raises while the ranks start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
