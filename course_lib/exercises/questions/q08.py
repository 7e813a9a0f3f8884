"""The questions of lesson 08: adapting a script from 2021 so that any launcher can start and restart it."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.file_audit import audit_files
from ..in_rank.work import in_group
from ..inputs import flat, machine, network, seeds, tensor, trainable
from ..judging import Faults, far, first_fault, with_two_world_sizes
from ..question import Ask, Finding, Result, question
from ..shape import NUMBER, reports
from ..wording import reason, told

CLOSE = 1e-9  # the tensors are float64


# --- 08.1 -------------------------------------------------------------------------------------------------

ON_CPU = "on the CPU it gives a DistributedDataParallel that averages the model's gradients"
ON_GPU = "on a GPU, device_ids names that GPU"


@question(
    "08.1",
    "wrap(model, device)",
    {ON_CPU: 2, ON_GPU: 2},
    hints={
        ON_CPU: {
            "an error": "Read the lesson's error for a CPU model again: what must device_ids be there?",
            "no DDP": "The training loop calls what you return, and that has to average the gradients.",
            "another model": "Do you wrap the given model itself, unchanged?",
        },
        ON_GPU: {
            "an error": "Here the device is a GPU (the check needs none). DDP must be called all the same.",
            "no GPU": "None is for the CPU. DDP has to be told this rank's GPU. (GPU 0 is one, too.)",
            "another GPU": "One process, one GPU: the one in `device`.",
        },
    },
)
@with_two_world_sizes()
def wrap(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    kind, *values = seeds(rng, 1 + ranks)
    gpus = rng.sample([0, rng.randint(1, 7)], 2)
    results = ask(_wrapped, kind, values, gpus, nprocs=ranks)
    own = [_gradient(network(kind, values[0]), seed) for seed in values]  # with rank 0's weights
    mean = [sum(gradients) / ranks for gradients in zip(*own, strict=True)]
    off = max(far(result["gradient"], mean) for result in results)
    trouble = next((result["trouble"] for result in results if result["trouble"]), "")
    hint = "an error" if "raised" in trouble else "no DDP" if trouble else "another model"
    seen = f"on {ranks} CPU ranks: {trouble or f'a gradient is off from the mean by {off:.3g}'}"
    yield Finding(ON_CPU, not trouble and off < CLOSE, seen, hint)
    for gpu, asked in [pair for result in results for pair in zip(gpus, result["asked"], strict=True)]:
        ids = asked["device_ids"]
        seen = asked["trouble"] or f"DDP was given device_ids={ids}"
        hint = "an error" if asked["trouble"] else "no GPU" if ids is None else "another GPU"
        yield Finding(ON_GPU, ids == [gpu], f"for cuda:{gpu} {seen}", hint)


def _gradient(model: Any, seed: int) -> list[float]:
    """Run a step; return the gradients, also of the model in a DDP."""
    model(tensor(seed, (5, 4))).square().sum().backward()
    return flat(p.grad for p in trainable(getattr(model, "module", model)) if p.grad is not None).tolist()


ASKED = {"trouble": str, "device_ids": ([(int, None), ...], None)}


@reports(lambda kind, values, gpus: {"trouble": str, "gradient": [NUMBER, ...], "asked": [ASKED] * len(gpus)})
@in_group
def _wrapped(answer: Any, kind: int, values: list[int], gpus: list[int]) -> Result:
    seed, trouble, gradient = values[dist.get_rank()], "", []
    model = network(kind, seed)
    try:
        with machine(gpus=8):  # the machine has GPUs, but this model is on the CPU
            ddp = answer(model, torch.device("cpu"))
        if not isinstance(ddp, DistributedDataParallel):
            trouble = f"wrap returned {told(ddp)}"
        elif ddp.module is model:
            gradient = _gradient(ddp, seed)
    except Exception as error:
        trouble = f"it raised {reason(error)}"
    return {"trouble": trouble, "gradient": gradient, "asked": [_on_gpu(answer, gpu) for gpu in gpus]}


def _on_gpu(answer: Any, gpu: int) -> Result:
    """Return how an answer would call DDP on a GPU, without using one."""
    asked: Result = {"trouble": "DDP was not called", "device_ids": None}

    def init(self: Any, module: Any, device_ids: Any = None, *_: Any, **__: Any) -> None:
        nn.Module.__init__(self)
        as_ints = (each if isinstance(each, int) else torch.device(each).index for each in device_ids or [])
        ids = None if device_ids is None else list(as_ints)
        asked.update(trouble="", device_ids=ids)

    elsewhere = 3 if gpu != 3 else 5  # a local rank need not be the index of its GPU
    with FakeTensorMode():
        model = nn.Linear(4, 2, device=torch.device("cuda", gpu))  # on that GPU, as far as its weights say
    same = mock.MagicMock(return_value=model)
    with (
        machine(8, {"LOCAL_RANK": str(elsewhere), "RANK": str(gpu + 8)}),
        mock.patch.object(DistributedDataParallel, "__init__", init),
        mock.patch.multiple(nn.Module, to=same, cuda=same),
    ):
        try:
            answer(model, torch.device("cuda", gpu))
        except Exception as error:
            asked["trouble"] = f"it raised {reason(error)}"
    return asked


# --- 08.2 -------------------------------------------------------------------------------------------------

GOES_ON = "a second start resumes after the last completed epoch"
SAME = "and ends with the weights of an uninterrupted run"
ONE = "rank 0 alone writes"
WHOLE = "a kill in the middle of a save leaves a checkpoint to resume from"
NEVER, AT_ONCE = -2, -1  # when a start is killed; otherwise in an epoch
NOTE = {"epoch": (int, None), "state": [NUMBER, ...], "file": (int, None), "wrote": int}
MOST_MOMENTS = 12  # of one save, at which a kill is tried
Notes = list[dict[str, Any]]  # of one start: a note as each epoch begins, and one at the end


@question(
    "08.2",
    "train(model, optimizer, run_epoch, epochs, path)",
    {GOES_ON: 2, SAME: 2, ONE: 1, WHOLE: 1},
    depends_on={SAME: GOES_ON, WHOLE: GOES_ON},
    hints={
        GOES_ON: {
            "starts over": "It started over. What should a start look for before its first epoch?",
            "another epoch": "Which epoch comes after the last one that was saved?",
            "not saved": "A kill then costs more than one epoch. When must `path` hold a new checkpoint?",
            "no end": "A run that is complete has nothing left to do.",
        },
        SAME: {
            "the model": "The second start began with other weights or buffers than were last saved.",
            "the optimizer": "The weights are restored. What else remembers the earlier steps?",
        },
        ONE: {
            "nobody": "A checkpoint must be written after each epoch, on one of the ranks.",
            "several": "All ranks hold the same weights. How many of them need to write the file?",
        },
        WHOLE: {
            "half a file": "Half a file had the name of the whole one. When may a file get that name?",
            "two steps": "A kill may come between two steps. What must change in a single step?",
        },
    },
)
def train(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    kind, data, *values = seeds(rng, 5)
    epochs, ranks = rng.randint(5, 7), rng.randint(2, 4)
    killed = rng.randint(3, epochs - 2)
    plan: dict[str, Any] = {"kind": kind, "data": data, "epochs": epochs, "look": killed - 2}
    with ask.folder() as place:
        plan |= {"place": f"{place}/run", "moments": f"{place}/moments"}
        first = [starts[0] for starts in ask(_started, plan, values[:1], killed, nprocs=ranks)]
        second, third = zip(*ask(_started, plan, values[1:], NEVER, nprocs=ranks), strict=True)
        (moments,) = ask(_from_moments, plan, values[1])
    right = _undisturbed(plan, values[0])
    yield first_fault(GOES_ON, _faults_of_epochs(first, second, third, killed, epochs))
    begun = max(far(notes[0]["state"], right[killed]) for notes in second)
    off = max(begun, *(far(notes[-1]["state"], right[-1]) for notes in second))
    hint = "the model" if begun > CLOSE else "the optimizer"
    yield Finding(SAME, off < CLOSE, f"a weight is off by {off:.3g}", hint)
    wrote = [one[-1]["wrote"] + other[-1]["wrote"] for one, other in zip(first, second, strict=True)]
    seen = f"files that were opened for writing, by rank: {wrote}"
    one = wrote[0] > 0 and not any(wrote[1:])
    yield Finding(ONE, one, seen, "several" if any(wrote) else "nobody")
    yield first_fault(WHOLE, _faults_of_kills(moments, plan["look"]))


def _epochs(notes: Notes) -> list[int]:
    return [note["epoch"] for note in notes if note["epoch"] is not None]


def _faults_of_epochs(first: Any, second: Any, third: Any, killed: int, epochs: int) -> Faults:
    for notes in map(_epochs, first):
        if notes != list(range(killed + 1)):
            yield f"killed in epoch {killed}, the first start ran the epochs {notes}", "another epoch"
    for one, other in itertools.chain(itertools.pairwise(first[0]), itertools.pairwise(second[0])):
        if one["file"] == other["file"]:
            yield f"after epoch {one['epoch']} there was no new file at path", "not saved"
    for notes in map(_epochs, second):
        if notes != list(range(killed, epochs)):
            seen = f"killed in epoch {killed}; the second start ran the epochs {notes}"
            yield seen, "starts over" if notes[:1] == [0] else "another epoch"
    for notes in map(_epochs, third):
        if notes:
            yield f"all epochs were done; one more start ran the epochs {notes}", "no end"


def _faults_of_kills(moments: list[Any], look: int) -> Faults:
    if not moments:
        yield f"no save was seen after epoch {look}", "half a file"
    for step, end, epochs in moments:
        seen = f"killed while it saved after epoch {look}, {step}: the next start "
        if end or epochs[:1] not in ([look], [look + 1]):
            hint = "half a file" if step == f"writing {CHECKPOINT}" else "two steps"
            yield seen + (end or f"ran the epochs {epochs}"), hint


def _begun(plan: dict[str, Any], values: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(plan["kind"], values)
    model.get_buffer("body.inner_layers.tied_.offset").fill_(0.5)  # a buffer that is in no state_dict
    return model, torch.optim.SGD(trainable(model), lr=0.05, momentum=0.9)


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for turn in range(3):
        x = tensor(seed + turn, (8, 4))
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.8  # so that more than momentum has to be restored


def _state(model: nn.Module) -> list[float]:
    return flat(numbers.double() for numbers in model.state_dict().values()).tolist()


def _undisturbed(plan: dict[str, Any], values: int) -> list[list[float]]:
    """Return the states of a training run that is never killed, as each epoch begins and at the end."""
    model, optimizer = _begun(plan, values)
    states = [_state(model)]
    for epoch in range(plan["epochs"]):
        _epoch(model, optimizer, plan["data"] + 10 * epoch)
        states.append(_state(model))
    return states


CHECKPOINT = "checkpoint.pt"


class _Killed(BaseException):
    """Ends a start in the middle of an epoch."""


def _start(answer: Any, plan: dict[str, Any], place: str, values: int, kill: int) -> Notes:
    """Start the training; end it in an epoch, or never. Keep what a kill during one save would leave."""
    model, optimizer = _begun(plan, values)
    path, notes = Path(place, CHECKPOINT), list[dict[str, Any]]()

    def before(what: str, name: str) -> None:
        if kill > 0 and dist.get_rank() == 0 and notes[-1:] and notes[-1]["epoch"] == plan["look"]:
            _keep_moments(plan, what, os.path.basename(name))

    with audit_files(place, before) as files:

        def note(epoch: int | None) -> None:
            held = zlib.crc32(path.read_bytes()) if path.is_file() else None
            wrote = len(files.opened) + files.saves
            notes.append({"epoch": epoch, "state": _state(model), "file": held, "wrote": wrote})

        def run_epoch(epoch: int) -> None:
            note(int(epoch))
            dist.barrier()  # as with DDP: no rank finishes an epoch before all have begun it
            if kill in (epoch, AT_ONCE) or len(notes) > 2 * plan["epochs"]:
                raise _Killed
            _epoch(model, optimizer, plan["data"] + 10 * int(epoch))

        try:
            answer(model, optimizer, run_epoch, plan["epochs"], str(path))
            note(None)
        except _Killed:
            pass
    return notes


def _keep_moments(plan: dict[str, Any], what: str, name: str) -> None:
    """Copy the folder as it is before a step, and as a kill leaves it while an opened file is written."""
    for step in [f"before {what} of {name}", f"writing {name}"][: 1 + (what == "open")]:
        number = len(list(Path(plan["moments"]).iterdir()))
        if number < MOST_MOMENTS and what != "save":
            kept = shutil.copytree(plan["place"], f"{plan['moments']}/{number:02} {step}")
            if step.startswith("writing"):
                Path(kept, name).write_bytes(b"")


@reports(lambda plan, values, kill: [[NOTE, NOTE, ...]] * len(values))
@in_group
def _started(answer: Any, plan: dict[str, Any], values: list[int], kill: int) -> list[Notes]:
    """Return the notes of several starts, one after the other."""
    for each in ("place", "moments"):
        Path(plan[each]).mkdir(exist_ok=True)
    starts = []
    for seed in values:
        starts.append(_start(answer, plan, plan["place"], seed, kill))
        dist.barrier()  # rank 0 may still be writing
    return starts


@reports(lambda plan, values: [[str, str, [int, ...]], ...])
@in_group
def _from_moments(answer: Any, plan: dict[str, Any], values: int) -> list[Any]:
    """Start from the folder as it was at each moment of a save; return moments, errors and epochs."""
    results = []
    for place in sorted(Path(plan["moments"]).iterdir()):
        try:
            end, epochs = "", _epochs(_start(answer, plan, str(place), values, AT_ONCE))
        except Exception as error:
            end, epochs = f"raised {reason(error)}", []
        results.append([place.name[3:], end, epochs])
    return results
