"""The questions of lesson 03: the chunks of a batch, and the right loss over them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ..asking import REST, Ask, Finding, Refused, far, nearest, question, the_number, told

CLOSE = 1e-5  # an answer may go through float32


def _chunks(batch_size: int, devices: int) -> list[int]:
    return [len(chunk) for chunk in torch.arange(batch_size).chunk(devices)]


# --- 03.1 -------------------------------------------------------------------------------------------------

EVEN, LAST, FEWER = (
    "a batch that can be shared evenly",
    "a batch whose last chunk is smaller",
    "a batch for which there are more devices than chunks",
)


@question("03.1", "chunk_sizes(batch_size, devices)", {EVEN: 1, LAST: 1, FEWER: 1})
def chunk_sizes(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    devices, size = rng.randint(3, 6), rng.randint(5, 12)
    cases = {
        EVEN: (devices * size, devices),
        LAST: (devices * size - 2, devices),  # all get size, the last one two less
        FEWER: rng.choice([(9, 4), (5, 4), (10, 6), (16, 7), (3, 5), (2, 4)]),
    }
    found = ask(_sizes, list(cases.values()))[0]
    for (what, (batch_size, count)), sizes in zip(cases.items(), found, strict=True):
        right = _chunks(batch_size, count)
        if sum(sizes) != batch_size:
            hint = f"These are {sum(sizes)} samples, and there are {batch_size}."
        elif min(sizes) <= 0:
            hint = "A chunk with nothing in it is no chunk: that device gets none."
        elif len(sizes) > len(right):
            hint = "The first chunks are the batch over the devices, rounded up. Is there something for each?"
        elif max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes):
            hint = "As even as can be. chunk is simpler: all alike, and the last has what is left."
        else:
            hint = "Round up for the first ones. What is left for the last?"
        seen = f"{batch_size} samples over {count} devices: {sizes}, and it is {right}"
        yield Finding(what, sizes == right, seen, hint)


def _sizes(answer: Any, cases: list[list[int]]) -> list[list[int]]:
    return [_whole(answer(batch_size, devices)) for batch_size, devices in cases]


def _whole(value: Any) -> list[int]:
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        sizes = [int(size) for size in value]
        if not isinstance(value, str) and sizes == [float(size) for size in value]:
            return sizes
    raise Refused(f"chunk_sizes must return a list of whole numbers; it returned {told(value)}")


# --- 03.2 -------------------------------------------------------------------------------------------------

ALIKE, UNEVEN, BACK = (
    "right where all chunks have the same size",
    "right where the last chunk is smaller",
    "backward() reaches each device's loss, in proportion to its chunk",
)
TOO_SMALL = "A sum of means over a number of samples: it is too small by about the size of a chunk."


@question("03.2", "batch_loss(losses, batch_size)", {ALIKE: 1, UNEVEN: 1, BACK: 1})
def batch_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    devices, size = rng.randint(3, 5), rng.randint(4, 8)
    fewer = rng.randint(2, min(devices, size) - 1)  # with as many as there are devices, all are alike again
    alike, uneven = devices * size, devices * size - fewer
    middle = [round(rng.uniform(1, 2), 2) for _ in range(devices - 2)]
    losses = [round(rng.uniform(0.2, 0.8), 2), *middle, round(rng.uniform(3, 5), 2)]  # sizes show, and order
    of_alike, of_uneven = ask(_losses, losses, [alike, uneven])[0]
    yield _counted(ALIKE, of_alike["value"], losses, alike)
    yield _counted(UNEVEN, of_uneven["value"], losses, uneven)
    sizes, gradient = _chunks(uneven, devices), of_uneven["gradient"]
    if gradient is None:
        hint = "Something in between has made a plain number of a tensor, or a new tensor of it."
        yield Finding(BACK, False, "no gradient arrives at the losses", hint)
        return
    shares = [count / uneven for count in sizes]
    got, right = (", ".join(f"{each:.3f}" for each in all_of) for all_of in (gradient, shares))
    seen = f"for chunks of {sizes} the losses get the gradients {got}, and the shares are {right}"
    hint = "The gradient of each loss is the weight with which it counts."
    yield Finding(BACK, far(gradient, shares) < CLOSE, seen, hint)


def _counted(what: str, value: float, losses: list[float], batch_size: int) -> Finding:
    sizes = _chunks(batch_size, len(losses))
    total = sum(loss * count for loss, count in zip(losses, sizes, strict=True))
    right = total / batch_size
    like = f"Each chunk counts alike here. Should a chunk of {sizes[-1]} count as much as one of {sizes[0]}?"
    hint = nearest(
        value,
        (sum(losses) / len(losses), like),
        (total, "That is the sum over the samples. A mean is asked for."),
        (sum(losses) / batch_size, TOO_SMALL),
        (total / len(losses), "The sum over the samples is right. By how many of them is it to be divided?"),
        otherwise="A chunk's mean times its size is the sum over its samples. What are the sizes?",
        within=CLOSE * batch_size,
    )
    seen = f"mean losses {losses} of chunks of {sizes}: {value:.4f}, and it is {right:.4f} for each sample"
    return Finding(what, far(value, right) < CLOSE, seen, hint)


def _losses(answer: Any, losses: list[float], batch_sizes: list[int]) -> list[dict[str, Any]]:
    found = []
    for batch_size in batch_sizes:
        given = torch.tensor(losses, dtype=torch.float64, requires_grad=True)
        loss = answer(given * 1, batch_size)  # as gathered ones are: a result, no leaf
        value = the_number(loss, "batch_loss must return one number, as a tensor")
        found.append({"value": value, "gradient": given.grad if _went_back(loss) else None})
    return found


def _went_back(loss: Any) -> bool:
    """Whether there is a way back from the loss; it has been gone then."""
    back = isinstance(loss, torch.Tensor) and loss.requires_grad
    if back:
        loss.sum().backward()
    return back


# --- 03.3 -------------------------------------------------------------------------------------------------

CHUNKS, VALUE, GRADIENTS = (
    "each replica works on its own chunk, in a thread of its own",
    "the loss is the one of the whole batch",
    "backward() leaves the gradients of the whole batch in the model",
)
SHAPES = [(12, 3), (10, 4), (9, 4)]  # even; the last chunk smaller; fewer chunks than devices
CALLS: list[tuple[threading.Thread, torch.Tensor]] = []  # of whatever copy of the model


class _Noting(nn.Sequential):
    """A small network that notes its calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append((threading.current_thread(), x.detach().clone()))
        return super().forward(x)


