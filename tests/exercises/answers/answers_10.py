"""What people answer in exercise 10, wrong and right (see `answers`)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, save

from tests.exercises.answers import right, wrong

OUTER = "the prefix is gone from the front of each name"
INNER = "nothing is changed inside a name"
PLAIN = "if only some names begin with it, all stay as they are"


@wrong("10.1", OUTER, hint="inside")
def replaces_everywhere(weights):
    return {name.replace("module.", ""): value for name, value in weights.items()}


@wrong("10.1", OUTER, PLAIN, hint="inside")
def as_long_as_it_is_there(weights):
    while all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


@wrong("10.1", OUTER, INNER, hint="some")
def each_name_for_itself(weights):
    return {name.removeprefix("module."): value for name, value in weights.items()}


@wrong("10.1", OUTER, INNER, hint="some")
def if_the_first_has_it(weights):
    if next(iter(weights)).startswith("module."):
        return {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


@wrong("10.1", PLAIN, hint="not off")
def as_it_came(weights):
    return weights


@wrong("10.1", hint="must return a dict")
def the_names_alone(weights):
    return [name.removeprefix("module.") for name in weights]


@right("10.1")
def in_place(weights):
    if all(name.startswith("module.") for name in weights):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(weights, "module.")
    return weights


@right("10.1")
def by_partition(weights):
    parts = {name: name.partition(".") for name in weights}
    if {(first, dot) for first, dot, _ in parts.values()} != {("module", ".")}:
        return dict(weights)
    return {rest: weights[name] for name, (_, _, rest) in parts.items()}


ONE = "rank 0 alone writes its state, and no rank returns before the file is there"
FULL = "at each moment, the old file or the new one is there and whole"
HEARD = "if the disk is full, every rank raises an error, and none waits for a timeout"


def written_whole(path, state) -> str:
    """On rank 0, beside the target; what went wrong."""
    if dist.get_rank():
        return ""
    try:
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    except Exception as error:
        return str(error) or "it failed"
    return ""


def all_hear(fault: str) -> None:
    told = [fault]
    dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise RuntimeError(told[0])


@wrong("10.2", ONE, FULL, hint="late")
def as_in_the_lesson(path, state):
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    dist.barrier()


@wrong("10.2", ONE, FULL, hint="others")
def the_others_go_on(path, state):
    try:
        if fault := written_whole(path, state):
            raise RuntimeError(fault)
    finally:
        dist.barrier()


@wrong("10.2", hint="writers")
def everybody(path, state):
    torch.save(state, path.with_suffix(f".{dist.get_rank()}"))
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(path.with_suffix(".0"), path)
    dist.barrier()


@wrong("10.2", hint="early")
def waits_before(path, state):
    dist.barrier()
    if fault := written_whole(path, state):
        raise RuntimeError(fault)


@wrong("10.2", hint="name")
def never_renamed(path, state):
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".part"))
    dist.barrier()


@wrong("10.2", hint="an error")
def from_another_disk(path, state):
    fault = ""
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as there:
            torch.save(state, f"{there}/new.pt")
            try:
                os.replace(f"{there}/new.pt", path)
            except OSError as error:
                fault = str(error)
    all_hear(fault)


@wrong("10.2", ONE, HEARD, hint="emptied")
def over_the_old_one(path, state):
    fault = ""
    if dist.get_rank() == 0:
        try:
            torch.save(state, path)
        except Exception as error:
            fault = repr(error)
    all_hear(fault)


@wrong("10.2", hint="never called barrier")
def barrier_on_rank_0(path, state):
    if dist.get_rank() == 0:
        written_whole(path, state)
        dist.barrier()


@right("10.2")
def into_an_open_file(path, state):
    fault = ""
    if dist.get_rank() == 0:
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, path)
        except Exception as error:
            fault = repr(error)
    faults = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    if any(faults):
        raise OSError(faults[0])


@right("10.2")
def by_the_imported_save_and_a_number(path, state):
    done, trouble = torch.zeros(1), None
    if dist.get_rank() == 0:
        try:
            save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            done += 1
        except (OSError, RuntimeError) as error:
            trouble = error
    dist.broadcast(done, 0)
    if not done:
        raise trouble or RuntimeError("rank 0 could not save")


LOADS = "a plain state_dict, a checkpoint of DDP and a file of another machine's GPU are loaded"
REFUSES = "a file that carries code, or fits another model, is refused with an error, and none of it runs"


def stripped(weights: Any) -> Any:
    if all(name.startswith("module.") for name in weights):
        return {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


@wrong("10.3", REFUSES, hint="of a GPU")
def bare_load(path, model):
    found = torch.load(path)
    model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", REFUSES, hint="of DDP")
def state_dicts_alone(path, model):
    model.load_state_dict(stripped(torch.load(path, map_location="cpu")))


@wrong("10.3", REFUSES, hint="plain")
def checkpoints_alone(path, model):
    model.load_state_dict(stripped(torch.load(path, map_location="cpu")["model"]))


@wrong("10.3", REFUSES, hint="of DDP")
def forgets_the_prefix(path, model):
    found = torch.load(path, map_location="cpu")
    model.load_state_dict(found.get("model", found))


@wrong("10.3", REFUSES, hint="not all")
def each_name_by_itself(path, model):
    found = torch.load(path, map_location="cpu", weights_only=True)
    found = found.get("model", found)
    model.load_state_dict({name.removeprefix("module."): each for name, each in found.items()})


@wrong("10.3", hint="not all")
def parameters_alone(path, model):
    found = torch.load(path, map_location="cpu", weights_only=True)
    found = stripped(found.get("model", found))
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(found[name])


@wrong("10.3", LOADS, hint="it ran")
def trusts_everyone(path, model):
    found = torch.load(path, map_location="cpu", weights_only=False)
    model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", LOADS, hint="no error")
def not_so_strict(path, model):
    found = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(stripped(found.get("model", found)), strict=False)


@wrong("10.3", LOADS, hint="no error")
def swallows_the_error(path, model):
    with contextlib.suppress(Exception):
        found = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(stripped(found.get("model", found)))


@right("10.3")
def wraps_the_model(path, model):
    found = torch.load(path, map_location=lambda storage, place: storage)
    found = {"model": found, **found}["model"]
    if all(name.startswith("module.") for name in found):
        model = nn.ModuleDict({"module": model})
    model.load_state_dict(found)


@right("10.3")
def copies_by_hand(path, model):
    found = torch.load(path, map_location=torch.device("cpu"), weights_only=True)
    found = stripped(found.get("model", found))
    own = model.state_dict()
    if own.keys() != found.keys():
        raise ValueError(f"{path} is of another model")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])
