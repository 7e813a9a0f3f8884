"""The questions of lesson 01: conversions that keep everything, tensors that are left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
FAR = torch.device("meta")  # another device, on every machine
CLOSE = 1e-5


def _told(error: Exception) -> str:
    reason = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {reason:.90}"


# --- 01.1 -------------------------------------------------------------------------------------------------

EXACT = "Python numbers and lists arrive exactly, as int64, float64 or bool"
KEPT = "arrays and tensors keep their dtype and their values"
OWN = "what is written into one side is never seen on the other"
THERE = "it arrives on the device that was asked for"


@question("01.1", {EXACT: 1, KEPT: 1, OWN: 1, THERE: 1})
def fresh(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "fresh(data, device)")
    seed = rng.randrange(2**31)
    found = observe(_fresh, answer, seed)[0]
    if all(each["made"] == "NoneType" for each in found):
        raise Refused("fresh(data, device) shall return a tensor; it returned nothing (None)")

    for what, python in ((EXACT, True), (KEPT, False)):
        wrong = next((each for each in found if each["python"] == python and not _intact(each)), None)
        yield what, wrong is None, *_of_values(wrong)

    wrong = next((each for each in found if each["shared"]), None)
    whole = all(each["made"] == "Tensor" for each in found if not each["flipped"])
    if wrong is None:
        seen, hint = "not everything became a tensor", "Once the values arrive, look at this again."
    elif wrong["shared"] == "storage":
        seen = f"{wrong['given']} and the tensor made of it use the same memory"
        hint = _of_sharing(wrong)
    else:
        seen = f"{wrong['given']}: {wrong['shared']}"
        hint = _of_sharing(wrong)
    yield OWN, wrong is None and whole, seen, hint

    wrong = next((each for each in found if each["far"] != str(FAR) and not each["flipped"]), None)
    seen = "" if wrong is None else f"{wrong['given']} was to go to {str(FAR)!r}: {wrong['far']}"
    hint = "The second argument says where. What sends a tensor somewhere?"
    if wrong is not None and ": " in wrong["far"]:
        hint = "Once it becomes a tensor at all, look at this again."
    yield THERE, wrong is None, seen, hint


def _intact(case: dict[str, Any]) -> bool:
    return case["dtype"] == case["should"] and case["exact"]


def _of_values(case: dict[str, Any] | None) -> tuple[str, str]:
    if case is None:
        return "", ""
    if case["made"] != "Tensor":
        seen = f"{case['given']}: {case['error'] or 'it became ' + case['made']}"
        if case["flipped"]:
            hint = (
                "A flipped array runs backwards through its memory, and a tensor cannot. What straightens it?"
            )
        else:
            hint = "It shall be a tensor, whatever comes in: a number, a list, an array, a tensor."
        return seen, hint
    seen = f"{case['given']} became {case['dtype']}, and should be {case['should']}"
    if case["dtype"] == case["should"]:
        seen = f"{case['given']} became {case['value']}"
        return seen, "The type is right, the numbers are not. Were they of another type on the way?"
    if case["should"] == "float64" and case["dtype"] == "float32" and case["python"]:
        return seen, "A Python float has 64 bits. Who keeps them: PyTorch's default, or NumPy's?"
    return seen, "Which ways of making a tensor look at the type of what they are given?"


def _of_sharing(case: dict[str, Any]) -> str:
    if case["python"]:
        return "A new tensor for each call: is one kept between calls?"
    if case["tensor"]:
        return "A tensor that is on the device already is handed back as it is. How do you ask for a copy?"
    return (
        "An array and the tensor made of it can be two names for one memory. Which ways of converting copy?"
    )


def _cases(seed: int) -> list[tuple[str, Any, str]]:
    """What to convert: in words, the thing, the dtype that it shall have."""
    rng = random.Random(seed)
    big, fraction = 2**53 + 2 * rng.randrange(2**20) + 1, rng.randrange(1, 1000) / 1000 + 1e-7
    small = [rng.randrange(200) for _ in range(6)]
    floats = np.array([rng.random() for _ in range(6)])
    return [
        (f"the number {big}", big, "int64"),
        (f"the number {fraction!r}", fraction, "float64"),
        (f"the list [3, {big}]", [3, big], "int64"),
        (f"the list [0.5, {fraction!r}]", [0.5, fraction], "float64"),
        ("the list [True, False]", [True, False], "bool"),
        (f"the list [[1, 2], [3, {big}]]", [[1, 2], [3, big]], "int64"),
        ("a float64 array", floats.copy(), "float64"),
        ("a float32 array", floats.astype(np.float32), "float32"),
        ("an int64 array with a large number", np.array([1, big]), "int64"),
        ("a uint8 array", np.array(small, dtype=np.uint8), "uint8"),
        ("a bool array", np.array([True, False, True]), "bool"),
        ("every second column of an array", floats.reshape(2, 3)[:, ::2], "float64"),
        ("a float64 tensor", torch.from_numpy(floats.copy()), "float64"),
        ("a float16 tensor", torch.tensor(small, dtype=torch.float16), "float16"),
        ("an int64 tensor", torch.tensor([1, big]), "int64"),
        ("a row of a tensor", torch.from_numpy(floats.reshape(2, 3).copy())[0], "float64"),
        ("a tensor with gradients", torch.tensor([1.5, small[0] + 0.25], requires_grad=True), "float32"),
        ("a flipped array", floats.copy()[::-1], "float64"),
    ]


def _fresh(answer: Any, seed: int) -> list[dict[str, Any]]:
    found = []
    for at, (given, data, should) in enumerate(_cases(seed)):
        case: dict[str, Any] = {
            "given": given,
            "should": should,
            "python": not isinstance(data, np.ndarray | torch.Tensor),
            "tensor": isinstance(data, torch.Tensor),
            "flipped": given == "a flipped array",
            "made": "",
            "dtype": "",
            "value": "",
            "exact": False,
            "error": "",
            "shared": "",
            "far": "",
        }
        values = _values(data)
        try:
            made = answer(data, torch.device("cpu"))
        except Exception as error:
            case["error"] = _told(error)
        else:
            case["made"] = "Tensor" if isinstance(made, torch.Tensor) else type(made).__name__
            if isinstance(made, torch.Tensor):
                case |= _looked_at(made, data, values, answer)
        try:
            moved = answer(_cases(seed)[at][1], FAR)
        except Exception as error:
            case["far"] = _told(error)
        else:
            on = isinstance(moved, torch.Tensor)
            case["far"] = str(moved.device) if on else f"it became {type(moved).__name__}"
        found.append(case)
    return found


def _values(data: Any) -> Any:
    return data.tolist() if isinstance(data, np.ndarray | torch.Tensor) else data


def _looked_at(made: torch.Tensor, data: Any, values: Any, answer: Any) -> dict[str, Any]:
    seen = {"dtype": str(made.dtype).removeprefix("torch."), "shared": ""}
    if made.device.type != "cpu":
        return seen | {"value": f"a tensor on {made.device}"}
    seen |= {"exact": made.tolist() == values, "value": f"{made.tolist()!r:.60}"}
    with torch.no_grad():
        before = _values(data)
        made.detach().bitwise_not_() if made.dtype == torch.bool else made.detach().add_(1)
        if _values(data) != before:
            seen["shared"] = "what was written into the tensor is seen in it"
        elif isinstance(data, np.ndarray | torch.Tensor):
            now = made.tolist()
            data[...] = 0
            if made.tolist() != now:
                seen["shared"] = "what is written into it is seen in the tensor"
        elif answer(data, torch.device("cpu")).data_ptr() == made.data_ptr():
            seen["shared"] = "two calls gave the same tensor"
    return seen


# --- 01.2 -------------------------------------------------------------------------------------------------

RIGHT = "forward(x) is (x - mean) / std, for each column"
MOVES = "after .to(device), nothing of it is left behind"
SAVED = "mean and std are saved with the model, and no optimizer trains them"


@question("01.2", {RIGHT: 1, MOVES: 1, SAVED: 1})
def standardize(answer: Any, rng: random.Random) -> Found:
    if not (isinstance(answer, type) and issubclass(answer, nn.Module)):
        raise Refused(f"Standardize is a class, a nn.Module; this is {answer!r:.60}")
    found = observe(_standardized, answer, rng.randrange(2**31))[0]
    moved = not found["left"] and found["far"] == str(FAR)
    seen = found["wrong"] or f"largest difference to (x - mean) / std: {found['difference']:.2g}"
    ok = not found["wrong"] and found["difference"] < CLOSE
    yield RIGHT, ok, seen, "forward needs the mean and the std that __init__ was given, as they were given."
    if found["left"]:
        seen = f"still on the CPU after .to(device): {', '.join(found['left'])}"
        hint = "Which tensors does a module know as its own? An attribute alone is not known."
    else:
        seen = f"forward on {str(FAR)!r}: {found['far']}"
        hint = "On which device are the tensors that meet in forward?"
    yield MOVES, moved, seen, hint
    if found["trained"]:
        seen = f"model.parameters() gives {found['trained']} of them to the optimizer"
        hint = "Trained: a parameter. Not trained, but part of the model: there is a second kind."
    else:
        seen = f"saved: {', '.join(found['saved']) or 'nothing'}; loaded into a new model: "
        seen += "the same" if found["restored"] else "not the same"
        hint = "What the module knows as its own, it saves as well, unless it is told not to."
    yield SAVED, found["restored"] and not found["trained"], seen, hint


def _standardized(answer: Any, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    mean, std = torch.randn(5, generator=generator), torch.rand(5, generator=generator) + 0.5
    x = torch.randn(7, 5, generator=generator)
    model = answer(mean.clone(), std.clone())
    found: dict[str, Any] = {"wrong": "", "difference": 0.0, "far": "", "restored": False}
    try:
        out = model(x.clone())
    except Exception as error:
        out, found["wrong"] = None, _told(error)
    if found["wrong"]:
        pass
    elif not isinstance(out, torch.Tensor) or out.shape != x.shape:
        found["wrong"] = f"it returned {type(out).__name__}, shape {list(getattr(out, 'shape', []))}"
    else:
        found["difference"] = float((out.detach() - (x - mean) / std).abs().nan_to_num(float("inf")).max())
    found["saved"] = list(model.state_dict())
    found["trained"] = len(list(model.parameters()))
    other = answer(torch.zeros(5), torch.ones(5))
    try:
        other.load_state_dict(model.state_dict())
        again = other(x.clone())
        found["restored"] = bool(torch.allclose(again, out, atol=CLOSE))
    except Exception:
        found["restored"] = False
    moved = answer(mean.clone(), std.clone()).to(FAR)
    found["left"] = _not_there(moved)
    try:
        found["far"] = str(moved(x.to(FAR)).device)
    except Exception as error:
        found["far"] = _told(error)
    return found


def _not_there(model: nn.Module) -> list[str]:
    """Names of a module's tensors that are not on `FAR`: parameters, buffers, plain attributes."""
    left = []
    for prefix, module in model.named_modules():
        held = vars(module) | module._parameters | module._buffers
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.device != FAR:
                left.append(f"{prefix}.{name}" if prefix else name)
    return sorted(left)


