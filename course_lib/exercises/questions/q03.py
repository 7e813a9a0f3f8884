"""The questions of lesson 03: the chunks of a batch, and the right loss over them."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..in_rank.work import on_each_case, the_number
from ..inputs import flat, network
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
SIZES = {
    "another sum": "Add yours up: each sample is in one chunk, and there are no others.",
    "an empty chunk": "A chunk is never empty: that device gets none.",
    "too even": "That is as even as possible. chunk is simpler: all are equal, and the last has the rest.",
    "other sizes": "Round up for the first ones. What is left for the last?",
}


@question(
    "03.1",
    "chunk_sizes(batch_size, devices)",
    {EVEN: 1, LAST: 1, FEWER: 2},
    hints={EVEN: SIZES, LAST: SIZES, FEWER: SIZES},
)
def chunk_sizes(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    devices, size, many = rng.randint(3, 6), rng.randint(7, 12), rng.randint(12, 40)
    cases = [(EVEN, [devices * size, devices]), (EVEN, [many, 1]), (EVEN, [many, many])]
    cases += [(LAST, [devices * size - 2, devices]), (LAST, [2 * size + 1, 2])]
    cases += [(FEWER, case) for case in ([9, 4], [5, 4], [16, 7], [many - 1, many], [1, devices])]
    for (what, case), sizes in zip(cases, ask(_sizes, [case for _, case in cases])[0], strict=True):
        right = _chunks(*case)
        fault = "other sizes"
        if min(sizes, default=0) <= 0:
            fault = "an empty chunk"
        elif sum(sizes) != case[0]:
            fault = "another sum"
        elif max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes):
            fault = "too even"
        seen = f"{case[0]} samples over {case[1]} devices: {sizes}, and it should be {right}"
        yield Finding(what, sizes == right, seen, fault)


@reports(lambda cases: [[int, ...]] * len(cases))
@on_each_case
def _sizes(answer: Any, batch_size: int, devices: int) -> list[int]:
    value = answer(batch_size, devices)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        sizes = [int(size) for size in value]
        if sizes == [float(size) for size in value]:
            return sizes
    raise Refused(f"chunk_sizes must return a list of whole numbers; it returned {told(value)}")


# --- 03.2 -------------------------------------------------------------------------------------------------

CHUNKS = "each replica works on its own chunk, in a thread of its own"
VALUE = "the loss is that of the whole batch, on devices[0]"
GRADIENTS = "backward() leaves the gradients of the whole batch in the model"
INPUTS, CLASSES = 6, 4
PATIENCE = 4.0  # seconds that a replica waits for the others to begin
META = torch.device("meta")


@question(
    "03.2",
    "parallel_loss(model, x, y, devices)",
    {CHUNKS: 2, VALUE: 2, GRADIENTS: 2},
    hints={
        CHUNKS: {
            "other chunks": "Cut the batch as chunk does; there are as many replicas as there are chunks.",
            "one after the other": "Right, but not in parallel. Which given function has the threads?",
            "no replicas": "A module that several threads call at once is no replica. Which move makes them?",
            "elsewhere": "A chunk and its replica have to meet on their device. What takes them there?",
        },
        VALUE: {
            "mean of means": "That is the mean of the chunks' means. The chunks differ in size.",
            "a sum": "That is a sum. A mean over all samples is asked for.",
            "another device": "Outputs and targets have to meet. On which device should the loss be?",
            "another loss": "Does each output meet its own target, and does each sample count once?",
        },
        GRADIENTS: {
            "no gradient": "The graph is cut. Which copy, or which number, no longer leads to the model?",
            "a part is missing": "Part of the graph is missing. Does each replica lead back to the model?",
        },
    },
)
def parallel_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    many, size = rng.randint(4, 5), rng.randint(3, 5)
    for shape in ((2 * size, 2), (many * size - 2, many), (5, 4), (2, 3), (size, 1)):
        batch = _batch(rng, *shape)
        yield from _of_batch(ask(_parallel, batch)[0], batch)
    places, raised = ask(_elsewhere, batch)[0]
    met = ", ".join(map(" and ".join, places)) or "none"
    seen = f"for the devices cpu, meta, meta: chunks and their weights were on {met}"
    yield Finding(CHUNKS, sorted(places) == [["cpu"] * 2, ["meta"] * 2, ["meta"] * 2], seen, "elsewhere")
    seen = f"with all `devices` and the model on meta, x and y on the CPU: {raised}"
    yield Finding(VALUE, not raised, seen, "another device")


def _batch(rng: random.Random, batch_size: int, devices: int) -> dict[str, int]:
    """Draw a batch on which a wrongly weighted loss differs visibly from the right one."""
    sizes = _chunks(batch_size, devices)
    while True:
        batch = {"seed": rng.randrange(2**31), "batch_size": batch_size, "devices": devices}
        means, loss, _ = _right(batch)
        if len(set(sizes)) == 1 or abs(sum(means) / len(means) - loss) > 0.05:
            return batch


def _right(batch: dict[str, int]) -> tuple[list[float], float, Tensor]:
    """Return the loss of each chunk, and the whole batch's loss and gradient, from one device."""
    (x, y), model, sizes = _inputs(batch), _net(batch), _chunks(batch["batch_size"], batch["devices"])
    means = [cross_entropy(model(a), b).item() for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    loss = cross_entropy(model(x), y)
    loss.backward()
    return means, loss.item(), _gradient(model)


def _of_batch(got: Result, batch: dict[str, int]) -> Iterator[Finding]:
    sizes, samples = _chunks(batch["batch_size"], batch["devices"]), _inputs(batch)[0].tolist()
    words = f"{len(samples)} samples over {batch['devices']} devices"
    calls, count = sorted(got["calls"], key=len, reverse=True), len(sizes)
    fault, seen = "", f"{words}: calls with {[*map(len, calls)]} samples, and the chunks are {sizes}"
    if [*map(len, calls)] != sizes or sorted(str(x) for call in calls for x in call) != sorted(
        map(str, samples)
    ):
        fault = "other chunks"
    elif count > 1 and (got["threads"] != count or got["in_a_row"]):
        seen = f"{words}: {count} calls, in {got['threads']} threads of their own"
        seen += ", one after the other" * got["in_a_row"]
        fault = "one after the other"
    elif got["replicas"] != count:
        fault, seen = "no replicas", f"{words}: {count} calls, of {got['replicas']} module(s)"
    yield Finding(CHUNKS, not fault, seen, fault)

    means, right, gradient = _right(batch)
    fault = nearest(
        got["loss"],
        (sum(means) / len(means), "mean of means"),
        (right * len(samples), "a sum"),
        (sum(means), "a sum"),
        otherwise="another loss",
        within=CLOSE,
    )
    is_right = far(got["loss"], right) < CLOSE
    yield Finding(VALUE, is_right, f"{words}: {got['loss']:.5f}, and one device has {right:.5f}", fault)
    norm = torch.tensor(got["gradient"], dtype=torch.float64).norm()
    seen = f"{words}: a gradient of norm {norm:.5f}, and one device has {gradient.norm():.5f}"
    fault = "a part is missing" if norm else "no gradient"
    yield Finding(GRADIENTS, far(got["gradient"], gradient) < CLOSE, seen, fault if is_right else REST)


def _inputs(batch: dict[str, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch["seed"])
    x = torch.randn(batch["batch_size"], INPUTS, generator=generator, dtype=torch.float64)
    x[-1] *= 20  # makes the last chunk differ from the others
    return x, torch.randint(CLASSES, [len(x)], generator=generator)


def _net(batch: dict[str, int]) -> nn.Module:
    return network(batch["seed"], batch["seed"], INPUTS, CLASSES, norm=False)


def _gradient(model: nn.Module) -> Tensor:
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


class _Noting(nn.Module):
    """A wrapper that notes each call, and blocks its thread until all chunks are under way."""

    def __init__(self, net: nn.Module, chunks: int = 1) -> None:
        super().__init__()
        self.net: Any = net
        self.calls: list[dict[str, Any]] = []  # one list for all replicas
        self.caller, self.in_a_row = threading.current_thread(), [False]
        self.meeting = threading.Barrier(chunks, timeout=PATIENCE)

    def __deepcopy__(self, memo: Any) -> _Noting:
        made = copy.copy(self)
        made._modules = {"net": copy.deepcopy(self.net, memo)}
        return made

    def forward(self, x: Tensor) -> Tensor:
        thread, places = threading.current_thread(), [x.device.type, self.net.first.weight.device.type]
        self.calls.append({"x": x.detach(), "thread": thread, "replica": self, "places": places})
        if thread is not self.caller and not self.in_a_row[0]:
            try:
                self.meeting.wait()
            except threading.BrokenBarrierError:
                self.in_a_row[0] = True
        return self.net(x)


@reports(
    lambda batch: {
        "loss": NUMBER,
        "gradient": [NUMBER] * len(_gradient(_net(batch))),
        "calls": [[[float, ...], ...], ...],
        "threads": int,
        "replicas": int,
        "in_a_row": bool,
    }
)
def _parallel(answer: Any, batch: dict[str, int]) -> Result:
    (x, y), devices = _inputs(batch), [torch.device("cpu")] * batch["devices"]
    model = _Noting(_net(batch), len(x.chunk(len(devices))))
    loss = answer(model, x, y, devices)
    calls = list(model.calls)
    seen: Result = {"loss": the_number(loss, "parallel_loss must return one number, as a tensor")}
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.sum().backward()
    seen |= {"gradient": _gradient(model), "calls": [call["x"] for call in calls]}
    seen |= {"threads": len({call["thread"] for call in calls} - {model.caller})}
    return seen | {"replicas": len({id(call["replica"]) for call in calls}), "in_a_row": model.in_a_row[0]}


@reports(lambda batch: [[[str, str], ...], str])
def _elsewhere(answer: Any, batch: dict[str, int]) -> tuple[list[list[str]], str]:
    """Return where chunks and weights met on two kinds of devices, and what failed with all on meta."""
    x, y = _inputs(batch | {"batch_size": 9})
    mixed, on_meta = _Noting(_net(batch), 3), _Noting(_net(batch), 3).to(META)
    with mock.patch("threading.excepthook"):
        with contextlib.suppress(Exception):  # nothing comes back from meta: a right answer fails in the end
            answer(mixed, x, y, [torch.device("cpu"), META, META])
        try:
            at = answer(on_meta, x, y, [META] * 3).device.type
            raised = "" if at == "meta" else f"the loss is on {at}"
        except Exception as error:
            raised = reason(error)
    return [call["places"] for call in mixed.calls], raised
