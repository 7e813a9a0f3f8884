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
from ..run.kept import clear_old
from ..run.run import Run
from ..run_folder import PROGRAM, RankFiles
from .dashboard import SafeView, View
from .forkserver import WAKE_SECONDS
from .processes import Started

LINGER_SECONDS = 5.0  # a rank that has returned its result may take this long to end
CONSEQUENCE_SECONDS = 0.5  # how much later than its consequence a cause may come to light


def watch(run: Run, start: Callable[[threading.Event], Started], timeout: float | None, view: View) -> None:
    """Start the processes, follow them to their end, record how it went, and raise what went wrong."""
    error: BaseException | None = None
    view = SafeView(view)
    with _interrupts_held(view.stop):
        try:
            ranks = start(view.stop)
        except Exception as reason:
            run.end("failed", f"the ranks could not be started: {reason}")
            view.finish()
            raise
        try:
            with contextlib.suppress(OSError):
                clear_old()  # while the ranks start
            error = _follow(run, ranks, timeout, view)
            text = "" if error is None else str(error)
        except BaseException as reason:
            error, text = reason, f"the launcher itself failed, so the ranks were ended: {reason!r}"
        try:
            ranks.kill()
        except Exception as reason:
            print(f"course_lib: a process of this run may still be there: {reason!r}", file=sys.stderr)
        state = "done" if error is None else "stopped" if isinstance(error, failed.Stopped) else "failed"
        run.end(state, text)
        if error is None and run.trusted:
            error = _load_results(run)
        view.finish()
    if error is not None:
        raise error from None


def _load_results(run: Run) -> failed.RankError | None:
    """Read the results while interrupts are held off, so that none is left half read."""
    try:
        _ = run.results
    except Exception as error:
        text = f"the ranks are done, but a result cannot be read here: {type(error).__name__}: {error}"
        run.end("failed", text)
        return failed.RankError(text, None, run)
    return None


def _follow(
    run: Run, ranks: Started, timeout: float | None, view: View
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
        failure = _first_failure(run, codes)
        if failure is not None:
            if failure.consequence:  # its cause, on another rank, may be recorded a little later
                time.sleep(CONSEQUENCE_SECONDS)
                failure = _first_failure(run, ranks.exit_codes()) or failure
            others = waiting.whereabouts(run, ranks.exit_codes())
            why = waiting.for_whom(run, ranks.exit_codes()) if failure.consequence else ""
            return failed.RankError(failed.describe(run, failure, others, why), failure.rank, run)
        if all(code is not None for code in codes.values()):
            return None
        if why := ranks.overdue():
            return failed.RankTimeout(why, None, run)
        if time.monotonic() > deadline:
            return _timed_out(run, ranks, timeout)
        if all(RankFiles(run.folder, rank).result.exists() for rank in codes):
            all_returned_at = min(all_returned_at, time.monotonic())
            if time.monotonic() > all_returned_at + LINGER_SECONDS:
                return None
        view.update()


def _timed_out(run: Run, ranks: Started, timeout: float | None) -> failed.RankTimeout:
    why = waiting.for_whom(run, ranks.exit_codes())
    where = waiting.whereabouts(run, ranks.exit_codes())
    lines = [f"{run.who(rank)} {doing}" for rank, doing in where.items()]
    head = f"not done after {timeout:g} s" + (f": {why}" if why else "; the ranks were ended")
    return failed.RankTimeout("\n".join([head, "", *lines]), None, run)


def _first_failure(run: Run, codes: dict[int | str, int | None]) -> failed.Failure | None:
    # exit code 0 is enough for a program; a rank must have left its result as well
    ended = {rank: code for rank, code in codes.items() if code or (code == 0 and rank != PROGRAM)}
    failures = [failed.failure_of(run, rank, code) for rank, code in ended.items()]
    found = [each for each in failures if each is not None]
    of_ranks = [each for each in found if each.rank != PROGRAM]
    return failed.cause(of_ranks or found)


@contextlib.contextmanager
def _interrupts_held(stop: threading.Event) -> Iterator[None]:
    """Make Ctrl-C and the kernel's interrupt set ``stop``, so that none strikes between two starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