# --- 01.3 -------------------------------------------------------------------------------------------------

AMONG = "finds the tensors among its arguments that are left behind, and names no other"
INSIDE = "looks into models: parameters and buffers"
PLAIN = "finds the tensors that are plain attributes of a model, or of a layer in it"


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@question("01.3", {AMONG: 1, INSIDE: 1, PLAIN: 1})
def left_behind(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "left_behind(device, **things)")
    seed = rng.randrange(2**31)
    found = observe(_left_behind, answer, seed)[0]
    if all(each["got"] == "None" for each in found):
        raise Refused("left_behind shall return a list of names; it returned nothing (None)")
    for what, hint in (
        (
            AMONG,
            "Each thing has a name and a device. Which device is not the one that was asked for?",
        ),
        (
            INSIDE,
            "A model has no device of its own; its tensors have. What lists them, with names?",
        ),
        (
            PLAIN,
            "What no list of a module has, is in its vars(). A model has modules in it: go through all.",
        ),
    ):
        wrong = next((each for each in found if each["what"] == what and each["got"] != each["right"]), None)
        seen = ""
        if wrong:
            seen = f"{wrong['given']}: it returned {wrong['got']}, and should return {wrong['right']}"
            if wrong["got"] != wrong["right"] and wrong["sorted"]:
                hint = "The names are right, and not in the order of the alphabet, each of them once."
        yield what, wrong is None, seen, hint


