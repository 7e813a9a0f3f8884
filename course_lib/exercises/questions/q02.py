"""The questions of lesson 02: a training loop that is right on one device."""

from __future__ import annotations

import operator
import random
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ..in_rank.work import the_number
from ..inputs import flat, network, seeds, tensor
from ..judging import far, nearest
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number

CLOSE = 1e-5  # tolerance: an answer may compute in float32

# --- 02.1 -------------------------------------------------------------------------------------------------

EQUAL, UNEVEN = "right where all batches have the same size", "right where batches have different sizes"
WEIGHTS = {
    "means over samples": "Each mean is divided by its batch's size already. What makes it a sum again?",
    "batches alike": "Each batch has the same weight here. Should a batch of 2 count as much as one of 8?",
    "divided by something else": "The sum over the samples is right. What should it be divided by?",
    "another sum": "Work out the sum over all samples first. What does each batch add to it?",
}


@question(
    "02.1",
    "mean_loss(losses, sizes)",
    {EQUAL: 2, UNEVEN: 2},
    hints={EQUAL: WEIGHTS, UNEVEN: WEIGHTS},
)
def mean_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    full, small = rng.randint(6, 9), rng.randint(1, 3)
    many = rng.sample(range(1, 40), rng.randint(5, 7))
    cases = [(EQUAL, [full] * 4), (UNEVEN, [full] * 3 + [small]), (UNEVEN, [small, full]), (UNEVEN, many)]
    means = [[round(rng.uniform(0.2, 0.6) + i, 2) for i in range(len(sizes))] for _, sizes in cases]
    values = ask(_mean_losses, [[mine, sizes] for mine, (_, sizes) in zip(means, cases, strict=True)])[0]
    for (what, sizes), mine, value in zip(cases, means, values, strict=True):
        total, count = sum(map(operator.mul, mine, sizes)), sum(sizes)
        seen = f"mean losses {mine} of batches of {sizes}: {value:.4f}, and it should be {total / count:.4f}"
        divisors = (1, len(sizes), sizes[0] * len(sizes))
        fault = nearest(
            value,
            (sum(mine) / count, "means over samples"),
            (sum(mine) / len(mine), "batches alike"),
            *((total / divisor, "divided by something else") for divisor in divisors),
            otherwise="another sum",
            within=CLOSE,
        )
        yield Finding(what, far(value, total / count) < CLOSE, seen, fault)


@reports(lambda cases: [NUMBER] * len(cases))
def _mean_losses(answer: Any, cases: list[Any]) -> list[float]:
    return [the_number(answer(*case), "mean_loss must return a number") for case in cases]


# --- 02.2 -------------------------------------------------------------------------------------------------

CLEARED = "each step follows the gradient of its own batch alone"
MODE = "the model is in training mode"
WEIGHED = "the loss is the mean over all samples"
RELEASED = "the graphs of the steps are not kept"
FEATURES, CLASSES = 4, 3
Epoch = dict[str, Any]


