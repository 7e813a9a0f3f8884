"""The questions of lesson 02: a training loop that is right on one device."""

from __future__ import annotations

import operator
import random
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import chain, groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ..in_rank.work import on_each_case, the_number
from ..inputs import all_tensors, flat, network, seeds, tensor
from ..judging import Faults, far, first_fault, nearest
from ..question import Ask, Finding, Refused, Result, question
from ..shape import NUMBER, reports
from ..wording import number

CLOSE = 1e-5  # tolerance: an answer may compute in float32
AS_MANY = "That counts every batch as a full one. The last one has fewer samples."
DATASET = "That is divided by the size of the whole dataset, but the loader gives only part of it."


class _Orders(Sampler):
    """A sampler over part of a dataset that rotates its order each pass: a shuffle known in advance."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.passes = order, 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        turn = self.passes % len(self.order)
        self.passes += 1
        return iter(self.order[turn:] + self.order[:turn])


# --- 02.1 -------------------------------------------------------------------------------------------------

EQUAL, UNEVEN = "right where all batches have the same size", "right where batches have different sizes"
TOO_SMALL = "A sum of means, divided by a number of samples: too small by about a factor of the batch size."
ALIKE = "Each batch has the same weight here. Should a batch of 2 count as much as one of 8?"
DIVIDED = "The sum over the samples is right. What should it be divided by?"
LAST = "Any batch may be smaller than the others, not only the last one."


@question("02.1", "mean_loss(losses, sizes)", {EQUAL: 1, UNEVEN: 1})
def mean_loss(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    full = rng.randint(6, 9)
    small, many = rng.randint(1, 3), rng.sample(range(1, 40), rng.randint(5, 7))
    cases = [(EQUAL, [full] * 4), (EQUAL, [rng.randint(2, 5)] * rng.randint(5, 7))]
    cases += [(UNEVEN, [full] * 3 + [small]), (UNEVEN, [small] + [full] * rng.randint(2, 4))]
    cases += [(UNEVEN, many), (UNEVEN, [full])]
    losses = []
    for _, sizes in cases:  # the first loss is small, the last large: wrong weights show
        ends = [round(rng.uniform(3.5, 5), 2) for _ in range(2)]
        between = [round(rng.uniform(0.2, 3), 2) for _ in sizes[2:]]
        losses.append([round(ends[0] / 10, 2), *between, ends[1]][-len(sizes) :])
    values = ask(_mean_losses, [(means, sizes) for means, (_, sizes) in zip(losses, cases, strict=True)])[0]
    for (what, sizes), means, value in zip(cases, losses, values, strict=True):
        total, count = sum(map(operator.mul, means, sizes)), sum(sizes)
        right = total / count
        seen = f"mean losses {means} of batches of {sizes}: {value:.4f}, and it is {right:.4f} per sample"
        hint = nearest(
            value,
            (sum(means) / count, TOO_SMALL),
            (sum(means) / len(means), ALIKE),
            *(
                (total / by, DIVIDED)
                for by in (1, len(sizes), sizes[0] * len(sizes), max(sizes) * len(sizes))
            ),
            ((sum(means[:-1]) * sizes[0] + means[-1] * sizes[-1]) / count, LAST),
            otherwise="A batch's mean times its size is the sum over its samples.",
            within=CLOSE,
        )
        yield Finding(what, far(value, right) < CLOSE, seen, hint)


@reports(lambda cases: [NUMBER] * len(cases))
def _mean_losses(answer: Any, cases: list[tuple[list[float], list[int]]]) -> list[float]:
    asked, values = "mean_loss must return a number", []
    losses: list[float] = []
    sizes: list[int] = []
    for losses[:], sizes[:] in cases:  # the same two lists, with new numbers each time
        values.append(the_number(answer(losses, sizes), asked))
    return values


# --- 02.2 -------------------------------------------------------------------------------------------------

COUNTS = "counts correctly, whatever the loader gives"
QUIET = "the model is in evaluation mode meanwhile"
GRAPHLESS = "no graph is built"
BACK = "afterwards the model is as it was, and every module in its own mode"
OF_BATCHES = "That is the mean of the batches' accuracies, as if all had one size. The last is smaller."


class _Scores(nn.Module):
    """A model with negative scores per class; each call's mode, graph and inputs are noted, copies' too."""

    calls: ClassVar[list[tuple[list[str], bool, Any]]] = []

    def __init__(self, classes: int) -> None:
        super().__init__()
        mix = nn.Linear(classes, classes, bias=False)
        norm, drop = nn.BatchNorm1d(classes), nn.Dropout(0.0)
        self.body = nn.Sequential(OrderedDict(mix=mix, norm=norm, last=nn.Sequential(drop)))
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():  # the score of class i is input i - 1
            mix.weight.copy_(torch.eye(classes).roll(1, 0))
        mix.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output = self.body(x) * self.scale
        training = [name or "model" for name, module in self.named_modules() if module.training]
        self.calls.append((training, output.requires_grad, x.tolist()))
        return output


@question("02.2", "evaluate(model, loader)", {COUNTS: 1, QUIET: 1, GRAPHLESS: 1, BACK: 1})
def evaluate(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    cases = [_an_evaluation(rng, classes) for classes in rng.sample(range(4, 8), 2)]
    while all(_is_round(_share_of_hits(case) * 100) for case in cases):  # a rounded share must be wrong
        cases[0] = _an_evaluation(rng, cases[0]["classes"])
    cases[0]["mode"], cases[1]["mode"] = True, False
    all_found = ask(_evaluated, cases)[0]
    if not all(result["calls"] for result in all_found):
        raise Refused("evaluate never called the model")
    for case, result in zip(cases, all_found, strict=True):
        counts, images = _of_counts(case, result), _images(case)[0]
        given = images[: case["count"]] if counts.ok else images[:0]
        _only_what_was_drawn([inputs for _, _, inputs in result["calls"]], images, given)
        yield counts
        value, right = result["again"], 1 - _share_of_hits(case)
        seen = f"the same model and loader, whose labels have changed: {right:.4f}; it returned {value:.4f}"
        yield Finding(COUNTS, far(value, right) < CLOSE, seen, "What do you keep between two calls?")
        training = [modules for modules, *_ in result["calls"] if modules]
        quiet, graphless = not training, not any(graph for _, graph, _ in result["calls"])
        seen, hint = (
            "the model was called in training mode",
            "Dropout is active in that mode. What switches it off?",
        )
        if training and "model" not in training[0]:
            seen = f"the model was called, and {training[0][0]} in it was in training mode"
            hint = "Each module has a mode of its own. What sets the mode of all of them?"
        yield Finding(QUIET, quiet, seen, hint)
        seen = "the model's output has requires_grad == True"
        yield Finding(GRAPHLESS, graphless, seen, "In which context is no graph built?")
        yield first_fault(BACK, _faults_of_the_way_back(result, quiet))


def _an_evaluation(rng: random.Random, classes: int) -> dict[str, Any]:
    """Draw labels and predictions in the loader's first order, then those of samples it never gives.

    The last, small batch is all wrong: it must count less. Guesses and labels of two passes hardly match.
    """
    size = rng.randint(5, 8)
    full, rest = size * rng.randint(2, 3), rng.randint(1, 3)
    others = rng.choice([count for count in range(4, 10) if rest + count != size])  # no full batch of both
    labels = [place % classes for place in range(full + rest + others)]
    wrong = [*rng.sample(range(full), rng.randint(2, full // 3)), *range(full, full + rest)]
    guesses = [(y + 2) % classes if place in wrong else y for place, y in enumerate(labels)]
    case = {"labels": labels, "guesses": guesses, "classes": classes, "size": size, "count": full + rest}
    return case | {"seed": rng.randrange(2**31)}


def _images(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Draw the images, in the order of the labels, and their places in the dataset."""
    total, classes = len(case["labels"]), case["classes"]
    generator = torch.Generator().manual_seed(case["seed"])
    images = -1.5 - 3 * torch.rand(total, classes, generator=generator)
    best = (torch.tensor(case["guesses"]) - 1) % classes
    images[torch.arange(total), best] = -0.9 + torch.rand(total, generator=generator) / 2
    return images, torch.randperm(total, generator=generator)


