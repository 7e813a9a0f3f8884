"""The questions of lesson 03: the chunks of a batch, and the right loss over them."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ..in_rank.work import on_each_case, the_number
from ..inputs import all_tensors, flat, network
from ..judging import far, nearest
from ..question import REST, Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import reason, told

CLOSE = 1e-5  # tolerance: an answer may compute in float32


def _chunks(batch_size: int, devices: int) -> list[int]:
    return [len(chunk) for chunk in torch.arange(batch_size).chunk(devices)]


# --- 03.1 -------------------------------------------------------------------------------------------------

EVEN = "a batch that can be shared evenly"
LAST = "a batch whose last chunk is smaller"
FEWER = "a batch for which there are more devices than chunks"


@question("03.1", "chunk_sizes(batch_size, devices)", {EVEN: 1, LAST: 1, FEWER: 1})
def chunk_sizes(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = _batches(rng)
    results = ask(_sizes, [case for _, case in cases])[0]
    for (what, (batch_size, count)), sizes in zip(cases, results, strict=True):
        right = _chunks(batch_size, count)
        hint = "Round up for the first ones. What is left for the last?"
        if sum(sizes) != batch_size:
            hint = f"These add up to {sum(sizes)} samples, and there are {batch_size}."
        elif min(sizes) <= 0:
            hint = "A chunk with nothing in it is no chunk: that device gets none."
        elif len(sizes) > len(right):
            hint = "The chunk size is batch size over devices, rounded up. Is anything left for every device?"
        elif max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes):
            hint = "That is as even as possible. chunk is simpler: all equal, and the last has what is left."
        seen = f"{batch_size} samples over {count} devices: {sizes}, and it is {right}"
        yield Finding(what, sizes == right, seen, hint)


def _batches(rng: random.Random) -> list[tuple[str, tuple[int, int]]]:
    """Draw several cases of each kind: small and large remainders, one device, fewer samples than devices."""
    devices, size = rng.randint(3, 6), rng.randint(7, 12)
    alone, many = rng.randint(2, 99), rng.randint(12, 40)
    cases = [(EVEN, case) for case in ((devices * size, devices), (alone, 1), (many, many))]
    cases.append((EVEN, (many * 100, many)))
    # all chunks are of one size, but the last is smaller
    lasts = [(devices * size - 2, devices), (2 * size + 1, 2), (devices * size - devices + 1, devices)]
    cases += [(LAST, case) for case in (*lasts, (many * 100 - many // 2, many))]
    # nothing left for the last device; for several, after a smaller chunk; one sample each, or none
    fewer = [(9, 4), (5, 4), (16, 7), rng.choice([(10, 6), (3, 5), (2, 4)]), (many - 1, many), (1, devices)]
    return cases + [(FEWER, case) for case in fewer]


@reports(lambda cases: [[int, ...]] * len(cases))
@on_each_case
def _sizes(answer: Any, batch_size: int, devices: int) -> list[int]:
    value = answer(batch_size, devices)
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        given = list(value)
        sizes = [int(size) for size in given]
        if not isinstance(value, str | dict) and sizes == [float(size) for size in given]:
            return sizes
    raise Refused(f"chunk_sizes must return a list of whole numbers; it returned {told(value)}")


# --- 03.2 -------------------------------------------------------------------------------------------------

ALIKE = "right where all chunks have the same size"
UNEVEN = "right where the last chunk is smaller"
BACK = "backward() reaches each device's loss, in proportion to its chunk"
TOO_SMALL = "A sum of means, divided by a number of samples: too small by about a factor of the chunk size."


@question("03.2", "batch_loss(losses, batch_size)", {ALIKE: 1, UNEVEN: 1, BACK: 1})
def batch_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [*_gathered(rng, rng.randint(3, 5)), *_gathered(rng, rng.randint(8, 12)), *_gathered(rng, 2)]
    cases.append((ALIKE, [round(rng.uniform(1, 2), 2)], rng.randint(2, 9)))  # one device
    asked = [(losses, batch_size, place % 3 == 2) for place, (_, losses, batch_size) in enumerate(cases)]
    results, raised = ask(_losses, asked)[0]
    hint = "What you compute from the batch size is on the CPU. Where are the losses?"
    yield Finding(ALIKE, not raised, f"for losses on the device meta it raised {raised}", hint)
    for (what, losses, batch_size), got in zip(cases, results, strict=True):
        yield _counted(what, got["value"], losses, batch_size)
        yield _counted(what, got["again"], losses[::-1], batch_size)
        yield _of_shares(got["gradient"], _chunks(batch_size, len(losses)))


def _gathered(rng: random.Random, devices: int) -> list[tuple[str, list[float], int]]:
    """Draw one loss per chunk, for a batch with equal chunks and for one whose last chunk is smaller."""
    size = rng.randint(4, 8)
    fewer = rng.randint(2, min(devices, size) - 1) if devices > 2 else 1
    middle = [round(rng.uniform(1, 2), 2) for _ in range(devices - 2)]
    losses = [round(rng.uniform(0.2, 0.8), 2), *middle, round(rng.uniform(3, 5), 2)]  # wrong weights show
    return [(ALIKE, losses, devices * size), (UNEVEN, losses, devices * size - fewer)]


def _of_shares(gradient: list[float] | None, sizes: list[int]) -> Finding:
    if gradient is None:
        hint = (
            "Something in between has turned a tensor into a plain number, or into a tensor without a graph."
        )
        return Finding(BACK, False, "no gradient arrives at the losses", hint)
    shares = [count / sum(sizes) for count in sizes]
    got, right = (", ".join(f"{number:.3f}" for number in all_of) for all_of in (gradient, shares))
    seen = f"for chunks of {sizes} the losses get the gradients {got}, and the shares are {right}"
    hint = "The gradient of each loss is the weight with which it counts."
    return Finding(BACK, far(gradient, shares) < CLOSE, seen, hint)


def _counted(what: str, value: float, losses: list[float], batch_size: int) -> Finding:
    sizes = _chunks(batch_size, len(losses))
    total = sum(loss * count for loss, count in zip(losses, sizes, strict=True))
    right = total / batch_size
    like = f"Each chunk has the same weight here. Should {sizes[-1]} samples count as much as {sizes[0]}?"
    hint = nearest(
        value,
        (sum(losses) / len(losses), like),
        (total, "That is the sum over the samples. A mean is asked for."),
        (sum(losses) / batch_size, TOO_SMALL),
        (total / len(losses), "The sum over the samples is right. How many of them should it be divided by?"),
        otherwise="A chunk's mean times its size is the sum over its samples. What are the sizes?",
        within=CLOSE * batch_size,
    )
    seen = f"mean losses {losses} of chunks of {sizes}: {value:.4f}, and it is {right:.4f} for each sample"
    return Finding(what, far(value, right) < CLOSE, seen, hint)


@reports(
    lambda cases: [
        [
            {"value": NUMBER, "gradient": ([NUMBER] * len(losses), None), "again": NUMBER}
            for losses, *_ in cases
        ],
        str,
    ]
)
def _losses(answer: Any, cases: list[tuple[list[float], int, bool]]) -> tuple[list[dict[str, Any]], str]:
    results, asked = [], "batch_loss must return one number, as a tensor"
    for losses, batch_size, short in cases:
        dtype = torch.float32 if short else torch.float64
        given = torch.tensor(losses, dtype=dtype, requires_grad=True)
        loss = answer(given * 1, batch_size)  # a result, not a leaf, as gathered losses are
        value = the_number(loss, asked)
        results.append({"value": value, "gradient": given.grad if _went_back(loss) else None})
        now = torch.tensor(losses, dtype=dtype)
        answer(now, batch_size)
        now.copy_(now.flip(0))  # the same tensor, with other losses
        results[-1]["again"] = the_number(answer(now, batch_size), asked)
    try:
        answer(torch.ones(3, device="meta", requires_grad=True) * 1, 8)
    except Exception as error:
        return results, reason(error) if _two_places(error) else ""
    return results, ""


def _two_places(error: BaseException) -> bool:
    """Whether the error is about tensors on two devices; reading from meta raises another one."""
    return type(error) is RuntimeError and "device" in str(error)


def _went_back(loss: Any) -> bool:
    """Call ``backward()`` on the loss if it has a graph; return whether it had."""
    back = isinstance(loss, torch.Tensor) and loss.requires_grad
    if back:
        loss.sum().backward()
    return back


# --- 03.3 -------------------------------------------------------------------------------------------------

CHUNKS = "each replica works on its own chunk, in a thread of its own"
VALUE = "the loss is that of the whole batch"
GRADIENTS = "backward() leaves the gradients of the whole batch in the model"
INPUTS, CLASSES = 6, 4
PATIENCE = 4.0  # seconds that a replica waits for the others to begin, and that a run on meta may take


@dataclass
class _Called:
    """One call of the model or of a copy of it."""

    replica: nn.Module
    thread: threading.Thread
    x: torch.Tensor
    weight: torch.Tensor


@dataclass
class _Calls:
    """What the model and its copies record while an answer runs."""

    noted: list[_Called] = field(default_factory=list)
    caller: threading.Thread | None = None
    meeting: threading.Barrier | None = None
    in_a_row: bool = False  # a replica waited in vain for the others; from then on none waits


CALLS = _Calls()


class _Noting(nn.Module):
    """A wrapper that records each call, and blocks its thread until all chunks are under way."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net: Any = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.current_thread()
        CALLS.noted.append(_Called(self, thread, x.detach().clone(), self.net.first.weight))
        if CALLS.meeting and not CALLS.in_a_row and thread is not CALLS.caller:
            try:
                CALLS.meeting.wait()
            except threading.BrokenBarrierError:
                CALLS.in_a_row = True
        return self.net(x)


