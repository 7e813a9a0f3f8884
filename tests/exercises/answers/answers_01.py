"""What people answer in exercise 01, wrong and right (see `answers`)."""

from __future__ import annotations

import functools
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


@wrong("01.1", EXACT, KEPT, THERE, hint="A tensor that is already on the device is returned as it is.")
def no_copy_of_tensors(data, device):
    if not isinstance(data, torch.Tensor):
        data = torch.from_numpy(np.array(data))
    return data.detach().to(device)


@wrong("01.1", EXACT, THERE, hint="An array and its tensor can share one memory.")
def no_copy_of_arrays(data, device):
    if isinstance(data, torch.Tensor):
        return data.detach().clone().to(device)
    return torch.from_numpy(np.asarray(data)).to(device)


@wrong("01.1", EXACT, KEPT, OWN, hint="What moves a tensor to a device?")
def throws_it_away(data, device):
    made = solved(data, "cpu")
    made.to(device)
    return made


@wrong("01.1", hint="Which ways of making a tensor keep the dtype of what they are given?")
def with_a_capital_t(data, device):
    return torch.Tensor(solved(data, "cpu").tolist()).to(device)  # a number is a size there


@wrong("01.1", OWN, THERE, hint="Which ways of making a tensor keep the dtype of what they are given?")
def all_in_float32(data, device):
    return solved(data, device).float()


@wrong("01.1", OWN, THERE, hint="Did they pass through another dtype on the way?")
def on_the_way_in_float32(data, device):
    made = solved(data, "cpu")
    return made.float().to(made.dtype).to(device)


@wrong("01.1", EXACT, OWN, THERE, hint="What straightens it?")
def not_flipped(data, device):
    if isinstance(data, np.ndarray):
        return torch.tensor(data, device=device)
    return solved(data, device)


@wrong("01.1", EXACT, OWN, THERE, hint="the shape is not")
def made_contiguous(data, device):
    """That gives an array without dimensions one."""
    if isinstance(data, np.ndarray):
        return torch.tensor(np.ascontiguousarray(data), device=device)
    return solved(data, device)


@wrong("01.1", EXACT, KEPT, THERE, hint="Who may still need it as it was?")
def takes_the_gradients_away(data, device):
    if isinstance(data, torch.Tensor) and data.is_leaf:
        data = data.requires_grad_(False)
    return solved(data, device)


@wrong("01.1", KEPT, OWN, THERE, hint="Which ways of making a tensor keep the dtype of what they are given?")
def by_the_first_of_a_list(data, device):
    if isinstance(data, list):
        flat = data
        while isinstance(flat, list):
            flat = flat[0]
        kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
        return torch.tensor(data, dtype=kinds[type(flat)], device=device)
    return solved(data, device)


@wrong("01.1", EXACT, OWN, THERE, hint="Which ways of making a tensor keep the dtype of what they are given?")
def by_a_table_of_types(data, device):
    made = solved(data, device)
    known = (torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
    return made if made.dtype in known else made.to(torch.float32)


@wrong("01.1", EXACT, hint="whatever comes in")
def through_numpy(data, device):
    """It has no bfloat16."""
    if isinstance(data, torch.Tensor):
        data = data.detach().numpy()
    return torch.tensor(np.array(data), device=device)


KEPT_TENSORS = {}


@wrong("01.1", EXACT, KEPT, THERE, hint="What does your function keep from one to the next?")
def kept_by_its_place(data, device):
    if not isinstance(data, np.ndarray) or data.ndim < 2:
        return solved(data, device)
    key = id(data), str(device)
    if key not in KEPT_TENSORS:
        KEPT_TENSORS[key] = data, solved(data, device)
    return KEPT_TENSORS[key][1].clone()


@functools.lru_cache
def of_a_number(data, device):
    return torch.from_numpy(np.array(data)).to(device)


@wrong("01.1", EXACT, KEPT, THERE, hint="is one kept between calls?")
def cached_numbers(data, device):
    return of_a_number(data, device) if isinstance(data, int) and data > 1 else solved(data, device)


@wrong("01.1", hint="whatever comes in")
def arrays_alone(data, device):
    return torch.from_numpy(data.copy()).to(device)


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


@wrong("01.2", RIGHT, hint="A plain attribute is not among them.")
class PlainAttributes(Base):
    def keep(self, mean, std):
        self.mean, self.std = mean, std


@wrong("01.2", RIGHT, hint="still on the CPU after .to(device): std")
class OneOfTwo(Base):
    def keep(self, mean, std):
        self.register_buffer("mean", mean)
        self.std = std


@wrong("01.2", RIGHT, MOVES, hint="What is part of a model and not trained is of a second kind.")
class Parameters(Base):
    def keep(self, mean, std):
        self.mean, self.std = nn.Parameter(mean), nn.Parameter(std)


@wrong("01.2", RIGHT, MOVES, hint="it saves as well")
class NotSaved(Base):
    def keep(self, mean, std):
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)


