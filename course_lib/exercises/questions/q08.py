"""The questions of lesson 08: a script of 2021, made one that any launcher starts and restarts."""

from __future__ import annotations

import io
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
RANKS = 3  # an answer that divides by 2 shall not pass
CLOSE = 1e-9  # the tensors are float64
NAMES = ("rank", "local_rank", "world_size")


def _said(error: BaseException) -> str:
    """What an answer raised, in one line."""
    if isinstance(error, SystemExit):
        return f"it ended the program (exit code {error.code})"
    return f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"


# --- 08.1 -------------------------------------------------------------------------------------------------

TOLD, OLD, ALONE = (
    "under torchrun it knows who it is",
    "an old launcher, which passes --local-rank, does not stop it",
    "started alone, it is rank 0 of 1",
)


@question("08.1", {TOLD: 1, OLD: 1, ALONE: 1})
def arguments(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "arguments(argv)")
    ranks_here, node = rng.randint(3, 6), rng.randint(1, 3)
    told = {"local_rank": rng.randint(1, ranks_here - 1), "world_size": ranks_here * 4}
    told["rank"] = node * ranks_here + told["local_rank"]
    environment = {name.upper(): str(value) for name, value in told.items()}
    environment |= {"LOCAL_WORLD_SIZE": str(ranks_here), "GROUP_RANK": str(node)}
    epochs = rng.randint(2, 9)
    alone = {"rank": 0, "local_rank": 0, "world_size": 1}
    words = [f"--epochs={epochs}"]
    cases = [
        (TOLD, environment, words, told),
        (OLD, environment, [f"--local-rank={told['local_rank']}", *words], told),
        (ALONE, {}, words, alone),
    ]
    (found,) = observe(_parsed, answer, [case[1:3] for case in cases])
    for (what, _, argv, right), got in zip(cases, found, strict=True):
        right = right | {"epochs": epochs}
        yield what, got == right, _who(argv, got, right), _of_arguments(what, got, right)


