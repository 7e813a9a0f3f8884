"""What people answer in exercise 02, wrong and right (see `answers`)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.exercises.answers import right, wrong

EQUAL = "right where all batches have the same size"


@wrong("02.1", hint="means over samples")
def means_over_samples(losses, sizes):
    return sum(losses) / sum(sizes)


@wrong("02.1", EQUAL, hint="batches alike")
def mean_of_means(losses, sizes):
    return sum(losses) / len(losses)


@wrong("02.1", hint="divided by something else")
def the_sum(losses, sizes):
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True))


@wrong("02.1", EQUAL, hint="divided by something else")
def as_if_all_were_full(losses, sizes):
    return the_sum(losses, sizes) / (len(sizes) * sizes[0])


@wrong("02.1", EQUAL, hint="another sum")
def with_a_small_last_one(losses, sizes):
    return (sum(losses[:-1]) * sizes[0] + losses[-1] * sizes[-1]) / sum(sizes)


@wrong("02.1", hint="it returned nothing (None)")
def prints_it(losses, sizes):
    print(the_sum(losses, sizes) / sum(sizes))


@right("02.1")
def by_numpy(losses, sizes):
    return np.average(np.float32(losses), weights=np.float32(sizes))


@right("02.1")
def by_tensors(losses, sizes):
    weights = torch.tensor(sizes) / sum(sizes)
    return (torch.tensor(losses) * weights).sum()


CLEARED, MODE = "each step follows the gradient of its own batch alone", "the model is in training mode"
WEIGHED, RELEASED = "the loss is the mean over all samples", "the graphs of the steps are not kept"


def epoch(model, loader, optimizer, clear="before", mode=True, reduction="mean"):
    total = count = 0
    if mode:
        model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, reduction=reduction)
        if clear == "before":
            optimizer.zero_grad()
        loss.backward()
        if clear == "too late":
            optimizer.zero_grad()
        optimizer.step()
        total += loss.item() * (len(y) if reduction == "mean" else 1)
        count += len(y)
    return total / count


@wrong("02.2", hint="not cleared")
def as_it_was_given(model, loader, optimizer):
    total = 0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss
    return total / len(loader)


@wrong("02.2", MODE, WEIGHED, RELEASED, hint="not cleared")
def never_clears(model, loader, optimizer):
    return epoch(model, loader, optimizer, clear="never")


@wrong("02.2", MODE, WEIGHED, RELEASED, hint="not moved")
def clears_after_backward(model, loader, optimizer):
    return epoch(model, loader, optimizer, clear="too late")


@wrong("02.2", MODE, WEIGHED, RELEASED, hint="another step")
def steps_along_the_sum(model, loader, optimizer):
    return epoch(model, loader, optimizer, reduction="sum")


@wrong("02.2", MODE, WEIGHED, RELEASED, hint="another step")
def with_an_optimizer_of_its_own(model, loader, optimizer):
    rate = optimizer.param_groups[0]["lr"]
    return epoch(model, loader, torch.optim.SGD(model.parameters(), lr=rate))


@wrong("02.2", CLEARED, WEIGHED, RELEASED, hint="evaluation")
def stays_in_eval(model, loader, optimizer):
    return epoch(model, loader, optimizer, mode=False)


@wrong("02.2", CLEARED, MODE, RELEASED, hint="batches alike")
def mean_of_the_batches(model, loader, optimizer):
    losses = [epoch(model, [batch], optimizer) for batch in loader]
    return sum(losses) / len(losses)


@wrong("02.2", CLEARED, MODE, RELEASED, hint="of the dataset")
def over_the_whole_dataset(model, loader, optimizer):
    total = sum(epoch(model, [batch], optimizer) * len(batch[1]) for batch in loader)
    return total / len(loader.dataset)


@wrong("02.2", CLEARED, MODE, RELEASED, hint="another loss")
def measures_afterwards(model, loader, optimizer):
    epoch(model, loader, optimizer)
    with torch.no_grad():
        pairs = [(F.cross_entropy(model(x), y).item(), len(y)) for x, y in loader]
    return sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs)


@wrong("02.2", MODE, RELEASED, hint="another loss")
def returns_in_the_loop(model, loader, optimizer):
    for batch in loader:
        return epoch(model, [batch], optimizer)


@wrong("02.2", CLEARED, MODE, RELEASED, hint="no number")
def returns_nothing(model, loader, optimizer):
    epoch(model, loader, optimizer)


@wrong("02.2", CLEARED, MODE, WEIGHED, hint="graph kept")
def keeps_the_graphs(model, loader, optimizer):
    total = count = 0
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total, count = total + loss * len(y), count + len(y)
    return (total / count).item()


@right("02.2")
def clears_at_the_end(model, loader, optimizer):
    model.train()
    total = torch.zeros(())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        total += loss.detach() * x.size(0)
    return total / len(loader.sampler)


@right("02.2")
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
