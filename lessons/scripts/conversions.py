"""A row of lesson 01's table: what a line of code that converts a number does to its type, value and memory.

from scripts.conversions import attempt  # in a notebook of the folder lessons
"""

import numpy as np
import torch

NUMBERS = {"2²⁴+1": 2**24 + 1, "2⁵³+1": 2**53 + 1, "0.1": 0.1}  # easy to lose
LETTERS = {"number": "v", "list": "l", "NumPy array": "a", "CPU tensor": "t", "device tensor": "d"}


def attempt(call, source, target, device):
    """A row of the table: ``call`` run as it stands, with each of the numbers in the form ``source``.

    In ``call``, the letter of ``source`` is the number in that form.
    """
    row = {"call": call, "source": source, "target": target, "shares": False, "lost": [], "error": ""}
    changes = []
    for name, number in NUMBERS.items():
        try:
            given = in_form(source, number, device)
            made = eval(call, {"np": np, "torch": torch, "device": device, LETTERS[source]: given})
        except (TypeError, ValueError, RuntimeError) as error:
            return row | {"dtype": "", "error": type(error).__name__}
        if kind(made) != kind(given):
            changes.append(f"{kind(given)} → {kind(made)}")
        if value(made) != number:
            row["lost"].append(name)
        row["shares"] |= shares(given, made)
    kept = "kept" if not changes else ", ".join(dict.fromkeys(changes))
    return row | {"dtype": "all → float32" if len(set(changes)) > 1 else kept}


def in_form(form, number, device):
    """The number in one of the forms that `LETTERS` names."""
    if form == "number":
        return number
    if form == "list":
        return [number]
    if form == "NumPy array":
        return np.array([number])
    tensor = torch.from_numpy(np.array([number]))
    return tensor if form == "CPU tensor" else tensor.to(device, copy=True)


def value(x):
    """The one number in x, as a Python number."""
    while isinstance(x, list | np.ndarray | torch.Tensor):
        x = x[0] if isinstance(x, list) else x.reshape(-1)[0].item()
    return x


def kind(x):
    """The type of x; a Python int counts as int64 and a Python float as float64."""
    x = x[0] if isinstance(x, list) else x
    return str(x.dtype).removeprefix("torch.") if hasattr(x, "dtype") else f"{type(x).__name__}64"


def shares(one, other):
    """Whether one side sees what is written into the other, tried both ways."""
    for number, (written, watched) in enumerate([(one, other), (other, one)], start=5):
        before = value(watched)
        write(written, number)
        if value(watched) != before:
            return True
    return False


def write(x, number):
    """Write a number into x, if x can be written to (a plain number cannot)."""
    if isinstance(x, list) and isinstance(x[0], torch.Tensor):
        x = x[0]  # a list of tensors: into the first of them
    if isinstance(x, list):
        x[0] = number
    elif not isinstance(x, int | float):
        x[...] = number
