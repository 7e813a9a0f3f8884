"""The questions of lesson 08: a script from 2021, made one that any launcher starts and restarts."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..asking import Ask, Finding, Refused, far, in_group, question, reason, told

RANKS = 3  # an answer that divides by 2 must not pass
CLOSE = 1e-9  # the tensors are float64

# --- 08.1 -------------------------------------------------------------------------------------------------

TOLD = "under torchrun it knows who it is"
OLD = "an old launcher, which passes --local-rank, does not stop it"
ALONE = "started alone, it is rank 0 of 1"
NAMES = ("rank", "local_rank", "world_size", "epochs")
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # and LOCAL_RANK, and what else ends so
UNKNOWN = "argparse ends a program that is given an argument it does not know. Hyphen or underscore?"
IN_VAIN = {
    "it returned None": "What parse_args gives has to come back, with three attributes more.",
    "SystemExit: 2": UNKNOWN,
    "KeyError": "A variable is not there where nobody launched the script. What must hold then?",
    "": "It has to return whatever the launcher is, or is not.",
}


@question("08.1", "arguments(argv)", {TOLD: 1, OLD: 1, ALONE: 1})
def arguments(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    ranks_here, node = rng.randint(3, 6), rng.randint(1, 3)
    launched = {"local_rank": rng.randint(1, ranks_here - 1), "world_size": ranks_here * 4}
    launched["rank"] = node * ranks_here + launched["local_rank"]
    environment = {name.upper(): str(value) for name, value in launched.items()}
    environment |= {"LOCAL_WORLD_SIZE": str(ranks_here), "GROUP_RANK": str(node)}
    epochs = rng.randint(2, 9)
    words = [f"--epochs={epochs}"]
    cases = [
        (TOLD, launched, environment, words),
        (OLD, launched, environment, [f"--local-rank={launched['local_rank']}", *words]),
        (ALONE, {"rank": 0, "local_rank": 0, "world_size": 1}, {}, words),
    ]
    (found,) = ask(_parsed, [case[2:] for case in cases])
    for (what, right, _, argv), got in zip(cases, found, strict=True):
        if isinstance(got, str):
            hint = next(hint for words, hint in IN_VAIN.items() if words in got)
            yield Finding(what, False, f"with the arguments {' '.join(argv)} {got}", hint)
        else:
            yield _known(what, got, right | {"epochs": epochs})


def _known(what: str, got: dict[str, Any], right: dict[str, int]) -> Finding:
    wrong = [name for name in right if got[name] != right[name]]
    if not wrong:
        return Finding(what, True)
    if any(got[name] == str(right[name]) for name in wrong):
        hint = "The environment holds text. What is asked for are numbers."
    elif "nothing" in got.values():
        hint = "It is not among the attributes of what was returned."
    elif wrong == ["epochs"]:
        hint = "The argument of the script itself has to survive."
    elif what == ALONE:
        hint = "Nobody set the variables here. What is true of a process that is alone?"
    elif "local_rank" in wrong and got["local_rank"] == right["rank"]:
        hint = "That is its number among all processes of all nodes, not among those of its own."
    else:
        hint = "Which of torchrun's environment variables says this?"
    seen = f"args.{wrong[0]} is {got[wrong[0]]!r}, and should be {right[wrong[0]]!r}"
    return Finding(what, False, seen, hint)


def _parsed(answer: Any, cases: list[tuple[dict[str, str], list[str]]]) -> list[dict[str, Any] | str]:
    found: list[dict[str, Any] | str] = []
    for environment, argv in cases:
        for name in [each for each in os.environ if each.endswith(OF_LAUNCHERS)]:
            del os.environ[name]
        os.environ.update(environment)
        try:
            args = answer(argv)
        except (Exception, SystemExit) as error:
            found.append(f"it raised {reason(error)}")
            continue
        values = {name: getattr(args, name, "nothing") for name in NAMES}
        values = {name: each if isinstance(each, int | str) else told(each) for name, each in values.items()}
        found.append("it returned None" if args is None else values)
    return found


# --- 08.2 -------------------------------------------------------------------------------------------------

TAKES = "on the CPU it gives a DistributedDataParallel"
MEAN = "whose gradients are the mean over all ranks"
ON_GPU = "on a GPU, device_ids names that GPU"


@question("08.2", "wrap(model, device)", {TAKES: 1, MEAN: 1, ON_GPU: 1})
def wrap(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds, gpu = [rng.randrange(2**31) for _ in range(RANKS)], rng.randint(1, 7)
    held = ask(_wrapped, seeds, nprocs=RANKS)
    is_ddp = all(each["kind"] == "DistributedDataParallel" for each in held)
    if any("raised" in each["kind"] for each in held):
        hint = "Read the last line of the error of a CPU model, in the lesson: what must device_ids be?"
    else:
        hint = "Whoever trains on calls what comes back, and it has to average."
    yield Finding(TAKES, is_ddp, f"on the CPU: {held[0]['kind']}", hint)
    mean = torch.stack([_samples(seed).sum(0).expand(3, 4) for seed in seeds]).mean(0)
    off = max(far(each["gradient"], mean) for each in held)
    lacking = any(each["gradient"] is None for each in held)
    seen = "there were no gradients" if lacking else f"a gradient is {off:.3g} away from the mean"
    if is_ddp:
        hint = "Is it the given model that is wrapped, as it is?"
    else:
        hint = "First it has to be a DDP that can be called; then look at this again."
    yield Finding(MEAN, off < CLOSE, seen, hint)
    (asked,) = ask(_on_gpu, gpu)
    trouble, ids, output = asked["trouble"], asked["device_ids"], asked["output_device"]
    seen = f"for cuda:{gpu} {trouble or f'DDP was given device_ids={ids}, output_device={output}'}"
    if trouble:
        hint = "Here the device is a GPU (none is needed for this check). DDP is called all the same."
    elif ids is None:
        hint = "None is for the CPU. On a GPU DDP has to be told which one is this rank's."
    elif ids == [0]:
        hint = "All ranks of the node would name the same GPU. Which one is this rank's own?"
    else:
        hint = "One process, one GPU: the one that `device` is."
    yield Finding(ON_GPU, ids == [gpu] and output in (None, gpu), seen, hint)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def _samples(seed: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@in_group
def _wrapped(answer: Any, seeds: list[int]) -> dict[str, Any]:
    model, kind = _network(), ""
    try:
        ddp = answer(model, torch.device("cpu"))
        kind = told(None) if ddp is None else type(ddp).__name__
        if callable(ddp):
            ddp(_samples(seeds[dist.get_rank()])).sum().backward()
    except Exception as error:
        kind = kind or f"it raised {reason(error)}"
    return {"kind": kind, "gradient": model.weight.grad}


def _on_gpu(answer: Any, gpu: int) -> dict[str, Any]:
    """What an answer would ask of DDP on a GPU: nothing here touches one."""
    asked = {"trouble": "DistributedDataParallel was not called", "device_ids": None, "output_device": None}

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *_: Any, **__: Any):
        nn.Module.__init__(self)
        ids = None if device_ids is None else [_index(each) for each in device_ids]
        asked.update(trouble="", device_ids=ids, output_device=_index(output_device))

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    with (
        mock.patch.object(DistributedDataParallel, "__init__", init),
        mock.patch.multiple(nn.Module, to=same, cuda=same),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(gpu), "RANK": str(gpu + 8)}),
    ):
        try:
            answer(_network(), torch.device("cuda", gpu))
        except Exception as error:
            asked["trouble"] = f"it raised {reason(error)}"
    return asked


def _index(device: Any) -> int | str | None:
    """The number of a GPU, however it is named."""
    if device is None or isinstance(device, int):
        return device
    try:
        index = torch.device(device).index
    except (TypeError, RuntimeError, ValueError):
        index = None
    return told(device) if index is None else index


# --- 08.3 -------------------------------------------------------------------------------------------------

GOES_ON = "a second start goes on after the last epoch that was completed"
SAME = "and ends with the weights of a training that nobody disturbed"
ONE = "rank 0 alone writes"
WHOLE = "a kill in the midst of writing leaves a checkpoint to go on from"
EPOCHS, NEVER = 5, -1


@question(
    "08.3",
    "train(model, optimizer, run_epoch, epochs, path)",
    {GOES_ON: 1, SAME: 1, ONE: 1, WHOLE: 1},
    rests={SAME: GOES_ON, WHOLE: GOES_ON},
)
def train(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed, killed = rng.randrange(2**31), rng.randint(2, EPOCHS - 2)
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as folder:
        path = f"{folder}/checkpoint.pt"
        first = ask(_trained, seed, path, killed, nprocs=RANKS)
        if all(each["epochs"] == [] for each in first):
            raise Refused("train never called run_epoch(epoch)")
        second = ask(_trained, seed, path, nprocs=RANKS)
        goes_on = _goes_on(first, second, killed)
        yield goes_on
        undisturbed = _undisturbed(seed)
        off = max(far(each["weights"], undisturbed) for each in second)
        hint = "The weights have come back. What else remembers the steps before? (It has a momentum.)"
        if goes_on.ok and far(second[0]["before"][0], first[0]["before"][-1]) > CLOSE:
            hint = "The second start began with other weights than the first one had when it last saved."
        yield Finding(SAME, off < CLOSE, f"a weight is {off:.3g} away", hint)
        saves = [a["saves"] + b["saves"] for a, b in zip(first, second, strict=True)]
        if saves[0]:
            hint = "All ranks hold the same weights. How many copies of them are needed in one file?"
        else:
            hint = "After each epoch, torch.save on one of the ranks."
        one = saves[0] > 0 and not any(saves[1:])
        yield Finding(ONE, one, f"calls of torch.save by rank: {saves}", hint)
        path = f"{folder}/another.pt"
        ask(_trained, seed, path, NEVER, killed)
        (again,) = ask(_started_again, seed, path)
        seen = f"killed while it saved after epoch {killed - 1}: the next start "
        seen += again if isinstance(again, str) else f"ran the epochs {again}"
        hint = "Half a file stood under the name of the whole one. When may it get that name?"
        yield Finding(WHOLE, again[:1] == [killed - 1], seen, hint)


def _goes_on(first: list[dict[str, Any]], second: list[dict[str, Any]], killed: int) -> Finding:
    done, epochs = first[0]["epochs"], second[0]["epochs"]
    in_order = done == list(range(killed + 1))
    ok = in_order and all(each["epochs"] == list(range(killed, EPOCHS)) for each in second)
    seen = f"killed in epoch {killed}; the second start ran the epochs {epochs}"
    hints = {
        0: "It began anew. What does a start look for, before its first epoch?",
        killed - 1: "The last epoch that was done is done again. Which one comes after it?",
        killed + 1: "The epoch in which it was killed was never completed, and now it is left out.",
    }
    if not in_order:
        hint = "The first start must run the epochs 0, 1, 2, … in order."
    else:
        hint = hints.get(epochs[0] if epochs else NEVER, "Which number has to be in the checkpoint for this?")
    return Finding(GOES_ON, ok, seen, hint)


class _Killed(BaseException):
    """What no answer catches by mistake."""


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.utils.skip_init(nn.Linear, 3, 2, dtype=torch.float64)  # also in the kernel: no seed of it
    generator = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        nn.init.normal_(each, generator=generator)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, epoch: int) -> None:
    generator = torch.Generator().manual_seed(seed + epoch)
    for _ in range(3):
        x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def _weights(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def _undisturbed(seed: int) -> list[float]:
    model, optimizer = _model(seed)
    for epoch in range(EPOCHS):
        _epoch(model, optimizer, seed, epoch)
    return _weights(model)


def _started_again(answer: Any, seed: int, path: str) -> list[int] | str:
    """The epochs of a start, or what it raised: it may find a broken checkpoint."""
    try:
        return _trained(answer, seed, path)["epochs"]
    except Exception as error:
        return f"raised {reason(error)}"


@in_group
def _trained(answer: Any, seed: int, path: str, kill_in: int = NEVER, kill_at: int = NEVER) -> dict[str, Any]:
    """One start of the training: killed in an epoch, while it saves for the n-th time, or not at all."""
    model, optimizer = _model(seed)
    epochs: list[int] = []
    before: list[list[float]] = []  # the weights at the beginning of each epoch
    saves, real_save = 0, torch.save

    def run_epoch(epoch: int) -> None:
        dist.barrier()  # as DDP would: no rank is done with an epoch before all have begun it
        before.append(_weights(model))
        epochs.append(int(epoch))
        if epoch == kill_in:
            raise _Killed
        _epoch(model, optimizer, seed, int(epoch))

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:  # named as torch.save names them
        nonlocal saves
        saves += 1
        if saves != kill_at:
            real_save(obj, f, *args, **kwargs)
            return
        real_save(obj, buffer := io.BytesIO())
        half = buffer.getvalue()[: buffer.getbuffer().nbytes // 2]
        if hasattr(f, "write"):
            f.write(half)
            f.flush()
        else:
            Path(f).write_bytes(half)
        raise _Killed

    with mock.patch.object(torch, "save", save), contextlib.suppress(_Killed):
        answer(model, optimizer, run_epoch, EPOCHS, path)
    return {"epochs": epochs, "before": before, "weights": _weights(model), "saves": saves}