@dataclass
class _Batch:
    """A batch over devices, by its seed, and what one device has for it."""

    seed: int
    words: str
    samples: list[list[float]]
    sizes: list[int]
    means: list[float]  # of each chunk
    loss: float
    gradient: torch.Tensor


@question("03.3", "parallel_loss(model, x, y, devices)", {CHUNKS: 1, VALUE: 1, GRADIENTS: 2})
def parallel_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    batches = [_batch(rng, *shape) for shape in SHAPES]
    found = ask(_parallel, [right.seed for right in batches], SHAPES)[0]
    for right, got in zip(batches, found, strict=True):
        loss = _of_value(got["loss"], right)
        yield _of_calls(got["calls"], got["threads"], right)
        yield loss
        yield _of_gradient(got["gradient"], right, loss.ok)


def _of_calls(calls: list[Any], threads: int, right: _Batch) -> Finding:
    sizes = sorted(map(len, calls), reverse=True)
    seen = f"{right.words}: calls with {sizes} samples, and the chunks are {right.sizes}"
    if not sizes:
        hint = "The model was never called, nor a replica of it."
    elif set(sizes) == {len(right.samples)}:
        hint = "All samples went through at once. Which move cuts the batch?"
    elif sizes != right.sizes:
        hint = "Cut the batch as chunk does; there are as many replicas as there are chunks."
    elif sorted(str(each) for call in calls for each in call) != sorted(map(str, right.samples)):
        seen, hint = f"{right.words}: some samples came twice, others never", "Which chunk is whose?"
    elif threads != len(right.sizes):
        seen = f"{right.words}: {len(right.sizes)} calls, in {threads} threads of their own"
        hint = "One after the other is right, and not parallel. Which move has the threads?"
    else:
        return Finding(CHUNKS, True)
    return Finding(CHUNKS, False, seen, hint)


