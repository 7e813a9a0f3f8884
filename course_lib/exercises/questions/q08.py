"""The questions of lesson 08: adapting a script from 2021 so that any launcher can start and restart it."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from ..in_rank.work import in_group
from ..inputs import flat, machine, network, seeds, tensor, trainable
from ..judging import far, first_wrong, with_two_world_sizes
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import reason, told
from .starts08 import NEVER, Notes, epochs_of, killed_often, started_again, undisturbed

CLOSE = 1e-9  # the tensors are float64

# --- 08.1 -------------------------------------------------------------------------------------------------

TOLD = "under torchrun it knows who it is"
OLD = "an old launcher, which passes --local-rank, does not stop it"
ALONE = "started alone, it is rank 0 of 1"
NAMES = ("rank", "local_rank", "world_size", "epochs")
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # endings: LOCAL_RANK, too
UNKNOWN = "argparse ends a program that is given an argument it does not know. Hyphen or underscore?"
LACKING = "argparse ends a program that lacks a required argument. Here no argument was given."
IN_VAIN = {
    "it returned None": "Return what parse_args gives, with three more attributes.",
    "SystemExit: 2": UNKNOWN,
    "KeyError": "Without a launcher the variable is not set. Which value is right then?",
    "": "It has to return with any launcher, and without one.",
}
Launched = tuple[dict[str, int], dict[str, str]]  # the right values, the environment


@question("08.1", "arguments(argv)", {TOLD: 1, OLD: 1, ALONE: 1})
def arguments(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    here, more = rng.randint(3, 6), rng.randint(1, 2)
    # the earlier nodes have other numbers of ranks: no value follows from another one
    before = 2 * here + more
    size = before + here + rng.choice([ranks for ranks in range(1, 6) if ranks + more != here])
    local_rank = rng.randint(1, here - 1)
    inner = _launched(before + local_rank, local_rank, size, here, 2)
    epochs = rng.randint(2, 9)
    words = rng.choice([[f"--epochs={epochs}"], ["--epochs", str(epochs)]])
    passed = [f"--local-rank={local_rank}"]
    alone: Launched = {"rank": 0, "local_rank": 0, "world_size": 1}, {}
    cases = [
        (TOLD, inner, words),
        (TOLD, _launched(before, 0, size, here, 2), words),
        (TOLD, _launched(0, 0, size, here, 0), words),
        (OLD, inner, passed + words),
        (OLD, inner, words + passed),
        (OLD, inner, [f"--local_rank={local_rank}", *words]),
        (ALONE, alone, words),
        (ALONE, alone, []),
    ]
    (results,) = ask(_parsed, [(environment, argv) for _, (_, environment), argv in cases], here)
    for (what, (right, _), argv), got in zip(cases, results, strict=True):
        if isinstance(got, str):
            hint = next(hint for words, hint in IN_VAIN.items() if words in got)
            hint = hint if argv or hint != UNKNOWN else LACKING
            yield Finding(what, False, f"with the arguments {' '.join(argv) or '(none)'} {got}", hint)
        else:
            yield _known(what, got, right | {"epochs": epochs if argv else 1})


def _launched(rank: int, local_rank: int, size: int, here: int, node: int) -> Launched:
    right = {"rank": rank, "local_rank": local_rank, "world_size": size}
    more = {"local_world_size": here, "group_rank": node, "group_world_size": 4}
    environment = {name.upper(): str(value) for name, value in (right | more).items()}
    environment |= {"ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "none"}
    return right, environment | {"MASTER_ADDR": "node-0", "MASTER_PORT": "29400"}


def _known(what: str, got: dict[str, Any], right: dict[str, int]) -> Finding:
    wrong = [name for name in right if got[name] != right[name]]
    if not wrong:
        return Finding(what, True)
    hint = "Which of torchrun's environment variables says this? (Nodes may have different numbers of ranks.)"
    if any(got[name] == str(right[name]) for name in wrong):
        hint = "The environment holds text. Numbers are asked for."
    elif "nothing" in got.values():
        hint = "It is not among the attributes of what was returned."
    elif wrong == ["epochs"]:
        hint = "The script's own argument has to be kept."
    elif what == ALONE:
        hint = "Nobody set the variables here. What is true of a process that is alone?"
    elif "local_rank" in wrong and got["local_rank"] == right["rank"]:
        hint = "That is its number among all processes of all nodes, not among those of its own."
    seen = f"args.{wrong[0]} is {got[wrong[0]]!r}, and should be {right[wrong[0]]!r}"
    return Finding(what, False, seen, hint)


@reports(lambda cases, _: [(dict.fromkeys(NAMES, (int, bool, str)), str)] * len(cases))
def _parsed(answer: Any, cases: list[tuple[dict[str, str], list[str]]], gpus: int) -> list[Any]:
    results: list[dict[str, Any] | str] = []
    same: dict[str, list[str]] = {}
    for environment, words in cases:
        argv = same.setdefault(" ".join(words), words)  # the same list object, in another environment
        for name in list(os.environ):
            if name.endswith(OF_LAUNCHERS) or name.startswith("TORCHELASTIC"):
                del os.environ[name]
        try:
            with machine(gpus, environment):
                args = answer(argv)
        except (Exception, SystemExit) as error:
            results.append(f"it raised {reason(error)}")
            continue
        values = {name: getattr(args, name, "nothing") for name in NAMES}
        values = {name: v if isinstance(v, int | str) else told(v) for name, v in values.items()}
        results.append("it returned None" if args is None else values)
    return results


# --- 08.2 -------------------------------------------------------------------------------------------------

TAKES = "on the CPU it gives a DistributedDataParallel"
MEAN = "whose gradients are the mean over all ranks"
ON_GPU = "on a GPU, device_ids names that GPU"


@question("08.2", "wrap(model, device)", {TAKES: 1, MEAN: 1, ON_GPU: 1})
@with_two_world_sizes()
def wrap(ask: Ask, rng: random.Random, ranks: int) -> Iterator[Finding]:
    kind, *values = seeds(rng, 1 + ranks)
    gpus = rng.sample([0, rng.randint(1, 7)], 2)
    results = ask(_wrapped, kind, values, gpus, nprocs=ranks)
    wrong = [result["kind"] for result in results if result["kind"]]
    hint = "The training loop calls what you return, and that has to average the gradients."
    if any("raised" in kind for kind in wrong):
        hint = "Read the last line of the error for a CPU model, in the lesson: what must device_ids be?"
    yield Finding(TAKES, not wrong, f"on the CPU: {(wrong or [''])[0]}", hint)
    own = [_gradient(kind, values, rank) for rank in range(ranks)]
    mean = [sum(gradients) / ranks for gradients in zip(*own, strict=True)]
    off = max(far(result["gradient"], mean) for result in results)
    lacking = any(result["gradient"] is None for result in results)
    seen = "there were no gradients" if lacking else f"a gradient is off from the mean by {off:.3g}"
    trouble = [result["trouble"] for result in results if result["trouble"]]
    hint = "First it has to be a DDP that can be called; then look at this again."
    if trouble:
        seen, hint = f"a step with it {trouble[0]}", "It takes the same inputs as the model."
    elif not wrong:
        hint = "Is it the given model that you wrap, unchanged?"
    yield Finding(MEAN, off < CLOSE, f"{ranks} ranks: {seen}", hint)
    for result in results:
        yield from map(_of_a_gpu, gpus, result["asked"])


def _of_a_gpu(gpu: int, asked: dict[str, Any]) -> Finding:
    trouble, ids, output = asked["trouble"], asked["device_ids"], asked["output_device"]
    seen = f"for cuda:{gpu} {trouble or f'DDP was given device_ids={ids}, output_device={output}'}"
    hint = "One process, one GPU: the one in `device`."
    if trouble:
        hint = "Here the device is a GPU (the check itself needs none). DDP must be called all the same."
    elif ids is None:
        hint = (
            "None is for the CPU. On a GPU DDP has to be told which one is this rank's. (GPU 0 is one, too.)"
        )
    elif ids == [0]:
        hint = "All ranks of the node would use the same GPU. Which one is this rank's own?"
    return Finding(ON_GPU, ids == [gpu] and output in (None, gpu), seen, hint)


def _gradient(kind: int, values: list[int], rank: int) -> list[float]:
    """Return one rank's gradient, with the weights of rank 0, which DDP gives to all."""
    model = network(kind, values[0])
    _loss(model, values[rank]).backward()
    return _gradients(model)


