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

import torch
import torch.distributed as dist
from torch import nn

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
RANKS = 3
SLOW_SECONDS = 0.7  # that rank 0's disk takes
LIMIT = 100_000  # bytes that fit on the disk that is full


# --- 10.1 -------------------------------------------------------------------------------------------------

OUTER = "the prefix is gone from the front of each name"
INNER = "inside of a name nothing is changed"
PLAIN = "names of which only some begin with it stay as they are"


@question("10.1", {OUTER: 1, INNER: 1, PLAIN: 1})
def without_prefix(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "without_prefix(weights)")
    # all begin with a letter of "module": str.lstrip would take it off
    a, b, c = (f"{rng.choice(['dense', 'embed', 'outer', 'lower'])}{rng.randrange(100)}" for _ in range(3))
    cases = [
        (OUTER, [f"{a}.weight", f"{a}.bias", f"{b}.0.weight"], True),
        (INNER, [f"submodule.{a}.weight", f"{b}.module.bias", f"module.{c}.weight"], True),
        (PLAIN, [f"module.{a}.weight", f"{b}.weight", f"submodule.{c}.bias"], False),
    ]
    given = [
        {("module." if wrapped else "") + name: rng.random() for name in names} for _, names, wrapped in cases
    ]
    (kept,) = observe(_stripped, answer, given)
    if not kept:
        raise Refused("without_prefix shall return a dict from names to tensors")
    for (what, names, _), before, after in zip(cases, given, kept, strict=True):
        wanted = dict(zip(names, before.values(), strict=True))
        lost = next((name for name in wanted if name not in after), None)
        if lost is not None:
            was = list(before)[names.index(lost)]
            place = names.index(lost)
            now = list(after)[place] if len(after) == len(before) else "not there"
            seen = f"{was} became {now}"
        elif after != wanted:
            seen = "the tensors have changed places, or others came along"
        else:
            seen = ""
        if what == OUTER:
            hint = "A wrapper puts the same letters before every name. Which string method takes them off?"
        elif what == INNER:
            hint = "Those letters may stand in the middle of a name, too. Take them from the front, and once."
        else:
            hint = "A wrapper marks every name. If one name lacks the mark, who has marked the others?"
        yield what, after == wanted, seen, hint


def _stripped(answer: Any, given: list[dict[str, float]]) -> list[dict[str, float]]:
    """What came back of each; nothing where one of them is no dict."""
    found = []
    for names in given:
        after = answer({name: torch.tensor(value, dtype=torch.float64) for name, value in names.items()})
        if not isinstance(after, dict):
            return []
        found.append({str(name): float(value) for name, value in after.items()})
    return found


# --- 10.2 -------------------------------------------------------------------------------------------------

ONE = "afterwards the file holds rank 0's state, and rank 0 alone has written"
WAITS = "no rank returns before the file is there"
FULL = "when the disk is full in the middle of a write, the file of before is whole"