def _of_value(loss: float, right: _Batch) -> Finding:
    means = right.means
    hint = nearest(
        loss,
        (sum(means) / len(means), "That is the mean of the chunks' means. The chunks are not alike."),
        (right.loss * len(right.samples), "That is the sum over all samples. A mean is asked for."),
        (sum(means), "That is the sum of the chunks' means."),
        otherwise="Does each output meet its own target, and does each sample count once?",
        within=CLOSE,
    )
    seen = f"{right.words}: {loss:.5f}, and one device has {right.loss:.5f}"
    return Finding(VALUE, far(loss, right.loss) < CLOSE, seen, hint)


def _of_gradient(gradient: list[float] | None, right: _Batch, right_loss: bool) -> Finding:
    if gradient is None:
        seen = f"{right.words}: after backward() the model's parameters have no gradient"
        hint = "The way back is cut. Which copy, or which plain number, does not know its origin?"
        return Finding(GRADIENTS, False, seen, hint)
    norm = torch.tensor(gradient).norm()
    seen = f"{right.words}: a gradient of norm {norm:.5f}, and one device has {right.gradient.norm():.5f}"
    hint = "The loss is right, and part of the way back is missing. Does each replica have one?"
    return Finding(GRADIENTS, far(gradient, right.gradient) < CLOSE, seen, hint if right_loss else REST)


def _drawn(seed: int, batch_size: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
        x, y = torch.randn(batch_size, 6, dtype=torch.float64), torch.randint(4, [batch_size])
    x[-1] *= 20  # the last chunk is another one than the rest
    return model, x, y


def _batch(rng: random.Random, batch_size: int, devices: int) -> _Batch:
    """Draw one with which a loss that is counted wrong shows."""
    sizes = _chunks(batch_size, devices)
    while True:
        seed = rng.randrange(2**31)
        model, x, y = _drawn(seed, batch_size)
        chunks = zip(x.split(sizes), y.split(sizes), strict=True)
        means = [cross_entropy(model(a), b).item() for a, b in chunks]
        loss = cross_entropy(model(x), y)
        if len(set(sizes)) == 1 or abs(sum(means) / len(means) - loss) > 0.05:
            break
    gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
    words = f"{batch_size} samples over {devices} devices"
    return _Batch(seed, words, x.tolist(), sizes, means, loss.item(), gradient)


def _parallel(answer: Any, seeds: list[int], shapes: list[list[int]]) -> list[dict[str, Any]]:
    found = []
    for seed, (batch_size, devices) in zip(seeds, shapes, strict=True):
        layers, x, y = _drawn(seed, batch_size)
        model = _Noting(*layers)
        CALLS.clear()
        loss = answer(model, x, y, [torch.device("cpu")] * devices)
        calls = list(CALLS)
        threads = {thread for thread, _ in calls} - {threading.current_thread()}
        value, gradient = the_number(loss, "parallel_loss must return one number, as a tensor"), None
        if _went_back(loss) and any(p.grad is not None for p in model.parameters()):
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            gradient = torch.cat([part.flatten() for part in parts])
        of_calls = {"calls": [samples for _, samples in calls], "threads": len(threads)}
        found.append({"loss": value, "gradient": gradient, **of_calls})
    return found
