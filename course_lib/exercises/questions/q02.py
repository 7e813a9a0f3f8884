"""The questions of lesson 02: a training loop that is right on one device."""

from __future__ import annotations

import operator
import random
import time
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ..asking import Ask, Finding, Refused, far, nearest, number, question, the_number

CLOSE = 1e-5  # answers may count in float32


# --- 02.1 -------------------------------------------------------------------------------------------------

EQUAL, UNEVEN = "right where all batches have the same size", "right where the last batch is smaller"
TOO_SMALL = "A sum of means over a number of samples: it is too small by about the batch size."
ALIKE = "Each batch counts alike here. Should a batch of 2 count as much as one of 8?"
DIVIDED = "The sum over the samples is right. By what should it be divided?"


@question("02.1", "mean_loss(losses, sizes)", {EQUAL: 1, UNEVEN: 1})
def mean_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    losses = [round(rng.uniform(0.2, 3), 2) for _ in range(3)]
    losses.append(round(rng.uniform(3.5, 5), 2))  # what the last one counts has to show
    cases = {EQUAL: [8, 8, 8, 8], UNEVEN: [8, 8, 8, rng.randint(1, 3)]}
    found = ask(_mean_losses, losses, list(cases.values()))[0]
    for (what, sizes), value in zip(cases.items(), found, strict=True):
        total, count = sum(map(operator.mul, losses, sizes)), sum(sizes)
        right = total / count
        seen = f"mean losses {losses} of batches of {sizes}: {value:.4f}, and it is {right:.4f} per sample"
        hint = nearest(
            value,
            (sum(losses) / count, TOO_SMALL),
            (sum(losses) / len(losses), ALIKE),
            *((total / by, DIVIDED) for by in (1, len(sizes), sizes[0] * len(sizes))),
            otherwise="A batch's mean times its size is the sum over its samples.",
            within=CLOSE,
        )
        yield Finding(what, far(value, right) < CLOSE, seen, hint)


def _mean_losses(answer: Any, losses: list[float], cases: list[list[int]]) -> list[float]:
    return [the_number(answer(list(losses), sizes), "mean_loss must return a number") for sizes in cases]


# --- 02.2 -------------------------------------------------------------------------------------------------

COUNTS, QUIET, GRAPHLESS, BACK = (
    "counts right, whatever the sizes of the batches",
    "the model is in evaluation mode meanwhile",
    "no graph is kept",
    "the model is in training mode again afterwards",
)