def _only_what_was_drawn(calls: list[list[list[float]]], drawn: Tensor, given: Tensor) -> None:
    """Refuse calls of the model with samples that were not drawn, or without some that it must have met."""
    known, needed = (set(map(tuple, samples.tolist())) for samples in (drawn, given))
    met = {tuple(sample) for inputs in calls for sample in inputs}
    if met - known:
        raise Refused("the model was called with other samples than the loader gives")
    if needed - met:
        raise Refused(f"{len(needed - met)} samples were counted that the model was never called with")


def _of_counts(case: dict[str, Any], result: Result) -> Finding:
    value, count, size = result["value"], case["count"], case["size"]
    hits, right = _hits(case), _share_of_hits(case)
    seen = f"{sum(hits)} of {count} are right, {right:.4f}; it returned {value:.4f}"
    batches = [hits[start : start + size] for start in range(0, count, size)]
    otherwise = "Count the correct predictions, count the samples, divide at the end."
    if result["passes"] > 1:
        seen += f"; the loader was gone through {result['passes']} times"
        otherwise = "A loader may give another order each time. Which label belongs to which prediction?"
    hint = nearest(
        value,
        (sum(sum(batch) / len(batch) for batch in batches) / len(batches), OF_BATCHES),
        (sum(hits), "That is how many are right. Of how many?"),
        (sum(hits) / len(case["labels"]), DATASET),
        (100 * right, "That is a percentage. A number between 0 and 1 is asked for."),
        otherwise=otherwise,
        within=CLOSE,
    )
    return Finding(COUNTS, far(value, right) < CLOSE, seen, hint)