@dataclass
class _Batch:
    """A batch drawn for several devices, with the loss and the gradient that one device computes."""

    given: dict[str, int]
    samples: list[list[float]]
    sizes: list[int]
    means: list[float]  # the loss of each chunk
    loss: float
    gradient: torch.Tensor

    def __str__(self) -> str:
        devices = self.given["devices"]
        return f"{len(self.samples)} samples over {devices} device{'s' * (devices > 1)}"


@question("03.3", "parallel_loss(model, x, y, devices)", {CHUNKS: 1, VALUE: 1, GRADIENTS: 2})
def parallel_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    few, many, size = rng.randint(2, 4), rng.randint(4, 5), rng.randint(3, 5)
    even, uneven = (few * size, few), (many * size - 2, many)
    fewer = ((many - 1) * 3, many)
    one, two = rng.sample(range(2**31), 2)
    shapes = [(one, even), (two, uneven), (two, fewer), (two, uneven), (one, (2, 3)), (one, (size, 1))]
    shapes.append((two, (5, 4)))  # fewer chunks than devices, and a smaller last chunk
    batches = [_batch(rng, kind, *shape) for kind, shape in shapes]
    results, elsewhere = ask(_parallel, [right.given for right in batches])[0]
    for right, got in zip(batches, results, strict=True):
        loss = _of_value(got["loss"], right)
        yield _of_calls(got, right)
        yield loss
        yield _of_gradient(got["gradient"], right, loss.ok)
    devices = _of_devices(**elsewhere["mixed"])
    yield devices
    raised = elsewhere["meta"] or elsewhere["mixed"]["raised"]
    if devices.ok and raised:
        hint = "The outputs and their targets have to be on one device. On which should the loss be?"
        yield Finding(VALUE, False, f"with replicas on the device meta {raised}", hint)


