"""The questions of lesson 03: the chunks of a batch, and the right loss over them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
CLOSE = 1e-5  # an answer may go through float32


def _chunks(batch_size: int, devices: int) -> list[int]:
    return [len(chunk) for chunk in torch.arange(batch_size).chunk(devices)]


# --- 03.1 -------------------------------------------------------------------------------------------------

EVEN, LAST, FEWER = (
    "a batch that can be shared evenly",
    "a batch whose last chunk is smaller",
    "a batch for which there are more devices than chunks",
)


@question("03.1", {EVEN: 1, LAST: 1, FEWER: 1})
def chunk_sizes(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "chunk_sizes(batch_size, devices)")
    devices, size = rng.randint(3, 6), rng.randint(5, 12)
    cases = {
        EVEN: (devices * size, devices),
        LAST: (devices * size - 2, devices),  # all get size, the last one two less
        FEWER: rng.choice([(9, 4), (5, 4), (10, 6), (16, 7), (3, 5), (2, 4)]),
    }
    found = observe(_sizes, answer, list(cases.values()))[0]
    for (what, (batch_size, number)), sizes in zip(cases.items(), found, strict=True):
        if isinstance(sizes, str):
            raise Refused(f"chunk_sizes shall return a list of whole numbers; it returned {sizes}")
        right = _chunks(batch_size, number)
        seen = f"{batch_size} samples over {number} devices: {sizes}, and it is {right}"
        if sizes == right:
            hint = ""
        elif sum(sizes) != batch_size:
            hint = f"These are {sum(sizes)} samples, and there are {batch_size}."
        elif min(sizes) <= 0:
            hint = "A chunk with nothing in it is no chunk: that device gets none."
        elif len(sizes) > len(right):
            hint = "The first chunks are the batch over the devices, rounded up. Is there something for each?"
        elif max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes):
            hint = "As even as can be. chunk is simpler: all alike, and the last has what is left."
        else:
            hint = "Round up for the first ones. What is left for the last?"
        yield what, sizes == right, seen, hint


def _sizes(answer: Any, cases: list[tuple[int, int]]) -> list[list[int] | str]:
    found: list[list[int] | str] = []
    for batch_size, devices in cases:
        value = answer(batch_size, devices)
        try:
            sizes = [int(size) for size in value]
            whole = not isinstance(value, str) and sizes == [float(size) for size in value]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            whole = False
        found.append(sizes if whole else f"{value!r:.60}, a {type(value).__name__}")
    return found


# --- 03.2 -------------------------------------------------------------------------------------------------

ALIKE, UNEVEN, BACK = (
    "right where all chunks have the same size",
    "right where the last chunk is smaller",
    "backward() reaches each device's loss, in proportion to its chunk",
)


@question("03.2", {ALIKE: 1, UNEVEN: 1, BACK: 1})
def batch_loss(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "batch_loss(losses, batch_size)")
    devices, size = rng.randint(3, 5), rng.randint(4, 8)
    fewer = rng.randint(2, min(devices, size) - 1)  # with as many as there are devices, all are alike again
    cases = {ALIKE: devices * size, UNEVEN: devices * size - fewer}
    middle = [round(rng.uniform(1, 2), 2) for _ in range(devices - 2)]
    losses = [round(rng.uniform(0.2, 0.8), 2), *middle, round(rng.uniform(3, 5), 2)]  # sizes show, and order
    found = observe(_losses, answer, losses, list(cases.values()))[0]
    for (what, batch_size), (value, _) in zip(cases.items(), found, strict=True):
        if isinstance(value, str):
            raise Refused(f"batch_loss shall return one number, as a tensor; it returned {value}")
        sizes = _chunks(batch_size, devices)
        total = sum(loss * count for loss, count in zip(losses, sizes, strict=True))
        right = total / batch_size
        seen = (
            f"mean losses {losses} of chunks of {sizes}: {value:.4f}, and it is {right:.4f} for each sample"
        )
        if abs(value - sum(losses) / devices) < CLOSE:
            hint = (
                f"Each chunk counts alike here. Should a chunk of {sizes[-1]} count as much as one of {size}?"
            )
        elif abs(value - total) < CLOSE * batch_size:
            hint = "That is the sum over the samples. A mean is asked for."
        elif abs(value * batch_size - sum(losses)) < CLOSE * batch_size:
            hint = "A sum of means over a number of samples: it is too small by about the size of a chunk."
        elif abs(value * devices - total) < CLOSE * batch_size:
            hint = "The sum over the samples is right. By how many of them is it to be divided?"
        else:
            hint = "A chunk's mean times its size is the sum over its samples. What are the sizes?"
        yield what, abs(value - right) < CLOSE, seen, hint
    gradient = found[1][1]
    share = [count / batch_size for count in sizes]  # of the uneven batch
    told = ", ".join(f"{each:.3f}" for each in share)
    if gradient is None:
        ok, seen = False, "no gradient arrives at the losses"
        hint = "Something in between has made a plain number of a tensor, or a new tensor of it."
    else:
        ok = max(abs(a - b) for a, b in zip(gradient, share, strict=True)) < CLOSE
        got = ", ".join(f"{each:.3f}" for each in gradient)
        seen = f"for chunks of {sizes} the losses get the gradients {got}, and the shares are {told}"
        hint = "The gradient of each loss is the weight with which it counts."
    yield BACK, ok, seen, hint


def _losses(
    answer: Any, losses: list[float], batch_sizes: list[int]
) -> list[tuple[float | str, list[float] | None]]:
    found: list[tuple[float | str, list[float] | None]] = []
    for batch_size in batch_sizes:
        given = torch.tensor(losses, dtype=torch.float64, requires_grad=True)
        gathered = given * 1  # as gathered ones are: a result, no leaf
        value = answer(gathered, batch_size)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            number, gradient = value.item(), None
            if value.requires_grad:
                value.sum().backward()
                gradient = None if given.grad is None else given.grad.tolist()
            found.append((float(number), gradient))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((float(value), None))
        else:
            found.append((f"{value!r:.60}, a {type(value).__name__}", None))
    return found


# --- 03.3 -------------------------------------------------------------------------------------------------

CHUNKS, VALUE, GRADIENTS = (
    "each replica works on its own chunk, in a thread of its own",
    "the loss is the one of the whole batch",
    "backward() leaves the gradients of the whole batch in the model",
)
CASES = [(12, 3), (10, 4), (9, 4)]  # even; the last chunk smaller; fewer chunks than devices

Call = tuple[int, list[list[float]]]  # number of a thread (0 is the main one), the samples that it was given
CALLS: list[tuple[threading.Thread, torch.Tensor]] = []  # of whatever copy of the model


class _Noting(nn.Sequential):
    """A small network that notes its calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append((threading.current_thread(), x.detach().clone()))
        return super().forward(x)