def _hits(case: dict[str, Any]) -> list[bool]:
    return list(map(operator.eq, case["guesses"], case["labels"]))[: case["count"]]


def _is_round(percents: float) -> bool:
    return abs(percents - round(percents)) < 0.01


def _share_of_hits(case: dict[str, Any]) -> float:
    return sum(_hits(case)) / case["count"]


def _faults_of_the_way_back(result: Result, quiet: bool) -> Faults:
    """Yield what the evaluation left changed."""
    if not quiet:
        yield "it was called in training mode, so there was no mode to restore", "See above."
    modes, graphs, numbers = result["modes"], result["graphs"], result["numbers"]
    if "model" in modes:
        now, before = modes["model"], not modes["model"]
        hint = "Does training always go on after it?"
        hint = "The training goes on after it." if before else hint
        yield f"model.training was {before} before, and is {now} when it returns", hint
    if modes:
        name, now = next(iter(modes.items()))
        hint = (
            "Somebody had left it so on purpose. Which mode did each module have before you set one for all?"
        )
        yield f"model.{name}.training was {not now} before, and is {now} when it returns", hint
    if not result["records"]:
        seen = "what the model computes after it returns builds no graph"
        yield seen, "The training goes on after it. For how long are graphs switched off?"
    if graphs:
        name, now = next(iter(graphs.items()))
        hint = "The training goes on after it. For how long are graphs switched off?"
        if now:
            hint = "That one was frozen before. How are graphs switched off without touching any parameter?"
        yield f"{name}.requires_grad was {not now} before, and is {now} when it returns", hint
    if numbers:
        yield f"{numbers[0]} holds other numbers than before", "An evaluation measures, and changes nothing."


