"""The questions of lesson 01: conversions that lose nothing, and tensors left on another device."""

from __future__ import annotations

import copy
import io
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..in_rank.work import on_each_case
from ..inputs import LAYOUTS, seeds, settings, tensor
from ..judging import far
from ..question import Ask, Finding, Refused, Result, a_module, question
from ..shape import TENSOR, reports
from ..wording import reason, told

FAR = torch.device("meta")  # another device that every machine has
KINDS: tuple[str, ...] = ("float64", "float32", "float16", "int64", "int32", "int16", "uint8", "bool")
KINDS += ("complex64", "complex128")


def _tensor_of(call: Callable[..., Any], *args: Any) -> Any:
    """Return the tensor that a call returns, or in words what it returned or raised instead."""
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
FLIPPED = "a flipped array"  # prefix of the cases with negative strides, which a tensor cannot have
FIXED = "an array that cannot be written"


@question("01.1", "fresh(data, device)", {EXACT: 1, KEPT: 1, OWN: 1, THERE: 1})
def fresh(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    results = ask(_fresh, seed)[0]
    if all(made.get("instead") == f"it returned {told(None)}" for made in results):
        raise Refused(f"fresh(data, device) must return a tensor; it returned {told(None)}")
    whole = True
    for (given, data), made in zip(_cases(seed).items(), results, strict=True):
        yield _kept(given, data, made)
        yield _own(given, data, made["shared"])
        if not given.startswith(FLIPPED):
            yield _there(given, made["to"], made["far"])
            whole = whole and "instead" not in made
    yield Finding(OWN, whole, "not everything became a tensor", "Once the values arrive, look at this again.")


def _kept(given: str, data: Any, made: dict[str, Any]) -> Finding:
    what = KEPT if isinstance(data, ARRAYS) else EXACT
    if "instead" in made:
        hint = "It must be a tensor, whatever comes in: a number, a list, an array, a tensor."
        if given.startswith(FLIPPED):
            hint = "A flipped array runs backwards through its memory; a tensor cannot. What straightens it?"
        return Finding(what, False, f"{given}: {made['instead']}", hint)
    dtype, should, shape = made["dtype"], _dtype(data), list(np.shape(data))
    if dtype != should:
        hint = "Which ways of making a tensor keep the dtype of what they are given?"
        if what == EXACT and (dtype, should) == ("float32", "float64"):
            hint = "A Python float has 64 bits. Which default keeps them: PyTorch's or NumPy's?"
        return Finding(what, False, f"{given} became {dtype}, and should be {should}", hint)
    if made["shape"] != shape:
        seen = f"{given} has the shape {shape}, and its tensor {made['shape']}"
        return Finding(
            what, False, seen, "The dtype is right, the shape is not. A single number has the shape []."
        )
    hint = "The dtype is right, the numbers are not. Did they pass through another dtype on the way?"
    right = _values(data)
    return Finding(what, made["values"] == right, f"{given} became {made['values']!s:.60}", hint)


def _own(given: str, data: Any, shared: str) -> Finding:
    hint = "A new tensor for each call: is one kept between calls?"
    if shared.startswith("it was"):
        hint = "The input may only be read. Who may still need it as it was?"
    elif shared.startswith("a second call"):
        hint = "The input may change between two calls. What does your function keep from one to the next?"
    elif isinstance(data, torch.Tensor):
        hint = "A tensor that is already on the device is returned as it is. How do you ask for a copy?"
    elif isinstance(data, np.ndarray):
        hint = "An array and its tensor can share one memory. Which ways of converting make a copy?"
    return Finding(OWN, not shared, f"{given}: {shared}", hint)


def _there(given: str, device: str, where: str) -> Finding:
    hint = "The second argument says where. What moves a tensor to a device?"
    if " " in where:  # no device's name
        hint = "Once it becomes a tensor at all, look at this again."
    return Finding(THERE, where == str(FAR), f"{given} was to go to {device}: {where}", hint)


def _values(data: Any) -> Any:
    """Return the values as plain numbers; a complex number becomes its real and imaginary part."""
    if isinstance(data, ARRAYS):
        data = torch.from_numpy(np.array(data)) if isinstance(data, np.ndarray) else data.detach()
        return (torch.view_as_real(data) if data.is_complex() else data).tolist()
    return data


def _dtype(data: Any) -> str:
    dtype = data.dtype if isinstance(data, torch.Tensor) else np.asarray(data).dtype
    return str(dtype).removeprefix("torch.")


def _cases(seed: int) -> dict[str, Any]:
    """Return what to convert, by description; the first case of each kind is the simplest."""
    rng = random.Random(seed)
    big, fraction = 2**53 + 2 * rng.randrange(2**20) + 1, rng.randrange(1, 1000) / 1000 + 1e-7
    many = iter(seeds(rng, 40))

    def a(dtype: torch.dtype, *shape: int, layout: str = "plain") -> torch.Tensor:
        return tensor(next(many), shape, dtype, layout)

    cases: dict[str, Any] = {
        f"the number {big}": big,
        f"the number {fraction!r}": fraction,
        f"the number {-big}": -big,
        "the number True": True,
        f"the list [3, {big}]": [3, big],
        f"the list [0.5, {fraction!r}]": [0.5, fraction],
        f"the list [1, {fraction!r}]": [1, fraction],
        "the list [True, False]": [True, False],
        f"the list [[1, 2], [3, {big}]]": [[1, 2], [3, big]],
        f"the list [[[{fraction!r}], [2.0]]]": [[[fraction], [2.0]]],
    }
    kinds = {kind: getattr(torch, kind) for kind in KINDS}
    for kind, dtype in kinds.items():
        cases[f"a {kind} array"] = a(dtype, 5).numpy()
        cases[f"a {kind} tensor"] = a(dtype, 5)
    cases["a bfloat16 tensor"] = a(torch.bfloat16, 5)  # NumPy has no such type
    some = iter(rng.sample(KINDS, 6))
    for layout in LAYOUTS[1:]:
        words = f"two-dimensional, {layout!r} in memory"
        cases[f"an array, {words}"] = a(kinds[next(some)], 3, 4, layout=layout).numpy()
        cases[f"a tensor, {words}"] = a(kinds[next(some)], 3, 4, layout=layout)
    floats = a(torch.float64, 3, 4).numpy()
    cases["every second column of an array"] = floats[:, ::2]
    cases["a row of a tensor"] = a(torch.float64, 3, 4)[1]
    cases["an array of one number, without dimensions"] = a(torch.float64).numpy()
    cases["a tensor of one number, without dimensions"] = a(torch.int64)
    cases["an empty array"] = a(torch.int64, 0).numpy()
    cases["an empty array of the shape [0, 3]"] = a(torch.int16, 0, 3).numpy()
    cases["an empty tensor of the shape [2, 0]"] = a(torch.float16, 2, 0)
    cases["a tensor with gradients"] = a(torch.float64, 3).requires_grad_()
    cases["a parameter"] = nn.Parameter(a(torch.float32, 2, 2))
    cases["a tensor that was computed from one with gradients"] = a(torch.float64, 3).requires_grad_() * 2
    cases[FIXED] = a(torch.float64, 4).numpy()
    cases[FIXED].flags.writeable = False
    cases[FLIPPED] = a(torch.float64, 6).numpy()[::-1]
    cases[f"{FLIPPED}, two-dimensional, along its second axis"] = a(torch.int32, 2, 3).numpy()[:, ::-1]
    return cases


ALL_SEE: Result = {"shared": str, "to": str, "far": str}
MADE = ALL_SEE | {"dtype": str, "shape": [int, ...], "values": object}


@reports(lambda seed: [(MADE, ALL_SEE | {"instead": str})] * len(_cases(seed)))
def _fresh(answer: Any, seed: int) -> list[Result]:
    results = []
    again = _cases(seed)  # a second set, since the answer and `_shared` write into the first
    for place, (given, data) in enumerate(_cases(seed).items()):
        here, far_away = (torch.device("cpu"), FAR) if place % 2 else ("cpu", str(FAR))
        needs = getattr(data, "requires_grad", None)
        before = copy.deepcopy(_values(data))
        made = _tensor_of(answer, data, here)
        as_it_was = _values(data) == before and getattr(data, "requires_grad", None) == needs
        seen = {"shared": ""}
        seen |= {"instead": made} if isinstance(made, str) else _looked_at(answer, data, made, here)
        if not as_it_was:
            seen["shared"] = "it was changed by your call"
        seen |= {"to": repr(far_away), "far": _device(_tensor_of(answer, again[given], far_away))}
        results.append(seen)
    return results


def _looked_at(answer: Any, data: Any, made: torch.Tensor, here: Any) -> Result:
    seen = {"dtype": _dtype(made), "shape": list(made.shape)}
    if made.device.type != "cpu":
        return seen | {"values": f"a tensor on {made.device}"}
    return seen | {"values": _values(made), "shared": _shared(answer, data, made, here)}


@torch.no_grad()
def _shared(answer: Any, data: Any, made: torch.Tensor, here: Any) -> str:
    before, first = _values(data), _values(made)
    _write(made.detach())
    if _values(data) != before:
        return "what was written into the tensor is seen in it"
    now = _values(made)
    if isinstance(data, torch.Tensor):
        _write(data.detach())
    elif isinstance(data, np.ndarray) and data.flags.writeable:
        data[...] = np.logical_not(data) if data.dtype == bool else 0
    if _values(made) != now:
        return "what is written into it is seen in the tensor"
    second = _tensor_of(answer, data, here)
    if isinstance(second, str):
        return f"a second call: {second}"
    if _values(data) != before and _values(second) == first:
        return "a second call, after something was written into it, gives what it held before"
    return "two calls gave the same tensor" * (second.numel() > 0 and second.data_ptr() == made.data_ptr())


def _write(values: torch.Tensor) -> None:
    values.logical_not_() if values.dtype == torch.bool else values.zero_()


# --- 01.2 -------------------------------------------------------------------------------------------------

RIGHT = "forward(x) is (x - mean) / std, for each column"
MOVES = "after .to(device), nothing of it is left behind"
SAVED = "mean and std are saved with the model, and no optimizer trains them"
CLOSE = 1e-12  # tolerance in float64


@question("01.2", "Standardize", {RIGHT: 1, MOVES: 1, SAVED: 1}, takes=a_module)
def standardize(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [(seed, columns) for seed, columns in zip(seeds(rng, 2), rng.sample(range(2, 9), 2), strict=True)]
    for case, result in zip(cases, ask(_standardized, cases)[0], strict=True):
        yield from _of_one(case, result)


def _of_one(case: tuple[int, int], result: Result) -> Iterator[Finding]:
    mean, std, x = _columns(*case)
    out, difference = result["out"], far(result["out"], (x - mean) / std)
    seen = out if isinstance(out, str) else f"largest difference from (x - mean) / std: {difference:.2g}"
    hint = "forward needs the mean and the std that __init__ was given, as they were given."
    if not isinstance(out, str) and (shape := list(torch.as_tensor(out).shape)) != list(x.shape):
        seen = f"it returned a tensor of shape {shape}"
    elif CLOSE <= difference < 1e-5:
        hint = "The first digits are right. Which dtype did the numbers have on the way?"
    elif far(result["out"], result["of_another"]) < CLOSE:
        seen = "two models were made, with different numbers; the first one returns what the second should"
        hint = "What belongs to one model, and what to its whole class?"
    yield Finding(RIGHT, difference < CLOSE, seen, hint)

    left = _on_the_cpu(result["tensors"])
    if left:
        seen = f"still on the CPU after .to(device): {', '.join(left)}"
        hint = "Which tensors does a module know as its own? A plain attribute is not among them."
    else:
        seen = f"forward on {str(FAR)!r}: {result['far']}"
        hint = "On which device are the tensors that meet in forward?"
    moved = not left and bool(result["tensors"] or not result["saved"])  # what is saved is a tensor
    yield Finding(MOVES, moved and result["far"] == str(FAR), seen, hint)

    restored = far(result["restored"], out) < CLOSE < far(result["of_another"], out) < math.inf
    if result["trained"]:
        seen = f"after one step of an optimizer that has all of model.parameters(): {result['trained']}"
        hint = "A parameter is trained. What is part of a model and not trained is of a second kind."
    else:
        seen = f"saved: {', '.join(result['saved']) or 'nothing'}; loaded into a new model: "
        seen += "the same" if restored else "not the same"
        hint = "What the module knows as its own, it saves as well, unless it is told not to."
    yield Finding(SAVED, restored and bool(result["saved"]) and not result["trained"], seen, hint)


def _on_the_cpu(tensors: list[list[str]]) -> list[str]:
    """Return the names of those of `_tensors` that have not moved."""
    names = set()
    for path, attribute, key, device in tensors:
        if device != str(FAR):
            name = key if attribute in ("_parameters", "_buffers") else attribute
            names.add(f"{path}.{name}".removeprefix("1."))
    return sorted(names)


def _columns(seed: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean, the standard deviation and the input to standardize."""
    mean, std, x = (tensor(seed + i, shape) for i, shape in enumerate([(columns,), (columns,), (7, columns)]))
    return mean, std.abs() + 0.5, x


OUT = (TENSOR, str)


@reports(
    lambda cases: (
        [
            {"out": OUT, "of_another": OUT, "restored": OUT, "saved": [str, ...]}
            | {"tensors": [[str, str, str, str], ...], "far": str, "trained": str}
        ]
        * len(cases)
    )
)
@on_each_case
def _standardized(answer: Any, seed: int, columns: int) -> Result:
    """Observe the module as a layer of a larger model, through that model's methods instead of its own."""
    mean, std, x = _columns(seed, columns)

    def whole(*given: torch.Tensor) -> nn.Module:
        return nn.Sequential(nn.Identity(), answer(*(values.clone() for values in given)))

    model, other = whole(mean, std), whole(mean - 3, std * 2)
    result = {"out": _tensor_of(model, x.clone()), "of_another": _tensor_of(other, x.clone())}
    result["saved"] = [name.removeprefix("1.") for name in model.state_dict()]
    result["restored"] = _tensor_of(_restored, model, other, x.clone())
    moved = whole(mean, std).to(FAR)
    result["tensors"] = _tensors(moved)
    result["far"] = _device(_tensor_of(moved, x.to(FAR)))
    return result | {"trained": _trained(whole(mean, std), x)}


# Which of these are left behind the judge says: to find them is what 01.3 asks for, so no work contains that.
def _tensors(model: nn.Module) -> list[tuple[str, str, str, str]]:
    """Return the module, attribute, key and device of each tensor that is an attribute, or in one."""
    rows = []
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            values = value if isinstance(value, list | tuple | dict) else [value]
            parts = values.items() if isinstance(values, dict) else enumerate(values)
            rows += [
                (path, attribute, str(key), str(part.device))
                for key, part in parts
                if isinstance(part, torch.Tensor)
            ]
    return rows


def _restored(model: nn.Module, other: nn.Module, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other(x)


def _trained(model: nn.Module, x: torch.Tensor) -> str:
    """Return in words what a step of an optimizer changed in the outputs; empty if nothing."""
    before, extra = _tensor_of(model, x.clone()), nn.Parameter(torch.ones(()))
    if isinstance(before, str):
        return ""
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1, weight_decay=0.1)
    (before * extra).square().sum().backward()
    optimizer.step()
    after = _tensor_of(model, x.clone())
    return "" if far(after, before.detach()) == 0 else "its outputs for the same inputs have changed"


def _left(name: str, thing: torch.Tensor | nn.Module, device: Any) -> list[str]:
    """List the names of tensors that are not on the device: parameters, buffers and plain attributes."""
    if isinstance(thing, torch.Tensor):
        return [] if thing.device == device else [name]
    left = []
    for path, module in thing.named_modules():
        known = {"_parameters", "_buffers", "_modules"}
        plain = {key: value for key, value in vars(module).items() if key not in known}
        for key, value in (plain | module._parameters | module._buffers).items():
            if isinstance(value, torch.Tensor) and value.device != device:
                left.append(".".join(filter(None, (name, path, key))))
    return list(dict.fromkeys(left))


# --- 01.3 -------------------------------------------------------------------------------------------------

AMONG = "finds the tensors among its arguments that are left behind, and names no other"
INSIDE = "looks into models: parameters and buffers"
PLAIN = "finds the tensors that are plain attributes of a model, or of a layer in it"
LOOK = {
    AMONG: "Each thing has a name and a device. Which device is not the one that was asked for?",
    INSIDE: "A model has no device of its own; its tensors have. What lists them, with names?",
    PLAIN: "What a module does not register is in its vars(). Go through all modules of the model.",
}
HERE, NEXT = torch.device("cpu"), torch.device("cuda:1")
MOVED = "a model that was left behind when you were asked before, and has moved since"
Things = dict[str, Any]


@question("01.3", "left_behind(device, **things)", {AMONG: 1, INSIDE: 1, PLAIN: 1})
def left_behind(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    results = ask(_left_behind, seed)[0]
    if all(result["got"] == told(None) for result in results):
        raise Refused("left_behind must return a list of names; it returned nothing (None)")
    for (what, given, device, things), result in zip(_things(seed), results, strict=True):
        if given == MOVED:
            things["model"].to(FAR)
        got = result["got"]
        right = sorted(left for name, thing in things.items() for left in _left(name, thing, device))
        hint = LOOK[what]
        if isinstance(got, list) and set(got) == set(right):
            hint = "The names are right, but they are not sorted, or one comes twice."
        elif device != FAR and isinstance(got, list):
            hint = "A tensor is left behind if it is on another device than the given one, whichever that is."
        elif given == MOVED:
            hint = "Tensors move while their names stay. What do you keep from an earlier call?"
        seen = f"{given}, and the device is {device}: it returned {got}, and should return {right}"
        yield Finding(what, got == right, seen, hint)
        hint = "A search only reads. Which dict of a module did you write into?"
        seen = f"{given}: after your call the model has other parameters, buffers or attributes, "
        seen += "or a parameter is frozen"
        yield Finding(what, result["as_it_was"], seen, hint)


class _OnAGpu(torch.Tensor):
    """A CPU tensor that claims to be on ``cuda:0``."""

    device = torch.device("cuda:0")


class _OnTheNext(torch.Tensor):
    device = torch.device("cuda:1")


def _on_a_gpu(second: bool) -> torch.Tensor:
    return torch.ones(2, 2).as_subclass(_OnTheNext if second else _OnAGpu)


def _layer(device: Any = FAR, **plain: torch.Tensor) -> nn.Module:
    """Build a layer of a linear without bias, a norm without weights, and a buffer that is not saved."""
    norm, linear = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3, bias=False)
    layer = nn.Sequential(OrderedDict(linear=linear.requires_grad_(False), _norm=norm))
    layer.register_buffer("table_", torch.ones(2), persistent=False)
    layer.to(device)
    for name, value in plain.items():
        setattr(layer, name, value)
    return layer


def _things(seed: int) -> list[tuple[str, str, torch.device, Things]]:
    """Return the cases: property, description, device and arguments."""
    rng = random.Random(seed)
    names = rng.sample(["images", "labels", "weight", "mask", "targets", "tokens"], 4)
    gone = rng.sample(names, 2)
    own, hidden = rng.choice(["scale", "mean", "offset", "table"]), rng.choice(["_cache", "_shift"])
    tensors = {name: torch.ones(2, device=HERE if name in gone else FAR) for name in names}
    swapped = {name: torch.ones(2, device=FAR if name in gone else HERE) for name in names}
    gpus = {name: _on_a_gpu(name in gone) for name in names}
    shared_out = nn.Linear(2, 2, bias=False)
    shared_out.weight = nn.Parameter(_on_a_gpu(second=True))
    shared_out.register_buffer("table_", _on_a_gpu(second=False))
    part = nn.ModuleDict({"part": nn.Tanh()})
    setattr(part["part"], own, _on_a_gpu(second=False))
    setattr(part["part"], hidden, _on_a_gpu(second=True))
    whole = nn.Sequential(_layer(HERE), nn.Linear(3, 2))
    buffer, table = _layer(), _layer()
    buffer.get_submodule("_norm").running_mean = torch.zeros(3)
    table.table_ = torch.ones(2)
    frozen = nn.Sequential(_layer(), nn.Sequential(nn.Linear(3, 2).to(FAR)))
    frozen.get_submodule("1.0").bias = nn.Parameter(torch.ones(2), requires_grad=False)
    deep = nn.Sequential(nn.Linear(3, 3).to(FAR), nn.Sequential(nn.ReLU(), _layer(**{own: torch.ones(3)})))
    many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
    both = {hidden: torch.ones(3), own: torch.ones((), dtype=torch.int64)}
    x = {"x": torch.ones(2, device=FAR)}
    inside: list[tuple[str, Things]] = [
        ("a model that was never moved", {"model": whole, **x}),
        ("a model with one layer left behind", {"model": nn.Sequential(_layer(), nn.Linear(3, 2))}),
        ("a model with one buffer left behind", {"net": buffer}),
        ("a model with one buffer left behind that is not saved", {"net": table}),
        ("a model with one frozen parameter left behind", {"net": frozen}),
        ("a model that has moved", {"model": _layer(), **x}),
        ("two models, and one of eleven layers", {"student": many, "teacher": nn.Linear(2, 1)}),
        (MOVED, {"model": nn.Sequential(_layer(HERE), nn.Linear(3, 2))}),
    ]
    plain: list[tuple[str, Things]] = [
        ("a model with a plain attribute", {"model": _layer(**{own: torch.ones(3)}), **x}),
        ("a plain attribute deep in a model", {"model": deep}),
        ("plain attributes, one with an underscore", {"model": nn.Sequential(_layer(**both))}),
        ("a plain attribute that is there", {"model": _layer(**{own: torch.ones(3, device=FAR)})}),
    ]
    stays = {"model": nn.Sequential(_layer(HERE, **{own: torch.ones(2, device=FAR)}))}
    return [
        (AMONG, f"tensors {', '.join(names)}", FAR, tensors),
        (AMONG, "tensors that have all moved", FAR, {name: torch.ones(2, device=FAR) for name in names}),
        (AMONG, f"tensors, of which {' and '.join(gone)} have moved to {FAR}", HERE, swapped),
        (AMONG, f"tensors on two GPUs: {', '.join(names)}", NEXT, gpus),
        (AMONG, "nothing at all", FAR, {}),
        *((INSIDE, words, FAR, things) for words, things in inside),
        (INSIDE, "a model on two GPUs", NEXT, {"net": shared_out}),
        (INSIDE, "a model with one layer that has moved", HERE, {"net": nn.Sequential(whole, _layer())}),
        *((PLAIN, words, FAR, things) for words, things in plain),
        (PLAIN, "plain attributes on two GPUs", NEXT, {"model": part}),
        (PLAIN, "a model whose plain attribute has moved", HERE, stays),
    ]


@reports(lambda seed: [{"got": ([str, ...], str), "as_it_was": bool}] * len(_things(seed)))
def _left_behind(answer: Any, seed: int) -> list[Result]:
    results = []
    for _, words, device, things in _things(seed):
        if words == MOVED:  # ask once before the move
            _names(answer, device, things)
            things["model"].to(FAR)
        before = _held(things)
        got = _names(answer, device, things)
        results.append({"got": got, "as_it_was": _held(things) == before})
    return results


def _held(things: Things) -> list[Any]:
    """Return names and ids of the attributes, parameters and buffers of all modules, and `settings`."""
    models = [thing for thing in things.values() if isinstance(thing, nn.Module)]
    modules = [module for model in models for module in model.modules()]
    kept = [part for module in modules for part in (vars(module), module._parameters, module._buffers)]
    return [[(name, id(value)) for name, value in part.items()] for part in kept] + [*map(settings, models)]


def _names(answer: Any, device: torch.device, things: Things) -> list[str] | str:
    try:
        got = answer(device, **things)
    except Exception as error:
        return reason(error)
    if not isinstance(got, list | tuple | set | dict):
        return told(got)
    return [name if isinstance(name, str) else told(name) for name in got]
