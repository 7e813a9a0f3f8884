"""What people answer in exercise 10, wrong and right (see `answers`)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.exercises.answers import right, wrong

OUTER = "the prefix is gone from the front of each name"
INNER = "inside of a name nothing is changed"
PLAIN = "names of which only some begin with it stay as they are"


@wrong("10.1", OUTER, hint="Take them from the front, and once")
def replaces_everywhere(weights):
    return {name.replace("module.", ""): value for name, value in weights.items()}


@wrong("10.1", OUTER, INNER, hint="If one name lacks the mark")
def each_name_for_itself(weights):
    return {name.removeprefix("module."): value for name, value in weights.items()}


@wrong("10.1", PLAIN, hint="Which string method takes them off?")
def as_it_came(weights):
    return weights


@wrong("10.1", OUTER, INNER, hint="If one name lacks the mark")
def cuts_seven_letters(weights):
    return {name[len("module.") :]: value for name, value in weights.items()}


@wrong("10.1", hint="Which string method takes them off?")
def strips_letters(weights):
    return {name.lstrip("module."): value for name, value in weights.items()}


@wrong("10.1", OUTER, INNER, hint="If one name lacks the mark")
def if_the_first_has_it(weights):
    if next(iter(weights)).startswith("module."):
        return {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


@wrong("10.1", OUTER, hint="Take them from the front, and once")
def takes_the_last_parts(weights):
    return {name.rpartition("module.")[2]: value for name, value in weights.items()}


@wrong("10.1", hint="must return a dict")
def the_names_alone(weights):
    return [name.removeprefix("module.") for name in weights]


@wrong("10.1", hint="must return a dict")
def in_place_and_no_return(weights):
    nn.modules.utils.consume_prefix_in_state_dict_if_present(weights, "module.")


@wrong("10.1", PLAIN, hint="changed places")
def mixes_them_up(weights):
    if not all(name.startswith("module.") for name in weights):
        return weights
    names = [name.removeprefix("module.") for name in weights]
    return dict(zip(names, reversed(list(weights.values())), strict=True))


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


ONE = "afterwards the file holds rank 0's state, and rank 0 alone has written"
WAITS = "no rank returns before the file is there"
FULL = "when the disk is full in the middle of a write, the file of before is whole"


@wrong("10.2", hint="Who writes it?")
def everybody(state, path):
    torch.save(state, path)
    dist.barrier()


@wrong("10.2", ONE, FULL, hint="lets nobody go on")
def nobody_waits(state, path):
    if dist.get_rank() == 0:
        part = f"{path}.part"
        torch.save(state, part)
        os.replace(part, path)


@wrong("10.2", ONE, WAITS, hint="Is there another name")
def over_the_old_one(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


@wrong("10.2", ONE, FULL, hint="where has it to stand")
def waits_before(state, path):
    dist.barrier()
    if dist.get_rank() == 0:
        part = f"{path}.part"
        torch.save(state, part)
        os.replace(part, path)


@wrong("10.2", hint="under the name that was asked for")
def never_renamed(state, path):
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.part")
    dist.barrier()


@wrong("10.2", hint="Who writes it?")
def the_last_rank(state, path):
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)
    dist.barrier()


@wrong("10.2", ONE, WAITS, hint="Is there another name")
def removes_the_old_one_first(state, path):
    if dist.get_rank() == 0:
        path.unlink(missing_ok=True)
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.rename(path)
    dist.barrier()


@wrong("10.2", ONE, WAITS, hint="Is there another name")
def renames_the_wrong_way(state, path):
    if dist.get_rank() == 0:
        os.replace(path, f"{path}.old")
        torch.save(state, path)
    dist.barrier()


@wrong("10.2", hint="never called barrier")
def barrier_on_rank_0(state, path):
    if dist.get_rank() == 0:
        part = f"{path}.part"
        torch.save(state, part)
        os.replace(part, path)
        dist.barrier()


@wrong("10.2", hint="torch.save writes")
def writes_nothing(state, path):
    dist.barrier()


@right("10.2")
def broadcasts(state, path):
    done = [None]
    if dist.get_rank() == 0:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
        done = ["saved"]
    dist.broadcast_object_list(done, src=0)


@right("10.2")
def says_so_and_goes_on(state, path):
    try:
        if dist.get_rank() == 0:
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    except (OSError, RuntimeError) as error:
        print("not saved:", error)
    finally:
        dist.all_reduce(torch.zeros(1))


BARE = "a state_dict alone is loaded"
TRAINING = "so is that in a training's checkpoint, with the prefix of DDP"
ELSEWHERE = "so is one that was saved on a GPU which is not here"
CODE = "a file that carries code is refused with an error, and nothing of it runs"


def stripped(weights: Any) -> Any:
    if all(name.startswith("module.") for name in weights):
        return {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


@wrong("10.3", BARE, TRAINING, CODE, hint="What tells the load where to put them")
def bare_load(path, model):
    found = torch.load(path)
    model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", BARE, TRAINING, ELSEWHERE, hint="read only data")
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


@wrong("10.3", BARE, ELSEWHERE, CODE, hint="their names begin with")
def replaces_in_names(path, model):
    found = torch.load(path, map_location="cpu")
    weights = found.get("model", found)
    if next(iter(weights)).startswith("module."):
        weights = {name.replace("module.", ""): value for name, value in weights.items()}
    model.load_state_dict(weights)


@wrong("10.3", BARE, TRAINING, ELSEWHERE, hint="let it be heard")
def swallows_the_error(path, model):
    with contextlib.suppress(Exception):
        found = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", BARE, ELSEWHERE, CODE, hint="the model has other weights than the file")
def not_so_strict(path, model):
    found = torch.load(path, map_location="cpu")
    model.load_state_dict(found.get("model", found), strict=False)


@wrong("10.3", BARE, TRAINING, ELSEWHERE, hint="read only data")
def tries_the_other_way_then(path, model):
    try:
        found = torch.load(path, map_location="cpu")
    except Exception:
        found = torch.load(path, map_location="cpu", weights_only=False)
    model.load_state_dict(stripped(found.get("model", found)))


@wrong("10.3", CODE, hint="What does the model get?")
def loads_in_the_loop(path, model):
    found = torch.load(path, map_location="cpu")
    for name, value in stripped(found.get("model", found)).items():
        model.load_state_dict({name: value})


@wrong("10.3", CODE, hint="the model has other weights than the file")
def into_another_model(path, model):
    found = torch.load(path, map_location="cpu")
    model = type(model)()
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
