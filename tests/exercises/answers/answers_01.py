"""What people answer in exercise 01, wrong and right (see `answers`)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.exercises.answers import right, wrong

EXACT = "Python numbers and lists arrive exactly, as int64, float64 or bool"
KEPT = "arrays and tensors keep their dtype and their values"
OWN = "what is written into one side is never seen on the other"
THERE = "it arrives on the device that was asked for"


@wrong("01.1", KEPT, OWN, THERE, hint="A Python float has 64 bits")
def by_tensor(data, device):
    if isinstance(data, np.ndarray):
        data = data.copy()
    return torch.tensor(data, device=device)


@wrong("01.1", THERE, hint="runs backwards through its memory")
def by_as_tensor(data, device):
    return torch.as_tensor(data, device=device)


@wrong("01.1", EXACT, KEPT, THERE, hint="handed back as it is")
def no_copy_of_tensors(data, device):
    if not isinstance(data, torch.Tensor):
        data = torch.from_numpy(np.array(data))
    return data.detach().to(device)


@wrong("01.1", EXACT, THERE, hint="two names for one memory")
def no_copy_of_arrays(data, device):
    if isinstance(data, torch.Tensor):
        return data.detach().clone().to(device)
    return torch.from_numpy(np.asarray(data)).to(device)


@wrong("01.1", EXACT, KEPT, OWN, hint="What sends a tensor somewhere?")
def stays_on_the_cpu(data, device):
    return solved(data, "cpu")


@wrong("01.1", EXACT, KEPT, OWN, hint="What sends a tensor somewhere?")
def throws_it_away(data, device):
    made = solved(data, "cpu")
    made.to(device)
    return made


@wrong("01.1", hint="Which ways of making a tensor look at the type")
def with_a_capital_t(data, device):
    return torch.Tensor(solved(data, "cpu").tolist()).to(device)  # a number is a size there


@wrong("01.1", OWN, THERE, hint="Which ways of making a tensor look at the type")
def all_in_float32(data, device):
    return solved(data, device).float()


@wrong("01.1", OWN, THERE, hint="Which ways of making a tensor look at the type")
def all_in_float64(data, device):
    return solved(data, device).double()


@wrong("01.1", OWN, THERE, hint="Were they of another type on the way?")
def on_the_way_in_float32(data, device):
    made = solved(data, "cpu")
    return made.float().to(made.dtype).to(device)


@wrong("01.1", EXACT, OWN, THERE, hint="What straightens it?")
def not_flipped(data, device):
    if isinstance(data, np.ndarray):
        return torch.tensor(data, device=device)
    return solved(data, device)


@wrong("01.1", hint="whatever comes in")
def arrays_alone(data, device):
    return torch.from_numpy(data.copy()).to(device)


@wrong("01.1", hint="whatever comes in")
def an_array_again(data, device):
    return np.array(data)


@wrong("01.1", hint="it returned nothing (None)")
def returns_nothing(data, device):
    solved(data, device)


@wrong("01.1", hint="raised SystemExit")
def does_not_come_back(data, device):
    raise SystemExit("no")


RIGHT = "forward(x) is (x - mean) / std, for each column"
MOVES = "after .to(device), nothing of it is left behind"
SAVED = "mean and std are saved with the model, and no optimizer trains them"


class Base(nn.Module):
    def __init__(self, mean: Any, std: Any) -> None:
        super().__init__()
        self.keep(mean, std)

    def keep(self, mean: Any, std: Any) -> None:
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Any) -> Any:
        return (x - self.mean) / self.std


@wrong("01.2", RIGHT, hint="An attribute alone is not known")
class PlainAttributes(Base):
    def keep(self, mean, std):
        self.mean, self.std = mean, std


@wrong("01.2", RIGHT, hint="still on the CPU after .to(device): std")
class OneOfTwo(Base):
    def keep(self, mean, std):
        self.register_buffer("mean", mean)
        self.std = std


@wrong("01.2", RIGHT, MOVES, hint="there is a second kind")
class Parameters(Base):
    def keep(self, mean, std):
        self.mean, self.std = nn.Parameter(mean), nn.Parameter(std)


@wrong("01.2", RIGHT, MOVES, hint="it saves as well")
class NotSaved(Base):
    def keep(self, mean, std):
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)


@wrong("01.2", RIGHT, hint="An attribute alone is not known")
class SendsThemEachTime(Base):
    def keep(self, mean, std):
        self.mean, self.std = mean, std

    def forward(self, x):
        return (x - self.mean.to(x.device)) / self.std.to(x.device)


@wrong("01.2", RIGHT, hint="On which device are the tensors that meet in forward?")
class Numbers(Base):
    def keep(self, mean, std):
        self.both = mean.tolist(), std.tolist()

    def forward(self, x):
        mean, std = map(torch.tensor, self.both)
        return (x - mean) / std


@wrong("01.2", MOVES, SAVED, hint="as they were given")
class SwapsThem(Base):
    def keep(self, mean, std):
        super().keep(std, mean)


@wrong("01.2", MOVES, SAVED, hint="as they were given")
class ItsOwnMean(Base):
    def forward(self, x):
        return (x - x.mean(0)) / self.std


@wrong("01.2", RIGHT, hint="An attribute alone is not known")
class InAList(Base):
    def keep(self, mean, std):
        self.mean, self.std = mean, std
        self.all = [mean, std]


@wrong("01.2", hint="failed")
class ForgetsSuper(nn.Module):
    def __init__(self, mean, std):
        self.register_buffer("mean", mean)


@wrong("01.2", hint="is a class, an nn.Module")
def a_plain_function(x):
    return x


AMONG = "finds the tensors among its arguments that are left behind, and names no other"
INSIDE = "looks into models: parameters and buffers"
PLAIN = "finds the tensors that are plain attributes of a model, or of a layer in it"


def inside(name: str, model: nn.Module, parameters: bool = True, buffers: bool = True) -> dict[str, Any]:
    """Names and tensors that the model's own lists have."""
    found: list[tuple[str, Any]] = []
    found += model.named_parameters() if parameters else []
    found += model.named_buffers() if buffers else []
    return {f"{name}.{key}": value for key, value in found}


