"""What people answer in exercise 03, wrong and right (see `answers`)."""

from __future__ import annotations

import copy
import threading

import torch
import torch.nn.functional as F
from torch.func import functional_call

from tests.exercises.answers import right, wrong

EVEN, LAST, FEWER = (
    "a batch that can be shared evenly",
    "a batch whose last chunk is smaller",
    "a batch for which there are more devices than chunks",
)


@wrong("03.1", EVEN, hint="and there are")
def rounds_down(batch_size, devices):
    return [batch_size // devices] * devices


@wrong("03.1", EVEN, hint="As even as can be")
def shares_evenly(batch_size, devices):
    size, more = divmod(batch_size, devices)
    return [size + 1] * more + [size] * (devices - more)


@wrong("03.1", EVEN, hint="What is left for the last?")
def the_rest_to_the_last(batch_size, devices):
    size = batch_size // devices
    return [size] * (devices - 1) + [batch_size - size * (devices - 1)]


@wrong("03.1", EVEN, LAST, hint="A chunk with nothing in it is no chunk")
def with_empty_ones(batch_size, devices):
    size = -(-batch_size // devices)
    return [max(0, min(size, batch_size - i * size)) for i in range(devices)]


@wrong("03.1", EVEN, LAST, hint="no chunk")
def less_than_nothing(batch_size, devices):
    size = -(-batch_size // devices)
    return [size] * (devices - 1) + [batch_size - size * (devices - 1)]


@wrong("03.1", EVEN, hint="and there are")
def rounds_up_everywhere(batch_size, devices):
    return [-(-batch_size // devices)] * devices


@wrong("03.1", hint="and there are")
def the_batch_for_each(batch_size, devices):
    return [batch_size] * devices


@wrong("03.1", hint="must return a list of whole numbers")
def halves_of_samples(batch_size, devices):
    return [batch_size / devices + 0.5] * devices


@wrong("03.1", hint="must return a list of whole numbers")
def as_text(batch_size, devices):
    return str(batch_size // devices)


@wrong("03.1", hint="must return a list of whole numbers")
def without_end(batch_size, devices):
    return [float("inf")]


@wrong("03.1", hint="and there are")
def none_at_all(batch_size, devices):
    return []


@wrong("03.1", hint="must return a list of whole numbers")
def one_number(batch_size, devices):
    return batch_size // devices


@wrong("03.1", hint="must return a list of whole numbers")
def tensors(batch_size, devices):
    return torch.arange(batch_size).chunk(devices)


@right("03.1")
def asks_chunk(batch_size, devices):
    return tuple(len(chunk) for chunk in torch.empty(batch_size).chunk(devices))


@right("03.1")
def takes_away(batch_size, devices):
    size, sizes = (batch_size + devices - 1) // devices, []
    while batch_size > 0:
        sizes.append(min(size, batch_size))
        batch_size -= size
    return torch.tensor(sizes)


ALIKE, UNEVEN, BACK = (
    "right where all chunks have the same size",
    "right where the last chunk is smaller",
    "backward() reaches each device's loss, in proportion to its chunk",
)


def sizes_of(losses, batch_size):
    return torch.tensor([len(chunk) for chunk in torch.arange(batch_size).chunk(len(losses))])


@wrong("03.2", ALIKE, hint="count as much as one of")
def the_plain_mean(losses, batch_size):
    return losses.mean()


@wrong("03.2", hint="too small by about the size of a chunk")
def means_over_samples(losses, batch_size):
    return losses.sum() / batch_size


@wrong("03.2", hint="A mean is asked for")
def the_sum_over_samples(losses, batch_size):
    return (losses * sizes_of(losses, batch_size)).sum()


@wrong("03.2", hint="By how many of them")
def divided_by_devices(losses, batch_size):
    return (losses * sizes_of(losses, batch_size)).mean()


@wrong("03.2", ALIKE, UNEVEN, hint="a plain number of a tensor")
def as_a_number(losses, batch_size):
    sizes = sizes_of(losses, batch_size)
    return sum(loss.item() * n.item() for loss, n in zip(losses, sizes, strict=True)) / batch_size


@wrong("03.2", ALIKE, UNEVEN, hint="or a new tensor of it")
def a_new_tensor(losses, batch_size):
    values = torch.tensor(losses.tolist(), requires_grad=True)
    return (values * sizes_of(losses, batch_size)).sum() / batch_size


@wrong("03.2", ALIKE, hint="What are the sizes?")
def sizes_turned_round(losses, batch_size):
    return (losses * sizes_of(losses, batch_size).flip(0)).sum() / batch_size


@wrong("03.2", ALIKE, hint="What are the sizes?")
def forgets_the_last(losses, batch_size):
    size = -(-batch_size // len(losses))
    return (losses * size).sum() / batch_size


@wrong("03.2", hint="must return one number")
def one_for_each(losses, batch_size):
    return losses * sizes_of(losses, batch_size) / batch_size


@wrong("03.2", ALIKE, UNEVEN, hint="the weight with which it counts")
def a_weight_without_gradient(losses, batch_size):
    weighted = losses * sizes_of(losses, batch_size)
    return (weighted.detach().sum() - losses.detach().sum() + losses.sum()) / batch_size


@right("03.2")
def by_shares(losses, batch_size):
    return (losses @ sizes_of(losses, batch_size).to(losses.dtype) / batch_size).reshape(1)


@right("03.2")
def one_after_the_other(losses, batch_size):
    size = -(-batch_size // len(losses))
    total = losses[:-1].sum() * size + losses[-1] * (batch_size - size * (len(losses) - 1))
    return total.float() / batch_size


CHUNKS, VALUE, GRADIENTS = (
    "each replica works on its own chunk, in a thread of its own",
    "the loss is the one of the whole batch",
    "backward() leaves the gradients of the whole batch in the model",
)


def in_threads(calls):
    done = [None] * len(calls)

    def work(i):
        done[i] = calls[i]()

    threads = [threading.Thread(target=work, args=[i]) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def outputs_of(model, chunks, detach=False):
    """Each chunk through a copy of the model whose weights are clones, in threads."""
    calls = []
    for chunk in chunks:
        weights = {name: p.detach() if detach else p.clone() for name, p in model.named_parameters()}
        frame = copy.deepcopy(model)
        calls.append(
            lambda frame=frame, weights=weights, chunk=chunk: functional_call(frame, weights, (chunk,))
        )
    return in_threads(calls)


def losses_of(model, x, y, devices, **how):
    outputs = outputs_of(model, x.chunk(len(devices)), **how)
    targets = y.chunk(len(devices))
    return torch.stack([F.cross_entropy(a, b) for a, b in zip(outputs, targets, strict=True)])


@wrong("03.3", CHUNKS, hint="mean of the chunks' means")
def mean_of_the_losses(model, x, y, devices):
    return losses_of(model, x, y, devices).mean()


@wrong("03.3", CHUNKS, hint="sum of the chunks' means")
def sum_of_the_losses(model, x, y, devices):
    return losses_of(model, x, y, devices).sum()


@wrong("03.3", CHUNKS, hint="sum over all samples")
def sum_over_samples(model, x, y, devices):
    return F.cross_entropy(torch.cat(outputs_of(model, x.chunk(len(devices)))), y, reduction="sum")


@wrong("03.3", VALUE, GRADIENTS, hint="All samples went through at once")
def on_one_device(model, x, y, devices):
    return F.cross_entropy(model(x), y)


@wrong("03.3", VALUE, GRADIENTS, hint="All samples went through at once")
def by_pytorch(model, x, y, devices):
    return F.cross_entropy(torch.nn.DataParallel(model)(x), y)


@wrong("03.3", VALUE, GRADIENTS, hint="Which move has the threads?")
def in_a_row(model, x, y, devices):
    return F.cross_entropy(torch.cat([model(chunk) for chunk in x.chunk(len(devices))]), y)


@wrong("03.3", CHUNKS, VALUE, hint="The way back is cut")
def detached_weights(model, x, y, devices):
    output = torch.cat(outputs_of(model, x.chunk(len(devices)), detach=True))
    return F.cross_entropy(output.requires_grad_(), y)


@wrong("03.3", CHUNKS, VALUE, hint="The way back is cut")
def deep_copies(model, x, y, devices):
    chunks = x.chunk(len(devices))
    replicas = [copy.deepcopy(model) for _ in chunks]
    calls = [lambda replica=r, chunk=c: replica(chunk) for r, c in zip(replicas, chunks, strict=True)]
    return F.cross_entropy(torch.cat(in_threads(calls)), y)


@wrong("03.3", CHUNKS, VALUE, hint="Does each replica have one?")
def only_replica_0_leads_back(model, x, y, devices):
    first, *others = outputs_of(model, x.chunk(len(devices)))
    return F.cross_entropy(torch.cat([first, *(each.detach() for each in others)]), y)


@wrong("03.3", CHUNKS, hint="Does each output meet its own target")
def gathered_in_reverse(model, x, y, devices):
    return F.cross_entropy(torch.cat(outputs_of(model, x.chunk(len(devices)))[::-1]), y)


@wrong("03.3", VALUE, GRADIENTS, hint="as many replicas as there are chunks")
def shared_evenly(model, x, y, devices):
    return F.cross_entropy(torch.cat(outputs_of(model, x.tensor_split(len(devices)))), y)


@wrong("03.3", hint="samples came twice")
def the_first_chunk_for_all(model, x, y, devices):
    size = -(-len(x) // len(devices))
    chunks = [x[: len(chunk)] for chunk in x.split(size)]
    return F.cross_entropy(torch.cat(outputs_of(model, chunks)), y)


@wrong("03.3", CHUNKS, hint="does each sample count once?")
def not_a_number(model, x, y, devices):
    return F.cross_entropy(torch.cat(outputs_of(model, x.chunk(len(devices)))), y) * float("nan")


@wrong("03.3", hint="must return one number")
def the_vector(model, x, y, devices):
    return losses_of(model, x, y, devices)


@wrong("03.3", CHUNKS, VALUE, hint="The way back is cut")
def a_plain_number(model, x, y, devices):
    return F.cross_entropy(torch.cat(outputs_of(model, x.chunk(len(devices)))), y).item()


@right("03.3")
def weighted(model, x, y, devices):
    losses = losses_of(model, x, y, devices)
    sizes = torch.tensor([len(chunk) for chunk in x.chunk(len(devices))])
    return (losses * sizes).sum() / len(x)


@right("03.3")
def sums_over_the_batch(model, x, y, devices):
    outputs = outputs_of(model, x.chunk(len(devices)))
    targets = y.chunk(len(devices))
    sums = [F.cross_entropy(a, b, reduction="sum") for a, b in zip(outputs, targets, strict=True)]
    return sum(sums) / len(x)
