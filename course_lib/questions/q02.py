"""The questions of lesson 02: a training loop that is right on one device."""

from __future__ import annotations

import operator
import random
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..check import Refused, a_function, observe, question

Found = Iterator[tuple[str, bool, str, str]]
CLOSE = 1e-6


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "nothing (None)" if value is None else f"{value!r:.60}, a {type(value).__name__}"
        raise Refused(f"{name} shall return a number; it returned {what}")
    return float(value)


# --- 02.1 -------------------------------------------------------------------------------------------------

EQUAL, UNEVEN = "right where all batches have the same size", "right where the last batch is smaller"


@question("02.1", {EQUAL: 1, UNEVEN: 1})
def mean_loss(answer: Any, rng: random.Random) -> Found:
    a_function(answer, "mean_loss(losses, sizes)")
    losses = [round(rng.uniform(0.2, 3), 2) for _ in range(4)]
    cases = {EQUAL: [8, 8, 8, 8], UNEVEN: [8, 8, 8, rng.randint(1, 3)]}
    found = observe(_mean_losses, answer, losses, list(cases.values()))[0]
    for (what, sizes), value in zip(cases.items(), found, strict=True):
        value = _number(value, "mean_loss")
        right = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        seen = (
            f"mean losses {losses} of batches of {sizes}: {value:.4f}, and it is {right:.4f} for each sample"
        )
        if abs(value * sum(sizes) - sum(losses)) < CLOSE:
            hint = "A sum of means over a number of samples: it is too small by about the batch size."
        elif abs(value - sum(losses) / len(losses)) < CLOSE:
            hint = "Each batch counts alike here. Should a batch of 2 count as much as one of 8?"
        else:
            hint = "A batch's mean times its size is the sum over its samples."
        yield what, abs(value - right) < CLOSE, seen, hint


def _mean_losses(answer: Any, losses: list[float], cases: list[list[int]]) -> list[Any]:
    return [answer(list(losses), list(sizes)) for sizes in cases]


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
    value, modes, training = observe(_evaluated, answer, guesses, labels)[0]
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
    yield (
        BACK,
        training and not inside,
        f"model.training is {training} when it returns",
        "The training goes on after it.",
    )


def _evaluated(answer: Any, guesses: list[list[int]], labels: list[list[int]]) -> tuple[Any, list[Any], bool]:
    model = Watched().train()
    loader = [
        (nn.functional.one_hot(torch.tensor(guess), 4).float(), torch.tensor(label))
        for guess, label in zip(guesses, labels, strict=True)
    ]
    value = answer(model, loader)
    return value, model.modes, model.training


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
    weights, loss = _reference(seed)
    off = (got["weights"] - weights).abs().max().item()
    seen = f"after four steps the weights are up to {off:.4f} away from those of such a training"
    if (got["weights"] - _batches(seed)[0]).abs().max() < CLOSE:
        hint = "They have not moved at all. Who changes the weights?"
    else:
        hint = "backward() adds to what .grad holds. What holds it before?"
    yield CLEARED, off < CLOSE, seen, hint
    training = all(got["modes"])
    yield (
        MODE,
        training,
        "the model was called with model.training == False",
        "evaluate() was called before. Who says that training goes on?",
    )
    value = got["loss"]
    if value is None:
        yield WEIGHED, False, "it returned no number", "It shall return the mean loss of the epoch."
    else:
        seen = f"it returned {value:.4f}, and the mean over all samples is {loss:.4f}"
        yield (
            WEIGHED,
            abs(value - loss) < 1e-5,
            seen,
            "The question before this one: the last batch is smaller.",
        )
    seen = (
        f"while the last batch was computed, the graphs of {got['kept']} batches before it were still there"
    )
    hint = "A loss that is added up as a tensor keeps its graph. What makes a number of it?"
    yield RELEASED, value is not None and not got["kept"] and not got["tensor"], seen, hint


def _batches(seed: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(3, generator=generator)
    return start, [
        (torch.randn(n, 3, generator=generator), torch.randint(0, 2, (n,), generator=generator))
        for n in (8, 8, 8, 3)
    ]


class Token:
    """Lives as long as the graph that holds it."""


class Scorer(nn.Module):
    """Two classes, three weights; notes in which mode it is called, and how many old graphs are kept."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())
        self.modes: list[bool] = []
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
        return torch.stack([score, -score], dim=1)


def _trained(answer: Any, seed: int) -> dict[str, Any]:
    start, loader = _batches(seed)
    model = Scorer(start).eval()  # as an evaluation may have left it
    value = answer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    return {
        "weights": model.weight.detach(),
        "modes": model.modes,
        "loss": float(value) if isinstance(value, int | float | torch.Tensor) else None,
        "tensor": isinstance(value, torch.Tensor) and value.requires_grad,
        "kept": model.kept,
    }


def _reference(seed: int) -> tuple[torch.Tensor, float]:
    start, loader = _batches(seed)
    model = Scorer(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = count = 0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss.item() * len(x), count + len(x)
    return model.weight.detach(), total / count