def _loss(model: Callable[[torch.Tensor], torch.Tensor], seed: int) -> torch.Tensor:
    return model(tensor(seed, (5, 4))).square().sum()


def _gradients(model: nn.Module) -> list[float]:
    trained: list[Any] = trainable(model)
    return flat(parameter.grad for parameter in trained).tolist()


INDEX = (int, str, None)
ASKED: Result = {"trouble": str, "device_ids": ([INDEX, ...], None), "output_device": INDEX}


@reports(
    lambda kind, values, gpus: (
        {"kind": str, "trouble": str, "gradient": ([NUMBER, ...], None)} | {"asked": [ASKED] * len(gpus)}
    )
)
@in_group
def _wrapped(answer: Any, kind: int, values: list[int], gpus: list[int]) -> Result:
    seed = values[dist.get_rank()]
    model = network(kind, seed)
    result: Result = {"kind": "", "trouble": "", "gradient": None}
    try:
        with machine(gpus=8):  # the machine has GPUs, but this model is on the CPU
            ddp = answer(model, torch.device("cpu"))
        if not isinstance(ddp, DistributedDataParallel):
            result["kind"] = told(None) if ddp is None else type(ddp).__name__
    except Exception as error:
        ddp, result["kind"] = None, f"it raised {reason(error)}"
    if callable(ddp):
        try:
            _loss(ddp, seed).backward()
            result["gradient"] = _gradients(model)
        except Exception as error:
            result["trouble"] = f"raised {reason(error)}"
        if all(parameter.grad is None for parameter in model.parameters()):
            result["trouble"] = ""  # another model was trained
    return result | {"asked": [_on_gpu(answer, kind, gpu) for gpu in gpus]}