def plain(name: str, model: nn.Module, deep: bool = True) -> dict[str, Any]:
    modules = model.named_modules() if deep else [("", model)]
    return {
        ".".join(filter(None, (name, prefix, key))): value
        for prefix, module in modules
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def search(device: Any, things: Any, *looks: Any) -> list[str]:
    held: dict[str, Any] = {}
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            for look in looks:
                held |= look(name, thing)
        else:
            held[name] = thing
    return sorted(name for name, value in held.items() if value.device != device)


@wrong("01.3", AMONG, hint="A model has no device of its own")
def tensors_alone(device, **things):
    return sorted(n for n, t in things.items() if isinstance(t, torch.Tensor) and t.device != device)


@wrong("01.3", AMONG, PLAIN, hint="What lists them, with names?")
def parameters_alone(device, **things):
    return search(device, things, lambda name, model: inside(name, model, buffers=False), plain)


@wrong("01.3", AMONG, INSIDE, hint="What no list of a module has")
def by_the_lists(device, **things):
    return search(device, things, inside)


@wrong("01.3", AMONG, INSIDE, hint="go through all")
def at_the_top_alone(device, **things):
    return search(device, things, inside, lambda name, model: plain(name, model, deep=False))


@wrong("01.3", hint="Which device is not the one")
def those_that_moved(device, **things):
    every = search(torch.device("cuda"), things, inside, plain)
    return [name for name in every if name not in search(device, things, inside, plain)]


@wrong("01.3", PLAIN, hint="not in the order of the alphabet")
def backwards(device, **things):
    return search(device, things, inside, plain)[::-1]


@wrong("01.3", hint="returned nothing (None)")
def prints_them(device, **things):
    print(search(device, things, inside, plain))


@wrong("01.3", AMONG, hint="model.1.bias")
def names_the_model(device, **things):
    return sorted({name.split(".")[0] for name in search(device, things, inside, plain)})


@wrong("01.3", AMONG, hint="A model has no device of its own")
def asks_the_model(device, **things):
    return sorted(name for name, thing in things.items() if thing.device != device)


@wrong("01.3", hint="Which device is not the one")
def a_number(device, **things):
    return len(search(device, things, inside, plain))


# --- right, in another style ---


@right("01.1")
def solved(data, device):
    if isinstance(data, torch.Tensor):
        return data.detach().to(device, copy=True)
    return torch.tensor(np.array(data), device=device)


@right("01.1")
def by_hand(data, device):
    if isinstance(data, torch.Tensor):
        source = data.detach()
    elif isinstance(data, np.ndarray):
        source = torch.from_numpy(np.ascontiguousarray(data))
    else:
        flat = data
        while isinstance(flat, list):
            flat = flat[0]
        kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
        source = torch.tensor(data, dtype=kinds[type(flat)])
    made = torch.empty(source.shape, dtype=source.dtype, device=device)
    return made.copy_(source)


@right("01.1")
def by_deepcopy(data, device):
    data = data.detach() if isinstance(data, torch.Tensor) else torch.as_tensor(np.array(data))
    return copy.deepcopy(data).to(device)


@right("01.2")
class InOneBuffer(Base):
    def keep(self, mean, std):
        self.register_buffer("both", torch.stack([mean, std]))

    def forward(self, x):
        return (x - self.both[0]) / self.both[1]


@right("01.2")
class AsBuffers(Base):
    def keep(self, mean, std):
        self.mean = nn.Buffer(mean)
        self.std = nn.Buffer(std)


@right("01.2")
class InALayer(Base):
    def keep(self, mean, std):
        self.inner = nn.Module()
        self.inner.register_buffer("mean", mean)
        self.inner.register_buffer("std", std.clone())

    def forward(self, x):
        return x.sub(self.inner.mean).div(self.inner.std)


@right("01.3")
def by_three_lists(device, **things):
    return search(device, things, inside, plain)


@right("01.3")
def by_its_state(device, **things):
    names = []
    for name, thing in things.items():
        if torch.is_tensor(thing):
            names += [name] * (thing.device != device)
            continue
        for prefix, module in thing.named_modules():
            held = {**module._parameters, **module._buffers, **module.__dict__}
            for key, value in held.items():
                if torch.is_tensor(value) and value.device.type != torch.device(device).type:
                    names.append(".".join(filter(None, [name, prefix, key])))
    names.sort()
    return names
