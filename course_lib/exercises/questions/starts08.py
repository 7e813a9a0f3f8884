"""Start, kill and restart the training run of question 08.3 in a rank; kills happen in forked processes."""

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

from ..in_rank.file_audit import audit_files
from ..in_rank.work import in_group, on_a_node_of_its_own
from ..inputs import flat, network, tensor, trainable
from ..shape import NUMBER, reports
from ..wording import reason

NEVER = -2
NOTES = "of another run"  # content of the file beside the checkpoint
START_SECONDS = 15.0  # time limit for a start in a forked process; a busy machine can stand still for seconds
MOST_MOMENTS = 8  # limit on the moments of one save at which a kill is tried
Notes = list[dict[str, Any]]  # of one start: one as each epoch begins, one at the end


def epochs_of(notes: Notes) -> list[int]:
    """Return the epochs that were begun."""
    return [note["epoch"] for note in notes if note["epoch"] is not None]


def _begun(kind: int, values: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(kind, values)
    model.get_buffer("body.inner_layers.tied_.offset").fill_(0.5)  # a buffer that is in no state_dict
    trained = trainable(model)
    groups: list[dict[str, Any]] = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.01}]
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for turn in range(3):
        x = tensor(seed + turn, (8, 4))
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()
    for group in optimizer.param_groups:  # so momentum is not all that has to be restored
        group["lr"] *= 0.8


def _state(model: nn.Module) -> list[float]:
    return flat(numbers.double() for numbers in model.state_dict().values()).tolist()


def undisturbed(plan: dict[str, Any]) -> list[list[float]]:
    """Return the states of a training run that is never killed, as each epoch begins and at the end."""
    model, optimizer = _begun(plan["kind"], plan["values"][0])
    states = [_state(model)]
    for epoch in range(plan["epochs"]):
        _epoch(model, optimizer, plan["data"] + 10 * epoch)
        states.append(_state(model))
    return states


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
    """Start the training; kill it in epoch ``kill_in``, in a save, after ``most`` epochs, or not at all.

    The save is that of ``break_after``. At each moment of the one of ``look_after``, keep what a kill leaves.
    """
    model, optimizer = _begun(plan["kind"], values)
    begun = [NEVER]
    place = os.path.dirname(path)

    def before(what: str, name: str) -> None:
        if begun[-1] == look_after != NEVER:
            _keep_a_moment(place, Path(plan["moments"]), f"{what} {os.path.basename(name)}")

    with audit_files(place, before) as files:

        def tell(epoch: int | None) -> None:
            wrote = len(files.opened) + files.saves
            note({"epoch": epoch, "state": _state(model), "file": _print_of(path), "wrote": wrote})

        def run_epoch(epoch: int) -> None:
            tell(int(epoch))
            dist.barrier()  # as with DDP: no rank finishes an epoch before all have begun it
            begun.append(int(epoch))
            if epoch in (kill_in, break_after + 1) or len(begun) > 1 + most:
                os.kill(os.getpid(), signal.SIGKILL)
            if epoch == break_after:
                _kill_at(sum(tensor.nbytes for tensor in model.state_dict().values()))
            _epoch(model, optimizer, plan["data"] + 10 * int(epoch))

        answer(model, optimizer, run_epoch, plan["epochs"], path)
        tell(None)


def _keep_a_moment(place: str, kept: Path, step: str) -> None:
    """Copy the folder as it is before a step of rank 0."""
    number = len(list(kept.glob("*.txt")))
    if os.environ["RANK"] == "0" and number < MOST_MOMENTS:
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(place, kept / str(number))
            (kept / f"{number}.txt").write_text(step)


def _kill_at(size: int) -> None:
    """Have the system kill this process when it grows a file beyond ``size`` bytes."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _print_of(path: str) -> list[int] | None:
    """Return a file's fingerprint: its inode and a checksum of its content."""
    try:
        return [os.stat(path).st_ino, zlib.crc32(Path(path).read_bytes())]
    except OSError:
        return None


def _note(plan: dict[str, Any]) -> dict[str, Any]:
    state = [NUMBER] * len(_state(_begun(plan["kind"], 0)[0]))
    return {"epoch": (int, None), "state": state, "file": ([int, int], None), "wrote": int}


def _of_starts(rank: int, note: dict[str, Any]) -> dict[str, Any]:
    notes = [note, ...]
    of_each = {"first": notes, "end": str, "other": notes, "other end": str}
    moments = [{"step": str, "notes": notes, "end": str}, ...]
    return of_each | ({} if rank else {"again": notes, "again's end": str, "moments": moments})


@reports(lambda plan, *_: partial(_of_starts, note=_note(plan)))
def killed_often(
    answer: Any, plan: dict[str, Any], kill_in: int, break_after: int, look_after: int
) -> dict[str, Any]:
    """Run two starts that are killed, in forked processes; then start rank 0 again after the second.

    Rank 0 also starts again from each moment of one save of the first.
    """
    on_a_node_of_its_own()
    Path(plan["neighbour"]).write_text(NOTES)  # every rank writes the same, before it starts
    values = plan["values"][0]
    first, end = _in_a_fork(
        partial(_start, answer, plan, plan["path"], values, kill_in=kill_in, look_after=look_after), "first"
    )
    start = partial(_start, answer, plan, plan["other"], values, break_after=break_after)
    other, others_end = _in_a_fork(start, "other")
    result = {"first": first, "end": end, "other": other, "other end": others_end}
    if os.environ["RANK"] != "0":
        return result
    os.environ["WORLD_SIZE"] = "1"  # if it fails on a broken file, no other rank waits for it
    start = partial(_start, answer, plan, plan["other"], plan["values"][1])
    again, agains_end = _in_a_fork(start, "again")
    return result | {"again": again, "again's end": agains_end, "moments": _from_moments(answer, plan)}


def _from_moments(answer: Any, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Start again, for two epochs, from what lay there before each step of a save; return what came of it."""
    results = []
    for step in sorted(Path(plan["moments"]).glob("*.txt")):
        path = str(step.with_suffix("") / os.path.basename(plan["path"]))
        notes, end = _in_a_fork(partial(_start, answer, plan, path, plan["values"][1], most=2), step.stem)
        results.append({"step": step.read_text(), "notes": notes, "end": end})
        if end.startswith(("raised", "was not")):
            break
    return results


@reports(lambda plan: {"second": [_note(plan), _note(plan), ...], "third": str, "stays": bool})
@in_group
def started_again(answer: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """Start again after the first start, which was killed, and once more when the training is complete."""
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
    """Run a start in a forked process with a group of its own; return its notes and how it ended."""
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
    """Run a start in the fork and send how it ended; never return."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)  # a log that is a file would be subject to the size limit, too
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
