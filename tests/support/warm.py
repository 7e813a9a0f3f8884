"""Run a program in a process that has already loaded torch, which takes a core several seconds.

The process is forked like a rank of `launch`. In `/proc`, its command and initial environment are those of
the fork server, so a test that reads them starts its program from nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from course_lib.launcher import forkserver
from course_lib.launcher.environment import loopback_environment, loopback_store

SECONDS = 900
GRACE_SECONDS = 30  # as torchrun gives the other ranks when one has failed


class Warm:
    """A running ``python words…``, used like a `subprocess.Popen`."""

    def __init__(self, *words: Any, cwd: Path | None = None, **variables: str) -> None:
        forkserver.warm_up()
        self._said = tempfile.TemporaryDirectory()
        self._texts = [Path(self._said.name, name) for name in ("stdout", "stderr")]
        context = multiprocessing.get_context(forkserver.METHOD)
        arguments = (list(map(str, words)), str(cwd or Path.cwd()), dict(os.environ) | variables, self._texts)
        self._process = context.Process(target=_become, args=arguments)
        with forkserver.without_main():
            self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr; this works only once."""
        self._process.join(timeout)
        in_time = self._process.exitcode is not None
        if not in_time:
            self._process.kill()
            self._process.join()
        out, err = (path.read_text() if path.exists() else "" for path in self._texts)
        self._said.cleanup()
        if not in_time:
            raise TimeoutError(f"not done after {timeout} s: {out}{err}")
        return out, err


def ended(*words: Any, ranks: int | None = None) -> tuple[int, str, str]:
    """Run ``python words…``, or ranks of it with torchrun's variables; return exit code, stdout and stderr.

    As under torchrun, when one rank fails, the others get SIGTERM, and the exit code is 1.
    """
    if ranks is None:
        program = Warm(*words)
        out, err = program.communicate()
        assert program.returncode is not None
        return program.returncode, out, err
    with loopback_store() as port:
        told = loopback_environment() | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        group = [Warm(*words, **told, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]
        until = time.monotonic() + SECONDS
        while any(each.returncode is None for each in group) and time.monotonic() < until:
            if any(each.returncode for each in group) and until > time.monotonic() + GRACE_SECONDS:
                until = time.monotonic() + GRACE_SECONDS
                for each in group:
                    if each.returncode is None:
                        with contextlib.suppress(ProcessLookupError):
                            each.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        said = [each.communicate(timeout=GRACE_SECONDS) for each in group]
    code = int(any(each.returncode for each in group))
    return code, "".join(out for out, _ in said), "".join(err for _, err in said)


def _become(words: list[str], folder: str, environment: dict[str, str], texts: list[Path]) -> NoReturn:
    """Run the program as Python would, from its first line to its exit handlers."""
    import torch

    for number, path in enumerate(texts, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # the platform's: workers are forked, where it forks
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.argv = words
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # wait for non-daemon threads, then run the exit handlers
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
