"""Run the fork server, which has torch loaded (`rank.preload`) and forks the ranks of `launch`.

A rank then starts within milliseconds, as a fresh process without the kernel's state and CUDA context.
Without a fork server, or if the processes that it forks crash or hang, as they may on macOS, ranks are
spawned, and each loads PyTorch itself.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from ..compat import fork_server_pid
from .guard import protect

WAKE_SECONDS = 0.05  # how often waiting code looks again
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
CRASHES = signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP
PROBE_SECONDS = 60  # for the first process that it forks; on free cores, a fraction of a second is enough
PRELOAD = "course_lib.rank.preload"  # the module that the fork server loads
_main_lock = threading.Lock()  # launches in several threads hide __main__ one at a time
_loaded: int | None = None  # pid of the fork server, once it has loaded torch


def warm_up() -> None:
    """Start the fork server, which loads torch in the background, unless it runs already."""
    if METHOD != "forkserver":
        return
    multiprocessing.set_forkserver_preload([PRELOAD])
    protect([])  # start the guard first: the kernel may be killed at any moment
    with without_main(), uninterrupted(), _environment("COURSE_KERNEL", str(os.getpid())):
        try:
            multiprocessing.forkserver.ensure_running()
        except OSError as error:
            if error.errno is not None:  # None: the socket's path is too long
                raise
            _spawn_from_now_on(f"{error}; a shorter TMPDIR would help")
    if pid := fork_server_pid():
        protect([pid])  # a server that still loads does not notice the kernel's end


def _spawn_from_now_on(why: str) -> None:
    global METHOD
    METHOD = "spawn"
    consequence = "so each loads PyTorch by itself, which takes seconds"
    print(f"course_lib: ranks cannot be forked here ({why}), {consequence}")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Block SIGINT in the processes that are started inside the block; they unblock it themselves.

    Jupyter interrupts the kernel's process group: that would end them while they load PyTorch.
    """
    multiprocessing.resource_tracker.ensure_running()  # started inside the block, it would unblock the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def load_here() -> None:
    """Load the fork server's modules into this process, which forks its fork servers from itself."""
    importlib.import_module(PRELOAD)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the processes that are started inside the block."""
    before, os.environ[name] = os.environ.get(name), value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the main script from multiprocessing, which would run it again in each rank.

    The function is pickled by value, so the ranks do not need the script. A notebook has none.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        # IPython's `%reset` deletes the __spec__ that multiprocessing reads: then __main__ is hidden, too
        if getattr(main, "__file__", None) is None and getattr(main, "__spec__", main) is None:
            yield
            return
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def wait_until_loaded(stop: threading.Event) -> None:
    """Wait until the fork server has loaded torch, which takes seconds, or until ``stop`` is set.

    If the process that it then forks crashes or hangs, it is no longer used.
    """
    global _loaded
    pid = fork_server_pid()
    if METHOD != "forkserver" or pid == _loaded is not None:
        return

    from ..rank.entry_function import try_out

    faults: list[str] = []

    def probe() -> None:
        context: Any = multiprocessing.get_context(METHOD)
        process = context.Process(target=try_out, daemon=True)
        with without_main():
            process.start()
        process.join(PROBE_SECONDS)
        if (code := process.exitcode) is None:
            process.kill()
            faults.append(f"a forked process did not end within {PROBE_SECONDS} s")
        elif -code in CRASHES:
            faults.append(f"a forked process crashed: {signal.Signals(-code).name}")

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    while thread.is_alive() and not stop.is_set():
        thread.join(WAKE_SECONDS)
    if not thread.is_alive():
        _loaded = pid
    if faults:
        _spawn_from_now_on(faults[0])