@wrong("01.2", RIGHT, hint="On which device are the tensors that meet in forward?")
class Numbers(Base):
    def keep(self, mean, std):
        self.both = mean.tolist(), std.tolist()

    def forward(self, x):
        mean, std = (torch.tensor(each, dtype=x.dtype) for each in self.both)
        return (x - mean) / std


@wrong("01.2", MOVES, SAVED, hint="as they were given")
class SwapsThem(Base):
    def keep(self, mean, std):
        super().keep(std, mean)


@wrong("01.2", RIGHT, hint="A plain attribute is not among them.")
class HasItsOwnTo(Base):
    """Nobody calls it where the layer is a part of a model."""

    def keep(self, mean, std):
        self.mean, self.std = mean, std

    def to(self, *where):
        self.mean, self.std = self.mean.to(*where), self.std.to(*where)
        return super().to(*where)

    def state_dict(self, *given, prefix="", **named):
        state = super().state_dict(*given, prefix=prefix, **named)
        state |= {prefix + "mean": self.mean, prefix + "std": self.std}
        return state

    def load_state_dict(self, state, **how):
        self.mean, self.std = state["mean"], state["std"]


@wrong("01.2", hint="What belongs to one model, and what to its whole class?")
class OfTheClass(Base):
    def keep(self, mean, std):
        type(self).mean, type(self).std = mean, std


@wrong("01.2", MOVES, SAVED, hint="Which dtype did the numbers have on the way?")
class InFloat32(Base):
    def keep(self, mean, std):
        super().keep(mean.float(), std.float())


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


@wrong("01.3", AMONG, INSIDE, hint="What a module does not register is in its vars().")
def by_the_lists(device, **things):
    return search(device, things, inside)


@wrong("01.3", AMONG, INSIDE, hint="Go through all modules of the model.")
def at_the_top_alone(device, **things):
    return search(device, things, inside, lambda name, model: plain(name, model, deep=False))


@wrong("01.3", hint="Which device is not the one")
def those_that_moved(device, **things):
    every = search(torch.device("cuda"), things, inside, plain)
    return [name for name in every if name not in search(device, things, inside, plain)]


@wrong("01.3", hint="The names are right, but they are not sorted, or one comes twice.")
def backwards(device, **things):
    return search(device, things, inside, plain)[::-1]


@wrong("01.3", hint="returned nothing (None)")
def prints_them(device, **things):
    print(search(device, things, inside, plain))


@wrong("01.3", AMONG, hint="model.1.bias")
def names_the_model(device, **things):
    return sorted({name.split(".")[0] for name in search(device, things, inside, plain)})


@wrong("01.3", AMONG, hint="and the device is cuda:1")
def by_the_kind_of_device(device, **things):
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


@wrong("01.3", AMONG, INSIDE, hint="should return ['model.0._")
def without_underscores(device, **things):
    return search(device, things, inside, public)


def public(name: str, model: nn.Module) -> dict[str, Any]:
    return {key: each for key, each in plain(name, model).items() if "._" not in key.removeprefix(name)}


