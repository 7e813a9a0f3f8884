"""The questions of lesson 10: names, a file that is whole, a load that takes what comes."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ..asking import Ask, Finding, Refused, in_group, number, question, reason, told

RANKS = 3
SLOW_SECONDS = 0.7  # that rank 0's disk takes
LIMIT = 100_000  # bytes that fit on the disk that is full

# --- 10.1 -------------------------------------------------------------------------------------------------

OUTER = "the prefix is gone from the front of each name"
INNER = "inside of a name nothing is changed"
PLAIN = "names of which only some begin with it stay as they are"
OF_NAMES = {
    OUTER: "A wrapper puts the same letters before every name. Which string method takes them off?",
    INNER: "Those letters may stand in the middle of a name, too. Take them from the front, and once.",
    PLAIN: "A wrapper marks every name. If one name lacks the mark, who has marked the others?",
}


@question("10.1", "without_prefix(weights)", {OUTER: 1, INNER: 1, PLAIN: 1})
def without_prefix(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    # all begin with a letter of "module": str.lstrip would take it off
    a, b, c = (f"{rng.choice(['dense', 'embed', 'outer', 'lower'])}{rng.randrange(100)}" for _ in range(3))
    names = {
        OUTER: [f"{a}.weight", f"{a}.bias", f"{b}.0.weight"],
        INNER: [f"submodule.{a}.weight", f"{b}.module.bias", f"module.{c}.weight"],
        PLAIN: [f"module.{a}.weight", f"{b}.weight", f"submodule.{c}.bias"],
    }
    wanted = {what: {name: rng.random() for name in mine} for what, mine in names.items()}
    given = {
        what: {f"{'' if what == PLAIN else 'module.'}{name}": value for name, value in mine.items()}
        for what, mine in wanted.items()
    }
    (kept,) = ask(_stripped, given)
    for what, right in wanted.items():
        after = kept[what]
        lost = [place for place, name in enumerate(right) if name not in after]
        if lost:
            now = list(after)[lost[0]] if len(after) == len(right) else "not there"
            seen = f"{list(given[what])[lost[0]]} became {now}"
        else:
            seen = "the tensors have changed places, or others came along"
        yield Finding(what, after == right, seen, OF_NAMES[what])


def _stripped(answer: Any, given: dict[str, dict[str, float]]) -> dict[str, dict[str, float | str]]:
    found = {}
    for what, names in given.items():
        after = answer({name: torch.tensor(value, dtype=torch.float64) for name, value in names.items()})
        if not isinstance(after, dict):
            raise Refused(f"without_prefix must return a dict from names to tensors, not {told(after)}")
        found[what] = {str(name): number(value) for name, value in after.items()}
    return found


# --- 10.2 -------------------------------------------------------------------------------------------------

ONE = "afterwards the file holds rank 0's state, and rank 0 alone has written"
WAITS = "no rank returns before the file is there"
FULL = "when the disk is full in the middle of a write, the file of before is whole"


@question("10.2", "save_once(state, path)", {ONE: 1, WAITS: 1, FULL: 1}, rests={WAITS: ONE, FULL: ONE})
def save_once(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    old, new = rng.randrange(1000), rng.randrange(1000, 2000)

    def shown(state: int | None) -> str:
        known = {old: "the state of before", new: "the new state", None: "nothing that can be loaded"}
        return known.get(state, "the state of another rank")

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint.pt"
        torch.save({"number": old}, path)
        ranks = ask(_saved, new, path, nprocs=RANKS)
        (last,) = ask(_left, path)
    writers = [rank for rank, each in enumerate(ranks) if each["wrote"]]
    if not writers:
        seen, hint = "nobody has saved anything", "torch.save writes. Who calls it?"
    elif writers != [0]:
        seen = f"the ranks that wrote: {', '.join(map(str, writers))}"
        hint = "All ranks hold the same weights, and there is one file. Who writes it?"
    else:
        seen = f"the file holds {shown(last)}"
        hint = "What is in the file under the name that was asked for, when all is done?"
    yield Finding(ONE, last == new and writers == [0], seen, hint)
    early = [rank for rank, each in enumerate(ranks) if each["found"] != new]
    seen = f"rank {early[0]} came back and found {shown(ranks[early[0]]['found'])}" if early else ""
    hint = "Which collective lets nobody go on before all have come? And where has it to stand?"
    yield Finding(WAITS, not early, seen, hint)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint.pt"
        torch.save({"number": old}, path)
        ask(_saved_on_a_full_disk, path)
        (left,) = ask(_left, path)
    hint = "To open a file for writing empties it. Is there another name to write to, and a way to swap?"
    yield Finding(FULL, left == old, f"it holds {shown(left)}", hint)


def _left(_: Any, path: str) -> int | None:
    """The number in a file, in a rank of its own: the kernel does not load what an answer has saved."""
    with contextlib.suppress(Exception):
        return int(torch.load(path, weights_only=True)["number"])
    return None


@in_group
def _saved(answer: Any, new: int, path: str) -> dict[str, Any]:
    rank, save, wrote = dist.get_rank(), torch.save, []

    def slow_save(*args: Any, **kwargs: Any) -> None:
        wrote.append(True)
        time.sleep(SLOW_SECONDS if rank == 0 else 0)
        save(*args, **kwargs)

    with mock.patch.object(torch, "save", slow_save):
        answer({"number": new + rank}, Path(path))
    return {"wrote": bool(wrote), "found": _left(answer, path)}


@in_group
def _saved_on_a_full_disk(answer: Any, path: str) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        with contextlib.suppress(Exception):  # that it fails is right
            answer({"number": -1, "weights": torch.zeros(LIMIT)}, Path(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- 10.3 -------------------------------------------------------------------------------------------------

BARE = "a state_dict alone is loaded"
TRAINING = "so is that in a training's checkpoint, with the prefix of DDP"
ELSEWHERE = "so is one that was saved on a GPU which is not here"
CODE = "a file that carries code is refused with an error, and nothing of it runs"
OF_LOADS = {
    BARE: "Here the file is the dict of weights itself. What does the model get?",
    TRAINING: "Here the weights are a part of a larger dict, and their names begin with module.",
    ELSEWHERE: "The tensors of this file remember a GPU. What tells the load where to put them instead?",
}
SHAPES = {"submodule.weight": (4, 3), "submodule.bias": (4,), "head.weight": (2, 4), "head.bias": (2,)}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.submodule = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)


class _Code:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@question("10.3", "load_any(path, model)", {BARE: 1, TRAINING: 1, ELSEWHERE: 1, CODE: 1})
def load_any(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seeds = {what: rng.randrange(2**31) for what in OF_LOADS}
    with tempfile.TemporaryDirectory() as folder:
        paths = {what: f"{folder}/{i}.pt" for i, what in enumerate((*seeds, CODE))}
        ask(_written, seeds, paths, f"{folder}/it ran")
        (loaded,) = ask(_loaded, paths)
        ran = Path(folder, "it ran").exists()
    for what, seed in seeds.items():
        right = {name: tensor.tolist() for name, tensor in _weights(seed).items()}
        state, error = loaded[what]["state"], loaded[what]["error"]
        seen = error or "the model has other weights than the file"
        yield Finding(what, state == right and not error, seen, OF_LOADS[what])
    if ran:
        seen = "the file made a folder when it was loaded"
        hint = "Which argument makes a load read only data?"
    else:
        seen = "no error was raised"
        hint = "Nobody must take an unloaded model for a loaded one: let it be heard."
    yield Finding(CODE, not ran and loaded[CODE]["error"] != "", seen, hint)


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _written(_: Any, seeds: dict[str, int], paths: dict[str, str], folder: str) -> None:
    """The files, in a rank of their own: it labels whatever it saves from then on."""
    torch.save(_weights(seeds[BARE]), paths[BARE])
    prefixed = {f"module.{name}": value for name, value in _weights(seeds[TRAINING]).items()}
    torch.save({"model": prefixed, "epoch": 3, "optimizer": {"lr": 0.1}}, paths[TRAINING])
    torch.save({"model": _weights(0), "best": _Code(folder)}, paths[CODE])
    torch.serialization.register_package(0, lambda storage: "cuda:63", lambda storage, label: None)
    torch.save({"model": _weights(seeds[ELSEWHERE])}, paths[ELSEWHERE])


def _loaded(answer: Any, paths: dict[str, str]) -> dict[str, Any]:
    found = {}
    for what, path in paths.items():
        model, error = _Net(), ""
        try:
            answer(Path(path), model)
        except Exception as raised:
            error = reason(raised)
        found[what] = {"state": model.state_dict(), "error": error}
    return found
