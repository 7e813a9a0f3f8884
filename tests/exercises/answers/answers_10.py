"""What people answer in exercise 10, wrong and right (see `answers`)."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, save

from tests.exercises.answers import right, wrong

OUTER = "the prefix is gone from the front of each name"
INNER = "nothing is changed inside a name"
PLAIN = "if only some names begin with it, all stay as they are"


@wrong("10.1", OUTER, hint="Take it off the front only, and once.")
def replaces_everywhere(weights):
    return {name.replace("module.", ""): value for name, value in weights.items()}


@wrong("10.1", OUTER, INNER, hint="If one name lacks it, where did the others get it?")
def each_name_for_itself(weights):
    return {name.removeprefix("module."): value for name, value in weights.items()}


@wrong("10.1", PLAIN, hint="Which string method takes it off?")
def as_it_came(weights):
    return weights


@wrong("10.1", hint="Which string method takes it off?")
def strips_letters(weights):
    return {name.lstrip("module."): value for name, value in weights.items()}


@wrong("10.1", OUTER, INNER, hint="If one name lacks it, where did the others get it?")
def if_the_first_has_it(weights):
    if next(iter(weights), "").startswith("module."):
        return {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


@wrong("10.1", hint="must return a dict")
def the_names_alone(weights):
    return [name.removeprefix("module.") for name in weights]


@wrong("10.1", PLAIN, hint="the tensors have other names now, or there are more of them")
def mixes_them_up(weights):
    if not all(name.startswith("module.") for name in weights):
        return weights
    names = [name.removeprefix("module.") for name in weights]
    return dict(zip(names, reversed(list(weights.values())), strict=True))


@wrong("10.1", hint="StopIteration")
def asks_the_first_of_none(weights):
    next(iter(weights))
    return in_place(weights)


@right("10.1")
def in_place(weights):
    if all(name.startswith("module.") for name in weights):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(weights, "module.")
    return weights


@right("10.1")
def by_partition(weights):
    parts = {name: name.partition(".") for name in weights}
    if {first for first, _, _ in parts.values()} != {"module"}:
        return dict(weights)
    return {rest: weights[name] for name, (_, _, rest) in parts.items()}


ONE = "rank 0 alone writes its state, and no rank returns before the file is there"
FULL = "when the disk fills up in the middle of a write, the old file stays whole"
HEARD = "and then every rank raises an error: none returns, none waits for a timeout"


def written_whole(state, path) -> str:
    """On rank 0, beside the target; what went wrong."""
    if dist.get_rank():
        return ""
    part = path.with_name(path.name + ".part")
    try:
        torch.save(state, part)
        os.replace(part, path)
    except Exception as error:
        return str(error) or "it failed"
    return ""


def all_hear(fault: str) -> None:
    told = [fault]
    dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise RuntimeError(told[0])


@wrong("10.2", ONE, FULL, hint="What must it still do before it leaves, whatever goes wrong?")
def as_in_the_lesson(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    dist.barrier()


@wrong("10.2", ONE, FULL, hint="How do the others learn of it, and what do they do then?")
def the_others_go_on(state, path):
    try:
        if fault := written_whole(state, path):
            raise RuntimeError(fault)
    finally:
        dist.barrier()


@wrong("10.2", ONE, FULL, hint="as if all were well")
def says_so_and_goes_on(state, path):
    if fault := written_whole(state, path):
        print("not saved:", fault)
    dist.all_reduce(torch.zeros(1))


@wrong("10.2", hint="Which rank writes it?")
def everybody(state, path):
    torch.save(state, path)
    dist.barrier()


@wrong("10.2", hint="Which collective lets no rank go on before all have reached it?")
def nobody_waits(state, path):
    if fault := written_whole(state, path):
        raise RuntimeError(fault)


@wrong("10.2", hint="Which collective lets no rank go on before all have reached it?")
def waits_for_a_file(state, path):
    """Yesterday's was there already."""
    fault = written_whole(state, path)
    while not fault and not path.exists():
        pass
    if fault:
        raise RuntimeError(fault)


@wrong("10.2", ONE, HEARD, hint="Is there another name")
def over_the_old_one(state, path):
    fault = ""
    if dist.get_rank() == 0:
        try:
            torch.save(state, path)
        except Exception as error:
            fault = repr(error)
    all_hear(fault)


@wrong("10.2", ONE, HEARD, hint="swap in one step")
def copies_it_over(state, path):
    part, fault = path.with_name("new.pt"), ""
    if dist.get_rank() == 0:
        try:
            torch.save(state, part)
            shutil.copyfile(part, path)
        except Exception as error:
            fault = repr(error)
    all_hear(fault)


@wrong("10.2", hint="And where must it be called?")
def waits_before(state, path):
    dist.barrier()
    if fault := written_whole(state, path):
        raise RuntimeError(fault)