def _of_calls(got: dict[str, Any], right: _Batch) -> Finding:
    calls, chunks = got["calls"], len(right.sizes)
    sizes = sorted(map(len, calls), reverse=True)
    seen = f"{right}: calls with {sizes} samples, and the chunks are {right.sizes}"
    if not sizes:
        hint = "The model was never called, nor a replica of it."
    elif chunks > 1 and set(sizes) == {len(right.samples)}:
        hint = "All samples went through at once. Which move cuts the batch?"
    elif sizes != right.sizes:
        hint = "Cut the batch as chunk does; there are as many replicas as there are chunks."
    elif sorted(str(sample) for call in calls for sample in call) != sorted(map(str, right.samples)):
        seen, hint = f"{right}: some samples came twice, others never", "Which replica gets which chunk?"
    elif chunks > 1 and got["threads"] != chunks:
        seen = f"{right}: {chunks} calls, in {got['threads']} threads of their own"
        hint = "One after the other gives the right result, but not in parallel. Which move has the threads?"
    elif got["replicas"] != chunks:
        seen = f"{right}: {chunks} calls, of {got['replicas']} module{'s' * (got['replicas'] > 1)}"
        hint = "A module that several threads call at once is no replica. Which move makes them?"
    elif got["in_a_row"]:
        seen = f"{right}: one thread began only when another had ended"
        hint = "You wait for a thread before the next one starts. When do you have to wait?"
    else:
        return Finding(CHUNKS, True)
    return Finding(CHUNKS, False, seen, hint)


