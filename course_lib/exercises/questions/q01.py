"""The questions of lesson 01: conversions that keep everything, tensors that are left behind."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..asking import Ask, Finding, Refused, a_module, far, question, reason, told

FAR = torch.device("meta")  # another device, on every machine
CLOSE = 1e-5


def _tensor_of(call: Callable[..., Any], *args: Any) -> Any:
    """The tensor that a call returns; of all else, what it is, in words."""
    try:
        made = call(*args)
    except Exception as error:
        return reason(error)
    return made if isinstance(made, torch.Tensor) else f"it returned {told(made)}"


def _device(made: torch.Tensor | str) -> str:
    return made if isinstance(made, str) else str(made.device)


# --- 01.1 -------------------------------------------------------------------------------------------------

EXACT = "Python numbers and lists arrive exactly, as int64, float64 or bool"
KEPT = "arrays and tensors keep their dtype and their values"
OWN = "what is written into one side is never seen on the other"
THERE = "it arrives on the device that was asked for"

ARRAYS = np.ndarray | torch.Tensor
FLIPPED = "a flipped array"


@question("01.1", "fresh(data, device)", {EXACT: 1, KEPT: 1, OWN: 1, THERE: 1})
def fresh(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    found = ask(_fresh, seed)[0]
    if all(made.get("instead") == f"it returned {told(None)}" for made in found):
        raise Refused(f"fresh(data, device) must return a tensor; it returned {told(None)}")
    whole = True
    for (given, data), made in zip(_cases(seed).items(), found, strict=True):
        yield _kept(given, data, made)
        yield _own(given, data, made.get("shared", ""))
        if given != FLIPPED:
            yield _there(given, made["far"])
            whole = whole and "instead" not in made
    yield Finding(OWN, whole, "not everything became a tensor", "Once the values arrive, look at this again.")


def _kept(given: str, data: Any, made: dict[str, Any]) -> Finding:
    what = KEPT if isinstance(data, ARRAYS) else EXACT
    if "instead" in made:
        hint = "It must be a tensor, whatever comes in: a number, a list, an array, a tensor."
        if given == FLIPPED:
            hint = "A flipped array runs backwards through its memory; a tensor cannot. What straightens it?"
        return Finding(what, False, f"{given}: {made['instead']}", hint)
    dtype, should = made["dtype"], _dtype(data)
    if dtype == should:
        hint = "The type is right, the numbers are not. Were they of another type on the way?"
        return Finding(what, made["values"] == _values(data), f"{given} became {made['values']!s:.60}", hint)
    hint = "Which ways of making a tensor look at the type of what they are given?"
    if what == EXACT and (dtype, should) == ("float32", "float64"):
        hint = "A Python float has 64 bits. Who keeps them: PyTorch's default, or NumPy's?"
    return Finding(what, False, f"{given} became {dtype}, and should be {should}", hint)


def _own(given: str, data: Any, shared: str) -> Finding:
    hint = "A new tensor for each call: is one kept between calls?"
    if isinstance(data, torch.Tensor):
        hint = "A tensor that is on the device already is handed back as it is. How do you ask for a copy?"
    elif isinstance(data, np.ndarray):
        hint = "An array and its tensor can be two names for one memory. Which ways of converting copy?"
    return Finding(OWN, not shared, f"{given}: {shared}", hint)


def _there(given: str, where: str) -> Finding:
    hint = "The second argument says where. What sends a tensor somewhere?"
    if " " in where:  # no device's name
        hint = "Once it becomes a tensor at all, look at this again."
    return Finding(THERE, where == str(FAR), f"{given} was to go to {str(FAR)!r}: {where}", hint)


def _values(data: Any) -> Any:
    return data.tolist() if isinstance(data, ARRAYS) else data


def _dtype(data: Any) -> str:
    dtype = data.dtype if isinstance(data, torch.Tensor) else np.asarray(data).dtype
    return str(dtype).removeprefix("torch.")


def _cases(seed: int) -> dict[str, Any]:
    """What to convert, and how it is called."""
    rng = random.Random(seed)
    big, fraction = 2**53 + 2 * rng.randrange(2**20) + 1, rng.randrange(1, 1000) / 1000 + 1e-7
    small = [rng.randrange(200) for _ in range(6)]
    floats = np.array([rng.random() for _ in range(6)])
    return {
        f"the number {big}": big,
        f"the number {fraction!r}": fraction,
        f"the list [3, {big}]": [3, big],
        f"the list [0.5, {fraction!r}]": [0.5, fraction],
        "the list [True, False]": [True, False],
        f"the list [[1, 2], [3, {big}]]": [[1, 2], [3, big]],
        "a float64 array": floats.copy(),
        "a float32 array": floats.astype(np.float32),
        "an int64 array with a large number": np.array([1, big]),
        "a uint8 array": np.array(small, dtype=np.uint8),
        "a bool array": np.array([True, False, True]),
        "every second column of an array": floats.reshape(2, 3)[:, ::2],
        "a float64 tensor": torch.from_numpy(floats.copy()),
        "a float16 tensor": torch.tensor(small, dtype=torch.float16),
        "an int64 tensor": torch.tensor([1, big]),
        "a row of a tensor": torch.from_numpy(floats.reshape(2, 3).copy())[0],
        "a tensor with gradients": torch.tensor([1.5, small[0] + 0.25], requires_grad=True),
        FLIPPED: floats.copy()[::-1],
    }


def _fresh(answer: Any, seed: int) -> list[dict[str, Any]]:
    found = []
    again = _cases(seed)  # the first ones are written into
    for given, data in _cases(seed).items():
        made = _tensor_of(answer, data, torch.device("cpu"))
        seen = {"instead": made} if isinstance(made, str) else _looked_at(answer, data, made)
        found.append(seen | {"far": _device(_tensor_of(answer, again[given], FAR))})
    return found


def _looked_at(answer: Any, data: Any, made: torch.Tensor) -> dict[str, Any]:
    seen = {"dtype": _dtype(made)}
    if made.device.type != "cpu":
        return seen | {"values": f"a tensor on {made.device}"}
    return seen | {"values": made.tolist(), "shared": _shared(answer, data, made)}


@torch.no_grad()
def _shared(answer: Any, data: Any, made: torch.Tensor) -> str:
    before = _values(data)
    made.detach().bitwise_not_() if made.dtype == torch.bool else made.detach().add_(1)
    if _values(data) != before:
        return "what was written into the tensor is seen in it"
    if isinstance(data, ARRAYS):
        now = made.tolist()
        data[...] = 0
        return "" if made.tolist() == now else "what is written into it is seen in the tensor"
    same = answer(data, torch.device("cpu")).data_ptr() == made.data_ptr()
    return "two calls gave the same tensor" if same else ""


# --- 01.2 -------------------------------------------------------------------------------------------------

RIGHT = "forward(x) is (x - mean) / std, for each column"
MOVES = "after .to(device), nothing of it is left behind"
SAVED = "mean and std are saved with the model, and no optimizer trains them"


@question("01.2", "Standardize", {RIGHT: 1, MOVES: 1, SAVED: 1}, takes=a_module)
def standardize(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    found = ask(_standardized, seed)[0]
    mean, std, x = _columns(seed)
    out, difference = found["out"], far(found["out"], (x - mean) / std)
    seen = out if isinstance(out, str) else f"largest difference to (x - mean) / std: {difference:.2g}"
    if found["shape"] not in (None, list(x.shape)):
        seen = f"it returned a tensor of shape {found['shape']}"
    hint = "forward needs the mean and the std that __init__ was given, as they were given."
    yield Finding(RIGHT, difference < CLOSE, seen, hint)

    if found["left"]:
        seen = f"still on the CPU after .to(device): {', '.join(found['left'])}"
        hint = "Which tensors does a module know as its own? An attribute alone is not known."
    else:
        seen = f"forward on {str(FAR)!r}: {found['far']}"
        hint = "On which device are the tensors that meet in forward?"
    yield Finding(MOVES, not found["left"] and found["far"] == str(FAR), seen, hint)

    restored = far(found["restored"], out) < CLOSE
    if found["trained"]:
        seen = f"model.parameters() gives {found['trained']} of them to the optimizer"
        hint = "Trained: a parameter. Not trained, but part of the model: there is a second kind."
    else:
        seen = f"saved: {', '.join(found['saved']) or 'nothing'}; loaded into a new model: "
        seen += "the same" if restored else "not the same"
        hint = "What the module knows as its own, it saves as well, unless it is told not to."
    yield Finding(SAVED, restored and not found["trained"], seen, hint)


def _columns(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, std, and what is to be standardised."""
    generator = torch.Generator().manual_seed(seed)
    mean, std = torch.randn(5, generator=generator), torch.rand(5, generator=generator) + 0.5
    return mean, std, torch.randn(7, 5, generator=generator)


