"""What people answer in exercise 02, wrong and right (see `answers`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.exercises.answers import right, wrong

EQUAL = "right where all batches have the same size"


@wrong("02.1", hint="too small by about the batch size")
def means_over_samples(losses, sizes):
    return sum(losses) / sum(sizes)


@wrong("02.1", EQUAL, hint="Should a batch of")
def mean_of_means(losses, sizes):
    return sum(losses) / len(losses)


@wrong("02.1", hint="By what should it be divided?")
def the_sum(losses, sizes):
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True))


@wrong("02.1", hint="By what should it be divided?")
def over_the_batches(losses, sizes):
    return the_sum(losses, sizes) / len(sizes)


@wrong("02.1", EQUAL, hint="By what should it be divided?")
def as_if_all_were_full(losses, sizes):
    return the_sum(losses, sizes) / (len(sizes) * sizes[0])


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


RIGHT, QUIET = "counts right, whatever the sizes of the batches", "the model is in evaluation mode meanwhile"
GRAPHLESS, BACK = "no graph is kept", "the model is in training mode again afterwards"


@wrong("02.2", RIGHT, GRAPHLESS, hint="nothing to go back from")
@torch.no_grad()
def never_in_eval(model, loader):
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / sum(len(y) for _, y in loader)


@wrong("02.2", RIGHT, QUIET, BACK, hint="Which context builds no graph?")
def with_graphs(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / sum(len(y) for _, y in loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="The training goes on after it")
@torch.no_grad()
def left_in_eval(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / sum(len(y) for _, y in loader)


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="the mean of the batches' accuracies")
@torch.no_grad()
def mean_of_accuracies(model, loader):
    model.eval()
    each = [(model(x).argmax(1) == y).float().mean().item() for x, y in loader]
    model.train()
    return sum(each) / len(each)


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="Of how many?")
@torch.no_grad()
def how_many(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right


@wrong("02.2", hint="it returned tensor(")
@torch.no_grad()
def each_on_its_own(model, loader):
    model.eval()
    right = torch.cat([model(x).argmax(1) == y for x, y in loader])
    model.train()
    return right


@wrong("02.2", QUIET, GRAPHLESS, BACK, hint="in percent")
def in_percent(model, loader):
    return 100 * whole_set(model, loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="For how long are graphs switched off?")
def never_switched_on_again(model, loader):
    torch.set_grad_enabled(False)
    return whole_set(model, loader)


@wrong("02.2", RIGHT, QUIET, GRAPHLESS, hint="For how long are graphs switched off?")
def frozen_for_good(model, loader):
    model.requires_grad_(False)
    return whole_set(model, loader)


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


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="Who changes the weights?")
def never_steps(model, loader, optimizer):
    return epoch(step=False)(model, loader, optimizer)


@wrong("02.3", CLEARED, WEIGHED, RELEASED, hint="Who says that training goes on?")
def stays_in_eval(model, loader, optimizer):
    return epoch(mode=False)(model, loader, optimizer)


@wrong("02.3", CLEARED, MODE, RELEASED, hint="the last batch is smaller")
def means_of_batches(model, loader, optimizer):
    losses = [epoch()(model, [batch], optimizer) for batch in loader]
    return sum(losses) / len(losses)


@wrong("02.3", CLEARED, MODE, WEIGHED, hint="What makes a number of it?")
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
    return epoch()(model, loader, optimizer) * len(loader.dataset) / len(loader)


@wrong("02.3", MODE, RELEASED, hint="Where does the loop end?")
def returns_in_the_loop(model, loader, optimizer):
    for batch in loader:
        return epoch()(model, [batch], optimizer)


@wrong("02.3", MODE, WEIGHED, RELEASED, hint="One step for each batch")
def steps_along_the_sum(model, loader, optimizer):
    total = 0
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader.dataset)


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


@right("02.1")
def by_tensors(losses, sizes):
    losses, sizes = torch.tensor(losses), torch.tensor(sizes)
    return (losses * sizes).sum() / sizes.sum()


@right("02.2")
@torch.inference_mode()
def with_a_tensor(model, loader):
    was = model.training
    model.train(False)
    right = sum((model(x).max(1).indices == y).sum() for x, y in loader)
    model.train(was)
    return right / len(loader.dataset)


@right("02.2")
def whole_set(model, loader):
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(x).argmax(1) for x, _ in loader])
    model.train()
    return (guesses.numpy() == torch.cat([y for _, y in loader]).numpy()).mean()


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
    return total / len(loader.dataset)


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
def by_a_closure(model, loader, optimizer):
    total = 0.0
    model.train()
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        total += optimizer.step(closure).item() * len(y)
    return total / len(loader.dataset)
