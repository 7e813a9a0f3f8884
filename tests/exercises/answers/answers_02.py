"""What people answer in exercise 02, wrong and right (see `answers`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.exercises.answers import right, wrong

EQUAL = "right where all batches have the same size"


@wrong("02.1", hint="too small by about a factor of the batch size.")
def means_over_samples(losses, sizes):
    return sum(losses) / sum(sizes)


@wrong("02.1", EQUAL, hint="Should a batch of")
def mean_of_means(losses, sizes):
    return sum(losses) / len(losses)


@wrong("02.1", hint="What should it be divided by?")
def the_sum(losses, sizes):
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True))


@wrong("02.1", EQUAL, hint="What should it be divided by?")
def as_if_all_were_full(losses, sizes):
    return the_sum(losses, sizes) / (len(sizes) * sizes[0])


@wrong("02.1", EQUAL, hint="Any batch may be smaller than the others, not only the last one.")
def with_a_small_last_one(losses, sizes):
    return (sum(losses[:-1]) * sizes[0] + losses[-1] * sizes[-1]) / sum(sizes)


@wrong("02.1", hint="A batch's mean times its size")
def of_four_batches(losses, sizes):
    return sum(losses[i % len(losses)] * sizes[i % len(sizes)] for i in range(4)) / sum(sizes)


EPOCHS: list[tuple[float, int]] = [(1.0, 1)]


@wrong("02.1", hint="it returned nothing (None)")
def prints_it(losses, sizes):
    print(the_sum(losses, sizes) / sum(sizes))


@wrong("02.1", hint="ended its process")
def exits(losses, sizes):
    raise SystemExit


@wrong("02.1", hint="A batch's mean times its size")
def remembered(losses, sizes):
    return 0.8


@wrong("02.1", hint="raised ZeroDivisionError")
def divides_by_zero(losses, sizes):
    return losses[0] / 0


RIGHT, QUIET = "counts correctly, whatever the loader gives", "the model is in evaluation mode meanwhile"
GRAPHLESS, BACK = "no graph is built", "afterwards the model is as it was, and every module in its own mode"


@contextlib.contextmanager
def quiet(model) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    yield
    for module, mode in modes:
        module.training = mode


def hits(model, loader) -> tuple[int, int]:
    """And of how many."""
    found = [((model(x).argmax(1) == y).sum().item(), len(y)) for x, y in loader]
    return sum(right for right, _ in found), sum(count for _, count in found)


def share(model, loader):
    right, count = hits(model, loader)
    return right / count


@torch.no_grad()
def solved(model, loader):
    with quiet(model):
        return share(model, loader)


@wrong("02.2", RIGHT, GRAPHLESS, hint="it was called in training mode, so there was no mode to restore")
@torch.no_grad()
def never_in_eval(model, loader):
    return share(model, loader)


@wrong("02.2", RIGHT, QUIET, BACK, hint="In which context is no graph built?")
def with_graphs(model, loader):
    with quiet(model):
        return share(model, loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="The training goes on after it")
@torch.no_grad()
def left_in_eval(model, loader):
    model.eval()
    return share(model, loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="Somebody had left it so on purpose")
@torch.no_grad()
def all_in_training_afterwards(model, loader):
    """The lesson's cell, and one line."""
    model.eval()
    right = seen = 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum().item()
        seen += len(x)
    model.train()
    return right / seen


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="Which mode did each module have before you set one for all?")
@torch.inference_mode()
def one_mode_for_all(model, loader):
    was = model.training
    model.train(False)
    found = share(model, loader)
    model.train(was)
    return found


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="Does training always go on after it?")
@torch.no_grad()
def the_modes_of_its_parts(model, loader):
    modes = [(part, part.training) for part in model.modules() if part is not model]
    model.eval()
    found = share(model, loader)
    for part, mode in modes:
        part.training = mode
    model.training = True
    return found


@wrong("02.2", RIGHT, GRAPHLESS, hint="What sets the mode of all of them?")
@torch.no_grad()
def an_attribute(model, loader):
    was, model.training = model.training, False
    found = share(model, loader)
    model.training = was
    return found


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="the mean of the batches' accuracies")
@torch.no_grad()
def mean_of_accuracies(model, loader):
    with quiet(model):
        each = [(model(x).argmax(1) == y).float().mean().item() for x, y in loader]
    return sum(each) / len(each)


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="Of how many?")
@torch.no_grad()
def how_many(model, loader):
    with quiet(model):
        return hits(model, loader)[0]


