"""Watch the processes of a run until they end, or must be ended."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from ..rank.entry_function import RETURN
from ..record.layout import RankFiles
from ..report import failed, waiting
from ..report.cause_words import ranks_text
from ..report.facts import Failure, Report
from ..run.run import Run
from .ask import report_on
from .dashboard import View
from .forkserver import WAKE_SECONDS
from .processes import Execution
from .retention import clear_now_and_then

LINGER_SECONDS = 5.0  # once all ranks have returned their results, they may take this long to end
CONSEQUENCE_SECONDS = 0.5  # how long after its consequence a cause may be recorded


def watch(run: Run, start: Callable[[threading.Event], Execution], timeout: float | None, view: View) -> Run:
    """Start the processes, follow them to their end, record how it went, and raise what went wrong."""
    error: BaseException | None = None
    with _interrupts_held(view.stop):
        try:
            ranks = start(view.stop)
        except Exception as reason:
            run.record.end("failed", f"the ranks could not be started: {reason}")
            view.safely(view.finish)
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
        if error is None:
            error = _load_results(run)
        if error is None and (doubts := waiting.doubts(run.snapshot())):
            view.safely(view.tell, doubts)
        view.safely(view.finish)  # even after a failed update: it may need less
        clear_now_and_then()
    if error is not None:
        raise error from None
    return run


def _load_results(run: Run) -> failed.RankError | None:
    """Read the results while interrupts are held off; return the error if some cannot be read."""
    if not run.unpickles or not (errors := run.results_and_errors[1]):
        return None
    (rank, error), *more = errors.items()
    others = f" (nor can those of {ranks_text(each for each, _ in more)})" if more else ""
    text = f"is done, but its result cannot be read here{others}: a {run.facts(rank).get('result')} "
    text += f"({type(error).__name__}: {error}); {RETURN}"
    failure = failed.RankError(run, Report(Failure(rank, "noted by the launcher", time.time(), message=text)))
    run.record.end("failed", str(failure))
    return failure


def _follow(run: Run, ranks: Execution, timeout: float | None, view: View) -> BaseException | None:
    """Wait for the end; return what went wrong, if anything did."""
    deadline = all_returned_at = math.inf
    while True:
        if timeout is not None and deadline == math.inf and ranks.began():
            deadline = time.monotonic() + timeout
        ranks.wait(WAKE_SECONDS)
        if view.stop.is_set():
            return failed.Stopped(run, *_interrupt(run, ranks))
        codes = ranks.exit_codes()
        if failures := failed.failures_of(run, codes):
            if (first := failed.first_failure(failures)).consequence or first.blames:  # a cause may be late
                time.sleep(CONSEQUENCE_SECONDS)
                failures = failed.failures_of(run, ranks.exit_codes()) or failures
            return failed.RankError(run, report_on(run, ranks.exit_codes(), failures))
        if all(code is not None for code in codes.values()):
            return None
        now = time.monotonic()  # taken before the look at the results: those found came in time
        if all(RankFiles(run.folder, rank).result.exists() for rank in codes):
            all_returned_at = min(all_returned_at, now)
            if now > all_returned_at + LINGER_SECONDS:
                left = [rank for rank, code in codes.items() if code is None]
                view.safely(view.tell, waiting.what_lingers(run, left, LINGER_SECONDS))
                return None
            if now > deadline:
                return None  # on a busy machine, the processes may take long to end
        elif now > deadline:
            return failed.RankTimeout(run, report_on(run, ranks.exit_codes(), {}, timeout))
        if view.works:
            view.safely(view.update)


def _interrupt(run: Run, ranks: Execution) -> tuple[float, list[int]]:
    """Interrupt the ranks; return how many seconds they had to end, and which of them still run."""
    seconds, began = ranks.interrupt(), time.monotonic()
    while None in ranks.exit_codes().values() and time.monotonic() < began + seconds:
        ranks.wait(WAKE_SECONDS)
    return seconds, [rank for rank in range(run.world_size) if run.lives(rank)]


@contextlib.contextmanager
def _interrupts_held(stop: threading.Event) -> Iterator[None]:
    """Make Ctrl-C and the kernel's interrupt only set ``stop``: neither raises while the ranks start."""
    if threading.current_thread() is not threading.main_thread():
        with _interrupts_seen(stop):
            yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_threads = threading.Lock()
_stops: list[threading.Event] = []  # of launches in other threads than the main one
_seen: list[IO[bytes]] = []  # the file that grows with each interrupt, while such launches run


@contextlib.contextmanager
def _interrupts_seen(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` when the process gets an interrupt, which Python handles in the main thread alone."""
    with _threads:
        _stops.append(stop)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            if _seen:  # another handler, such as asyncio's, may have replaced ours
                faulthandler.unregister(signal.SIGINT)
            else:
                _seen.append(tempfile.TemporaryFile())
                threading.Thread(target=_see, args=_seen, name="course-interrupts", daemon=True).start()
            # `faulthandler` can be asked from any thread, and lets Python handle the signal as well
            faulthandler.register(signal.SIGINT, _seen[0], False, chain=True)
    try:
        yield
    finally:
        with _threads:
            _stops.remove(stop)


def _see(seen: IO[bytes]) -> None:
    """Set all ``stop`` whenever the file has grown, until no launch is left."""
    size = 0
    while True:
        time.sleep(WAKE_SECONDS)
        with _threads, seen if not _stops else contextlib.nullcontext():
            if not _stops:
                faulthandler.unregister(signal.SIGINT)
                _seen.clear()
                return
            if size != (size := os.fstat(seen.fileno()).st_size):
                for stop in _stops:
                    stop.set()