@question(
    "02.2",
    "train_epoch(model, loader, optimizer)",
    {CLEARED: 2, MODE: 1, WEIGHED: 2, RELEASED: 1},
    hints={
        CLEARED: {
            "not cleared": "backward() adds to what .grad holds. What does it hold before?",
            "not moved": "The weights have not moved at all. What does the step find in .grad?",
            "another step": "Each batch gives one step of this optimizer, on its mean loss. What differs?",
        },
        MODE: {"evaluation": "An evaluation came before. What ends its mode?"},
        WEIGHED: {
            "batches alike": "As in question 02.1: the last batch is smaller.",
            "of the dataset": "That is divided by the size of the dataset. Does the loader give all of it?",
            "no number": "It must return the mean loss of the epoch, a number.",
            "another loss": "It is the loss that the steps follow, as a mean over all samples. What differs?",
        },
        RELEASED: {
            "graph kept": "A loss that is added up as a tensor keeps its graph. What gives the number alone?"
        },
    },
)
def train_epoch(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    for seed, size in zip(seeds(rng, 2), rng.sample(range(5, 9), 2), strict=True):
        count = size * rng.randint(2, 3) + rng.randint(2, 3)
        epoch: Epoch = {"seed": seed, "size": size, "count": count, "all": count + rng.randint(3, 9)}
        epoch["rates"] = [round(rate, 3) for rate in (rng.uniform(0.05, 0.1), rng.uniform(0.15, 0.25))]
        result = ask(_trained, epoch)[0]
        batches, weights = list(_loader(epoch)), partial(_weights, epoch)
        off = far(result["weights"], weights())
        fault = nearest(
            result["weights"],
            (weights(steps=False), "not moved"),
            (weights(clear=False), "not cleared"),
            otherwise="another step",
            within=CLOSE,
        )
        seen = f"after {len(batches)} steps the weights are off by up to {off:.4f}"
        yield Finding(CLEARED, off < CLOSE, seen, fault)
        if not result["outputs"]:
            raise Refused("train_epoch never called the model")
        seen = "the model, or a module in it, was called with training == False"
        yield Finding(MODE, result["training"], seen, "evaluation")
        yield _weighed(epoch, result, [y for _, y in batches])
        seen = "what it returned is a tensor that holds a graph"
        if result["kept"]:
            seen = f"while a batch was computed, the graphs of {result['kept']} before it were still there"
        yield Finding(RELEASED, not result["kept"] and not result["holds a graph"], seen, "graph kept")


def _weighed(epoch: Epoch, result: Result, labels: list[Tensor]) -> Finding:
    """Check the mean loss against the model's own outputs, so that wrong steps are not counted twice."""
    value, outputs = result["value"], result["outputs"]
    if isinstance(value, str):
        return Finding(WEIGHED, False, f"it returned {value}", "no number")
    if list(map(len, outputs)) != list(map(len, labels)):
        seen = f"the model met {len(outputs)} batches, and there are {len(labels)}"
        return Finding(WEIGHED, False, seen, "another loss")
    scores = [torch.tensor(output, dtype=torch.float32) for output in outputs]
    means = [cross_entropy(each, y).item() for each, y in zip(scores, labels, strict=True)]
    total = sum(mean * len(y) for mean, y in zip(means, labels, strict=True))
    right = total / epoch["count"]
    fault = nearest(
        value,
        (sum(means) / len(means), "batches alike"),
        (total / epoch["all"], "of the dataset"),
        otherwise="another loss",
        within=CLOSE,
    )
    seen = f"it returned {value:.4f}, and the mean over all samples is {right:.4f}"
    return Finding(WEIGHED, far(value, right) < CLOSE, seen, fault)


def _loader(epoch: Epoch) -> DataLoader[Any]:
    """Make a loader over part of a dataset; its last batch is smaller."""
    generator = torch.Generator().manual_seed(epoch["seed"])
    inputs = tensor(epoch["seed"], (epoch["all"], FEATURES), torch.float32)
    labels = torch.randint(0, CLASSES, (epoch["all"],), generator=generator)
    part = torch.randperm(epoch["all"], generator=generator)[: epoch["count"]].tolist()
    return DataLoader(TensorDataset(inputs, labels), epoch["size"], sampler=part)


class _Token:
    """An object that lives as long as the graph that holds it."""


class _Watched(nn.Module):
    """A wrapper that records modes, the first output for each batch, and how many old graphs are alive."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.modes: list[bool] = []
        self.outputs: dict[str, list[Any]] = {}  # by batch
        self.graphs: list[weakref.ref[_Token]] = []
        self.kept = 0

    def forward(self, x: Tensor) -> Tensor:
        old = self.graphs[:-1]  # the last one may still be in use
        if any(token() for token in old):
            time.sleep(0.05)  # the thread that watches the rank may briefly hold a frame
        self.kept = max(self.kept, sum(token() is not None for token in old))
        scores = self.net(x)
        if scores.grad_fn is not None:
            token = _Token()
            scores.grad_fn.metadata["token"] = token
            self.graphs.append(weakref.ref(token))
        self.modes += [module.training for module in self.modules()]
        self.outputs.setdefault(str(x.tolist()), scores.tolist())
        return scores


def _training(epoch: Epoch) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model, in evaluation mode, and an optimizer with momentum and two learning rates."""
    net: Any = network(epoch["seed"], epoch["seed"], FEATURES, CLASSES, frozen=False, norm=False).float()
    net.drop.p = 0.0
    net.eval()
    head = list(net.head.parameters())
    others = [parameter for name, parameter in net.named_parameters() if not name.startswith("head.")]
    groups = [{"params": part, "lr": rate} for part, rate in zip((head, others), epoch["rates"], strict=True)]
    return net, torch.optim.SGD(groups, momentum=0.9)


@reports(
    lambda epoch: {
        "training": bool,
        "outputs": [[[NUMBER] * CLASSES, ...], ...],
        "value": (NUMBER, str),
        "kept": int,
        "holds a graph": bool,
        "weights": [NUMBER] * len(_weights(epoch, steps=False)),
    }
)
def _trained(answer: Any, epoch: Epoch) -> Result:
    net, optimizer = _training(epoch)
    model = _Watched(net).eval()
    value = answer(model, _loader(epoch), optimizer)
    seen = {"training": all(model.modes), "outputs": list(model.outputs.values()), "value": number(value)}
    seen |= {"kept": model.kept, "weights": flat(net.parameters())}
    return seen | {"holds a graph": isinstance(value, Tensor) and value.requires_grad}


def _weights(epoch: Epoch, steps: bool = True, clear: bool = True) -> Tensor:
    """Return the weights after a right epoch, after one without steps, or after one that never clears."""
    net, optimizer = _training(epoch)
    for x, y in _loader(epoch) if steps else ():
        if clear:
            optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return flat(net.parameters())
