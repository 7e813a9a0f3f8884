"""What people answer in exercise 03, wrong and right (see `answers`)."""

from __future__ import annotations

import copy
import functools
import math
import queue
import threading
import weakref
from functools import partial

import numpy as np
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


@wrong("03.1", EVEN, hint="That is as even as possible.")
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


@wrong("03.1", EVEN, LAST, hint="These add up to 6 samples, and there are 5")
def leaves_out_what_is_empty(batch_size, devices):
    size = -(-batch_size // devices)
    sizes = [size] * (devices - 1) + [batch_size - size * (devices - 1)]
    return [size for size in sizes if size > 0]


@wrong("03.1", EVEN, LAST, hint="samples, and there are")
def one_each_when_few(batch_size, devices):
    if batch_size < 2 * devices:
        return [2] * (batch_size // 2) + [1] * (batch_size % 2) if batch_size > devices else [1] * devices
    return asks_chunk(batch_size, devices)


@wrong("03.1", LAST, FEWER, hint="Is anything left for every device?")
def one_device_is_forgotten(batch_size, devices):
    return asks_chunk(batch_size, max(2, devices))


@wrong("03.1", EVEN, LAST, hint="no chunk")
def less_than_nothing(batch_size, devices):
    size = -(-batch_size // devices)
    return [size] * (devices - 1) + [batch_size - size * (devices - 1)]


@wrong("03.1", hint="and there are")
def the_batch_for_each(batch_size, devices):
    return [batch_size] * devices


@wrong("03.1", hint="must return a list of whole numbers")
def halves_of_samples(batch_size, devices):
    return [batch_size / devices + 0.5] * devices


@wrong("03.1", hint="must return a list of whole numbers")
def without_end(batch_size, devices):
    return [float("inf")]


@right("03.1")
def asks_chunk(batch_size, devices):
    return tuple(len(chunk) for chunk in torch.empty(batch_size).chunk(devices))


@right("03.1")
def yields_them(batch_size, devices):
    for start in range(0, batch_size, size := math.ceil(batch_size / devices)):
        yield min(size, batch_size - start)


@right("03.1")
def with_numpy(batch_size, devices):
    edges = np.append(np.arange(0, batch_size, -(-batch_size // devices)), batch_size)
    return np.diff(edges)


ALIKE, UNEVEN, BACK = (
    "right where all chunks have the same size",
    "right where the last chunk is smaller",
    "backward() reaches each device's loss, in proportion to its chunk",
)


def sizes_of(losses, batch_size):
    sizes = [len(chunk) for chunk in torch.arange(batch_size).chunk(len(losses))]
    return torch.tensor(sizes, device=losses.device)


@wrong("03.2", UNEVEN, BACK, hint="Where are the losses?")
def on_the_cpu(losses, batch_size):
    sizes = torch.tensor([len(chunk) for chunk in torch.arange(batch_size).chunk(len(losses))])
    return (losses * sizes).sum() / batch_size


@wrong("03.2", ALIKE, hint="samples count as much as")
def the_plain_mean(losses, batch_size):
    return losses.mean()


@wrong("03.2", hint="too small by about a factor of the chunk size.")
def means_over_samples(losses, batch_size):
    return losses.sum() / batch_size


@wrong("03.2", hint="A mean is asked for")
def the_sum_over_samples(losses, batch_size):
    return (losses * sizes_of(losses, batch_size)).sum()


@wrong("03.2", hint="How many of them should it be divided by?")
def divided_by_devices(losses, batch_size):
    return (losses * sizes_of(losses, batch_size)).mean()


@wrong(
    "03.2",
    ALIKE,
    UNEVEN,
    hint="Something in between has turned a tensor into a plain number, or into a tensor without a graph.",
)
def as_a_number(losses, batch_size):
    sizes = sizes_of(losses, batch_size)
    return sum(loss.item() * n.item() for loss, n in zip(losses, sizes, strict=True)) / batch_size


@wrong("03.2", ALIKE, hint="What are the sizes?")
def sizes_turned_round(losses, batch_size):
    return (losses * sizes_of(losses, batch_size).flip(0)).sum() / batch_size


@wrong("03.2", hint="must return one number")
def one_for_each(losses, batch_size):
    return losses * sizes_of(losses, batch_size) / batch_size


@wrong("03.2", ALIKE, UNEVEN, hint="the weight with which it counts")
def a_weight_without_gradient(losses, batch_size):
    weighted = losses * sizes_of(losses, batch_size)
    return (weighted.detach().sum() - losses.detach().sum() + losses.sum()) / batch_size


@wrong("03.2", hint="What are the sizes?")
def the_rest_is_two(losses, batch_size):
    size = -(-batch_size // len(losses))
    weights = [size / batch_size] * (len(losses) - 1) + [(size - 2) / batch_size]
    return (losses * torch.tensor(weights, device=losses.device)).sum()


@wrong("03.2", UNEVEN, BACK, hint="nan, and it is")
def without_the_last(losses, batch_size):
    size = -(-batch_size // len(losses))
    last = batch_size - size * (len(losses) - 1)
    return (losses[:-1].mean() * (batch_size - last) + losses[-1] * last) / batch_size


@wrong("03.2", hint="expected both vectors to have same dtype")
def in_float64_alone(losses, batch_size):
    return losses @ sizes_of(losses, batch_size).double() / batch_size


@wrong("03.2", ALIKE, BACK, hint="What are the sizes?")
@functools.cache
def remembers(losses, batch_size):
    return stacked(losses, batch_size)


@right("03.2")
def stacked(losses, batch_size):
    sizes = chunk_sizes_of(batch_size, len(losses))
    return torch.stack([loss * n / batch_size for loss, n in zip(losses, sizes, strict=True)]).sum()


def chunk_sizes_of(batch_size, devices):
    size = -(-batch_size // devices)
    return [min(size, batch_size - start) for start in range(0, batch_size, size)]


@right("03.2")
def one_after_the_other(losses, batch_size):
    size = -(-batch_size // len(losses))
    total = losses[:-1].sum() * size + losses[-1] * (batch_size - size * (len(losses) - 1))
    return total.float() / batch_size


CHUNKS, VALUE, GRADIENTS = (
    "each replica works on its own chunk, in a thread of its own",
    "the loss is that of the whole batch",
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


def calls_of(model, chunks, devices, detach=False):
    """Each chunk through a copy of the model whose weights are copies with a way back."""
    calls = []
    for chunk, device in zip(chunks, devices, strict=False):
        weights = {name: p.detach() if detach else p for name, p in model.named_parameters()}
        weights = {name: p.to(device, copy=True) for name, p in weights.items()}
        frame = copy.deepcopy(model).to(device)
        calls.append(partial(functional_call, frame, weights, (chunk.to(device),)))
    return calls


def outputs_of(model, chunks, devices, **how):
    return [each.to(devices[0]) for each in in_threads(calls_of(model, chunks, devices, **how))]


def losses_of(model, x, y, devices, **how):
    outputs = outputs_of(model, x.chunk(len(devices)), devices, **how)
    targets = y.to(devices[0]).chunk(len(devices))
    return torch.stack([F.cross_entropy(a, b) for a, b in zip(outputs, targets, strict=True)])


@wrong("03.3", CHUNKS, hint="mean of the chunks' means")
def mean_of_the_losses(model, x, y, devices):
    return losses_of(model, x, y, devices).mean()


@wrong("03.3", CHUNKS, hint="sum of the chunks' means")
def sum_of_the_losses(model, x, y, devices):
    return losses_of(model, x, y, devices).sum()


@wrong("03.3", CHUNKS, hint="sum over all samples")
def sum_over_samples(model, x, y, devices):
    return F.cross_entropy(
        torch.cat(outputs_of(model, x.chunk(len(devices)), devices)), y.to(devices[0]), reduction="sum"
    )


@wrong("03.3", VALUE, GRADIENTS, hint="All samples went through at once")
def on_one_device(model, x, y, devices):
    return F.cross_entropy(model(x.to(devices[0])), y.to(devices[0]))


@wrong("03.3", VALUE, GRADIENTS, hint="Which move has the threads?")
def in_a_row(model, x, y, devices):
    return F.cross_entropy(torch.cat([model(chunk) for chunk in x.chunk(len(devices))]), y.to(devices[0]))


@wrong("03.3", CHUNKS, VALUE, hint="The graph is cut.")
def detached_weights(model, x, y, devices):
    output = torch.cat(outputs_of(model, x.chunk(len(devices)), devices, detach=True))
    return F.cross_entropy(output.requires_grad_(), y.to(devices[0]))


@wrong("03.3", CHUNKS, VALUE, hint="Does each replica lead back to the model?")
def only_replica_0_leads_back(model, x, y, devices):
    first, *others = outputs_of(model, x.chunk(len(devices)), devices)
    return F.cross_entropy(torch.cat([first, *(each.detach() for each in others)]), y.to(devices[0]))


@wrong("03.3", CHUNKS, hint="Does each output meet its own target")
def gathered_in_reverse(model, x, y, devices):
    return F.cross_entropy(
        torch.cat(outputs_of(model, x.chunk(len(devices)), devices)[::-1]), y.to(devices[0])
    )


@wrong("03.3", VALUE, GRADIENTS, hint="as many replicas as there are chunks")
def shared_evenly(model, x, y, devices):
    return F.cross_entropy(
        torch.cat(outputs_of(model, x.tensor_split(len(devices)), devices)), y.to(devices[0])
    )


@wrong("03.3", hint="samples came twice")
def the_first_chunk_for_all(model, x, y, devices):
    size = -(-len(x) // len(devices))
    chunks = [x[: len(chunk)] for chunk in x.split(size)]
    return F.cross_entropy(torch.cat(outputs_of(model, chunks, devices)), y.to(devices[0]))


@wrong("03.3", CHUNKS, hint="does each sample count once?")
def not_a_number(model, x, y, devices):
    return F.cross_entropy(
        torch.cat(outputs_of(model, x.chunk(len(devices)), devices)), y.to(devices[0])
    ) * float("nan")


@wrong("03.3", hint="must return one number")
def the_vector(model, x, y, devices):
    return losses_of(model, x, y, devices)


def threads_of(replicas, chunks):
    return in_threads([lambda r=r, c=c: r(c) for r, c in zip(replicas, chunks, strict=True)])


@wrong("03.3", VALUE, GRADIENTS, hint="of 1 module")
def one_module_in_all_threads(model, x, y, devices):
    chunks = x.chunk(len(devices))
    return F.cross_entropy(torch.cat(threads_of([model] * len(chunks), chunks)), y.to(devices[0]))


@wrong("03.3", VALUE, GRADIENTS, hint="have to meet on their device")
def moves_nothing(model, x, y, devices):
    chunks = x.chunk(len(devices))
    return F.cross_entropy(torch.cat(outputs_of(model, chunks, [x.device] * len(chunks))), y.to(devices[0]))


@wrong("03.3", VALUE, GRADIENTS, hint="When do you have to wait?")
def a_thread_after_the_other(model, x, y, devices):
    outputs = [in_threads([call])[0] for call in calls_of(model, x.chunk(len(devices)), devices)]
    return F.cross_entropy(torch.cat([each.to(devices[0]) for each in outputs]), y.to(devices[0]))


KEPT = weakref.WeakKeyDictionary()  # by model: an id would be that of another one later


@wrong("03.3", CHUNKS, hint="does each sample count once?")
def replicas_made_once(model, x, y, devices):
    weights = KEPT.setdefault(model, [{k: p.clone() for k, p in model.named_parameters()} for _ in range(9)])
    chunks = x.chunk(len(devices))
    calls = []
    for chunk, device, kept in zip(chunks, devices, weights, strict=False):
        frame, own = copy.deepcopy(model).to(device), {k: w.to(device) for k, w in kept.items()}
        calls.append(partial(functional_call, frame, own, (chunk.to(device),)))
    return F.cross_entropy(torch.cat([each.to(devices[0]) for each in in_threads(calls)]), y.to(devices[0]))


@wrong("03.3", hint="has no attribute")
def knows_its_layers(model, x, y, devices):
    weights = [model[0].weight.clone() for _ in devices]
    return F.cross_entropy(x @ weights[0].T, y.to(devices[0]))


@wrong("03.3", CHUNKS, GRADIENTS, hint="The outputs and their targets have to be on one device.")
def leaves_the_targets(model, x, y, devices):
    return F.cross_entropy(torch.cat(outputs_of(model, x.chunk(len(devices)), devices)), y)


@wrong("03.3", CHUNKS, GRADIENTS, hint="the loss is on meta")
def gathers_on_the_last(model, x, y, devices):
    outputs = in_threads(calls_of(model, x.chunk(len(devices)), devices))
    return F.cross_entropy(torch.cat([each.to(devices[-1]) for each in outputs]), y.to(devices[-1]))


@right("03.3")
def through_a_queue(model, x, y, devices):
    """One device needs no thread; the threads of several hand over their sums."""
    if len(devices) == 1:
        return F.cross_entropy(model(x.to(devices[0])), y.to(devices[0]))
    done, targets = queue.Queue(), y.chunk(len(devices))
    calls = calls_of(model, x.chunk(len(devices)), devices)

    def work(call, target):
        output = call()
        done.put(F.cross_entropy(output, target.to(output.device), reduction="sum"))

    for pair in zip(calls, targets, strict=True):
        threading.Thread(target=work, args=pair, daemon=True).start()
    return sum(done.get().to(devices[0]) for _ in calls) / len(x)


@right("03.3")
def weighted(model, x, y, devices):
    losses = losses_of(model, x, y, devices)
    sizes = torch.tensor([len(chunk) for chunk in x.chunk(len(devices))]).to(losses)
    return (losses * sizes).sum() / len(x)


# --- the result is right, and it was not done as asked ---