@wrong("10.2", hint="under the name that was asked for")
def never_renamed(state, path):
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.part")
    dist.barrier()


@wrong("10.2", hint="cross-device")
def from_another_disk(state, path):
    fault = ""
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as there:
            torch.save(state, f"{there}/new.pt")
            try:
                os.replace(f"{there}/new.pt", path)
            except OSError as error:
                fault = str(error)
    all_hear(fault)


@wrong("10.2", hint="That file is not yours.")
def tidies_up(state, path):
    fault = written_whole(state, path)
    if dist.get_rank() == 0:
        for each in path.parent.glob("*.txt"):
            each.unlink()
    all_hear(fault)


@wrong("10.2", hint="never called barrier")
def barrier_on_rank_0(state, path):
    if dist.get_rank() == 0:
        written_whole(state, path)
        dist.barrier()


@wrong("10.2", hint="torch.save writes")
def writes_nothing(state, path):
    dist.barrier()


@right("10.2")
def into_an_open_file(state, path):
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
def by_the_imported_save_and_a_number(state, path):
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


BARE = "a state_dict alone is loaded"
TRAINING = "so is that in the checkpoint of a training run, with DDP's prefix"
ELSEWHERE = "so is one that was saved on a GPU that this machine lacks"
CODE = "a file that carries code, or fits another model, is refused with an error, and none of it runs"


def stripped(weights: Any) -> Any:
    if all(name.startswith("module.") for name in weights):
        return {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


@wrong("10.3", BARE, TRAINING, CODE, hint="What tells the load where to put them")
def bare_load(path, model):
    found = torch.load(path)
    model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", BARE, TRAINING, ELSEWHERE, hint="Which argument restricts a load to data?")
def trusts_everyone(path, model):
    found = torch.load(path, map_location="cpu", weights_only=False)
    model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", BARE, CODE, hint="a part of a larger dict")
def state_dicts_alone(path, model):
    model.load_state_dict(stripped(torch.load(path, map_location="cpu")))


@wrong("10.3", TRAINING, ELSEWHERE, CODE, hint="the file is the dict of weights itself")
def checkpoints_alone(path, model):
    model.load_state_dict(stripped(torch.load(path, map_location="cpu")["model"]))


@wrong("10.3", BARE, ELSEWHERE, CODE, hint="their names begin with")
def forgets_the_prefix(path, model):
    found = torch.load(path, map_location="cpu")
    model.load_state_dict(found.get("model", found))


@wrong("10.3", CODE, hint="their names begin with")
def replaces_in_names(path, model):
    found = torch.load(path, map_location="cpu")
    weights = found.get("model", found)
    if next(iter(weights)).startswith("module."):
        weights = {name.replace("module.", ""): value for name, value in weights.items()}
    model.load_state_dict(weights)


@wrong("10.3", BARE, TRAINING, ELSEWHERE, hint="let the error through.")
def swallows_the_error(path, model):
    with contextlib.suppress(Exception):
        found = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", BARE, ELSEWHERE, hint="the model has other weights than the file")
def not_so_strict(path, model):
    found = torch.load(path, map_location="cpu")
    model.load_state_dict(found.get("model", found), strict=False)


@wrong("10.3", BARE, TRAINING, ELSEWHERE, hint="of another model")
def not_strict_with_the_right_names(path, model):
    found = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(stripped(found.get("model", found)), strict=False)


@wrong("10.3", hint="more than parameters")
def parameters_alone(path, model):
    found = torch.load(path, map_location="cpu", weights_only=True)
    found = stripped(found.get("model", found))
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(found[name])


@wrong("10.3", TRAINING, CODE, hint="may be called module")
def each_name_by_itself(path, model):
    found = torch.load(path, map_location="cpu", weights_only=True)
    found = found.get("model", found)
    model.load_state_dict({name.removeprefix("module."): each for name, each in found.items()})


@wrong("10.3", CODE, hint="What does the model get?")
def loads_in_the_loop(path, model):
    found = torch.load(path, map_location="cpu")
    for name, value in stripped(found.get("model", found)).items():
        model.load_state_dict({name: value})


@wrong("10.3", CODE, hint="the model has other weights than the file")
def into_another_model(path, model):
    found = torch.load(path, map_location="cpu")
    model = copy.deepcopy(model)
    model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", BARE, TRAINING, ELSEWHERE, hint="A model that was not loaded must not pass for a loaded one:")
def what_fits(path, model):
    found = torch.load(path, map_location="cpu")
    unlike = model.load_state_dict(stripped(found.get("model", found)), strict=False)
    if unlike.missing_keys:
        raise KeyError(unlike.missing_keys)


@functools.cache
def loaded(path):
    return torch.load(path, map_location="cpu", weights_only=True)


@wrong("10.3", TRAINING, ELSEWHERE, CODE, hint="What does the model get?")
def loads_a_name_once(path, model):
    found = loaded(path)
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