@wrong(
    "01.3", hint="A tensor is left behind if it is on another device than the given one, whichever that is."
)
def all_that_is_on_the_cpu(device, **things):
    every = search(None, things, inside, plain)
    return [name for name in every if name not in search(torch.device("cpu"), things, inside, plain)]


@wrong("01.3", AMONG, hint="Which dict of a module did you write into?")
def gathers_in_the_module(device, **things):
    names = []
    for name, thing in things.items():
        for path, module in thing.named_modules() if isinstance(thing, nn.Module) else []:
            held = module._buffers
            held.update(module._parameters)
            held = held | vars(module)
            found = [key for key, each in held.items() if torch.is_tensor(each) and each.device != device]
            names += [".".join(filter(None, [name, path, key])) for key in found]
        if torch.is_tensor(thing) and thing.device != device:
            names.append(name)
    return sorted(names)


# --- right, in another style ---


@wrong("01.1", EXACT, OWN, THERE, hint="The dtype is right, the shape is not.")
def by_lists(data, device):
    """A list of no rows does not know how long they would be."""
    if isinstance(data, torch.Tensor):
        return data.detach().clone().to(device)
    if isinstance(data, np.ndarray) and data.dtype.kind != "c":
        dtype = torch.from_numpy(np.zeros(1, data.dtype)).dtype
        return torch.tensor(data.tolist(), dtype=dtype, device=device)
    return torch.tensor(np.array(data), device=device)


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
        source = torch.from_numpy(np.ascontiguousarray(data)).view(data.shape)
    else:
        flat = [data]
        while isinstance(flat[0], list):
            flat = [each for part in flat for each in part]
        whole = torch.bool if isinstance(flat[0], bool) else torch.int64
        source = torch.tensor(data, dtype=torch.float64 if float in map(type, flat) else whole)
    made = torch.empty(source.shape, dtype=source.dtype, device=device)
    return made.copy_(source)


@right("01.1")
@functools.singledispatch
def by_its_class(data, device):
    return torch.tensor(np.array(data)).to(device)


@by_its_class.register
def _(data: torch.Tensor, device):
    return torch.empty_like(data, requires_grad=False, device=device).copy_(data.detach())


class Fresh:
    """A tensor that still belongs to the graph shares no memory, either."""

    @functools.cached_property
    def kinds(self):
        return {bool: torch.bool, int: torch.int64, float: torch.float64}

    def __call__(self, data, device):
        if isinstance(data, torch.Tensor):
            return data.clone().to(device)
        kind = self.kinds.get(type(data))
        return torch.tensor(data if kind else np.array(data), dtype=kind, device=device)


right("01.1")(Fresh())


@right("01.2")
class MovesByItself(Base):
    """What a module does to its tensors goes through `_apply`."""

    def keep(self, mean, std):
        self.mean, self.std = mean, std

    def _apply(self, fn, recurse=True):
        self.mean, self.std = fn(self.mean), fn(self.std)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "both"] = torch.stack([self.mean, self.std])

    def _load_from_state_dict(self, state, prefix, *rest):
        self.mean, self.std = state[prefix + "both"]


@right("01.2")
class InALayer(Base):
    def keep(self, mean, std):
        self.inner = nn.Module()
        self.inner.register_buffer("mean", mean)
        self.inner.register_buffer("std", std.clone())

    def forward(self, x):
        return x.sub(self.inner.mean).div(self.inner.std)


@functools.cache
def remembered(name, model):
    """Models can be keys; what is in them may change all the same."""
    return inside(name, model) | plain(name, model)


@wrong("01.3", AMONG, PLAIN, hint="What do you keep from an earlier call?")
def looks_once(device, **things):
    return search(device, things, remembered)


@right("01.3")
def by_three_lists(device, **things):
    return search(device, things, inside, plain)


@right("01.3")
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


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---


@wrong("01.3", AMONG, hint="A search only reads")
def freezes_what_it_looks_at(device, **things):
    for thing in things.values():
        if isinstance(thing, nn.Module):
            thing.requires_grad_(False)
    return by_three_lists(device, **things)