def _on_gpu(answer: Any, kind: int, gpu: int) -> Result:
    """Return how an answer would call DDP on a GPU, without using one."""
    asked: Result = {"trouble": "DistributedDataParallel was not called"}
    asked |= {"device_ids": None, "output_device": None}
    device = torch.device("cuda", gpu)
    current: list[int | str | None] = [0]

    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *_: Any, **__: Any
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        ids = None if device_ids is None else [_index(device) for device in device_ids]
        asked.update(trouble="", device_ids=ids, output_device=_index(output_device))

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    model, fake = network(kind, 0), FakeTensorMode()
    for layer in model.modules():  # the weights claim to be on the GPU
        for name, parameter in list(layer.named_parameters(recurse=False)):
            there = FakeTensor(fake, torch.empty(parameter.shape, device="meta"), device)
            setattr(layer, name, nn.Parameter(there, parameter.requires_grad))
    elsewhere = 3 if gpu != 3 else 5  # a local rank need not be the index of its GPU
    with (
        machine(8, {"LOCAL_RANK": str(elsewhere), "RANK": str(gpu + 8)}),
        mock.patch.object(DistributedDataParallel, "__init__", init),
        mock.patch.multiple(nn.Module, to=same, cuda=same),
        mock.patch.object(torch.cuda, "set_device", side_effect=lambda gpu: current.append(_index(gpu))),
        mock.patch.object(torch.cuda, "current_device", side_effect=lambda: current[-1]),
    ):
        try:
            answer(model, device)
        except Exception as error:
            asked["trouble"] = f"it raised {reason(error)}"
    return asked