def _standardized(answer: Any, seed: int) -> dict[str, Any]:
    mean, std, x = _columns(seed)
    model = answer(mean.clone(), std.clone())
    out = _tensor_of(model, x.clone())
    other = answer(torch.zeros(5), torch.ones(5))
    moved = answer(mean.clone(), std.clone()).to(FAR)
    return {
        "out": out,
        "shape": getattr(out, "shape", None),
        "saved": list(model.state_dict()),
        "trained": len(list(model.parameters())),
        "restored": _tensor_of(_restored, model, other, x.clone()),
        "left": sorted(_left("", moved)),
        "far": _device(_tensor_of(moved, x.to(FAR))),
    }


def _restored(model: nn.Module, other: nn.Module, x: torch.Tensor) -> Any:
    other.load_state_dict(model.state_dict())
    return other(x)


def _left(name: str, thing: torch.Tensor | nn.Module) -> list[str]:
    """Names of the tensors in it that are not on `FAR`: parameters, buffers, plain attributes."""
    if isinstance(thing, torch.Tensor):
        return [] if thing.device == FAR else [name]
    left = []
    for path, module in thing.named_modules():
        for key, value in (vars(module) | module._parameters | module._buffers).items():
            if isinstance(value, torch.Tensor):
                left += _left(".".join(filter(None, (name, path, key))), value)
    return left