@reports(
    lambda cases: (
        [
            {"value": NUMBER, "calls": [[[str, ...], bool, [[float, ...], ...]], ...], "passes": int}
            | {
                "records": bool,
                "again": NUMBER,
                "modes": {str: bool},
                "graphs": {str: bool},
                "numbers": [str, ...],
            }
        ]
        * len(cases)
    )
)
@on_each_case
def _evaluated(answer: Any, case: dict[str, Any]) -> Result:
    """Run one evaluation; return the accuracy, how it called the model and what it left changed."""
    classes, count, labels = case["classes"], case["count"], torch.tensor(case["labels"])
    images, places = _images(case)
    data = TensorDataset(images[places.argsort()], labels[places.argsort()])
    orders = _Orders(places[:count].tolist())
    model = _Scores(classes).train(case["mode"])
    model.body.eval()  # a module in training mode inside one that is not
    model.get_submodule("body.last").train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = _state(model)
    model.calls.clear()
    loader, asked = DataLoader(data, batch_size=case["size"], sampler=orders), "evaluate must return a number"
    value, calls = the_number(answer(model, loader), asked), list(model.calls)
    states = zip(before, _state(model), strict=True)
    changed = [{name: now[name] for name in now if now[name] != was[name]} for was, now in states]
    modes, graphs, numbers = changed
    records = torch.is_grad_enabled() and (bool(graphs) or model(images).requires_grad)
    result = {"value": value, "calls": calls, "passes": orders.passes, "records": records}
    labels = data.tensors[1]
    labels.copy_((labels + 2) % classes)  # now the wrong guesses are right
    result["again"] = the_number(answer(model, loader), asked)
    return result | {"modes": modes, "graphs": graphs, "numbers": list(numbers)}


