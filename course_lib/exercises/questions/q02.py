"""The questions of lesson 02: a training loop that is right on one device."""

from __future__ import annotations

import contextlib
import operator
import random
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
CLOSE = 1e-5  # answers may count in float32


def _plain(value: Any) -> float | str:
    """A number of whatever type, as one that can travel; of all else, what it is."""
    if value is None:
        return "nothing (None)"
    if not isinstance(value, bool | str):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return float(value)
    return f"{value!r:.60}, a {type(value).__name__}"


def _number(value: float | str, name: str) -> float:
    if isinstance(value, str):
        raise Refused(f"{name} shall return a number; it returned {value}")
    return value


# --- 02.1 -------------------------------------------------------------------------------------------------

EQUAL, UNEVEN = "right where all batches have the same size", "right where the last batch is smaller"


@question("02.1", {EQUAL: 1, UNEVEN: 1})
def mean_loss(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "mean_loss(losses, sizes)")
    losses = [round(rng.uniform(0.2, 3), 2) for _ in range(3)]
    losses.append(round(rng.uniform(3.5, 5), 2))  # what the last one counts has to show
    cases = {EQUAL: [8, 8, 8, 8], UNEVEN: [8, 8, 8, rng.randint(1, 3)]}
    found = observe(_mean_losses, answer, losses, list(cases.values()))[0]
    for (what, sizes), value in zip(cases.items(), found, strict=True):
        value = _number(value, "mean_loss")
        total = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
        right = total / sum(sizes)
        seen = (
            f"mean losses {losses} of batches of {sizes}: {value:.4f}, and it is {right:.4f} for each sample"
        )
        if abs(value * sum(sizes) - sum(losses)) < CLOSE:
            hint = "A sum of means over a number of samples: it is too small by about the batch size."
        elif abs(value - sum(losses) / len(losses)) < CLOSE:
            hint = "Each batch counts alike here. Should a batch of 2 count as much as one of 8?"
        elif any(abs(value - total / by) < CLOSE for by in (1, len(sizes), sizes[0] * len(sizes))):
            hint = "The sum over the samples is right. By what should it be divided?"
        else:
            hint = "A batch's mean times its size is the sum over its samples."
        yield what, abs(value - right) < CLOSE, seen, hint


def _mean_losses(answer: Any, losses: list[float], cases: list[list[int]]) -> list[Any]:
    return [_plain(answer(list(losses), list(sizes))) for sizes in cases]


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


@question("02.2", {COUNTS: 1, QUIET: 1, GRAPHLESS: 1, BACK: 1})
def evaluate(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "evaluate(model, loader)")
    sizes = [5, 5, rng.randint(1, 3)]
    labels = [[rng.randrange(4) for _ in range(size)] for size in sizes]
    guesses = [[y if rng.random() < 0.6 else (y + 1) % 4 for y in batch] for batch in labels]
    guesses[-1] = [(y + 1) % 4 for y in labels[-1]]  # the small batch is all wrong: it must not count as much
    value, modes, training, gradients = observe(_evaluated, answer, guesses, labels)[0]
    value = _number(value, "evaluate")
    pairs = [pair for batch in zip(guesses, labels, strict=True) for pair in zip(*batch, strict=True)]
    right = sum(guess == label for guess, label in pairs) / len(pairs)
    seen = f"{right * len(pairs):.0f} of {len(pairs)} are right, {right:.4f}; it returned {value:.4f}"
    of_batches = [
        sum(map(operator.eq, *batch)) / len(batch[0]) for batch in zip(guesses, labels, strict=True)
    ]
    if abs(value - sum(of_batches) / len(of_batches)) < CLOSE:
        hint = "That is the mean of the batches' accuracies. The last batch is smaller."
    elif abs(value - right * len(pairs)) < CLOSE:
        hint = "That is how many are right. Of how many?"
    elif abs(value - 100 * right) < 100 * CLOSE:
        hint = "That is in percent, and was asked for as a number between 0 and 1."
    else:
        hint = "Count what is right, count what was judged, divide at the end."
    yield COUNTS, abs(value - right) < CLOSE, seen, hint
    if not modes:
        return
    inside, graphs = any(mode for mode, _ in modes), any(graph for _, graph in modes)
    yield (
        QUIET,
        not inside,
        "the model was called with model.training == True",
        "Dropout is active so. What ends it?",
    )
    yield (
        GRAPHLESS,
        not graphs,
        "the model's output has requires_grad == True",
        "Which context builds no graph?",
    )
    if inside:
        seen, hint = "it was called in training mode, so there was nothing to go back from", "See above."
    elif not training:
        seen, hint = "model.training is False when it returns", "The training goes on after it."
    else:
        seen = "what the model computes after it returns builds no graph"
        hint = "The training goes on after it. For how long are graphs switched off?"
    yield BACK, training and gradients and not inside, seen, hint


