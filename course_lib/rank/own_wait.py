"""Record what a rank's main thread waits in, where PyTorch's flight recorder does not tell.

That is which call of the learner's line has not ended, and in functions of ``torch.distributed`` with which
ranks they meet, by the arguments that they were called with.
"""

from __future__ import annotations

import contextlib
import linecache
import os
from itertools import islice
from types import FrameType
from typing import Any

from ..frames import frame_of, is_learners
from ..private_names import process_groups

C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
LONGEST_CALL = 200  # characters
ROOT = {"broadcast": "src", "scatter": "src", "recv": "src", "reduce": "dst", "gather": "dst", "send": "dst"}


def own_wait(thread: int | None) -> dict[str, Any]:
    """Return ``call``, the call in the learner's line, and ``meets``, with whom it meets, as far as known."""
    frame, told = frame_of(thread), dict[str, Any]()
    with contextlib.suppress(Exception):  # the stack still shows where the rank is
        while frame is not None and not is_learners(frame.f_code.co_filename):
            if "meets" not in told and frame.f_code.co_filename.endswith(C10D):
                told |= _meets(frame)
            frame = frame.f_back
        if frame is not None:
            told["call"] = _call(frame)
    return told


def _meets(frame: FrameType) -> dict[str, Any]:
    """Return with which ranks a function of torch.distributed meets; empty for any other frame.

    Only frames of torch are asked for their variables: before Python 3.13 they keep those alive.
    """
    name = frame.f_code.co_name
    if name not in (*ROOT, "new_group", "monitored_barrier"):
        return {}
    import torch.distributed as dist

    arguments = frame.f_locals
    everyone = list(range(dist.get_world_size()))
    if name == "new_group":
        ranks = arguments["ranks"]
        ranks = everyone if ranks is None else sorted(ranks)
        return {"meets": {"name": name, "ranks": ranks, "number": process_groups()[1] - 1}}
    ranks = dist.get_process_group_ranks(arguments["group"]) if arguments["group"] else everyone
    if name not in ROOT:
        return {"meets": {"name": name, "ranks": ranks}}
    root, in_group = arguments[ROOT[name]], arguments[f"group_{ROOT[name]}"]
    if root is None and in_group is not None:
        root = ranks[in_group]
    if name in ("recv", "send"):  # from any rank, if it names none
        ranks = [rank for rank in ranks if rank != dist.get_rank()] if root is None else [root]
        return {"meets": {"name": name, "ranks": ranks, "number": arguments["tag"]}}
    return {"meets": {"name": name, "ranks": ranks, "root": root}}


def _call(frame: FrameType) -> str:
    """Return the source of the call that has not ended; its whole line if the source is no call."""
    first, last, start, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    line = linecache.getline(frame.f_code.co_filename, first or frame.f_lineno)
    text = line.encode()[start : end if last == first else None].decode(errors="replace").strip()
    return (text if "(" in text else line.strip())[:LONGEST_CALL]