def _of_devices(places: list[list[str]], raised: str) -> Finding:
    """Check where the chunks and the weights were, on devices of two kinds."""
    seen = "for the devices cpu, meta, meta the chunks were on " + ", ".join(chunk for chunk, _ in places)
    seen += ", and the weights on " + ", ".join(weight for _, weight in places)
    seen += f" ({raised})" * bool(raised)
    hint = "A chunk and its replica have to meet on their device. Which moves take them there?"
    return Finding(CHUNKS, sorted(places) == [["cpu"] * 2, ["meta"] * 2, ["meta"] * 2], seen, hint)


def _of_value(loss: float, right: _Batch) -> Finding:
    means = right.means
    hint = nearest(
        loss,
        (sum(means) / len(means), "That is the mean of the chunks' means. The chunks differ in size."),
        (right.loss * len(right.samples), "That is the sum over all samples. A mean is asked for."),
        (sum(means), "That is the sum of the chunks' means."),
        otherwise="Does each output meet its own target, and does each sample count once?",
        within=CLOSE,
    )
    seen = f"{right}: {loss:.5f}, and one device has {right.loss:.5f}"
    return Finding(VALUE, far(loss, right.loss) < CLOSE, seen, hint)


def _of_gradient(gradient: list[float] | None, right: _Batch, right_loss: bool) -> Finding:
    if gradient is None:
        seen = f"{right}: after backward() the model's parameters have no gradient"
        hint = "The graph is cut. Which copy, or which plain number, has lost its origin?"
        return Finding(GRADIENTS, False, seen, hint)
    norm = torch.tensor(gradient, dtype=torch.float64).norm()
    seen = f"{right}: a gradient of norm {norm:.5f}, and one device has {right.gradient.norm():.5f}"
    hint = "The loss is right, but part of the graph is missing. Does each replica lead back to the model?"
    return Finding(GRADIENTS, far(gradient, right.gradient) < CLOSE, seen, hint if right_loss else REST)