def _state(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return, by name, the mode of each module, each ``requires_grad``, and all values and gradients."""
    numbers: dict[str, Any] = {name: value.tolist() for name, value in all_tensors(model).items()}
    numbers |= {f"{name}.grad": getattr(p.grad, "tolist", str)() for name, p in model.named_parameters()}
    modes = {name or "model": module.training for name, module in model.named_modules()}
    return modes, {name: parameter.requires_grad for name, parameter in model.named_parameters()}, numbers


# --- 02.3 -------------------------------------------------------------------------------------------------

CLEARED = "each step follows the gradient of its own batch alone"
MODE = "the model is in training mode"
WEIGHED = "the loss is the mean over all samples"
RELEASED = "the graphs of the steps are not kept"
FEATURES, CLASSES = 4, 3
Epoch = dict[str, Any]
ONE_CALL = "The loss that is asked for is the one that each step follows. One call of the model gives both."


@question("02.3", "train_epoch(model, loader, optimizer)", {CLEARED: 1, MODE: 1, WEIGHED: 1, RELEASED: 1})
def train_epoch(ask: Ask, rng: random.Random) -> Iterator[Finding]:
    form: dict[str, Any] = {"kind": rng.randrange(1000), "values": rng.randrange(2**31)}
    form["rates"] = [round(rate, 3) for rate in (rng.uniform(0.05, 0.1), rng.uniform(0.15, 0.25))]
    epochs = []
    for seed, size in zip(seeds(rng, 2), rng.sample(range(5, 9), 2), strict=True):
        count = size * rng.randint(2, 3) + rng.randint(2, 3)
        epochs.append({"seed": seed, "size": size, "count": count, "all": count + size + rng.randint(0, 4)})
    epochs.append(epochs[-1])  # a second epoch from the same loader
    results = ask(_trained, form, epochs)[0]
    if not results[0]["calls"]:
        raise Refused("train_epoch never called the model")
    for epoch, result in zip(epochs, results, strict=True):
        inputs = _samples(epoch)[0]
        _only_what_was_drawn([_column(call, 0) for _, call in result["calls"]], inputs, inputs[:0])
    came = [_batches_of(*pair) for pair in zip(epochs, results, strict=True)]
    right = _weights(form, came)
    for call, (epoch, result, batches) in enumerate(zip(epochs, results, came, strict=True)):
        so_far = came[: call + 1]
        off = far(result["weights"], right[call])
        weights = partial(_weights, form, so_far)
        steps = len(batches) if not call else f"{len(batches)} more"
        seen = f"after {steps} steps the weights are off by up to {off:.4f}"
        hint = nearest(
            result["weights"],
            (_weights(form, [])[-1], "They have not moved at all. Which call changes the weights?"),
            (weights(clear=False)[-1], "backward() adds to what .grad holds. What does it hold before?"),
            (weights(reduction="sum")[-1], "Each step follows the sum over its batch, not the mean."),
            (
                weights(soft=True)[-1],
                "cross_entropy takes raw scores, and turns them into probabilities itself.",
            ),
            otherwise="One step for each batch, with the gradient of its own mean loss and nothing else."
            if not call
            else "The first epoch is right. What do you keep from it when the same loader comes again?",
            within=CLOSE,
        )
        yield Finding(CLEARED, off < CLOSE, seen, hint)
        seen = "the model, or a module in it, was called with training == False"
        hint = "evaluate() was called before. What puts the model back into training mode?"
        yield Finding(MODE, all(training for training, *_ in result["calls"]), seen, hint)
        if isinstance(result["value"], str):
            hint = "It must return the mean loss of the epoch, a number."
            for what in (WEIGHED, RELEASED):
                yield Finding(what, False, f"it returned {result['value']}", hint)
            return
        yield _weighed(epoch, result, batches)
        seen = "what it returned is a tensor that holds a graph"
        if result["kept"]:
            seen = f"while a batch was computed, the graphs of {result['kept']} before it were still there"
        hint = "A loss that is added up as a tensor keeps its graph. What turns it into a number?"
        yield Finding(RELEASED, not result["kept"] and not result["holds a graph"], seen, hint)
        if off >= CLOSE:
            return


def _samples(epoch: Epoch) -> tuple[Tensor, Tensor, list[int]]:
    """Return a dataset's inputs and labels, and the indices that its loader gives, in their first order."""
    generator = torch.Generator().manual_seed(epoch["seed"])
    inputs = tensor(epoch["seed"], (epoch["all"], FEATURES), torch.float32)
    labels = torch.randint(0, CLASSES, (epoch["all"],), generator=generator)
    return inputs, labels, torch.randperm(epoch["all"], generator=generator)[: epoch["count"]].tolist()


def _loader(epoch: Epoch) -> DataLoader:
    inputs, labels, order = _samples(epoch)
    return DataLoader(TensorDataset(inputs, labels), batch_size=epoch["size"], sampler=_Orders(order))


def _batches_of(epoch: Epoch, result: Result) -> list[tuple[Tensor, Tensor]]:
    """Return the batches that the model saw if they make up the epoch, in any order; else the epoch's own."""
    inputs, labels, order = _samples(epoch)
    place = {tuple(row): i for i, row in enumerate(inputs.tolist())}
    batches = [order[start : start + epoch["size"]] for start in range(0, len(order), epoch["size"])]
    given: list[Any] = [[place.get(tuple(row)) for row in batch] for batch, _ in _first_calls(result)]
    seen = given[: len(batches)]
    if list(map(len, seen)) == list(map(len, batches)) and set(chain(*seen)) == set(order):
        batches = seen
    return [(inputs[batch], labels[batch]) for batch in batches]


def _column(rows: list[Any], at: int) -> list[Any]:
    return [row[at] for row in rows]


def _first_calls(result: Result) -> list[Any]:
    """Return inputs and outputs of the model's calls; of consecutive calls with one batch, the first's."""
    noted = [(_column(call, 0), _column(call, 1)) for _, call in result["calls"]]
    return [next(calls) for _, calls in groupby(noted, key=operator.itemgetter(0))]


def _weighed(epoch: Epoch, result: Result, batches: list[tuple[Tensor, Tensor]]) -> Finding:
    """Check the mean loss against the model's own outputs, so that wrong steps are not counted twice."""
    value, calls = result["value"], len(result["calls"])
    outputs = [output for _, output in _first_calls(result)[: len(batches)]]
    labels = [y for _, y in batches]
    if [len(output) for output in outputs] != [len(y) for y in labels]:
        seen = f"it called the model {calls} times, and there are {len(labels)} batches"
        return Finding(WEIGHED, False, seen, "Where does the loop end?")
    means = [cross_entropy(torch.tensor(o), y).item() for o, y in zip(outputs, labels, strict=True)]
    total = sum(mean * len(y) for mean, y in zip(means, labels, strict=True))
    right = total / epoch["count"]
    seen = f"it returned {value:.4f}, and the mean over all samples is {right:.4f}"
    otherwise = "As in question 02.1: what is divided by what?"
    if calls > len(labels):
        seen += f"; it called the model {calls} times, for {len(labels)} batches"
        otherwise = ONE_CALL
    hint = nearest(
        value,
        (sum(means) / len(means), "As in question 02.1: the last batch is smaller."),
        (total / (len(labels) * epoch["size"]), AS_MANY),
        (total / epoch["all"], DATASET),
        otherwise=otherwise,
        within=CLOSE,
    )
    return Finding(WEIGHED, far(value, right) < CLOSE, seen, hint)


class _Token:
    """An object that lives as long as the graph that holds it."""


class _Watched(nn.Module):
    """A wrapper that records mode, inputs and outputs of each call, and how many old graphs are alive."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.noted: list[tuple[bool, list[Any]]] = []
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
        training = all(module.training for module in self.modules())
        self.noted.append((training, list(zip(x.tolist(), scores.tolist(), strict=True))))
        return scores


def _training(form: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with a frozen layer, and an optimizer with momentum and two learning rates."""
    net: Any = network(form["kind"], form["values"], FEATURES, CLASSES, norm=False).float()
    net.drop.p = 0.0
    head = list(net.head.parameters())
    others = [parameter for name, parameter in net.named_parameters() if not name.startswith("head.")]
    groups = [{"params": part, "lr": rate} for part, rate in zip((head, others), form["rates"], strict=True)]
    return net, torch.optim.SGD(groups, momentum=0.9)


@reports(
    lambda form, epochs: (
        [
            {"calls": [[bool, [[[float, ...], [NUMBER] * CLASSES], ...]], ...], "value": (NUMBER, str)}
            | {"kept": int, "holds a graph": bool, "weights": [NUMBER] * len(_weights(form, [])[0])}
        ]
        * len(epochs)
    )
)
def _trained(answer: Any, form: dict[str, Any], epochs: list[Epoch]) -> list[Result]:
    """Run the epochs of one training run, the last two with the same loader."""
    net, optimizer = _training(form)
    model = _Watched(net)
    results: list[Result] = []
    loaders = [*map(_loader, epochs[:-1])]
    for loader in (*loaders, loaders[-1]):
        model.eval()  # as an evaluation may have left it
        model.noted = []
        value = answer(model, loader, optimizer)
        results.append({"calls": model.noted, "value": number(value), "kept": model.kept})
        results[-1]["weights"] = flat(net.parameters())
        results[-1]["holds a graph"] = isinstance(value, Tensor) and value.requires_grad
    return results


def _weights(
    form: dict[str, Any],
    epochs: list[list[tuple[Tensor, Tensor]]],
    clear: bool = True,
    soft: bool = False,
    reduction: str = "mean",
) -> list[Tensor]:
    """Return the right weights after each epoch; without any epoch, the initial ones."""
    net, optimizer = _training(form)
    weights = []
    net.train()
    for batches in epochs:
        for x, y in batches:
            if clear:
                optimizer.zero_grad()
            scores = net(x).softmax(1) if soft else net(x)
            cross_entropy(scores, y, reduction=reduction).backward()
            optimizer.step()
        weights.append(flat(net.parameters()))
    return weights or [flat(net.parameters())]