@question("10.2", {ONE: 1, WAITS: 1, FULL: 1})
def save_once(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "save_once(state, path)")
    old, new = rng.randrange(1000), rng.randrange(1000, 2000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save({"number": old}, path)
        ranks = observe(_saved, answer, new, str(path), nprocs=RANKS)
        last = _number(path)
    writers = [rank for rank, each in enumerate(ranks) if each["wrote"]]
    one = last == new and writers == [0]
    if not writers:
        seen, hint = "nobody has saved anything", "torch.save writes. Who calls it?"
    elif writers != [0]:
        seen = f"the ranks that wrote: {', '.join(map(str, writers))}"
        hint = "All ranks hold the same weights, and there is one file. Who writes it?"
    else:
        seen = f"the file holds {_told(last, old, new)}"
        hint = "What is in the file under the name that was asked for, when all is done?"
    yield ONE, one, seen, hint
    early = [rank for rank, each in enumerate(ranks) if each["found"] != new]
    seen = (
        f"rank {early[0]} came back and found {_told(ranks[early[0]]['found'], old, new)}" if early else seen
    )
    hint = "Which collective lets nobody go on before all have come? And where has it to stand?"
    yield WAITS, one and not early, seen, hint if one else "This rests on what is above; that comes first."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save({"number": old}, path)
        observe(_saved_on_a_full_disk, answer, str(path))
        left = _number(path)
    seen = f"it holds {_told(left, old, new)}"
    if not one:
        hint = "This rests on what is above; that comes first."
    else:
        hint = "To open a file for writing empties it. Is there another name to write to, and a way to swap?"
    yield FULL, one and left == old, seen, hint


def _told(number: int | None, old: int, new: int) -> str:
    if number is None:
        return "nothing that can be loaded"
    return {old: "the state of before", new: "the new state"}.get(number, "the state of another rank")


def _number(path: Path) -> int | None:
    with contextlib.suppress(Exception):
        return int(torch.load(path, weights_only=True)["number"])
    return None


def _saved(answer: Any, new: int, path: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, save, wrote = dist.get_rank(), torch.save, []

    def slow_save(*args: Any, **kwargs: Any) -> None:
        wrote.append(True)
        time.sleep(SLOW_SECONDS if rank == 0 else 0)
        save(*args, **kwargs)

    dist.barrier()
    torch.save = slow_save
    try:
        answer({"number": new + rank}, Path(path))
    finally:
        torch.save = save
    found = _number(Path(path))
    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another one is still at it
    return {"wrote": bool(wrote), "found": found}


def _saved_on_a_full_disk(answer: Any, path: str) -> bool:
    import resource

    dist.init_process_group("gloo")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        with contextlib.suppress(Exception):  # that it fails is right
            answer({"number": -1, "weights": torch.zeros(LIMIT)}, Path(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return True


# --- 10.3 -------------------------------------------------------------------------------------------------

BARE = "a state_dict alone is loaded"
TRAINING = "so is that in a training's checkpoint, with the prefix of DDP"
ELSEWHERE = "so is one that was saved on a GPU which is not here"
CODE = "a file that carries code is refused with an error, and nothing of it runs"


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


@question("10.3", {BARE: 1, TRAINING: 1, ELSEWHERE: 1, CODE: 1})
def load_any(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "load_any(path, model)")
    with tempfile.TemporaryDirectory() as folder:
        seeds = {what: rng.randrange(2**31) for what in (BARE, TRAINING, ELSEWHERE)}
        paths = {what: str(Path(folder, f"{i}.pt")) for i, what in enumerate((*seeds, CODE))}
        observe(_write_three, seeds, paths, str(Path(folder, "it ran")))
        (loaded,) = observe(_loaded, answer, paths)
        ran = Path(folder, "it ran").exists()
    hints = {
        BARE: "Here the file is the dict of weights itself. What does the model get?",
        TRAINING: "Here the weights are a part of a larger dict, and their names begin with module.",
        ELSEWHERE: "The tensors of this file remember a GPU. What tells the load where to put them instead?",
    }
    for what, hint in hints.items():
        state, error = loaded[what]
        right = {name: tensor.clone() for name, tensor in _model(seeds[what]).state_dict().items()}
        ok = state.keys() == right.keys() and all(torch.equal(state[name], right[name]) for name in right)
        seen = error or "the model has other weights than the file"
        yield what, ok, seen, hint
    if ran:
        seen, hint = (
            "the file made a folder when it was loaded",
            "Which argument makes a load read only data?",
        )
    else:
        seen, hint = (
            "no error was raised",
            "Nobody must take an unloaded model for a loaded one: let it be heard.",
        )
    yield CODE, not ran and bool(loaded[CODE][1]), seen, hint


def _model(seed: int) -> _Net:
    torch.manual_seed(seed)
    return _Net()


def _write_three(seeds: dict[str, int], paths: dict[str, str], folder: str) -> bool:
    torch.save(_model(seeds[BARE]).state_dict(), paths[BARE])
    prefixed = {f"module.{name}": value for name, value in _model(seeds[TRAINING]).state_dict().items()}
    torch.save({"model": prefixed, "epoch": 3, "optimizer": {"lr": 0.1}}, paths[TRAINING])
    torch.save({"model": _model(0).state_dict(), "best": _Code(folder)}, paths[CODE])
    # last: from here on, this process labels whatever it saves
    torch.serialization.register_package(0, lambda storage: "cuda:63", lambda storage, label: None)
    torch.save({"model": _model(seeds[ELSEWHERE]).state_dict()}, paths[ELSEWHERE])
    return True


def _loaded(answer: Any, paths: dict[str, str]) -> dict[str, Any]:
    found = {}
    for what, path in paths.items():
        model, error = _model(1), ""
        try:
            answer(Path(path), model)
        except Exception as reason:
            error = f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0]:.120}"
        found[what] = ({name: value.clone() for name, value in model.state_dict().items()}, error)
    return found
