"""What people answer in exercise 03, wrong and right (see `answers`)."""

from __future__ import annotations

import copy
import queue
import threading
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


@wrong("03.1", EVEN, hint="another sum")
def rounds_down(batch_size, devices):
    size = batch_size // devices
    return [size] * devices


@wrong("03.1", EVEN, hint="too even")
def shares_evenly(batch_size, devices):
    size, more = divmod(batch_size, devices)
    return [size + 1] * more + [size] * (devices - more)


@wrong("03.1", EVEN, hint="other sizes")
def the_rest_to_the_last(batch_size, devices):
    size = batch_size // devices
    return [size] * (devices - 1) + [batch_size - size * (devices - 1)]


@wrong("03.1", EVEN, LAST, hint="an empty chunk")
def with_empty_ones(batch_size, devices):
    size = -(-batch_size // devices)
    return [max(0, min(size, batch_size - i * size)) for i in range(devices)]


@wrong("03.1", EVEN, LAST, hint="an empty chunk")
def less_than_nothing(batch_size, devices):
    size = -(-batch_size // devices)
    return [size] * (devices - 1) + [batch_size - size * (devices - 1)]


@wrong("03.1", EVEN, LAST, hint="another sum")
def leaves_out_what_is_empty(batch_size, devices):
    return [size for size in less_than_nothing(batch_size, devices) if size > 0]


@wrong("03.1", EVEN, hint="another sum")
def all_alike(batch_size, devices):
    size = -(-batch_size // devices)
    return [size] * -(-batch_size // size)


@wrong("03.1", hint="must return a list of whole numbers")
def parts_of_samples(batch_size, devices):
    return [batch_size / devices + 0.5] * devices


@right("03.1")
def asks_chunk(batch_size, devices):
    return [len(chunk) for chunk in torch.empty(batch_size).chunk(devices)]


@right("03.1")
def with_numpy(batch_size, devices):
    edges = np.append(np.arange(0, batch_size, -(-batch_size // devices)), batch_size)
    return np.diff(edges)


CHUNKS, VALUE, GRADIENTS = (
    "each replica works on its own chunk, in a thread of its own",
    "the loss is that of the whole batch, on devices[0]",
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


def outputs_of(model, chunks, devices, at=0, **how):
    return [each.to(devices[at]) for each in in_threads(calls_of(model, chunks, devices, **how))]


def output_of(model, x, devices, **how):
    return torch.cat(outputs_of(model, x.chunk(len(devices)), devices, **how))


def losses_of(model, x, y, devices):
    outputs = outputs_of(model, x.chunk(len(devices)), devices)
    targets = y.to(devices[0]).chunk(len(devices))
    return torch.stack([F.cross_entropy(a, b) for a, b in zip(outputs, targets, strict=True)])


@wrong("03.2", CHUNKS, hint="mean of means")
def mean_of_the_losses(model, x, y, devices):
    return losses_of(model, x, y, devices).mean()


@wrong("03.2", CHUNKS, hint="a sum")
def sum_of_the_losses(model, x, y, devices):
    return losses_of(model, x, y, devices).sum()


@wrong("03.2", CHUNKS, hint="another loss")
def gathered_in_reverse(model, x, y, devices):
    outputs = outputs_of(model, x.chunk(len(devices)), devices)
    return F.cross_entropy(torch.cat(outputs[::-1]), y.to(devices[0]))


@wrong("03.2", VALUE, GRADIENTS, hint="other chunks")
def on_one_device(model, x, y, devices):
    return F.cross_entropy(model(x.to(devices[0])), y.to(devices[0]))


@wrong("03.2", VALUE, GRADIENTS, hint="other chunks")
def shared_evenly(model, x, y, devices):
    outputs = outputs_of(model, x.tensor_split(len(devices)), devices)
    return F.cross_entropy(torch.cat(outputs), y.to(devices[0]))


@wrong("03.2", VALUE, GRADIENTS, hint="one after the other")
def a_thread_after_the_other(model, x, y, devices):
    outputs = [in_threads([call])[0] for call in calls_of(model, x.chunk(len(devices)), devices)]
    return F.cross_entropy(torch.cat([each.to(devices[0]) for each in outputs]), y.to(devices[0]))


@wrong("03.2", VALUE, GRADIENTS, hint="no replicas")
def one_module_in_all_threads(model, x, y, devices):
    outputs = in_threads([partial(model, chunk.to(devices[0])) for chunk in x.chunk(len(devices))])
    return F.cross_entropy(torch.cat(outputs), y.to(devices[0]))


@wrong("03.2", VALUE, GRADIENTS, hint="elsewhere")
def all_on_the_first(model, x, y, devices):
    return F.cross_entropy(output_of(model, x, devices[:1] * len(devices)), y.to(devices[0]))


@wrong("03.2", CHUNKS, VALUE, hint="no gradient")
def detached_weights(model, x, y, devices):
    output = output_of(model, x, devices, detach=True)
    return F.cross_entropy(output.requires_grad_(), y.to(devices[0]))


@wrong("03.2", CHUNKS, VALUE, hint="a part is missing")
def only_replica_0_leads_back(model, x, y, devices):
    first, *others = outputs_of(model, x.chunk(len(devices)), devices)
    return F.cross_entropy(torch.cat([first, *(each.detach() for each in others)]), y.to(devices[0]))


@wrong("03.2", CHUNKS, GRADIENTS, hint="another device")
def leaves_the_targets(model, x, y, devices):
    return F.cross_entropy(output_of(model, x, devices), y)


@wrong("03.2", CHUNKS, GRADIENTS, hint="another device")
def on_the_device_of_the_labels(model, x, y, devices):
    return F.cross_entropy(output_of(model, x, devices).to(y.device), y)


@right("03.2")
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


@right("03.2")
def weighted(model, x, y, devices):
    losses = losses_of(model, x, y, devices)
    sizes = torch.tensor([len(chunk) for chunk in x.chunk(len(devices))]).to(losses)
    return (losses * sizes).sum() / len(x)