@question("03.3", {CHUNKS: 1, VALUE: 1, GRADIENTS: 2})
def parallel_loss(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "parallel_loss(model, x, y, devices)")
    seed = rng.randrange(2**31)
    found = observe(_parallel, answer, seed)[0]
    for (batch_size, devices), each in zip(CASES, found, strict=True):
        if isinstance(each["loss"], str):
            raise Refused(f"parallel_loss shall return one number, as a tensor; it returned {each['loss']}")
        each["case"] = f"{batch_size} samples over {devices} devices"
        each["right sizes"] = _chunks(batch_size, devices)
    yield CHUNKS, *_of_calls(found)
    yield VALUE, *_of_values(found)
    yield GRADIENTS, *_of_gradients(found)


def _of_calls(found: list[dict[str, Any]]) -> tuple[bool, str, str]:
    for each in found:
        sizes, right = sorted(each["sizes"], reverse=True), each["right sizes"]
        seen = f"{each['case']}: calls with {sizes} samples, and the chunks are {right}"
        if sizes != right:
            if not sizes:
                return False, seen, "The model was never called, nor a replica of it."
            if sizes == [sum(right)] or set(sizes) == {sum(right)}:
                return False, seen, "All samples went through at once. Which move cuts the batch?"
            return False, seen, "Cut the batch as chunk does; there are as many replicas as there are chunks."
        if not each["own samples"]:
            return False, f"{each['case']}: some samples came twice, others never", "Which chunk is whose?"
        if each["threads"] != len(right):
            seen = f"{each['case']}: {len(right)} calls, in {each['threads']} threads of their own"
            return False, seen, "One after the other is right, and not parallel. Which move has the threads?"
    return True, "", ""