def _parsed(answer: Any, cases: list[tuple[dict[str, str], list[str]]]) -> list[dict[str, Any] | str]:
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    found: list[dict[str, Any] | str] = []
    for environment, argv in cases:
        for name in (*launchers, "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        try:
            args = answer(list(argv))
        except (Exception, SystemExit) as error:
            found.append(_said(error))
            continue
        if args is None:
            found.append("it returned None")
        else:
            values = {name: getattr(args, name, "nothing") for name in (*NAMES, "epochs")}
            found.append({k: v if isinstance(v, int | str) else repr(v)[:60] for k, v in values.items()})
    return found


def _who(argv: list[str], got: dict[str, Any] | str, right: dict[str, Any]) -> str:
    if isinstance(got, str):
        return f"with the arguments {' '.join(argv)} {got}"
    name = next((name for name in right if got[name] != right[name]), "rank")
    return f"args.{name} is {got[name]!r}, and should be {right[name]!r}"


def _of_arguments(what: str, got: dict[str, Any] | str, right: dict[str, Any]) -> str:
    if got == "it returned None":
        return "What parse_args gives has to come back, with three attributes more."
    if isinstance(got, str):
        if "exit code 2" in got:
            return "argparse ends a program that is given an argument it does not know. Hyphen or underscore?"
        if "KeyError" in got:
            return "A variable is not there where nobody launched the script. What shall hold then?"
        return "It has to return whatever the launcher is, or is not."
    wrong = [name for name in right if got[name] != right[name]]
    if any(got[name] == str(right[name]) for name in wrong):
        return "The environment holds text. What is asked for are numbers."
    if "nothing" in got.values():
        return "It is not among the attributes of what was returned."
    if wrong == ["epochs"]:
        return "The argument of the script itself has to survive."
    if what == ALONE:
        return "Nobody set the variables here. What is true of a process that is alone?"
    if "local_rank" in wrong and got["local_rank"] == right["rank"]:
        return "That is its number among all processes of all nodes, not among those of its own."
    return "Which of torchrun's environment variables says this?"


# --- 08.2 -------------------------------------------------------------------------------------------------

TAKES, MEAN, ON_GPU = (
    "on the CPU it gives a DistributedDataParallel",
    "whose gradients are the mean over all ranks",
    "on a GPU, device_ids names that GPU",
)


@question("08.2", {TAKES: 1, MEAN: 1, ON_GPU: 1})
def wrap(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "wrap(model, device)")
    seeds = [rng.randrange(2**31) for _ in range(RANKS)]
    number = rng.randint(1, 7)
    held = observe(_wrapped, answer, seeds, nprocs=RANKS)
    is_ddp = all(each["kind"] == "DistributedDataParallel" for each in held)
    hint = "Read the last line of the error of a CPU model, in the lesson: what must device_ids be?"
    if not any("raised" in each["kind"] for each in held):
        hint = "Whoever trains on calls what comes back, and it has to average."
    yield TAKES, is_ddp, f"on the CPU: {held[0]['kind']}", hint
    mean = torch.stack([_gradient(seed) for seed in seeds]).mean(0)
    far = [
        float("inf") if each["gradient"] is None else (each["gradient"] - mean).abs().max().item()
        for each in held
    ]
    own = sum(far) == float("inf")
    seen = "there were no gradients" if own else f"a gradient is {max(far):.3g} away from the mean"
    hint = "First it has to be a DDP that can be called; then look at this again."
    if is_ddp:
        hint = "Is it the given model that is wrapped, as it is?"
    yield MEAN, max(far) < CLOSE, seen, hint
    (asked,) = observe(_on_gpu, answer, number)
    ids, output = asked["device_ids"], asked["output_device"]
    seen = asked["trouble"] or f"for cuda:{number} DDP was given device_ids={ids}, output_device={output}"
    if asked["trouble"]:
        hint = "Here the device is a GPU (none is needed for this check). DDP is called all the same."
    elif ids is None:
        hint = "None is for the CPU. On a GPU DDP has to be told which one is this rank's."
    elif len(ids) == 1 and ids[0] == 0:
        hint = "All ranks of the node would name the same GPU. Which one is this rank's own?"
    else:
        hint = "One process, one GPU: the one that `device` is."
    yield ON_GPU, ids == [number] and output in (None, number), seen, hint


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def _gradient(seed: int) -> torch.Tensor:
    """Of the sum of outputs for one rank's samples."""
    return _samples(seed).sum(0).expand(3, 4)


def _samples(seed: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _wrapped(answer: Any, seeds: list[int]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    model = _network()
    kind, gradient = "", None
    try:
        ddp = answer(model, torch.device("cpu"))
        kind = type(ddp).__name__
        if callable(ddp):
            ddp(_samples(seeds[dist.get_rank()])).sum().backward()
            gradient = None if model.weight.grad is None else model.weight.grad.detach()
    except Exception as error:
        kind = kind or _said(error)
    if dist.is_initialized():
        dist.barrier()
    return {"kind": "nothing (None)" if kind == "NoneType" else kind, "gradient": gradient}


def _on_gpu(answer: Any, number: int) -> dict[str, Any]:
    """What an answer would ask of DDP on a GPU: nothing here touches one."""
    asked: list[dict[str, Any]] = []

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *_: Any, **__: Any):
        nn.Module.__init__(self)
        asked.append({"device_ids": device_ids, "output_device": output_device})

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    trouble = ""
    with (
        mock.patch.object(DistributedDataParallel, "__init__", init),
        mock.patch.object(nn.Module, "to", same),
        mock.patch.object(nn.Module, "cuda", same),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(number), "RANK": str(number + 8)}),
    ):
        try:
            answer(_network(), torch.device("cuda", number))
        except Exception as error:
            trouble = f"for cuda:{number} {_said(error)}"
    if not asked and not trouble:
        trouble = f"for cuda:{number} DistributedDataParallel was not called"
    last = asked[-1] if asked else {"device_ids": None, "output_device": None}
    ids = last["device_ids"]
    ids = ids if ids is None else [_index(each) for each in ids]
    output = last["output_device"]
    return {
        "trouble": trouble,
        "device_ids": ids,
        "output_device": None if output is None else _index(output),
    }


def _index(device: Any) -> int | str:
    """The number of a GPU, however it is named."""
    try:
        index = device if isinstance(device, int) else torch.device(device).index
    except (TypeError, RuntimeError, ValueError):
        return repr(device)[:60]
    return repr(device)[:60] if index is None else index


# --- 08.3 -------------------------------------------------------------------------------------------------

GOES_ON, SAME, ONE, WHOLE = (
    "a second start goes on after the last epoch that was completed",
    "and ends with the weights of a training that nobody disturbed",
    "rank 0 alone writes",
    "a kill in the midst of writing leaves a checkpoint to go on from",
)
EPOCHS = 5


