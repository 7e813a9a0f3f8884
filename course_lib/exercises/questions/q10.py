"""The questions of lesson 10: parameter names, a file that is always whole, a load of any checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..in_rank.file_audit import NAMES, audit_files
from ..in_rank.work import in_group, true_on_all_ranks
from ..inputs import network, seeds, tensor
from ..judging import Faults, first_fault
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number, reason, told

SLOW_SECONDS = 0.4  # that rank 0's disk takes for each step
PATIENCE = 3.0  # timeout of a collective, in seconds, when the disk is full
LIMIT = 100_000  # bytes that fit into a file on the full disk
NOTES = "of somebody else"  # content of the file beside the checkpoint

# --- 10.1 -------------------------------------------------------------------------------------------------

OUTER = "the prefix is gone from the front of each name"
INNER = "nothing is changed inside a name"
PLAIN = "if only some names begin with it, all stay as they are"
OF_NAMES = {
    OUTER: "A wrapper puts the same prefix before every name. Which string method takes it off?",
    INNER: "The prefix may occur inside a name, too. Take it off the front only, and once.",
    PLAIN: "A wrapper adds its prefix to every name. If one name lacks it, where did the others get it?",
}


@question("10.1", "without_prefix(weights)", {OUTER: 1, INNER: 1, PLAIN: 1})
def without_prefix(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    # each begins with a letter of "module", which str.lstrip would take off
    words = [f"{rng.choice(['dense', 'embed', 'outer', 'lower'])}{rng.randrange(100)}" for _ in range(3)]
    a, b, c = words
    wrapped = [
        (OUTER, [f"{a}.weight", f"{a}.bias", f"{b}.0.weight"]),
        (OUTER, [c]),
        (OUTER, []),  # a model without parameters
        (INNER, [f"submodule.{a}.weight", f"{b}.module.bias", f"module.{c}.weight"]),
        (INNER, [f"{a}.module.module.{b}", f"{c}module.bias"]),
    ]
    plain = [
        [f"module.{a}.weight", f"{b}.weight", f"submodule.{c}.bias"],  # only the first has the prefix, …
        [f"{b}.weight", f"module.{a}.weight", f"module.{a}.bias"],  # all but the first, all but the last, …
        [f"module.{a}.weight", f"module.{a}.bias", f"{c}.weight"],
        [f"module.{a}.weight", f"module.{a}.bias", f"{c}.bias", f"module.{b}.bias"],
        [f"modules.{a}", f"module_{b}.bias", "module"],
        [f"sub.module.{a}", f"{b}.module.weight"],
    ]
    wanted = [(what, {name: rng.random() for name in names}) for what, names in wrapped]
    given = [{f"module.{name}": value for name, value in mine.items()} for _, mine in wanted]
    for names in plain:
        given.append({name: rng.random() for name in names})
        wanted.append((PLAIN, given[-1]))
    (kept,) = ask(_stripped, given)
    for before, (what, right), after in zip(given, wanted, kept, strict=True):
        lost = [place for place, name in enumerate(right) if name not in after]
        if lost:
            now = list(after)[lost[0]] if len(after) == len(right) else "not there"
            seen = f"{list(before)[lost[0]]} became {now}"
        elif not before:
            seen = f"given no names at all, it returned {list(after)}"
        else:
            seen = "the tensors have other names now, or there are more of them"
        yield Finding(what, after == right, seen, OF_NAMES[what])


@reports(lambda given: [{str: (NUMBER, str)}] * len(given))
def _stripped(answer: Any, given: list[dict[str, float]]) -> list[dict[str, float | str]]:
    results = []
    weights: OrderedDict[str, torch.Tensor] = OrderedDict()
    for names in given:
        weights.clear()  # the same dict, with other names and tensors
        weights.update({name: torch.tensor(value, dtype=torch.float64) for name, value in names.items()})
        after = answer(weights)
        if not isinstance(after, dict):
            raise Refused(f"without_prefix must return a dict from names to tensors, not {told(after)}")
        results.append({str(name): number(value) for name, value in after.items()})
    return results


# --- 10.2 -------------------------------------------------------------------------------------------------

ONE = "rank 0 alone writes its state, and no rank returns before the file is there"
FULL = "when the disk fills up in the middle of a write, the old file stays whole"
HEARD = "and then every rank raises an error: none returns, none waits for a timeout"


@question("10.2", "save_once(state, path)", {ONE: 1, FULL: 1, HEARD: 1}, rests={FULL: ONE, HEARD: ONE})
def save_once(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    """Judge saves over an old file, onto a full disk, to a new file, over it, and without a way to rename."""
    old, new, next_, last = rng.sample(range(0, 10_000, 10), 4)
    ranks = rng.randint(2, 4)

    def shown(state: int | None) -> str:
        known = {old: "the old state", new: "the new state", None: "nothing that can be loaded"}
        return known.get(state, "the state of another rank, or of another call")

    with ask.folder() as place:
        neighbour, path, other = (str(place / name) for name in ("notes.txt", "checkpoint.pt", "other.pt"))
        results = ask(_saved, old, new, [next_, last], path, other, neighbour, nprocs=ranks)
        ((left, another, stays),) = ask(_left, [path, other], neighbour)
    in_time = not any(result["second"]["late"] for result in results)
    if in_time and not all(result["third"] for result in results):
        raise Refused("the ranks were in time, and not all of them made the calls that follow")
    yield first_fault(ONE, _of_a_save([result["first"] for result in results], new, shown))
    if in_time:
        for turn, right in enumerate((next_, last)):
            yield first_fault(ONE, _of_a_save([result["third"][turn] for result in results], right, shown))
    gone = Finding(ONE, False, "a file beside it is gone or has changed", "That file is not yours.")
    is_right = another == last or not in_time
    wrong = Finding(
        ONE, is_right, f"the last file holds {shown(another)}", "Which call's state should it hold?"
    )
    yield wrong if stays else gone
    hint = "Opening a file for writing empties it. Is there another name to write to, and a way to swap?"
    yield Finding(FULL, left == new, f"it holds {shown(left)}", hint)
    over = results[0]["first"]["over"]
    seen = f"the old file {over} before the new one was there: a kill in between leaves no whole file"
    yield Finding(FULL, not over, seen, "Is there a way to swap in one step?")
    yield first_fault(HEARD, _of_the_error("the disk is full", [result["second"] for result in results]))
    heard = in_time and all(result["second"]["error"] for result in results)
    if heard and all(result["first"]["found"] == new for result in results):
        fourth = [result["fourth"] for result in results]
        if None in fourth:
            raise Refused("all was right so far, and not all ranks made the call that follows")
        if fourth[0]["met"]:
            yield first_fault(HEARD, _of_the_error("the file could not be renamed", fourth))


def _of_a_save(ranks: list[Result], right: int, shown: Any) -> Faults:
    writers = [rank for rank, result in enumerate(ranks) if result["wrote"]]
    early = [rank for rank, result in enumerate(ranks) if result["found"] != right]
    for error in (result["error"] for result in ranks if result["error"]):
        hint = "Which other rank writes or renames that file at the same moment?"
        if len(writers) < 2:
            hint = "Read the error: what does your code assume about the disk that is not true?"
        yield f"nothing is wrong with the disk, but it raised {error}", hint
    if not writers:
        yield "nothing was saved", "torch.save writes. Which rank calls it?"
    if writers != [0]:
        seen = f"the ranks that wrote: {', '.join(map(str, writers))}"
        yield seen, "There is one file, for one rank's state. Which rank writes it?"
    if early == list(range(len(ranks))):
        seen = f"the file holds {shown(ranks[0]['found'])}"
        yield seen, "What is in the file under the name that was asked for, when all is done?"
    if early:
        seen = f"rank {early[0]} returned and found {shown(ranks[early[0]]['found'])}"
        yield (
            seen,
            "Which collective lets no rank go on before all have reached it? And where must it be called?",
        )


def _of_the_error(why: str, ranks: list[Result]) -> Faults:
    for rank, result in enumerate(ranks):
        if not result["error"]:
            seen = f"{why}, and rank {rank} returned as if all were well"
            yield (
                seen,
                "Rank 0 knows that it failed. How do the others learn of it, and what do they do then?",
            )
        elif result["late"]:
            seen = f"{why}, and rank {rank} waited until the timeout ({result['error']})"
            hint = f"Rank 0 has left, by {ranks[0]['error']}. "
            yield seen, hint + "What must it still do before it leaves, whatever goes wrong?"


@reports(lambda paths, _: [*[(int, None)] * len(paths), bool])
def _left(_: Any, paths: list[str], neighbour: str) -> list[Any]:
    """Return the numbers in files, read in a rank of its own: the kernel loads nothing that an answer saved.

    The last value is whether the file beside them is unchanged.
    """
    beside = Path(neighbour)
    stays = beside.is_file() and beside.read_text() == NOTES
    return [*(_number_in(path) for path in paths), stays]


def _number_in(path: str | Path) -> int | None:
    with contextlib.suppress(Exception):
        return int(torch.load(path, weights_only=True)["number"])
    return None


SAVE: Result = {"wrote": bool, "found": (int, None), "error": str, "over": str}
IN_VAIN: Result = {"error": str, "late": bool}


@reports(
    lambda *_: (
        {"first": SAVE, "second": IN_VAIN, "third": ([SAVE, SAVE], None)}
        | {"fourth": (IN_VAIN | {"met": bool}, None)}
    )
)
@in_group
def _saved(
    answer: Any, old: int, new: int, others: list[int], path: str, other: str, neighbour: str
) -> Result:
    if dist.get_rank() == 0:
        Path(neighbour).write_text(NOTES)
        torch.save({"number": old}, path)
    dist.barrier()
    state: dict[str, Any] = {}
    result: Result = {"first": _one_save(answer, state, new, Path(path)), "third": None, "fourth": None}
    dist.barrier()
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE), group)
    with _a_full_disk():
        result["second"] = _in_vain(answer, {"number": -1, "weights": torch.zeros(LIMIT)}, path)
    late, heard = result["second"]["late"], result["second"]["error"]
    if not true_on_all_ranks("in time", not late):  # a collective that timed out leaves the group broken
        return result
    again = Path(other)  # the same state and path, twice
    result["third"] = []
    for saved in others:
        result["third"].append(_one_save(answer, state, saved, again))
        true_on_all_ranks(f"read {saved}", True)
    if true_on_all_ranks(
        "right so far", bool(heard) and result["first"]["found"] == new
    ):  # otherwise it may hang
        result["fourth"] = _without_a_new_name(answer, {"number": -1}, f"{other}.pt")
    return result


def _in_vain(answer: Any, state: dict[str, Any], path: str) -> Result:
    """Make a call that must raise on every rank, and before a collective times out."""
    begun = time.monotonic()
    error = _raised(answer, state, Path(path))
    return {"error": error, "late": time.monotonic() - begun > PATIENCE - 0.5}


def _without_a_new_name(answer: Any, state: dict[str, Any], path: str) -> Result:
    """Save where no file can be renamed or linked; also return whether the answer came that far."""
    met = []

    def fails(what: str, name: str) -> None:
        if what in NAMES:
            met.append(what)
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    with audit_files(Path(path).parent, fails):
        return _in_vain(answer, state, path) | {"met": bool(met)}


def _one_save(answer: Any, state: dict[str, Any], value: int, path: Path) -> Result:
    rank = dist.get_rank()
    state["number"] = value + rank
    with audit_files(path.parent, partial(_slow, rank)) as files:
        error = _raised(answer, state, path)
        number = _number_in(path)
    name, over = os.path.realpath(path), ""
    if name in files.opened:
        over = "was opened for writing"
    elif name in files.gone:
        over = "was removed"
    return {"wrote": bool(files.saves or files.opened), "found": number, "error": error, "over": over}


def _slow(rank: int, what: str, name: str) -> None:
    """Slow down the disk of rank 0, for each ``torch.save`` and each rename or link."""
    if rank == 0 and what in ("save", *NAMES):
        time.sleep(SLOW_SECONDS)


def _raised(answer: Any, state: dict[str, Any], path: Path) -> str:
    try:
        answer(state, path)
    except (Exception, SystemExit) as error:
        return reason(error)
    return ""


@contextlib.contextmanager
def _a_full_disk() -> Iterator[None]:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- 10.3 -------------------------------------------------------------------------------------------------

BARE = "a state_dict alone is loaded"
TRAINING = "so is that in the checkpoint of a training run, with DDP's prefix"
ELSEWHERE = "so is one that was saved on a GPU that this machine lacks"
CODE = "a file that carries code, or fits another model, is refused with an error, and none of it runs"
OTHERS = {
    "with other names": "a file whose names are all those of another model",
    "with more": "a file of a larger model, with a layer that this one lacks",
    "with fewer": "a file of a smaller model, which lacks one layer of this one",
}
OF_LOADS = {
    BARE: "Here the file is the dict of weights itself. What does the model get?",
    TRAINING: "Here the weights are a part of a larger dict, and their names begin with module.",
    ELSEWHERE: "The tensors of this file remember a GPU. What tells the load where to put them instead?",
}
BUFFERS = " (A model has more than parameters, and a layer may be called module.)"


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


@question("10.3", "load_any(path, model)", {BARE: 1, TRAINING: 1, ELSEWHERE: 1, CODE: 1})
def load_any(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    kind, other, *values = seeds(rng, 2 + len(OF_LOADS))
    numbers = dict(zip(OF_LOADS, values, strict=True))
    with ask.folder() as place:
        paths = {what: f"{place}/{i}.pt" for i, what in enumerate((*OF_LOADS, CODE, *OTHERS))}
        ask(_written, kind, other, numbers, paths, f"{place}/it ran")
        ((loaded, ran),) = ask(_loaded, kind, numbers[BARE] // 2, paths, f"{place}/it ran")
    for what, seed in numbers.items():
        right = _state(_Net(kind, seed))
        state, error = loaded[what]["state"], loaded[what]["error"]
        seen = error or "the model has other weights than the file"
        unlike = "loading state_dict" in error
        hint = OF_LOADS[what] + BUFFERS * (not error or unlike)
        if what == ELSEWHERE and unlike:
            hint = "It was read, but the names do not match." + BUFFERS
        yield Finding(what, state == right and not error, seen, hint)
    hint = "A model that was not loaded must not pass for a loaded one: let the error through."
    if ran:
        seen = "the file made a folder when it was loaded"
        hint = "Which argument restricts a load to data?"
    else:
        seen = "no error was raised"
    yield Finding(CODE, not ran and loaded[CODE]["error"] != "", seen, hint)
    for what, shown in OTHERS.items():
        yield Finding(CODE, loaded[what]["error"] != "", f"no error was raised for {shown}", hint)


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@reports(lambda *_: None)
def _written(_: Any, kind: int, other: int, numbers: dict[str, int], paths: dict[str, str], ran: str) -> None:
    """Write the files, in a rank of its own, since all that it saves from then on is tagged with a GPU."""
    states = {what: _Net(kind, seed).state_dict() for what, seed in numbers.items()}
    torch.save(states[BARE], paths[BARE])
    prefixed = {f"module.{name}": value for name, value in states[TRAINING].items()}
    torch.save({"model": prefixed, "epoch": 3, "optimizer": {"lr": 0.1}}, paths[TRAINING])
    torch.save({"model": states[BARE], "best": _Code(ran)}, paths[CODE])
    bare, layer = states[BARE], "submodule.head."
    others = {
        "with other names": {f"encoder.{name}": value for name, value in bare.items()},
        "with more": bare | {f"more.{name}": value for name, value in bare.items() if "head" in name},
        "with fewer": {name: value for name, value in bare.items() if not name.startswith(layer)},
    }
    for what, weights in others.items():
        torch.save({"model": weights, "epoch": 3}, paths[what])
    gpus = random.Random(other)
    tag, elsewhere = (lambda storage: f"cuda:{gpus.randint(40, 99)}"), (lambda storage, label: None)
    torch.serialization.register_package(0, tag, elsewhere)
    torch.save({"model": states[ELSEWHERE]}, paths[ELSEWHERE])


@reports(
    lambda kind, values, paths, ran: [
        {what: {"error": str} | ({"state": object} if what in OF_LOADS else {}) for what in paths},
        bool,
    ]
)
def _loaded(
    answer: Any, kind: int, values: int, paths: dict[str, str], ran: str
) -> tuple[dict[str, Any], bool]:
    """Load every file; return what came of each load, and whether code of a file ran."""
    results: dict[str, Any] = {}
    model = _Net(kind, values)  # one model for all loads
    here = Path(f"{paths[BARE]}.now")
    shutil.copy(paths[TRAINING], here)
    with contextlib.suppress(Exception):
        answer(here, model)
    shutil.copy(paths[BARE], here)  # under the same name, into the same model
    for what, path in (paths | {BARE: here}).items():
        error = ""
        try:
            answer(here if path is here else Path(path), model)
        except Exception as raised:
            error = reason(raised)
        results[what] = {"error": error}
        if what in (BARE, TRAINING, ELSEWHERE):
            results[what]["state"] = _state(model)
    return results, os.path.exists(ran)
