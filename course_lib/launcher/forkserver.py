"""Run the fork server, which has torch loaded (`rank.preload`) and forks the ranks of `launch`.

A rank then starts within milliseconds, as a fresh process without the kernel's state and CUDA context.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator

from ..compat import fork_server_pid
from .guard import protect

WAKE_SECONDS = 0.05  # how often waiting code looks again
PRELOAD = "course_lib.rank.preload"  # the module that the fork server loads
_main_lock = threading.Lock()  # launches in several threads hide __main__ one at a time
_loaded: int | None = None  # pid of the fork server, once it has loaded torch


def warm_up() -> None:
    """Start the fork server, which loads torch in the background, unless it runs already."""
    multiprocessing.set_forkserver_preload([PRELOAD])
    protect([])  # start the guard first: the kernel may be killed at any moment
    os.environ["COURSE_KERNEL"] = str(os.getpid())  # an orphaned server ends: `rank.preload`
    with without_main(), uninterrupted():
        try:
            multiprocessing.forkserver.ensure_running()
        except OSError as error:
            if error.errno is not None:  # None: the socket's path is too long
                raise
            raise OSError(f"{error}: set TMPDIR to a folder with a shorter path, and start again") from None
    if pid := fork_server_pid():
        protect([pid])  # a server that still loads does not notice the kernel's end


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
    """Wait until the fork server has loaded torch, which takes seconds, or until ``stop`` is set."""
    global _loaded
    pid = fork_server_pid()
    if pid == _loaded is not None:
        return

    def fork_one() -> None:
        process = multiprocessing.get_context("forkserver").Process(target=int, daemon=True)
        with without_main():
            process.start()
        process.join()

    thread = threading.Thread(target=fork_one, daemon=True)
    thread.start()
    while thread.is_alive() and not stop.is_set():
        thread.join(WAKE_SECONDS)
    if not thread.is_alive():
        _loaded = pid