@question("08.3", {GOES_ON: 1, SAME: 1, ONE: 1, WHOLE: 1})
def train(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "train(model, optimizer, run_epoch, epochs, path)")
    seed, killed = rng.randrange(2**31), rng.randint(2, EPOCHS - 2)
    folder = Path(tempfile.mkdtemp(prefix="course-"))
    try:
        path = str(folder / "checkpoint.pt")
        first = observe(_trained, answer, seed, path, killed, nprocs=RANKS)
        if all(each["epochs"] == [] for each in first):
            raise Refused("train never called run_epoch(epoch)")
        second = observe(_trained, answer, seed, path, None, nprocs=RANKS)
        epochs, right = second[0]["epochs"], list(range(killed, EPOCHS))
        seen = f"killed in epoch {killed}; the second start ran the epochs {epochs}"
        goes_on = first[0]["epochs"] == list(range(killed + 1)) and all(
            each["epochs"] == right for each in second
        )
        yield GOES_ON, goes_on, seen, _of_start(first[0]["epochs"], epochs, killed)
        undisturbed = _undisturbed(seed)
        far = max((each["weights"] - undisturbed).abs().max().item() for each in second)
        hint = "The weights have come back. What else remembers the steps before? (It has a momentum.)"
        if not goes_on:
            hint = "First the right epochs; then look at this again."
        elif (second[0]["begun"] - first[0]["last"]).abs().max().item() > CLOSE:
            hint = "The second start began with other weights than the first one had when it last saved."
        seen = f"a weight is {far:.3g} away" if far == far else "a weight is not a number"
        yield SAME, goes_on and far < CLOSE, seen, hint
        saves = [a["saves"] + b["saves"] for a, b in zip(first, second, strict=True)]
        hint = "All ranks hold the same weights. How many copies of them are needed in one file?"
        if not saves[0]:
            hint = "After each epoch, torch.save on one of the ranks."
        yield ONE, saves[0] > 0 and not any(saves[1:]), f"calls of torch.save by rank: {saves}", hint
        path = str(folder / "another.pt")
        observe(_trained, answer, seed, path, None, killed)
        (again,) = observe(_trained, answer, seed, path, None, None, True)
        seen = again["trouble"] or f"the next start ran the epochs {again['epochs']}"
        hint = "Half a file stood under the name of the whole one. When may it get that name?"
        if not goes_on:
            hint = "First it has to go on at all."
        whole = not again["trouble"] and goes_on and again["epochs"][:1] == [killed - 1]
        yield WHOLE, whole, f"killed while it saved after epoch {killed - 1}: {seen}", hint
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _of_start(first: list[int], epochs: list[int], killed: int) -> str:
    if first != list(range(killed + 1)):
        return "The first start shall run the epochs 0, 1, 2, … in order."
    if epochs[:1] == [0]:
        return "It began anew. What does a start look for, before its first epoch?"
    if epochs[:1] == [killed - 1]:
        return "The last epoch that was done is done again. Which one comes after it?"
    if epochs[:1] == [killed + 1]:
        return "The epoch in which it was killed was never completed, and now it is left out."
    return "Which number has to be in the checkpoint for this?"


class _Killed(BaseException):
    """What no answer catches by mistake."""


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, epoch: int) -> None:
    generator = torch.Generator().manual_seed(seed + epoch)
    for _ in range(3):
        x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def _weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _undisturbed(seed: int) -> torch.Tensor:
    with torch.random.fork_rng():
        model, optimizer = _model(seed)
    for epoch in range(EPOCHS):
        _epoch(model, optimizer, seed, epoch)
    return _weights(model)


def _trained(
    answer: Any,
    seed: int,
    path: str,
    kill_in: int | None,
    kill_at_save: int | None = None,
    careful: bool = False,
) -> dict[str, Any]:
    """One start of the training: killed in an epoch, while it saves for the n-th time, or not at all."""
    dist.init_process_group("gloo")
    model, optimizer = _model(seed)
    epochs: list[int] = []
    seen = {"begun": _weights(model), "last": _weights(model)}
    saves = 0
    real_save: Callable[..., None] = torch.save

    def run_epoch(epoch: int) -> None:
        dist.barrier()  # as DDP would: no rank is done with an epoch before all have begun it
        if not epochs:
            seen["begun"] = _weights(model)
        seen["last"] = _weights(model)
        epochs.append(int(epoch))
        if epoch == kill_in:
            raise _Killed
        _epoch(model, optimizer, seed, int(epoch))

    def save(thing: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal saves
        saves += 1
        if saves != kill_at_save:
            real_save(thing, file, *args, **kwargs)
            return
        buffer = io.BytesIO()
        real_save(thing, buffer)
        half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
        if hasattr(file, "write"):
            file.write(half)
            file.flush()
        else:
            Path(file).write_bytes(half)
        raise _Killed

    trouble = ""
    with mock.patch.object(torch, "save", save):
        try:
            answer(model, optimizer, run_epoch, EPOCHS, path)
        except _Killed:
            pass
        except Exception as error:
            if not careful:
                raise
            trouble = _said(error)
    if dist.is_initialized():
        dist.barrier()
    return {"epochs": epochs, "weights": _weights(model), "saves": saves, "trouble": trouble, **seen}