class Watched(nn.Module):
    """Says of each call in which modes it came; its answers are in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = x * self.scale
        self.modes.append((self.training, output.requires_grad))
        return output


@question("02.2", "evaluate(model, loader)", {COUNTS: 1, QUIET: 1, GRAPHLESS: 1, BACK: 1})
def evaluate(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    sizes = [5, 5, rng.randint(1, 3)]
    labels = [[rng.randrange(4) for _ in range(size)] for size in sizes]
    guesses = [[y if rng.random() < 0.6 else (y + 1) % 4 for y in batch] for batch in labels]
    guesses[-1] = [(y + 1) % 4 for y in labels[-1]]  # the small batch is all wrong: it must not count as much
    value, modes, training, graph = ask(_evaluated, guesses, labels)[0]
    hits = [sum(map(operator.eq, *batch)) for batch in zip(guesses, labels, strict=True)]
    right = sum(hits) / sum(sizes)
    seen = f"{sum(hits)} of {sum(sizes)} are right, {right:.4f}; it returned {value:.4f}"
    of_batches = sum(map(operator.truediv, hits, sizes)) / len(sizes)
    hint = nearest(
        value,
        (of_batches, "That is the mean of the batches' accuracies. The last batch is smaller."),
        (sum(hits), "That is how many are right. Of how many?"),
        (100 * right, "That is in percent, and was asked for as a number between 0 and 1."),
        otherwise="Count what is right, count what was judged, divide at the end.",
        within=CLOSE,
    )
    yield Finding(COUNTS, far(value, right) < CLOSE, seen, hint)
    if not modes:
        return
    quiet = not any(mode for mode, _ in modes)
    seen = "the model was called with model.training == True"
    yield Finding(QUIET, quiet, seen, "Dropout is active so. What ends it?")
    graphless = not any(graph for _, graph in modes)
    seen = "the model's output has requires_grad == True"
    yield Finding(GRAPHLESS, graphless, seen, "Which context builds no graph?")
    if not quiet:
        seen, hint = "it was called in training mode, so there was nothing to go back from", "See above."
    elif not training:
        seen, hint = "model.training is False when it returns", "The training goes on after it."
    else:
        seen = "what the model computes after it returns builds no graph"
        hint = "The training goes on after it. For how long are graphs switched off?"
    yield Finding(BACK, quiet and training and graph, seen, hint)


def _evaluated(answer: Any, guesses: list[list[int]], labels: list[list[int]]) -> tuple[Any, ...]:
    """The accuracy, the modes of each call; afterwards the mode, and whether a call builds a graph."""
    model = Watched().train()
    images = nn.functional.one_hot(torch.tensor(list(chain(*guesses))), 4).float()
    data = TensorDataset(images, torch.tensor(list(chain(*labels))))
    value = answer(model, DataLoader(data, batch_size=len(labels[0])))
    value = the_number(value, "evaluate must return a number")
    return value, list(model.modes), model.training, model(images).requires_grad


# --- 02.3 -------------------------------------------------------------------------------------------------

CLEARED, MODE, WEIGHED, RELEASED = (
    "each step follows the gradient of its own batch alone",
    "the model is in training mode",
    "the loss is the mean over all samples",
    "the graphs of the steps are not kept",
)


@question("02.3", "train_epoch(model, loader, optimizer)", {CLEARED: 1, MODE: 1, WEIGHED: 1, RELEASED: 1})
def train_epoch(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    seed = rng.randrange(2**31)
    got = ask(_trained, seed)[0]
    if not got["modes"]:
        raise Refused("train_epoch never called the model")
    start, loader = _batches(seed)
    off = far(got["weights"], _weights(seed))
    seen = f"after four steps the weights are up to {off:.4f} away from those of such a training"
    hint = nearest(
        got["weights"],
        (start, "They have not moved at all. Who changes the weights?"),
        (_weights(seed, clear=False), "backward() adds to what .grad holds. What holds it before?"),
        otherwise="One step for each batch: from the gradient of its mean loss, and of no other's.",
        within=CLOSE,
    )
    yield Finding(CLEARED, off < CLOSE, seen, hint)
    seen = "the model was called with model.training == False"
    hint = "evaluate() was called before. Who says that training goes on?"
    yield Finding(MODE, all(got["modes"]), seen, hint)
    if isinstance(got["value"], str):
        hint = "It must return the mean loss of the epoch, a number."
        for what in (WEIGHED, RELEASED):
            yield Finding(what, False, f"it returned {got['value']}", hint)
        return
    yield _weighed(got["value"], got["outputs"], [y for _, y in loader])
    seen = "what it returned is a tensor that holds a graph"
    if got["kept"]:
        seen = f"while the last batch was computed, the graphs of {got['kept']} before it were still there"
    hint = "A loss that is added up as a tensor keeps its graph. What makes a number of it?"
    yield Finding(RELEASED, not got["kept"] and not got["holds a graph"], seen, hint)


def _weighed(value: float, outputs: list[Any], labels: list[torch.Tensor]) -> Finding:
    """Of the model's own outputs: steps that are wrong make no second fault of the mean."""
    if [len(output) for output in outputs] != [len(y) for y in labels]:
        seen = f"it called the model {len(outputs)} times, and there are {len(labels)} batches"
        return Finding(WEIGHED, False, seen, "Where does the loop end?")
    means = [cross_entropy(torch.tensor(o), y).item() for o, y in zip(outputs, labels, strict=True)]
    right = sum(mean * len(y) for mean, y in zip(means, labels, strict=True)) / sum(map(len, labels))
    even = sum(means) / len(means), "As in question 02.1: the last batch is smaller."
    hint = nearest(value, even, otherwise="As in question 02.1: what is divided by what?", within=CLOSE)
    seen = f"it returned {value:.4f}, and the mean over all samples is {right:.4f}"
    return Finding(WEIGHED, far(value, right) < CLOSE, seen, hint)


def _batches(seed: int) -> tuple[torch.Tensor, DataLoader]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(3, generator=generator)
    images = torch.randn(27, 3, generator=generator)
    labels = torch.randint(0, 2, (27,), generator=generator)
    return start, DataLoader(TensorDataset(images, labels), batch_size=8)  # of 8, 8, 8 and 3


class Token:
    """Lives as long as the graph that holds it."""


class Scorer(nn.Module):
    """Two classes, three weights; notes in which mode it is called, and how many old graphs are kept."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())
        self.modes: list[bool] = []
        self.outputs: list[torch.Tensor] = []
        self.graphs: list[weakref.ref[Token]] = []
        self.kept = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old = self.graphs[:-1]  # the last may be in use
        if any(each() for each in old):
            time.sleep(0.05)  # the thread that looks where a rank stands may hold a frame for a moment
        self.kept = max(self.kept, sum(each() is not None for each in old))
        self.modes.append(self.training)
        score = x @ self.weight
        if score.grad_fn is not None:
            token = Token()
            score.grad_fn.metadata["token"] = token
            self.graphs.append(weakref.ref(token))
        output = torch.stack([score, -score], dim=1)
        self.outputs.append(output.detach().clone())
        return output


def _trained(answer: Any, seed: int) -> dict[str, Any]:
    start, loader = _batches(seed)
    model = Scorer(start).eval()  # as an evaluation may have left it
    value = answer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    return {
        "weights": model.weight,
        "modes": model.modes,
        "outputs": model.outputs,
        "value": number(value),
        "holds a graph": isinstance(value, torch.Tensor) and value.requires_grad,
        "kept": model.kept,
    }


def _weights(seed: int, clear: bool = True) -> torch.Tensor:
    """What such a training makes of the weights."""
    start, loader = _batches(seed)
    model = Scorer(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        if clear:
            optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.weight
