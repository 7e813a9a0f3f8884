"""Ask the ranks for their Python stacks, read them, and find the learner's line in them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..frames import Place, is_learners, with_source
from ..run_folder import RankFiles
from .facts import Position

if TYPE_CHECKING:
    from ..run.run import Run

STACK_SECONDS = 1.0  # how long the ranks get to write their stacks; it takes milliseconds
MAIN_THREAD = re.compile(r"main thread 0x([0-9a-f]+)\n")
THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+).*\n((?:  .*\n)*)", re.MULTILINE)
STACK_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')
WRAPPERS = {"wrapper", "decorate_context", "_fn", "__call__", "_wrapped_call_impl", "_call_impl"}
DISTRIBUTED = os.path.join("torch", "distributed") + os.sep


def ask_stacks(run: Run, ranks: Iterable[int]) -> None:
    """Have live ranks on this machine write their Python stacks to a file (SIGUSR1), and wait for that."""
    if run.is_job or not hasattr(signal, "SIGUSR1"):  # another machine's pid is somebody else's here
        return
    before: dict[Path, int] = {}
    pids: dict[Path, int] = {}
    for rank in ranks:
        path = RankFiles(run.folder, rank).stack
        with contextlib.suppress(OSError, KeyError):
            size = path.stat().st_size
            if size:  # its handler is installed; without it the signal would end the rank
                pids[path] = run.facts(rank)["pid"]
                os.kill(pids[path], signal.SIGUSR1)
                before[path] = size
    seen: dict[Path, int] = {}
    until = time.monotonic() + STACK_SECONDS
    while before and time.monotonic() < until:
        time.sleep(0.01)
        sizes = {path: path.stat().st_size if path.exists() else 0 for path in before}
        before = {path: size for path, size in before.items() if not size < sizes[path] == seen.get(path)}
        before = {path: size for path, size in before.items() if psutil.pid_exists(pids[path])}
        seen = sizes


def python_stack(run: Run, rank: int | str) -> list[Place]:
    """Return all frames on a rank's main thread, innermost first, when last asked or crashed."""
    try:
        text = RankFiles(run.folder, rank).stack.read_text(errors="replace")
    except OSError:
        return []
    head = MAIN_THREAD.match(text)
    main_thread = int(head[1], 16) if head else None
    stacks = [match[2] for match in THREAD.finditer(text) if int(match[1], 16) == main_thread]
    if not stacks:
        return []
    stack = [(file, int(line), function) for file, line, function in STACK_LINE.findall(stacks[-1])]
    started_by = ("<string>", 1, "<module>")  # multiprocessing's python -c
    return stack[:-1] if stack[-1:] == [started_by] else stack


def position_of(stack: Sequence[Place], pending: bool = False) -> Position | None:
    """Return where a stack is in the learner's code; None if it is not.

    Parameters
    ----------
    stack
        Innermost frame first.
    pending
        Whether the rank has called a collective that is not over: then it waits.
    """
    depth = next((i for i, (file, _, _) in enumerate(stack) if is_learners(file)), None)
    if depth is None:
        return None
    inner = stack[:depth]
    function = next((name for _, _, name in reversed(inner) if name not in WRAPPERS), None)
    waits = pending or any(DISTRIBUTED in file for file, _, _ in inner)
    return Position(with_source(*stack[depth]), function, waits)
