"""Keeps the process that all ranks of a kernel are forked from: it has loaded torch (`rank.preload`).

So each rank is a fresh process, with none of the kernel's state and no CUDA context, within milliseconds.
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

from .guard import protect, release

WAKE_SECONDS = 0.05  # how often someone who waits looks around
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # for the heap of the fork server: a fork takes 5 ms instead of 9
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOAD = "course_lib.rank.preload"  # what the fork server has loaded
_main_lock = threading.Lock()  # launches in several threads hide __main__ one after the other
_loaded: int | None = None  # the fork server that has loaded torch
_protected: int | None = None  # the one that the guard knows


def warm_up() -> None:
    """Start the fork server, which loads torch meanwhile; nothing happens where it runs already."""
    if METHOD == "forkserver":
        multiprocessing.set_forkserver_preload([PRELOAD])
        protect([])  # the guard is there first: a kernel may be killed in the next moment
        with without_main():
            multiprocessing.resource_tracker.ensure_running()  # or it would unblock the signal below
            # Jupyter's interrupt goes to the kernel's process group: it would end the server as it loads
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            tunables = ":".join(filter(None, [HUGE_PAGES, os.environ.get("GLIBC_TUNABLES")]))
            try:
                with _environment(GLIBC_TUNABLES=tunables, COURSE_KERNEL=str(os.getpid())):
                    multiprocessing.forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _end_it_with_the_kernel()


def load_here() -> None:
    """Load what the fork server loads: for a process whose fork servers are copies of it."""
    importlib.import_module(PRELOAD)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for what is started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end_it_with_the_kernel() -> None:
    """At once: while it loads, for seconds or more, it does not hear that the kernel has ended."""
    global _protected
    pid = _pid()
    if pid is not None and pid != _protected:
        release([_protected] if _protected else [])
        protect([pid])
        _protected = pid


def _pid() -> int | None:
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    return getattr(server, "_forkserver_pid", None)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide a script's own file from multiprocessing, which would run it again in each rank.

    The function travels by value, so the ranks need nothing of it. A notebook has no such file.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        # IPython's `%reset` takes the __spec__ away, which multiprocessing asks for: then it is hidden, too
        if getattr(main, "__file__", None) is None and getattr(main, "__spec__", main) is None:
            yield
            return
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def wait_until_loaded(stop: threading.Event) -> None:
    """Until the fork server has loaded torch, which takes seconds, or until someone wants an end of it."""
    global _loaded
    pid = _pid()
    if METHOD != "forkserver" or pid == _loaded is not None:
        return

    def probe() -> None:
        process = multiprocessing.get_context(METHOD).Process(target=int, daemon=True)
        with without_main():
            process.start()
        process.join()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    while thread.is_alive() and not stop.is_set():
        thread.join(WAKE_SECONDS)
    if not thread.is_alive():
        _loaded = pid