def _of_values(found: list[dict[str, Any]]) -> tuple[bool, str, str]:
    for each in found:
        loss, right = each["loss"], each["right loss"]
        seen = f"{each['case']}: {loss:.5f}, and one device has {right:.5f}"
        if not abs(loss - right) <= CLOSE:  # nor is NaN
            if abs(loss - each["mean of means"]) < CLOSE:
                return False, seen, "That is the mean of the chunks' means. The chunks are not alike."
            if abs(loss - right * sum(each["right sizes"])) < CLOSE * 100:
                return False, seen, "That is the sum over all samples. A mean is asked for."
            if abs(loss - each["sum of means"]) < CLOSE:
                return False, seen, "That is the sum of the chunks' means."
            return False, seen, "Does each output meet its own target, and does each sample count once?"
    return True, "", ""


def _of_gradients(found: list[dict[str, Any]]) -> tuple[bool, str, str]:
    for each in found:
        norm, right = each["norm"], each["right norm"]
        if norm is None:
            seen = f"{each['case']}: after backward() the model's parameters have no gradient"
            return (
                False,
                seen,
                "The way back is cut. Which copy, or which plain number, does not know its origin?",
            )
        if each["far"] > CLOSE:
            seen = f"{each['case']}: a gradient of norm {norm:.5f}, and one device has {right:.5f}"
            if not abs(each["loss"] - each["right loss"]) <= CLOSE:
                return False, seen, "This rests on the loss; that comes first."
            return (
                False,
                seen,
                "The loss is right, and part of the way back is missing. Does each replica have one?",
            )
    return True, "", ""


def _parallel(answer: Any, seed: int) -> list[dict[str, Any]]:
    found = []
    for batch_size, devices in CASES:
        torch.manual_seed(seed)
        model = _Noting(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
        while True:
            x, y = torch.randn(batch_size, 6, dtype=torch.float64), torch.randint(4, [batch_size])
            x[-1] *= 20  # the last chunk is another one than the rest
            chunks = list(zip(x.chunk(devices), y.chunk(devices), strict=True))
            means = [nn.functional.cross_entropy(model(a), b) for a, b in chunks]
            right = nn.functional.cross_entropy(model(x), y)
            alike = len({len(a) for a, _ in chunks}) == 1
            if alike or abs(sum(means) / len(means) - right) > 0.05:  # whoever counts it wrong, shows
                break
        wanted = torch.cat([each.flatten() for each in torch.autograd.grad(right, list(model.parameters()))])
        CALLS.clear()
        loss = answer(model, x.clone(), y.clone(), [torch.device("cpu")] * devices)
        calls = list(CALLS)
        seen = torch.cat([x[:0], *(each for _, each in calls if each.shape[1:] == x.shape[1:])])
        main = threading.current_thread()
        one: dict[str, Any] = {
            "sizes": [len(each) for _, each in calls],
            "threads": len({thread for thread, _ in calls} - {main}),
            "own samples": sorted(seen.tolist()) == sorted(x.tolist()),
            "right loss": right.item(),
            "mean of means": sum(means).item() / len(means),
            "sum of means": sum(means).item(),
            "norm": None,
            "right norm": wanted.norm().item(),
        }
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
            if not isinstance(loss, int | float) or isinstance(loss, bool):
                return [{"loss": f"{loss!r:.60}, a {type(loss).__name__}"}] * len(CASES)
            loss = torch.tensor(float(loss))
        one["loss"] = loss.item()
        if loss.requires_grad:
            loss.sum().backward()
            if any(p.grad is not None for p in model.parameters()):
                parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
                gradient = torch.cat([part.flatten() for part in parts])
                one["norm"] = gradient.norm().item()
                one["far"] = (gradient - wanted).abs().nan_to_num(float("inf")).max().item()
        found.append(one)
    return found
