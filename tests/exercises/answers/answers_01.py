"""What people answer in exercise 01, wrong and right (see `answers`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tests.exercises.answers import right, wrong

KEPT = "dtype, shape and values arrive as they were"
OWN = "what is written into one side is never seen on the other"
THERE = "it arrives on the device that was asked for"


def as_given(data):
    """The two lines of the exercise."""
    return data if isinstance(data, torch.Tensor) else torch.from_numpy(np.array(data))


@wrong("01.1", KEPT, THERE, hint="shares")
def without_a_copy(data, device):
    return as_given(data).detach().to(device)


@wrong("01.1", KEPT, OWN, hint="not moved")
def throws_the_moved_one_away(data, device):
    made = as_given(data).detach().clone()
    made.to(device)
    return made


@wrong("01.1", KEPT, THERE, hint="input changed")
def takes_the_gradients_away(data, device):
    return as_given(data).requires_grad_(False).clone().to(device)


@wrong("01.1", OWN, THERE, hint="another dtype")
def all_in_float32(data, device):
    return torch.tensor(as_given(data).tolist(), dtype=torch.float32, device=device)


@wrong("01.1", OWN, THERE, hint="another dtype")
def by_the_first_of_a_list(data, device):
    if isinstance(data, list) and not isinstance(data[0], float):
        return torch.tensor(data, dtype=torch.int64, device=device)
    return solved(data, device)


@wrong("01.1", OWN, THERE, hint="other numbers")
def on_the_way_in_float32(data, device):
    made = as_given(data).detach()
    return made.to(torch.float32, copy=True).to(device, made.dtype)


@wrong("01.1", hint="no tensor")
def through_numpy(data, device):
    return torch.tensor(as_given(data).numpy(), device=device)


@wrong("01.1", hint="it returned nothing (None)")
def returns_nothing(data, device):
    solved(data, device)


@right("01.1")
def solved(data, device):
    return as_given(data).detach().to(device, copy=True)


@right("01.1")
def with_its_graph(data, device):
    return as_given(data).clone().to(device)


AMONG = "finds the tensors among its arguments that are left behind, and names no other"
INSIDE = "looks into models: parameters and buffers"
PLAIN = "finds the tensors that are plain attributes of a model, or of a module in it"


def registered(name, model, buffers=True):
    found = dict(model.named_parameters(prefix=name))
    return found | dict(model.named_buffers(prefix=name)) if buffers else found


def plain(name, model, deep=True):
    modules = model.named_modules(prefix=name) if deep else [(name, model)]
    found = {f"{path}.{key}": value for path, module in modules for key, value in vars(module).items()}
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def whole(name, model):
    return registered(name, model) | plain(name, model)


def search(things, look, is_left):
    held = {}
    for name, thing in things.items():
        held |= look(name, thing) if isinstance(thing, nn.Module) else {name: thing}
    return sorted(name for name, value in held.items() if is_left(value.device))


@wrong("01.2", AMONG, hint="not inside")
def tensors_alone(device, **things):
    return search(things, lambda name, model: {}, lambda at: at != device)


@wrong("01.2", AMONG, hint="other names")
def names_the_model(device, **things):
    return sorted({name.split(".")[0] for name in search(things, whole, lambda at: at != device)})


@wrong("01.2", AMONG, PLAIN, hint="not inside")
def parameters_alone(device, **things):
    return search(
        things, lambda *each: registered(*each, buffers=False) | plain(*each), lambda at: at != device
    )


@wrong("01.2", AMONG, hint="not inside")
def by_state_dict(device, **things):
    return search(
        things,
        lambda name, model: {f"{name}.{k}": v for k, v in model.state_dict().items()},
        lambda at: at != device,
    )


@wrong("01.2", AMONG, INSIDE, hint="not registered")
def at_the_top_alone(device, **things):
    return search(things, lambda *each: registered(*each) | plain(*each, deep=False), lambda at: at != device)


@wrong("01.2", hint="another device")
def those_that_moved(device, **things):
    return search(things, whole, lambda at: at == device)


@wrong("01.2", INSIDE, PLAIN, hint="another device")
def by_the_kind_of_device(device, **things):
    return search(things, whole, lambda at: at.type != device.type)


@wrong("01.2", hint="other names")
def unsorted(device, **things):
    return search(things, whole, lambda at: at != device)[::-1]


@wrong("01.2", AMONG, PLAIN, hint="it writes")
def gathers_in_the_module(device, **things):
    def look(name, model):
        for module in model.modules():
            vars(module).update(module._parameters | module._buffers)
        return plain(name, model)

    return search(things, look, lambda at: at != device)


@wrong("01.2", hint="returned nothing (None)")
def prints_them(device, **things):
    print(search(things, whole, lambda at: at != device))


@right("01.2")
def by_three_lists(device, **things):
    return search(things, whole, lambda at: at != device)


@right("01.2")
def by_getattr(device, **things):
    names = set()
    for name, thing in things.items():
        parts = dict(thing.named_modules(prefix=name)) if hasattr(thing, "named_modules") else {}
        if not parts and thing.device != device:
            names.add(name)
        for path, part in parts.items():
            for key in [*part._parameters, *part._buffers, *vars(part)]:
                value = getattr(part, key)
                if isinstance(value, torch.Tensor) and str(value.device) != str(device):
                    names.add(f"{path}.{key}")
    return sorted(names)