def _index(device: Any) -> int | str | None:
    """Return the index of a GPU, however it is given."""
    if device is None or isinstance(device, int):
        return device
    try:
        index = torch.device(device).index
    except (TypeError, RuntimeError, ValueError):
        index = None
    return told(device) if index is None else index


# --- 08.3 -------------------------------------------------------------------------------------------------

GOES_ON = "a second start resumes after the last completed epoch"
SAME = "and ends with the weights of an uninterrupted run"
ONE = "rank 0 alone writes"
WHOLE = "a kill in the middle of a write leaves a checkpoint to resume from"
UNLIKE = "The second start began with other weights or buffers than the first one had when it last saved."
LEFT_OVER = "A partial file that a kill left behind is still there. May the next start overwrite it?"
AT_ONCE = "A kill may come between two steps of a save. What must change in a single step, with what in it?"


@question(
    "08.3",
    "train(model, optimizer, run_epoch, epochs, path)",
    {GOES_ON: 1, SAME: 1, ONE: 1, WHOLE: 1},
    rests={SAME: GOES_ON, WHOLE: GOES_ON},
)
def train(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    kind, data, *values = seeds(rng, 5)
    epochs = rng.randint(5, 7)
    killed = rng.randint(3, epochs - 2)
    broken = rng.choice([epoch for epoch in range(1, epochs - 1) if epoch != killed])
    plan = {"kind": kind, "data": data, "values": values, "epochs": epochs}
    with ask.folder() as place, ask.folder() as moments:
        plan |= {"path": f"{place}/checkpoint.pt", "other": f"{place}/another.pt"}
        plan |= {"neighbour": f"{place}/notes.txt", "moments": str(moments)}
        ranks = rng.randint(2, 4)
        first = ask(killed_often, plan, killed, broken, killed - 2, nprocs=ranks)
        if all(epochs_of(result["first"]) == [] and result["end"] == "done" for result in first):
            raise Refused("train never called run_epoch(epoch)")
        second = ask(started_again, plan, nprocs=ranks)
    stays = all(result["stays"] for result in second)
    goes_on = _goes_on(first, second, killed, epochs)
    yield goes_on
    right = undisturbed(plan)
    begun = [note for result in first for note in result["first"] if note["epoch"] in range(epochs)]
    off = max(far(note["state"], right[note["epoch"]]) for note in begun) if begun else math.inf
    off = max(off, *(far(result["second"][-1]["state"], right[-1]) for result in second))
    hint = "The weights are restored. What else remembers the earlier steps? (Think of momentum.)"
    if goes_on.ok and far(second[0]["second"][0]["state"], first[0]["first"][-1]["state"]) > CLOSE:
        hint = UNLIKE
    if len({str(result["second"][-1]["state"]) for result in second}) > 1:
        hint = "The ranks have different weights. Does each of them restore everything that it had?"
    yield Finding(SAME, off < CLOSE, f"a weight is off by {off:.3g}", hint)
    last_notes = [_last_notes(*results) for results in zip(first, second, strict=True)]
    wrote = [sum(note["wrote"] for note in notes) for notes in last_notes]
    hint = "Call torch.save after each epoch, on one of the ranks."
    if wrote[0]:
        hint = "All ranks hold the same weights. How many of them need to write the file?"
    one = wrote[0] > 0 and not any(wrote[1:])
    yield Finding(ONE, one, f"files that were opened for writing, by rank: {wrote}", hint)
    yield _of_a_broken_write(first[0], broken, stays)


def _last_notes(first: Result, second: Result) -> Notes:
    """Return the last note of each start, which counts everything written until then."""
    return [notes[-1] for notes in (first["first"], first["other"], second["second"]) if notes]


def _goes_on(first: Notes, second: Notes, killed: int, epochs: int) -> Finding:
    begun, again = [epochs_of(result["first"]) for result in first], epochs_of(second[0]["second"])
    done = begun[first_wrong(epochs == list(range(killed + 1)) for epochs in begun)]
    in_order = done == list(range(killed + 1))
    ok = in_order and all(epochs_of(result["second"]) == list(range(killed, epochs)) for result in second)
    seen = f"killed in epoch {killed}; the second start ran the epochs {again}"
    hints = {
        0: "It started over. What should a start look for before its first epoch?",
        killed - 1: "The last completed epoch is run again. Which one comes after it?",
        killed + 1: "The epoch in which it was killed was never completed, and now it is skipped.",
    }
    stale = _stale(first[0]["first"], second[0]["second"])
    if not in_order:
        seen = f"the first start ran the epochs {done}; {first[0]['end']}"
        hint = "The first start must run the epochs 0, 1, 2, … in order."
    elif stale:
        ok = False
        seen = f"when the epoch after epoch {stale[0]} began, the checkpoint was still an older one"
        hint = "A kill there costs more than one epoch. How often must it be written, and when?"
    elif ok and (more := second[0]["third"]):
        ok, seen = False, f"all epochs were done; one more start: {more}"
        hint = "A run that is complete has nothing left to do."
    else:
        hint = hints.get(again[0] if again else NEVER, "Which number has to be in the checkpoint for this?")
    return Finding(GOES_ON, ok, seen, hint)


def _stale(first: Notes, second: Notes) -> list[int]:
    """Return the epochs after which the file had not changed; none if the first start left no file."""
    if all(note["file"] is None for note in first):
        return []
    pairs = [*itertools.pairwise(first), *itertools.pairwise(second)]
    return [one["epoch"] for one, other in pairs if one["file"] == other["file"]]


def _of_a_broken_write(first: Result, broken: int, stays: bool) -> Finding:
    again, end = first["again"], first["again's end"]
    seen = f"killed while it saved after epoch {broken}: the next start "
    seen += f"ran the epochs {epochs_of(again)}" if end == "done" else f"{end}"
    hint = "Half a file had the name of the whole one. When may a file get that name?"
    if "FileExistsError" in end:
        hint = LEFT_OVER
    files = [note["file"] for note in first["first"] if note["file"]]
    over = any(one[0] == other[0] for one, other in itertools.pairwise(files))
    ok = end == "done" and epochs_of(again)[:1] == [broken]
    if ok and over:
        seen = "the same file was overwritten after each epoch; a kill in between leaves half of it"
    elif ok and not stays:
        seen, hint = "a file beside it, notes.txt, is gone or has changed", "It was not yours."
    elif not epochs_of(first["other"]):
        ok, seen = False, f"another start {first['other end']}"
        hint = "When a run begins for the first time, is there a checkpoint to find?"
    elif ok and (trouble := _of_a_moment(first)):
        ok, seen, hint = False, trouble, LEFT_OVER if "FileExistsError" in trouble else AT_ONCE
    return Finding(WHOLE, ok and not over and stays, seen, hint)


def _of_a_moment(first: Result) -> str:
    """Describe the first moment of a save at which a kill costs more than that epoch; empty if none does."""
    states = {note["epoch"]: note["state"] for note in first["first"] if note["epoch"] is not None}
    if not states or not first["moments"]:
        return "no step of a save was seen"
    last = max(states) - 2  # the epoch with the save that was looked at

    def others(moment: dict[str, Any]) -> bool:
        known = [note for note in moment["notes"] if note["epoch"] in states]
        return any(far(note["state"], states[note["epoch"]]) > CLOSE for note in known)

    moments = first["moments"]
    lacks = others(moments[0])  # even a whole checkpoint lacks something: SAME says so
    for moment in moments:
        epochs = epochs_of(moment["notes"])
        seen = f"killed while it saved after epoch {last}, before this step: {moment['step']}. "
        seen += "The next start "
        if moment["end"] not in ("was killed", "done"):
            return seen + moment["end"]
        if epochs[:1] not in ([last], [last + 1]):
            return seen + (f"began with epoch {epochs[0]}" if epochs else "ran no epoch")
        if not lacks and others(moment):
            return (
                seen
                + f"began with epoch {epochs[0]}, but with weights or an optimizer's state of another one"
            )
    return ""
