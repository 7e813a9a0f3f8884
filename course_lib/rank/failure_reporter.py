"""Let a process that is about to fail say so, whatever signal handlers its program has installed.

Python runs a signal handler in the main thread, wherever a call begins or ends there, and a handler may raise
or exit: the one that torch installs for a DataLoader's workers raises once more when each of them ends. So
another thread reports, while the main thread is inside one call of C code that does not return.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import ctypes
import faulthandler
import functools
import operator
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from ..tracebacks.learner_code import is_learners

# Signals that a crash sends, and the one by which a process learns how its children end
LEFT_ALONE = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
LEFT_ALONE |= {signal.SIGTRAP, signal.SIGSYS, signal.SIGCHLD}


class FailureReporter:
    """The last act of a process: it reports its failure, and ends.

    Make it before there is an error. Then set ``error`` and call only `report`. It passes the error to a
    function that returns the exit code. Call `report_here` if no thread could be started.
    """

    error: BaseException

    def __init__(self, report: Callable[[BaseException], int]) -> None:
        self._report, self._pid = report, os.getpid()
        libc, every = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        libc.sigfillset(every)
        start = functools.partial(_thread.start_new_thread, self.report_here, ())
        steps = start, functools.partial(libc.sigsuspend, every)
        # one call, all of it in C: no handler runs before it returns, and it does not return
        self.report: Callable[[], object] = functools.partial(collections.deque, map(operator.call, steps), 0)

    def report_here(self) -> NoReturn:
        """Report, and end this process at once: an orderly exit may hang or abort without its peers."""
        code = 1
        try:
            _ignore_signals()
            code = self._report(self.error) if os.getpid() == self._pid else exit_code(self.error)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # a full disk, a closed stream, one of the program's own
                    stream.flush()
            os._exit(code & 0xFF)  # a system keeps only these bits; a larger code would raise here


def exit_code(error: BaseException) -> int:
    """Print what Python prints when a program ends by an exception; return the program's exit code."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    trace = error.__traceback__  # from the learner's first line on
    while trace is not None and not is_learners(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    with contextlib.suppress(OSError):  # a full disk
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        else:
            traceback.print_exception(type(error), error, trace)
    return 1


def _ignore_signals() -> None:
    """Ignore, from any thread, the signals that end a process by default: torchrun's SIGTERM, an alarm."""
    faulthandler.cancel_dump_traceback_later()
    ignore = ctypes.CDLL(None).signal
    ignore.argtypes, ignore.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    for number in signal.valid_signals() - LEFT_ALONE:
        ignore(number, int(signal.SIG_IGN))
