"""Question 08.3's starts of a training, in a rank: some are killed, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..asking import in_group, on_a_node_of_its_own, reason
from ..drawn import network, tensor
from ..written import written

NEVER = -2
NOTES = "of another training"  # what is in the file beside the checkpoint
START_SECONDS = 8.0  # that a start may take which is to be killed
MOST_MOMENTS = 8  # of one save, in which a kill is tried
Notes = list[dict[str, Any]]  # one at the beginning of each epoch of a start, one at its end


def epochs_of(notes: Notes) -> list[int]:
    """The epochs that were begun."""
    return [note["epoch"] for note in notes if note["epoch"] is not None]


def _begun(kind: int, values: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(kind, values)
    model.body.inner_layers.tied_.offset.fill_(0.5)  # no state_dict has it
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.01}]
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for turn in range(3):
        x = tensor(seed + turn, (8, 4))
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()
    for group in optimizer.param_groups:  # what the steps leave behind is not the momentum alone
        group["lr"] *= 0.8


def _state(model: nn.Module) -> list[float]:
    return torch.cat([each.detach().double().flatten() for each in model.state_dict().values()]).tolist()


def undisturbed(plan: dict[str, Any]) -> list[float]:
    """What a training ends with that nobody kills."""
    model, optimizer = _begun(plan["kind"], plan["values"][0])
    for epoch in range(plan["epochs"]):
        _epoch(model, optimizer, plan["data"] + 10 * epoch)
    return _state(model)


def _start(
    answer: Any,
    plan: dict[str, Any],
    path: str,
    values: int,
    note: Callable[[dict[str, Any]], Any],
    kill_in: int = NEVER,
    break_after: int = NEVER,
    look_after: int = NEVER,
    most: int = 1000,
) -> None:
    """One start of the training: killed in an epoch, or when it writes after one, or after so many, or not.

    What a kill would find in each moment of the save after the epoch ``look_after`` is kept.
    """
    model, optimizer = _begun(plan["kind"], values)
    begun = [NEVER]
    place = os.path.dirname(path)

    def before(what: str, name: str) -> None:
        if begun[-1] == look_after != NEVER:
            _keep_a_moment(place, Path(plan["moments"]), f"{what} {os.path.basename(name)}")

    with written(place, before) as files:

        def tell(epoch: int | None) -> None:
            wrote = len(files.opened) + files.saves
            note({"epoch": epoch, "state": _state(model), "file": _print_of(path), "wrote": wrote})

        def run_epoch(epoch: int) -> None:
            tell(int(epoch))
            dist.barrier()  # as DDP would: no rank is done with an epoch before all have begun it
            begun.append(int(epoch))
            if epoch in (kill_in, break_after + 1) or len(begun) > 1 + most:
                os.kill(os.getpid(), signal.SIGKILL)
            if epoch == break_after:
                _kill_at(sum(each.nbytes for each in model.state_dict().values()))
            _epoch(model, optimizer, plan["data"] + 10 * int(epoch))

        answer(model, optimizer, run_epoch, plan["epochs"], path)
        tell(None)


def _keep_a_moment(place: str, kept: Path, step: str) -> None:
    """What lies in a folder before a step of rank 0, as a copy."""
    number = len(list(kept.glob("*.txt")))
    if os.environ["RANK"] == "0" and number < MOST_MOMENTS:
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(place, kept / str(number))
            (kept / f"{number}.txt").write_text(step)


def _kill_at(size: int) -> None:
    """The system ends this process from now on when a file of its grows beyond so many bytes."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _print_of(path: str) -> list[int] | None:
    """Which file has this name, and what is in it."""
    try:
        return [os.stat(path).st_ino, zlib.crc32(Path(path).read_bytes())]
    except OSError:
        return None


def killed_often(
    answer: Any, plan: dict[str, Any], kill_in: int, break_after: int, look_after: int
) -> dict[str, Any]:
    """Two starts that are killed, in processes of their own; then one rank starts again after the second.

    And in each moment of one save of the first, too.
    """
    on_a_node_of_its_own()
    Path(plan["neighbour"]).write_text(NOTES)  # each rank writes the same, before it begins
    values = plan["values"][0]
    first, end = _in_a_fork(
        partial(_start, answer, plan, plan["path"], values, kill_in=kill_in, look_after=look_after), "first"
    )
    start = partial(_start, answer, plan, plan["other"], values, break_after=break_after)
    other, others_end = _in_a_fork(start, "other")
    found = {"first": first, "end": end, "other": other, "other end": others_end}
    if os.environ["RANK"] != "0":
        return found
    os.environ["WORLD_SIZE"] = "1"  # it may find a broken file, and then nobody waits for it
    start = partial(_start, answer, plan, plan["other"], plan["values"][1])
    again, agains_end = _in_a_fork(start, "again")
    return found | {"again": again, "again's end": agains_end, "moments": _from_moments(answer, plan)}


def _from_moments(answer: Any, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """What the next start does with what was there before a step; two epochs of it."""
    found = []
    for step in sorted(Path(plan["moments"]).glob("*.txt")):
        path = str(step.with_suffix("") / os.path.basename(plan["path"]))
        notes, end = _in_a_fork(partial(_start, answer, plan, path, plan["values"][1], most=2), step.stem)
        found.append({"step": step.read_text(), "notes": notes, "end": end})
        if end.startswith(("raised", "was not")):
            break
    return found


@in_group
def started_again(answer: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """A start after the first one, which was killed; and one more, when all is done."""
    notes: Notes = []
    _start(answer, plan, plan["path"], plan["values"][1], notes.append)
    dist.barrier()  # rank 0 may still be writing
    third: Notes = []
    try:
        _start(answer, plan, plan["path"], plan["values"][2], third.append)
        more = f"it ran the epochs {epochs_of(third)}" if epochs_of(third) else ""
    except Exception as error:
        more = f"it raised {reason(error)}"
    beside = Path(plan["neighbour"])
    stays = beside.is_file() and beside.read_text() == NOTES
    return {"second": notes, "third": more, "stays": stays}


def _in_a_fork(start: Callable[[Callable[[dict[str, Any]], Any]], None], name: str) -> tuple[Notes, str]:
    """What a start noted in a process of its own, which has a group of its own, and how it ended."""
    coming, going = os.pipe()
    pid = os.fork()
    if pid == 0:
        _of_its_own(start, name, partial(_send, going))
    os.close(going)
    notes, until, text = [], time.monotonic() + START_SECONDS, b""
    while select.select([coming], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (more := os.read(coming, 1 << 16)):
            break
        text += more
    os.close(coming)
    late = time.monotonic() >= until
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for line in text.splitlines(keepends=True):
        if line.endswith(b"\n"):
            notes.append(json.loads(line))
    if notes and "end" in notes[-1]:
        return notes[:-1], notes[-1]["end"]
    return notes, "was not done in time" if late else "was killed"


def _send(pipe: int, told: dict[str, Any]) -> None:
    text = json.dumps(told).encode() + b"\n"
    while text:
        text = text[os.write(pipe, text) :]


def _of_its_own(start: Callable[..., None], name: str, send: Callable[[dict[str, Any]], None]) -> None:
    """In a fork; it never returns."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)  # what a log takes would count for the file that is to break
        os.dup2(silent, 2)
        store, rank, count = next(dist.rendezvous("env://"))
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"course/{name}", store), rank=rank, world_size=count
        )
        start(send)
        send({"end": "done"})
    except BaseException as error:
        send({"end": f"raised {reason(error)}"})
    finally:
        os._exit(0)
