"""Run a work on an answer in a rank, and leave what it saw there as JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...files import write_whole
from ..question import Refused, Work
from ..wording import number, told
from .limits import limited

MOST_NUMBERS = 400_000  # that a work may report on one rank; eight characters count as one

UNWAITED = (
    "rank {} started {} without waiting for the end of it: until it waits, nothing is sure to have "
    "arrived, or to have been sent"
)


def run_work(asked: tuple[Callable[[Any, str], None], str], work: Work, answer: Any, args: Any) -> str:
    """In a rank, run a work on an answer; return as JSON what it saw or its refusal. Errors propagate."""
    accepts, signature = asked
    try:
        accepts(answer, signature)
        seen = work(answer, *args)
        if not _is_small(seen):
            raise Refused(f"your code returned more than {MOST_NUMBERS:,} numbers; far fewer are asked for")
        report = {"seen": seen}
    except Refused as reason:
        report = {"refused": str(reason)}
    return json.dumps(report, default=_numbers_of)


def answer_in_a_rank(asked: Any, work: Work, answer: bytes, args: Any) -> None:
    """In a rank of a run, leave what `run_work` returns for a pickled answer in the run's folder.

    An answer can forge that file: it runs in this process, and may write the file itself and end the process.
    No secret helps, since the process would have to know it. So a judge sends no expected value here, refuses
    reports without the shape that their work must give (`shape.reports`), and compares them with what follows
    from its draw.
    """
    path = answer_file(Path(os.environ["COURSE_RUN"]), int(os.environ["RANK"]))
    with limited():
        write_whole(path, run_work(asked, work, pickle.loads(answer), args))


def answer_file(folder: Path, rank: int) -> Path:
    """Return the file in a run's folder in which a rank leaves what an answer did there, as JSON."""
    return folder / f"rank-{rank}.answer"


def _is_small(value: Any) -> bool:
    """Return whether a value holds no more than `MOST_NUMBERS` numbers, without looking beyond that."""
    count, rest = 0, [value]
    while rest and count <= MOST_NUMBERS:
        part = rest.pop()
        if isinstance(part, list | tuple | dict):
            count += len(part)
            if count <= MOST_NUMBERS:
                rest += [*part, *part.values()] if isinstance(part, dict) else part
        elif isinstance(part, str):
            count += len(part) // 8
        elif isinstance(part, torch.Tensor):
            count += part.numel()
        else:
            count += getattr(part, "size", 1) if hasattr(part, "tolist") else 1
    return count <= MOST_NUMBERS


def _numbers_of(value: Any) -> Any:
    """Convert a tensor or an array to (nested) lists, for JSON; describe all else in words."""
    with contextlib.suppress(Exception):  # a tensor without numbers: sparse, or on the meta device
        return value.detach().cpu().tolist() if isinstance(value, torch.Tensor) else value.tolist()
    return told(value)


def in_group(work: Work) -> Work:
    """Wrap a work to run in one gloo group: no rank begins before all have joined, or leaves before all end.

    The environment puts each rank on a node of its own, so that a local rank cannot pass for a rank.

    An answer that starts something (``async_op``) and does not wait for it is refused: its result is chance.
    """

    @functools.wraps(work)
    def joined(answer: Any, *args: Any) -> Any:
        import torch.distributed as dist

        from .traffic import let_end, unwaited_work

        store, rank, count = next(dist.rendezvous("env://"))
        on_a_node_of_its_own()

        def meet(word: str) -> None:
            store.set(f"course/{word}/{rank}", "here")
            store.wait([f"course/{word}/{other}" for other in range(count)])

        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        meet("begins")
        with unwaited_work() as pending:
            try:
                result = work(answer, *args)
            except Refused:  # perhaps on this rank alone: the others must not wait for it
                meet("ends")
                raise
        names = [name for name, _ in pending.values()]
        let_end([work for _, work in pending.values()])  # another rank may still need this one for it
        meet("ends")
        if names:
            raise Refused(UNWAITED.format(rank, " and ".join(dict.fromkeys(names))))
        return result

    return joined


def on_each_case(work: Work) -> Work:
    """Wrap a work to run on several cases, one after the other; a list has a case's arguments."""

    @functools.wraps(work)
    def on_all(answer: Any, cases: list[Any]) -> list[Any]:
        return [work(answer, *(case if isinstance(case, list) else [case])) for case in cases]

    return on_all


def on_a_node_of_its_own() -> None:
    """Set this process's environment as torchrun would on a node with one rank."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}


def the_number(value: Any, what: str) -> float:
    """Convert a value to a number, or refuse it with a message that begins with what was asked for."""
    converted = number(value)
    if isinstance(converted, str):
        raise Refused(f"{what}; it returned {converted}")
    return converted


def refuse_unless(holds: bool, what: str, value: Any) -> None:
    """Refuse a returned value unless this holds; the message begins with what was asked for."""
    if not holds:
        raise Refused(f"{what}; it returned {told(value)}")
