"""The questions of lesson 10: parameter names, a file that is always whole, a load of any checkpoint."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..in_rank.file_audit import NAMES, audit_files
from ..in_rank.work import in_group, on_each_case
from ..inputs import network, seeds, tensor
from ..judging import Faults, first_fault
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, reason, told

SLOW_SECONDS = 0.4  # that rank 0's disk takes for each step
PATIENCE = 3.0  # timeout of a collective, in seconds, when the disk is full

# --- 10.1 -------------------------------------------------------------------------------------------------

OUTER = "the prefix is gone from the front of each name"
INNER = "nothing is changed inside a name"
PLAIN = "if only some names begin with it, all stay as they are"


@question(
    "10.1",
    "without_prefix(weights)",
    {OUTER: 1, INNER: 1, PLAIN: 1},
    hints={
        OUTER: {"not off": "A wrapper puts the same prefix before every name. Which method takes it off?"},
        INNER: {"inside": "The prefix may occur inside a name, too. Take it off the front only, and once."},
        PLAIN: {"some": "A wrapper adds its prefix to every name. If one lacks it, keep them all."},
    },
)
def without_prefix(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    # Each begins with a letter of "module", which str.lstrip would remove
    a, b, c = [f"{rng.choice(['dense', 'embed', 'outer', 'lower'])}{rng.randrange(100)}" for _ in range(3)]
    inside = [  # the right names, for each kind of model
        (OUTER, [f"{a}.weight", f"{a}.bias", f"{b}.0.weight"]),
        (INNER, [f"submodule.{a}.weight", f"{b}.module.bias", f"{c}module.bias"]),
        (INNER, [f"module.{a}.weight", f"module.{b}.bias"]),  # twice before each name
    ]
    plain = [
        [f"module.{a}.weight", f"{b}.weight", f"submodule.{c}.bias"],  # only the first has the prefix, …
        [f"{b}.weight", f"module.{a}.weight", f"module.{a}.bias"],  # all but the first
        [f"modules.{a}", f"module_{b}.bias", "module"],
    ]
    asked = [(what, {name: rng.random() for name in names}, "module.") for what, names in inside]
    asked += [(PLAIN, {name: rng.random() for name in names}, "") for names in plain]
    given = [{prefix + name: value for name, value in right.items()} for _, right, prefix in asked]
    (results,) = ask(_stripped, given)
    hints = {OUTER: "not off", INNER: "inside", PLAIN: "some"}
    for (what, right, _), before, after in zip(asked, given, results, strict=True):
        yield Finding(what, after == right, f"{list(before)} became {list(after)}", hints[what])


@reports(lambda given: [{str: (NUMBER, str)}] * len(given))
@on_each_case
def _stripped(answer: Any, names: dict[str, float]) -> dict[str, float | str]:
    after = answer({name: torch.tensor(value, dtype=torch.float64) for name, value in names.items()})
    if not isinstance(after, dict):
        raise Refused(f"without_prefix must return a dict from names to tensors, not {told(after)}")
    return {str(name): number(value) for name, value in after.items()}


# --- 10.2 -------------------------------------------------------------------------------------------------

ONE = "rank 0 alone writes its state, and no rank returns before the file is there"
FULL = "at each moment, the old file or the new one is there and whole"
HEARD = "if the disk is full, every rank raises an error, and none waits for a timeout"


@question(
    "10.2",
    "write(path, state)",
    {ONE: 2, FULL: 2, HEARD: 1},
    depends_on={FULL: ONE, HEARD: ONE},
    hints={
        ONE: {
            "writers": "There is one file, for one rank's state. Which rank writes it?",
            "name": "What is in the file under the name that was asked for, when all is done?",
            "early": "Which call lets no rank go on before all have reached it? And where does it belong?",
            "an error": "Read the error: what does your code assume about the disk that is not true?",
        },
        FULL: {"emptied": "Opening a file for writing empties it. Is there another name, and a way to swap?"},
        HEARD: {
            "others": "Rank 0 knows that it failed. How do the others learn of it, and what do they do then?",
            "late": "Rank 0 has left. Whatever goes wrong, what must it do before it leaves?",
        },
    },
)
def write(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    """Judge a save over an old file on a slow disk, and one onto a full disk."""
    old, new = rng.sample(range(0, 10_000, 10), 2)
    with ask.folder() as place:
        results = ask(_saved, old, new, f"{place}/checkpoint.pt", nprocs=rng.randint(2, 4))
    states = {old: "the old state", new: "the new state", None: "nothing that can be loaded"}
    held = [states.get(result["found"], "the state of another rank") for result in results]
    yield first_fault(ONE, _of_a_save(results, held))
    over, left = (next((result[name] for result in results if result[name]), "") for name in ("over", "left"))
    yield Finding(FULL, not (over or left), over or left, "emptied")
    yield first_fault(HEARD, _of_the_error(results))


def _of_a_save(ranks: list[Result], held: list[str]) -> Faults:
    for error in (result["error"] for result in ranks if result["error"]):
        yield f"nothing is wrong with the disk, but it raised {error}", "an error"
    writers = [rank for rank, result in enumerate(ranks) if result["wrote"]]
    if writers != [0]:
        yield f"the ranks that wrote: {', '.join(map(str, writers)) or 'none'}", "writers"
    early = [rank for rank, found in enumerate(held) if found != "the new state"]
    if early:
        hint = "name" if len(early) == len(ranks) else "early"
        yield f"rank {early[0]} returned and found {held[early[0]]}", hint


def _of_the_error(ranks: list[Result]) -> Faults:
    for rank, result in enumerate(ranks):
        if not result["heard"]:
            yield f"the disk is full, and rank {rank} returned as if all were well", "others"
        elif result["late"]:
            yield f"the disk is full, and rank {rank} waited until the timeout ({result['heard']})", "late"


def _number_in(path: Path) -> int | None:
    try:
        return int(torch.load(path, weights_only=True)["number"])
    except Exception:
        return None


TEXTS = ("error", "over", "heard", "left")


@reports(lambda *_: {"wrote": bool, "found": (int, None), "late": bool} | dict.fromkeys(TEXTS, str))
@in_group
def _saved(answer: Any, old: int, new: int, name: str) -> Result:
    rank, path = dist.get_rank(), Path(name)
    if rank == 0:
        torch.save({"number": old}, path)
    dist.barrier()

    def slow(what: str, name: str) -> None:
        if rank == 0 and what in ("save", *NAMES):
            time.sleep(SLOW_SECONDS)

    def full(what: str, name: str) -> None:
        if what == "save":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    with audit_files(path.parent, slow) as files:
        error = _raised(answer, path, {"number": new + rank})
        found = _number_in(path)
    over = f"{path.name} itself was opened for writing, or removed"
    over *= os.path.realpath(path) in files.opened + files.gone
    wrote = bool(files.saves or files.opened)
    dist.barrier()
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE), group)
    begun = time.monotonic()
    with audit_files(path.parent, full):
        heard = _raised(answer, path, {"number": -1})
    late = time.monotonic() - begun > PATIENCE - 0.5
    left = "the disk was full in the middle of a write, and then the old file was gone"
    left *= found is not None and _number_in(path) != found
    of_first = {"wrote": wrote, "found": found, "error": error, "over": over}
    return of_first | {"heard": heard, "late": late, "left": left}


def _raised(answer: Any, path: Path, state: dict[str, Any]) -> str:
    try:
        answer(path, state)
    except (Exception, SystemExit) as error:
        return reason(error)
    return ""


# --- 10.3 -------------------------------------------------------------------------------------------------

LOADS = "a plain state_dict, a checkpoint of DDP and a file of another machine's GPU are loaded"
REFUSES = "a file that carries code, or fits another model, is refused with an error, and none of it runs"
KINDS, OTHERS = ("plain", "of DDP", "of a GPU"), ("with code", "with more", "with fewer")


@question(
    "10.3",
    "load_any(path, model)",
    {LOADS: 1, REFUSES: 1},
    hints={
        LOADS: {
            "plain": "Here the file is the dict of weights itself. What does the model get?",
            "of DDP": "Here the weights are a part of a larger dict, and their names begin with module.",
            "of a GPU": "The tensors of this file remember a GPU. What tells the load where to put them?",
            "not all": "It was read. But a model has more than parameters, and a layer may be called module.",
        },
        REFUSES: {
            "it ran": "Which argument restricts a load to data?",
            "no error": "A model that was not loaded must not pass for a loaded one: let the error through.",
        },
    },
)
def load_any(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    kind, *values = seeds(rng, 1 + len(KINDS))
    with ask.folder() as place:
        ask(_written, kind, values, str(place))
        ((loaded, refused),) = ask(_loaded, kind, str(place))
    for what, seed, (state, error) in zip(KINDS, values, loaded, strict=True):
        holds, unlike = state == _state(_Net(kind, seed)), "loading state_dict" in error
        seen = f"the file {what}: {error or 'the model has other weights than the file'}"
        hint = "not all" if not error or (unlike and what != "of DDP") else what
        yield Finding(LOADS, holds and not error, seen, hint)
    for what, (error, ran) in zip(OTHERS, refused, strict=True):
        seen = "it made a folder when it was loaded" if ran else "no error was raised"
        yield Finding(
            REFUSES, bool(error) and not ran, f"the file {what}: {seen}", "it ran" if ran else "no error"
        )


class _Net(nn.Module):
    """A model with the prefix ``module`` inside the names of its layers."""

    def __init__(self, kind: int, values: int) -> None:
        super().__init__()
        self.module, self.submodule = nn.Linear(2, 2).double(), network(kind, values)
        with torch.no_grad():
            self.module.weight.copy_(tensor(values, (2, 2)))
            self.module.bias.copy_(tensor(values + 1, (2,)))


class _Code:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@reports(lambda *_: None)
def _written(_: Any, kind: int, values: list[int], place: str) -> None:
    """Write the files, in a process of their own: at the end, it tags all that it saves with a GPU."""
    plain, of_ddp, of_gpu = (_Net(kind, seed).state_dict() for seed in values)
    of_ddp = {f"module.{name}": value for name, value in of_ddp.items()}
    files = {
        "plain": plain,
        "of DDP": {"model": of_ddp, "epoch": 3, "optimizer": {"lr": 0.1}},
        "with code": {"model": plain, "best": _Code(f"{place}/it ran")},
        "with more": {"model": plain | {"more.weight": torch.ones(2)}, "epoch": 3},
        "with fewer": {"model": {name: value for name, value in plain.items() if "head" not in name}},
        "of a GPU": {"model": of_gpu},
    }
    for what, content in files.items():
        if what == "of a GPU":
            torch.serialization.register_package(0, lambda _: "cuda:77", lambda storage, label: None)
        torch.save(content, f"{place}/{what}.pt")


@reports(lambda *_: [[[object, str]] * len(KINDS), [[str, bool]] * len(OTHERS)])
def _loaded(answer: Any, kind: int, place: str) -> list[Any]:
    """Load every file; return the states and errors, and whether a file's code ran."""
    results: list[Any] = [[], []]
    for what in (*KINDS, *OTHERS):
        model, error = _Net(kind, 0), ""
        try:
            answer(Path(place, f"{what}.pt"), model)
        except Exception as raised:
            error = reason(raised)
        if what in KINDS:
            results[0].append([_state(model), error])
        else:
            results[1].append([error, os.path.exists(f"{place}/it ran") and what == "with code"])
    return results
