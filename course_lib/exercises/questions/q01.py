"""The questions of lesson 01: a copy that shares nothing, and tensors left on another device."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..inputs import seeds, tensor
from ..question import REST, Ask, Finding, Refused, Result, question
from ..shape import reports
from ..wording import reason, told

CPU, FAR = torch.device("cpu"), torch.device("meta")  # another device that every machine has

# --- 01.1 -------------------------------------------------------------------------------------------------

KEPT = "dtype, shape and values arrive as they were"
OWN = "what is written into one side is never seen on the other"
THERE = "it arrives on the device that was asked for"
KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


@question(
    "01.1",
    "fresh(data, device)",
    {KEPT: 2, OWN: 1, THERE: 1},
    hints={
        KEPT: {
            "no tensor": "It must be a tensor, whatever comes in: a number, a list, an array, a tensor.",
            "another dtype": "Which call on the way changes the dtype?",
            "other numbers": "The dtype is right, the numbers are not. Which dtype did they pass through?",
        },
        OWN: {
            "shares": "On the same device, which of your calls makes a copy? See the lesson's rule.",
            "input changed": "The input may only be read. Who may still need it unchanged?",
        },
        THERE: {"not moved": "The second argument says where. What does a tensor's own move return?"},
    },
)
def fresh(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    results = ask(_fresh, seed)[0]
    if all(made.get("instead") == f"it returned {told(None)}" for made in results):
        raise Refused(f"fresh(data, device) must return a tensor; it returned {told(None)}")
    for (given, data), made in zip(_cases(seed).items(), results, strict=True):
        if "instead" in made:
            for what in (KEPT, OWN, THERE):
                fault = "no tensor" if what == KEPT else REST
                yield Finding(what, False, f"{given}: {made['instead']}", fault)
            continue
        if not isinstance(data, torch.Tensor):
            data = torch.from_numpy(np.array(data))
        right = {"dtype": str(data.dtype), "shape": list(data.shape), "values": data.tolist()}
        fault = "other numbers" if made["dtype"] == right["dtype"] else "another dtype"
        wrong = next((part for part in right if made[part] != right[part]), "values")
        seen = f"{given}: its {wrong} became {made[wrong]!s:.60}, and should be {right[wrong]!s:.60}"
        yield Finding(KEPT, made[wrong] == right[wrong], seen, fault)
        fault = "input changed" if made["shared"].startswith("your call") else "shares"
        yield Finding(OWN, not made["shared"], f"{given}: {made['shared']}", fault)
        yield Finding(
            THERE, made["far"] == str(FAR), f"{given} should be on {FAR}: it is on {made['far']}", "not moved"
        )


def _cases(seed: int) -> dict[str, Any]:
    """Return what to convert, by description."""
    rng, many = random.Random(seed), iter(seeds(random.Random(seed), 40))
    big, fraction = 2**53 + 2 * rng.randrange(2**20) + 1, rng.randrange(1, 1000) / 1000 + 1e-7
    cases: dict[str, Any] = {f"the number {number}": number for number in (big, fraction, True)}
    for listed in ([fraction, 0.5], [3, big], [[1, 2], [3, fraction]]):
        cases[f"the list {listed}"] = listed
    for kind in KINDS:
        cases[f"a {kind} tensor"] = tensor(next(many), (2, 3), getattr(torch, kind))
        if kind != "bfloat16":  # NumPy has no such type
            cases[f"a {kind} array"] = tensor(next(many), (5,), getattr(torch, kind)).numpy()
    cases["a flipped array"] = tensor(next(many), (4,)).numpy()[::-1]
    cases["a transposed tensor"] = tensor(next(many), (2, 3)).T
    cases["a tensor of one number, without dimensions"] = tensor(next(many), ())
    cases["an empty tensor"] = tensor(next(many), (0, 3))
    cases["a parameter"] = nn.Parameter(tensor(next(many), (2, 2), torch.float32))
    return cases


@reports(
    lambda seed: (
        [({"dtype": str, "shape": [int, ...], "values": object, "shared": str, "far": str}, {"instead": str})]
        * len(_cases(seed))
    )
)
def _fresh(answer: Any, seed: int) -> list[Result]:
    results: list[Result] = []
    for data, again in zip(_cases(seed).values(), _cases(seed).values(), strict=True):
        before = str(data)  # which shows requires_grad, too
        made, far_away = _tensor_of(answer, data, "cpu"), _tensor_of(answer, again, FAR)
        if isinstance(made, str) or isinstance(far_away, str):
            results.append({"instead": made if isinstance(made, str) else far_away})
            continue
        seen = {"dtype": str(made.dtype), "shape": list(made.shape), "values": f"a tensor on {made.device}"}
        seen |= {"shared": "your call changed it" * (str(data) != before), "far": str(far_away.device)}
        if made.device.type == "cpu":
            seen["values"] = made.tolist()
            made.detach().copy_(made.detach() == 0)
            if str(data) != before and not seen["shared"]:
                seen["shared"] = "what was written into its tensor is seen in it"
        results.append(seen)
    return results


def _tensor_of(call: Callable[..., Any], *args: Any) -> torch.Tensor | str:
    """Return the tensor that a call returns, or in words what it returned or raised instead."""
    try:
        made = call(*args)
    except Exception as error:
        return reason(error)
    return made if isinstance(made, torch.Tensor) else f"it returned {told(made)}"


# --- 01.2 -------------------------------------------------------------------------------------------------

AMONG = "finds the tensors among its arguments that are left behind, and names no other"
INSIDE = "looks into models: parameters and buffers"
PLAIN = "finds the tensors that are plain attributes of a model, or of a module in it"
READS = "A search only reads. Which dict of a module did you write into?"
NAMES = "Compare the two lists: full paths with single dots, sorted, and each name once."
Case = tuple[str, str, torch.device, dict[str, Any], list[str]]


@question(
    "01.2",
    "left_behind(device, **things)",
    {AMONG: 2, INSIDE: 2, PLAIN: 2},
    hints={
        AMONG: {
            "another device": "A tensor is left behind if it is not on the given device, whichever that is.",
            "other names": NAMES,
        },
        INSIDE: {
            "not inside": "A model has two kinds of tensors, and not all are saved. What gives each kind?",
            "other names": NAMES,
            "it writes": READS,
        },
        PLAIN: {
            "not registered": "What a module does not register is in its vars(). Ask each module.",
            "other names": NAMES,
        },
    },
)
def left_behind(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    results = ask(_left_behind, seed)[0]
    if all(result["got"] == told(None) for result in results):
        raise Refused("left_behind must return a list of names; it returned nothing (None)")
    faults = {AMONG: "another device", INSIDE: "not inside", PLAIN: "not registered"}
    for (what, given, device, _, right), result in zip(_things(seed), results, strict=True):
        got = result["got"]
        seen = f"{given}, and the device is {device}: it gave {got}, and should return {right}"
        some = isinstance(got, list) and bool(set(got) & set(right))
        named = isinstance(got, list) and (set(got) == set(right) or (what != AMONG and got and not some))
        named = named or ".." in str(got)
        yield Finding(what, got == right, seen, "other names" if named else faults[what])
        seen = f"{given}: after your call it has other parameters, buffers or attributes"
        yield Finding(INSIDE, result["as_it_was"], seen, "it writes")


class _OnTheNext(torch.Tensor):
    """A CPU tensor that claims to be on ``cuda:1``."""

    device = torch.device("cuda:1")


def _layer() -> nn.Sequential:
    """Build a linear layer and a norm on `FAR`, and a buffer that is not saved."""
    layer = nn.Sequential(OrderedDict(linear=nn.Linear(3, 3), _norm=nn.BatchNorm1d(3, affine=False)))
    layer.register_buffer("table_", torch.ones(2), persistent=False)
    return layer.to(FAR)


def _things(seed: int) -> list[Case]:
    """Return the cases: property, description, device, arguments, and the names of tensors left behind."""
    rng = random.Random(seed)
    names = rng.sample(["images", "labels", "weight", "mask", "targets", "tokens"], 4)
    net = rng.choice(["model", "net", "student", "teacher", "encoder"])
    own, hidden = rng.choice(["mean", "scale", "offset"]), rng.choice(["_cache", "_shift", "_seen"])
    here, gone = sorted(names[:2]), sorted(names[2:])
    mixed = {name: torch.ones(2, device=FAR if name in gone else CPU) for name in names}
    next_gpu = {name: torch.ones(2).as_subclass(_OnTheNext) for name in here}
    whole = nn.Sequential(OrderedDict(head=nn.Linear(3, 2), norm=nn.BatchNorm1d(3, affine=False)))
    of_whole = [
        "head.bias",
        "head.weight",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    frozen, table, plain = (nn.Sequential(nn.ReLU(), _layer()) for _ in range(3))
    frozen.get_submodule("1.linear").bias = nn.Parameter(torch.ones(3), requires_grad=False)
    table[1].table_ = torch.ones(2)
    setattr(plain, own, torch.ones(2))
    setattr(plain.get_submodule("1._norm"), hidden, torch.ones(2))
    moved = _layer()
    setattr(moved, own, torch.ones(2, device=FAR))
    return [
        (AMONG, f"tensors {', '.join(names)}", FAR, mixed, here),
        (AMONG, f"tensors {', '.join(names)}", CPU, mixed, gone),
        (AMONG, f"tensors {', '.join(here)} on cuda:1", torch.device("cuda:0"), next_gpu, here),
        (INSIDE, "a model that was never moved", FAR, {net: whole}, [f"{net}.{name}" for name in of_whole]),
        (INSIDE, "a model that has moved, and a tensor", CPU, {net: whole, **mixed}, gone),
        (INSIDE, "one frozen parameter left behind", FAR, {net: frozen}, [f"{net}.1.linear.bias"]),
        (INSIDE, "one unsaved buffer left behind", FAR, {net: table}, [f"{net}.1.table_"]),
        (PLAIN, "plain attributes", FAR, {net: plain}, sorted([f"{net}.{own}", f"{net}.1._norm.{hidden}"])),
        (PLAIN, "a plain attribute that is there", FAR, {net: moved}, []),
    ]


@reports(lambda seed: [{"got": ([str, ...], str), "as_it_was": bool}] * len(_things(seed)))
def _left_behind(answer: Any, seed: int) -> list[Result]:
    results = []
    for _, _, device, things, _ in _things(seed):
        before = _held(things)
        try:
            got = answer(device, **things)
        except Exception as error:
            got = reason(error)
        else:
            got = list(map(str, got)) if isinstance(got, list | tuple) else told(got)
        results.append({"got": got, "as_it_was": _held(things) == before})
    return results


def _held(things: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """Return the names and ids of all that the modules hold."""
    models = [thing for thing in things.values() if isinstance(thing, nn.Module)]
    modules = [module for model in models for module in model.modules()]
    parts = [part for module in modules for part in (vars(module), module._parameters, module._buffers)]
    return [[(name, id(value)) for name, value in part.items()] for part in parts]