# --- 01.3 -------------------------------------------------------------------------------------------------

AMONG = "finds the tensors among its arguments that are left behind, and names no other"
INSIDE = "looks into models: parameters and buffers"
PLAIN = "finds the tensors that are plain attributes of a model, or of a layer in it"
LOOK = {
    AMONG: "Each thing has a name and a device. Which device is not the one that was asked for?",
    INSIDE: "A model has no device of its own; its tensors have. What lists them, with names?",
    PLAIN: "What no list of a module has, is in its vars(). A model has modules in it: go through all.",
}


@question("01.3", "left_behind(device, **things)", {AMONG: 1, INSIDE: 1, PLAIN: 1})
def left_behind(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    found = ask(_left_behind, seed)[0]
    if all(got == told(None) for got in found):
        raise Refused("left_behind must return a list of names; it returned nothing (None)")
    for (what, given, things), got in zip(_things(seed), found, strict=True):
        right = sorted(each for name, thing in things.items() for each in _left(name, thing))
        hint = LOOK[what]
        if isinstance(got, list) and set(got) == set(right):
            hint = "The names are right, and not in the order of the alphabet, each of them once."
        yield Finding(what, got == right, f"{given}: it returned {got}, and should return {right}", hint)


def _layer(device: Any = FAR, **plain: torch.Tensor) -> nn.Module:
    layer = nn.Sequential(OrderedDict(linear=nn.Linear(3, 3), norm=nn.BatchNorm1d(3))).to(device)
    for name, tensor in plain.items():
        setattr(layer, name, tensor)
    return layer


def _things(seed: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Property, in words, the arguments."""
    rng = random.Random(seed)
    names = rng.sample(["images", "labels", "weight", "mask", "targets", "tokens"], 4)
    gone = rng.sample(names, 2)
    own = rng.choice(["scale", "mean", "offset", "table"])
    tensors = {name: torch.ones(2, device="cpu" if name in gone else FAR) for name in names}
    whole = nn.Sequential(_layer("cpu"), nn.Linear(3, 2))
    buffer = _layer()
    buffer.norm.running_mean = torch.zeros(3)
    deep = nn.Sequential(nn.Linear(3, 3).to(FAR), nn.Sequential(nn.ReLU(), _layer(**{own: torch.ones(3)})))
    x = {"x": torch.ones(2, device=FAR)}
    return [
        (AMONG, f"tensors {', '.join(names)}", tensors),
        (AMONG, "tensors that have all moved", {name: torch.ones(2, device=FAR) for name in names}),
        (INSIDE, "a model that was never moved", {"model": whole, **x}),
        (INSIDE, "a model with one layer left behind", {"model": nn.Sequential(_layer(), nn.Linear(3, 2))}),
        (INSIDE, "a model with one buffer left behind", {"net": buffer}),
        (INSIDE, "a model that has moved", {"model": _layer(), **x}),
        (PLAIN, "a model with a plain attribute", {"model": _layer(**{own: torch.ones(3)}), **x}),
        (PLAIN, "a plain attribute deep in a model", {"model": deep}),
        (PLAIN, "a plain attribute that is there", {"model": _layer(**{own: torch.ones(3, device=FAR)})}),
    ]


def _left_behind(answer: Any, seed: int) -> list[list[str] | str]:
    return [_names(answer, things) for _, _, things in _things(seed)]


def _names(answer: Any, things: dict[str, Any]) -> list[str] | str:
    try:
        got = answer(FAR, **things)
    except Exception as error:
        return reason(error)
    if not isinstance(got, list | tuple | set | dict):
        return told(got)
    return [each if isinstance(each, str) else told(each) for each in got]
