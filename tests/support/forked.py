"""Fork the ranks for an answer from the judging process, which takes less time than `launch`.

`check` asks ranks through its `RankRunner`, which this one replaces. In a rank, an answer finds the same: a
fresh process, torchrun's variables, a store, no GPU. A failure has no report, only a kind;
`RankRunner.failed` says that there was one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import selectors
import signal
import time
from typing import Any

import torch

from course_lib.compat import adapt_torch
from course_lib.exercises import check
from course_lib.exercises.in_rank.work import run_work
from course_lib.exercises.judging import read
from course_lib.exercises.question import Question, Refused, Work
from course_lib.kill import end_with
from course_lib.launcher.environment import loopback_environment, loopback_store
from course_lib.rank import preload  # noqa: F401 – what a rank of `launch` has loaded
from course_lib.rank.entry_function import own_autograd

LIMIT_SECONDS = 6.0  # for an answer on the ranks; most solutions take less than 2 s
NOT_DONE = "it was not done after"


def get_ready() -> None:
    """Prepare for the first fork: limit torch to one thread, and let the ranks share memory pages."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(Exception):  # glibc: memory that the imports have freed need not be copied
        ctypes.CDLL(None).malloc_trim(0)


class Failed(Refused):
    """A rank raised, ended its process, or was not done in time."""


class RankRunner(check.RankRunner):
    """Like `check.RankRunner`, but with forked ranks; if one raises or ends, or time is up, all end."""

    failed = False  # whether a rank has failed

    def __call__(self, work: Work, *args: Any, nprocs: int = 1) -> list[Any]:
        try:
            return _ask_ranks(self._asked, self._answer, work, args, nprocs)
        except Failed:
            self.failed = True
            raise


def _ask_ranks(asked: Question, answer: Any, work: Work, args: tuple[Any, ...], nprocs: int) -> list[Any]:
    given = json.loads(json.dumps(args))

    def judged_work() -> str:
        # The store's thread looks up the name of each client under a lock of glibc. A process forked at that
        # moment would hang in its own first connection, so no rank connects before all are forked.
        os.close(go)
        os.read(all_are_there, 1)
        own_autograd()
        adapt_torch()
        return run_work(_kind(asked), work, answer, given)

    with loopback_store() as port, selectors.DefaultSelector() as pipes:
        pids: list[int] = []
        texts: list[bytes] = [b""] * nprocs
        all_are_there, go = os.pipe()
        try:
            for rank in range(nprocs):
                reads, writes = os.pipe()
                pid = os.fork()
                if pid == 0:
                    _be_a_rank(rank, nprocs, port, writes, judged_work)
                os.close(writes)
                pids.append(pid)
                pipes.register(reads, selectors.EVENT_READ, rank)
            os.close(go)
            until = time.monotonic() + LIMIT_SECONDS
            while pipes.get_map():
                found = pipes.select(max(0.0, until - time.monotonic()))
                if not found:
                    raise Failed(f"{NOT_DONE} {LIMIT_SECONDS:g} s")
                for key, _ in found:
                    if part := os.read(key.fd, 1 << 20):
                        texts[key.data] += part
                        continue
                    pipes.unregister(key.fd)
                    os.close(key.fd)
                    if not texts[key.data].startswith(b"{"):
                        why = texts[key.data].decode(errors="replace") or "it ended its process"
                        raise Failed(f"rank {key.data}: {why}")
        finally:
            os.close(all_are_there)
            for key in list(pipes.get_map().values()):
                os.close(key.fd)
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)  # if it has no process group of its own yet
                os.waitpid(pid, 0)
    return [read(text.decode(errors="replace")) for text in texts]


def _kind(asked: Question) -> tuple[Any, str]:
    return asked.accepts, asked.signature


def _be_a_rank(rank: int, count: int, port: int, writes: int, work: Any) -> None:
    """Be a rank, in the forked process: write the result of `work`, or what it raised, to the pipe; exit."""
    try:
        parent = os.getppid()
        os.setsid()
        end_with(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(nothing, each)
        os.environ |= loopback_environment() | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        multiprocessing.set_start_method(None, force=True)
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(text.encode(errors="replace") or b"?")
    finally:
        os._exit(0)