def _evaluated(
    answer: Any, guesses: list[list[int]], labels: list[list[int]]
) -> tuple[float | str, list[Any], bool, bool]:
    model = Watched().train()
    images = nn.functional.one_hot(torch.tensor([each for batch in guesses for each in batch]), 4).float()
    data = TensorDataset(images, torch.tensor([each for batch in labels for each in batch]))
    value = _plain(answer(model, DataLoader(data, batch_size=len(labels[0]))))
    return value, list(model.modes), model.training, model(images).requires_grad


# --- 02.3 -------------------------------------------------------------------------------------------------

CLEARED, MODE, WEIGHED, RELEASED = (
    "each step follows the gradient of its own batch alone",
    "the model is in training mode",
    "the loss is the mean over all samples",
    "the graphs of the steps are not kept",
)


@question("02.3", {CLEARED: 1, MODE: 1, WEIGHED: 1, RELEASED: 1})
def train_epoch(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "train_epoch(model, loader, optimizer)")
    seed = rng.randrange(2**31)
    got = observe(_trained, answer, seed)[0]
    if not got["modes"]:
        raise Refused("train_epoch never called the model")
    weights = _reference(seed)
    off = (got["weights"] - weights).abs().max().item()
    seen = f"after four steps the weights are up to {off:.4f} away from those of such a training"
    if (got["weights"] - _batches(seed)[0]).abs().max() < CLOSE:
        hint = "They have not moved at all. Who changes the weights?"
    elif (got["weights"] - _reference(seed, clear=False)).abs().max() < CLOSE:
        hint = "backward() adds to what .grad holds. What holds it before?"
    else:
        hint = "One step for each batch: from the gradient of its mean loss, and of no other's."
    yield CLEARED, off < CLOSE, seen, hint
    training = all(got["modes"])
    yield (
        MODE,
        training,
        "the model was called with model.training == False",
        "evaluate() was called before. Who says that training goes on?",
    )
    value, right = got["value"], got["right"]
    if isinstance(value, str):
        seen, hint = f"it returned {value}", "It shall return the mean loss of the epoch, a number."
        yield WEIGHED, False, seen, hint
        yield RELEASED, False, seen, hint
        return
    if right is None:
        seen = f"it called the model {len(got['modes'])} times, and there are 4 batches"
        hint = "Where does the loop end?"
    else:
        seen = f"it returned {value:.4f}, and the mean over all samples is {right:.4f}"
        last = abs(value - got["even"]) < CLOSE
        hint = "As in question 02.1: " + (
            "the last batch is smaller." if last else "what is divided by what?"
        )
    yield WEIGHED, right is not None and abs(value - right) < CLOSE, seen, hint
    if got["kept"]:
        seen = f"while the last batch was computed, the graphs of {got['kept']} before it were still there"
    else:
        seen = "what it returned is a tensor that holds a graph"
    hint = "A loss that is added up as a tensor keeps its graph. What makes a number of it?"
    yield RELEASED, not got["kept"] and not got["tensor"], seen, hint


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
        self.kept = max(
            self.kept, sum(each() is not None for each in self.graphs[:-1])
        )  # the last may be in use
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
    # of the model's own outputs: steps that are wrong make no second fault of the mean
    pairs = list(zip(model.outputs, (y for _, y in loader), strict=False))
    whole = len(pairs) == len(loader) and all(len(output) == len(y) for output, y in pairs)
    means = [nn.functional.cross_entropy(output, y).item() for output, y in pairs] if whole else []
    return {
        "weights": model.weight.detach(),
        "modes": model.modes,
        "value": _plain(value),
        "right": sum(m * len(y) for m, (_, y) in zip(means, pairs, strict=True)) / 27 if whole else None,
        "even": sum(means) / len(loader),
        "tensor": isinstance(value, torch.Tensor) and value.requires_grad,
        "kept": model.kept,
    }


def _reference(seed: int, clear: bool = True) -> torch.Tensor:
    start, loader = _batches(seed)
    model = Scorer(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        if clear:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.weight.detach()
