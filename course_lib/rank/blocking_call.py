"""Record the call that a rank's main thread waits in, where PyTorch's flight recorder does not say.

For functions of ``torch.distributed``, the arguments of the call say which ranks meet there.
"""

from __future__ import annotations

import contextlib
import linecache
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

from ..compat import process_groups
from ..tracebacks.learner_code import error_of, frame_of, is_learners
from .failure import described

C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
JOINS_BY = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "init_method"]
JOINS_BY += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
LONGEST_CALL = 200  # characters
ROOT = {"broadcast": "src", "scatter": "src", "recv": "src", "reduce": "dst", "gather": "dst", "send": "dst"}


def blocking_call(thread: int | None, launched: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what is known of a thread's wait: ``call``, ``meets``, ``joins``, ``lock_file``, ``handles``."""
    frame, wait = frame_of(thread), dict[str, Any]()
    with contextlib.suppress(Exception):  # the stack still shows where the rank is
        error = error_of(thread)
        if error and any(is_learners(each.f_code.co_filename) for each, _ in walk_tb(error.__traceback__)):
            wait["handles"] = [{"thread": ""} | described(error)]
        while frame is not None and not is_learners(frame.f_code.co_filename):
            if "meets" not in wait and frame.f_code.co_filename.endswith(C10D):
                if meets := _meets(frame):
                    wait["meets"] = meets
                if frame.f_code.co_name == "init_process_group":
                    wait["joins"] = _joins_by(frame.f_locals, launched)
            if frame.f_code.co_name in ("acquire", "wait") and "self" in frame.f_code.co_varnames:
                lock = frame.f_locals["self"]  # of filelock, or of torch.utils.cpp_extension
                if path := getattr(lock, "lock_file", getattr(lock, "lock_file_path", None)):
                    wait |= {"lock_file": os.path.abspath(path), "lock_holder": _holder_of(path)}
            frame = frame.f_back
        if frame is not None:
            wait["call"] = _call(frame)
    return wait


def _meets(frame: FrameType) -> dict[str, Any]:
    """Return which ranks meet in a function of torch.distributed; empty for any other frame.

    Call it only for frames of torch: before Python 3.13, reading a frame's variables keeps them alive.
    """
    import torch.distributed as dist

    name, arguments = frame.f_code.co_name, frame.f_locals
    checks = dist.get_debug_level() == dist.DebugLevel.DETAIL and "group" in arguments  # all meet first
    if name not in (*ROOT, "new_group", "monitored_barrier") and not checks:
        return {}
    everyone = list(range(dist.get_world_size()))
    if name == "new_group":
        ranks = everyone if arguments["ranks"] is None else sorted(arguments["ranks"])
        return {"name": name, "ranks": ranks, "number": process_groups()[1] - 1}
    ranks = dist.get_process_group_ranks(arguments["group"]) if arguments["group"] else everyone
    meets = {"name": name, "ranks": ranks}
    if name not in ROOT:
        return meets
    root, in_group = arguments[ROOT[name]], arguments[f"group_{ROOT[name]}"]
    if root is None and in_group is not None:
        root = ranks[in_group]
    if name not in ("recv", "send"):
        return meets | {"root": root}
    others = [rank for rank in ranks if rank != dist.get_rank()]  # recv without a source takes from any
    return meets | {"ranks": others if root is None else [root], "number": arguments["tag"]}


def _joins_by(arguments: Mapping[str, Any], launched: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the settings by which init_process_group joins: the value of each now and at the launch."""
    given = {name: arguments[name.lower()] for name in JOINS_BY[:2]}
    now = os.environ | {name: str(number) for name, number in given.items() if number >= 0}
    if (method := arguments["init_method"] or "env://") != "env://":
        now |= {"init_method": method, "MASTER_ADDR": "", "MASTER_PORT": ""}
    return {name: [now[name], launched.get(name, "")] for name in JOINS_BY if now.get(name)}


def _holder_of(path: str) -> int | None:
    """Return the pid of the process on this machine that has locked a file, or None (Linux)."""
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        inode = f":{os.stat(path).st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        return next(int(lock[4]) for lock in locks if lock[5].endswith(inode))
    return None


def _call(frame: FrameType) -> str:
    """Return the source of the call that a frame is in, or the whole line if that source is no call."""
    first, last, start, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    line = linecache.getline(frame.f_code.co_filename, first or frame.f_lineno)
    text = line.encode()[start : end if last == first else None].decode(errors="replace").strip()
    return (text if "(" in text else line.strip())[:LONGEST_CALL]