def _inputs(values: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(values)
    x = torch.randn(batch_size, INPUTS, generator=generator, dtype=torch.float64)
    x[-1] *= 20  # makes the last chunk differ from the others
    return x, torch.randint(CLASSES, [batch_size], generator=generator)


def _net(kind: int, values: int) -> nn.Module:
    return network(kind, values, INPUTS, CLASSES, norm=False)


def _batch(rng: random.Random, kind: int, batch_size: int, devices: int) -> _Batch:
    """Draw a batch on which a wrongly weighted loss differs visibly from the right one."""
    sizes = _chunks(batch_size, devices)
    while True:
        values = rng.randrange(2**31)
        model, (x, y) = _net(kind, values), _inputs(values, batch_size)
        chunks = zip(x.split(sizes), y.split(sizes), strict=True)
        means = [cross_entropy(model(a), b).item() for a, b in chunks]
        loss = cross_entropy(model(x), y)
        if len(set(sizes)) == 1 or abs(sum(means) / len(means) - loss) > 0.05:
            break
    loss.backward()
    given = {"kind": kind, "values": values, "batch_size": batch_size, "devices": devices}
    return _Batch(given, x.tolist(), sizes, means, loss.item(), _gradient(model))


def _gradient(model: nn.Module) -> torch.Tensor:
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def _seen_of(batch: dict[str, int]) -> Result:
    gradient = [NUMBER] * len(_gradient(_net(batch["kind"], batch["values"])))
    of_calls = {"calls": [[object, ...], ...], "threads": int, "in_a_row": bool, "replicas": int}
    return {"loss": NUMBER, "gradient": (gradient, None), **of_calls}


@reports(
    lambda batches: [
        list(map(_seen_of, batches)),
        {"mixed": {"places": [[str, str], ...], "raised": str}, "meta": str},
    ]
)
def _parallel(answer: Any, batches: list[dict[str, int]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the answer on each batch and return what it did.

    Batches of one kind share a model, with new weights each time; batches of one shape share their tensors.
    """
    results = []
    models: dict[int, _Noting] = {}
    tensors: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, list[torch.device]]] = {}
    CALLS.in_a_row = False
    for batch in batches:
        net, new = _net(batch["kind"], batch["values"]), _inputs(batch["values"], batch["batch_size"])
        given = *new, [torch.device("cpu")] * batch["devices"]
        x, y, devices = tensors.setdefault((batch["batch_size"], batch["devices"]), given)
        x.copy_(new[0])
        y.copy_(new[1])
        model = models.setdefault(batch["kind"], _Noting(copy.deepcopy(net)))
        with torch.no_grad():
            for mine, drawn in zip(all_tensors(model.net).values(), all_tensors(net).values(), strict=True):
                mine.copy_(drawn)
        model.zero_grad()
        chunks = len(x.chunk(len(devices)))
        CALLS.noted, CALLS.meeting = [], threading.Barrier(chunks, timeout=PATIENCE)
        CALLS.caller = threading.current_thread()
        loss = answer(model, x, y, devices)
        calls, in_a_row = CALLS.noted, CALLS.in_a_row
        threads = {call.thread for call in calls} - {CALLS.caller}
        value, gradient = the_number(loss, "parallel_loss must return one number, as a tensor"), None
        if _went_back(loss) and any(p.grad is not None for p in model.parameters()):
            gradient = _gradient(model)
        of_calls = {"calls": [call.x for call in calls], "threads": len(threads), "in_a_row": in_a_row}
        of_calls["replicas"] = len({id(call.replica) for call in calls})
        results.append({"loss": value, "gradient": gradient, **of_calls})
    return results, _elsewhere(answer, batches[0])


def _elsewhere(answer: Any, batch: dict[str, int]) -> Result:
    """Run the answer on three devices, two or all of them meta, which holds no data."""
    model, given = _Noting(_net(batch["kind"], batch["values"])), _inputs(batch["values"], 9)
    raised = _on(("cpu", "meta", "meta"), answer, model, *given)
    places = [[call.x.device.type, call.weight.device.type] for call in CALLS.noted]
    mixed = {"places": places, "raised": raised}
    return {"mixed": mixed, "meta": _on(("meta", "meta", "meta"), answer, model.to("meta"), *given)}


def _on(names: tuple[str, ...], answer: Any, *given: Any) -> str:
    """Run the answer on these devices; return in words what it puts on the wrong one.

    No data comes back from meta: a right answer fails in the end, and one that hangs is abandoned.
    """
    CALLS.noted, CALLS.meeting, raised = [], None, []

    def work() -> None:
        try:
            loss = answer(*given, [torch.device(name) for name in names])
            if isinstance(loss, torch.Tensor) and loss.device.type != names[0]:
                raised.append(f"the loss is on {loss.device}, and devices[0] is {names[0]}")
        except Exception as error:
            if _two_places(error):
                raised.append(f"it raised {reason(error)}")

    before, until = set(threading.enumerate()), time.monotonic() + PATIENCE
    with mock.patch("threading.excepthook"):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        for other in set(threading.enumerate()) - before:  # a failed answer may have left threads at work
            other.join(max(0.0, until - time.monotonic()))
    return "".join(raised)