def _things(rng: random.Random) -> list[tuple[str, str, dict[str, Any], list[str]]]:
    """Property, in words, the arguments, what is right."""
    names = rng.sample(["images", "labels", "weight", "mask", "targets", "tokens"], 4)
    gone = sorted(rng.sample(names, 2))
    tensors = {name: torch.ones(2, device="cpu" if name in gone else FAR) for name in names}
    none = {name: torch.ones(2, device=FAR) for name in names}

    whole = nn.Sequential(_Layer(), nn.Linear(3, 2))
    all_names = sorted(f"model.{name}" for name, _ in (*whole.named_parameters(), *whole.named_buffers()))
    half = nn.Sequential(_Layer().to(FAR), nn.Linear(3, 2))
    buffer = _Layer().to(FAR)
    buffer.norm.running_mean = torch.zeros(3)

    name = rng.choice(["scale", "mean", "offset", "table"])
    plain = _Layer().to(FAR)
    setattr(plain, name, torch.ones(3))
    deep = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), _Layer()))
    setattr(deep[1][1], name, torch.ones(3))
    deep.to(FAR)
    fine = _Layer()
    setattr(fine, name, torch.ones(3, device=FAR))
    fine.to(FAR)
    x = {"x": torch.ones(2, device=FAR)}
    return [
        (AMONG, f"tensors {', '.join(names)}", tensors, gone),
        (AMONG, "tensors that have all moved", none, []),
        (INSIDE, "a model that was never moved", {"model": whole, **x}, all_names),
        (INSIDE, "a model with one layer left behind", {"model": half}, ["model.1.bias", "model.1.weight"]),
        (INSIDE, "a model with one buffer left behind", {"net": buffer}, ["net.norm.running_mean"]),
        (INSIDE, "a model that has moved", {"model": _Layer().to(FAR), **x}, []),
        (PLAIN, "a model with a plain attribute", {"model": plain, **x}, [f"model.{name}"]),
        (PLAIN, "a plain attribute deep in a model", {"model": deep}, [f"model.1.1.{name}"]),
        (PLAIN, "a plain attribute that is there", {"model": fine}, []),
    ]


def _left_behind(answer: Any, seed: int) -> list[dict[str, Any]]:
    found = []
    for what, given, things, right in _things(random.Random(seed)):
        try:
            got = answer(FAR, **things)
            got = list(got) if isinstance(got, list | tuple | set | dict) else got
            told = repr(got) if got is None or isinstance(got, list) else f"{got!r:.80}"
        except Exception as error:
            got, told = None, _told(error)
        same = isinstance(got, list) and {str(each) for each in got} == set(right)
        found.append({"what": what, "given": given, "got": told, "right": repr(right), "sorted": same})
    return found