@wrong("02.2", hint="it returned tensor(")
@torch.no_grad()
def each_on_its_own(model, loader):
    with quiet(model):
        return torch.cat([model(x).argmax(1) == y for x, y in loader])


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="That is a percentage.")
def in_percent(model, loader):
    return 100 * solved(model, loader)


@wrong(
    "02.2",
    QUIET,
    GRAPHLESS,
    BACK,
    hint="That is divided by the size of the whole dataset, but the loader gives only part of it.",
)
@torch.no_grad()
def of_the_whole_dataset(model, loader):
    with quiet(model):
        return hits(model, loader)[0] / len(loader.dataset)


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="Which label belongs to which prediction?")
@torch.no_grad()
def whole_set(model, loader):
    with quiet(model):
        guesses = torch.cat([model(x).argmax(1) for x, _ in loader])
    return (guesses.numpy() == torch.cat([y for _, y in loader]).numpy()).mean()


@wrong(
    "02.2",
    QUIET,
    GRAPHLESS,
    BACK,
    hint="Count the correct predictions, count the samples, divide at the end.",
)
@torch.no_grad()
def those_above_zero(model, loader):
    with quiet(model):
        pairs = [(model(x).gather(1, y[:, None]) > 0, y) for x, y in loader]
    return sum(above.sum().item() for above, _ in pairs) / sum(len(y) for _, y in pairs)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="For how long are graphs switched off?")
def never_switched_on_again(model, loader):
    torch.set_grad_enabled(False)
    return solved(model, loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="That one was frozen before")
def frozen_for_a_while(model, loader):
    model.requires_grad_(False)
    found = solved(model, loader)
    model.requires_grad_(True)
    return found


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="An evaluation measures")
def clears_the_gradients(model, loader):
    model.zero_grad()
    return solved(model, loader)


@wrong("02.2", hint="never called the model")
def from_the_labels(model, loader):
    return sum((y == 0).sum().item() for _, y in loader) / 10


CLEARED, MODE = "each step follows the gradient of its own batch alone", "the model is in training mode"
WEIGHED, RELEASED = "the loss is the mean over all samples", "the graphs of the steps are not kept"


def epoch(clear: bool = True, mode: bool = True, step: bool = True, late: bool = False) -> Callable[..., Any]:
    def train(model, loader, optimizer):
        total = count = 0
        if mode:
            model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if clear and not late:
                optimizer.zero_grad()
            loss.backward()
            if clear and late:
                optimizer.zero_grad()
            if step:
                optimizer.step()
            total, count = total + loss.item() * len(y), count + len(y)
        return total / count

    return train


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="backward() adds to what .grad holds")
def never_clears(model, loader, optimizer):
    return epoch(clear=False)(model, loader, optimizer)


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="They have not moved at all")
def clears_after_backward(model, loader, optimizer):
    return epoch(late=True)(model, loader, optimizer)


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="Which call changes the weights?")
def never_steps(model, loader, optimizer):
    return epoch(step=False)(model, loader, optimizer)


@wrong("02.3", CLEARED, WEIGHED, RELEASED, hint="What puts the model back into training mode?")
def stays_in_eval(model, loader, optimizer):
    return epoch(mode=False)(model, loader, optimizer)


@wrong("02.3", CLEARED, MODE, RELEASED, hint="the last batch is smaller")
def means_of_batches(model, loader, optimizer):
    losses = [epoch()(model, [batch], optimizer) for batch in loader]
    return sum(losses) / len(losses)


@wrong("02.3", CLEARED, MODE, WEIGHED, hint="What turns it into a number?")
def keeps_the_graphs(model, loader, optimizer):
    total = count = 0
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss * len(y), count + len(y)
    return (total / count).item()


@wrong("02.3", CLEARED, MODE, RELEASED, hint="what is divided by what?")
def over_the_number_of_batches(model, loader, optimizer):
    return epoch()(model, loader, optimizer) * len(loader.sampler) / len(loader)


@wrong("02.3", MODE, RELEASED, hint="Where does the loop end?")
def returns_in_the_loop(model, loader, optimizer):
    for batch in loader:
        return epoch()(model, [batch], optimizer)


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="follows the sum over its batch")
def steps_along_the_sum(model, loader, optimizer):
    total = count = 0
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss.item(), count + len(y)
    return total / count


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="What do you keep from it when the same loader comes again?")
def with_an_optimizer_of_its_own(model, loader, optimizer):
    groups = [{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups]
    return epoch()(model, loader, torch.optim.SGD(groups, momentum=0.9))


@wrong(
    "02.3",
    MODE,
    WEIGHED,
    RELEASED,
    hint="One step for each batch, with the gradient of its own mean loss and nothing else.",
)
def with_one_learning_rate(model, loader, optimizer):
    optimizer = torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"])
    return epoch()(model, loader, optimizer)


@wrong(
    "02.3", MODE, RELEASED, hint="cross_entropy takes raw scores, and turns them into probabilities itself."
)
def softmax_twice(model, loader, optimizer):
    def shares(x):
        return model(x).softmax(1)

    shares.train = model.train
    return epoch()(shares, loader, optimizer)


@wrong(
    "02.3",
    CLEARED,
    MODE,
    RELEASED,
    hint="That is divided by the size of the whole dataset, but the loader gives only part of it.",
)
def over_the_whole_dataset(model, loader, optimizer):
    total = 0.0
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
    return total / len(loader.dataset)


@wrong("02.3", CLEARED, MODE, RELEASED, hint="One call of the model gives both.")
def measures_afterwards(model, loader, optimizer):
    epoch()(model, loader, optimizer)
    with torch.no_grad():
        pairs = [(F.cross_entropy(model(x), y).item(), len(y)) for x, y in loader]
    return sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs)


SEEN: list[float] = []


@wrong(
    "02.3",
    MODE,
    RELEASED,
    hint="One step for each batch, with the gradient of its own mean loss and nothing else.",
)
def the_whole_at_once(model, loader, optimizer):
    parts = list(loader)
    batch = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    return epoch()(model, [batch], optimizer)


@wrong("02.3", CLEARED, MODE, hint="It must return the mean loss")
def returns_nothing(model, loader, optimizer):
    epoch()(model, loader, optimizer)


@wrong("02.3", hint="never called the model")
def does_nothing(model, loader, optimizer):
    return 0.5


# --- right, in another style ---


@right("02.1")
def by_numpy(losses, sizes):
    return np.average(np.float32(losses), weights=np.float32(sizes))


@functools.cache
def plus(a, b):
    return a + b


@right("02.1")
def by_a_cached_sum(losses, sizes):
    total = functools.reduce(plus, map(float.__mul__, losses, map(float, sizes)))
    return total / functools.reduce(plus, sizes)


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="What do you keep between two calls?")
@functools.cache
def remembers(model, loader):
    with torch.no_grad(), quiet(model):
        return share(model, loader)


@right("02.2")
@torch.inference_mode()
def by_numpy_and_the_sampler(model, loader):
    modes = {name: module.training for name, module in model.named_modules()}
    model.train(False)
    found = [(model(x).max(1).indices == y).numpy() for x, y in loader]
    for name, mode in modes.items():
        model.get_submodule(name).training = mode
    return np.concatenate(found).mean()


class Evaluation:
    """Called as a function."""

    @functools.cached_property
    def what(self):
        return solved

    def __call__(self, model, loader):
        return self.what(model, loader)


right("02.2")(Evaluation())


@wrong("02.3", MODE, RELEASED, hint="What do you keep from it when the same loader comes again?")
@functools.cache
def trains_once(model, loader, optimizer):
    return clears_at_the_end(model, loader, optimizer)


@right("02.3")
def clears_at_the_end(model, loader, optimizer):
    model.train()
    total = torch.zeros(())
    for _, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        total += loss.detach() * x.size(0)
    return total / len(loader.sampler)


@right("02.3")
def by_the_model_and_numpy(model, loader, optimizer):
    model.train()
    losses, sizes = [], []
    for x, y in loader:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy())
        sizes.append(len(y))
    return np.average(losses, weights=sizes).astype(np.float32)


@right("02.3")
def with_a_second_look(model, loader, optimizer):
    """The loss of the same weights, by a call of its own."""
    model.train()
    losses, sizes = [], []
    for x, y in list(loader):
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x), y, reduction="sum"))
        sizes.append(y.numel())
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") / len(y)).backward()
        optimizer.step()
    return torch.stack(losses).sum().item() / sum(sizes)


# --- a state that is given back changed, nothing done, a neighbour class, a kind draw ---
