"""Simulated devices for lesson 14: each layer sleeps while a device would compute; the messages are real.

from scripts.simulated import a_step, drawn, simulated, steps_of  # in a notebook of the folder lessons
"""

import time

import torch
import torch.distributed as dist
from torch import nn

from course_lib import profiled, timeline


class OnItsOwnDevice(torch.autograd.Function):
    """Forward sleeps for `seconds`, backward for twice as long; the gradient of the weights is all ones."""

    start = done = 0.0  # when the device began its step, and when it will have finished all the work queued

    @classmethod
    def begin(cls, *_):
        cls.start = cls.done = time.time()

    @classmethod
    def compute(cls, seconds):
        cls.done += seconds  # its work is queued: a late host does not hold it up
        time.sleep(max(0.0, cls.done - time.time()))

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        OnItsOwnDevice.compute(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        OnItsOwnDevice.compute(2 * ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradient, torch.ones_like(weight), None


class Layer(nn.Module):
    """`kib` of weights; its forward takes `seconds` for each sample."""

    def __init__(self, kib, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(kib * 256)), seconds

    def forward(self, x):
        return OnItsOwnDevice.apply(x, self.weight, self.seconds * len(x))


def simulated(layers, kib, ms):
    """A model of so many layers of `kib` each, whose forward and backward take `ms` for each sample."""
    model = nn.Sequential(*[Layer(kib, ms / 3e3 / layers) for _ in range(layers)])
    model.register_forward_pre_hook(OnItsOwnDevice.begin)
    return model


def a_step(ddp, samples):
    """The spans of one step; what computes is the simulated device, by its own clock."""
    begin = torch.tensor(time.time() + 0.02, dtype=torch.float64)
    dist.broadcast(begin, src=0)
    with profiled() as spans:
        time.sleep(max(0.0, begin.item() - time.time()))  # all ranks start at the same time
        ddp(torch.zeros(samples)).sum().backward()
    start, done = OnItsOwnDevice.start, OnItsOwnDevice.done
    turn = start + (done - start) / 3
    parts = ("forward", start, turn), ("backward", turn, done)
    computes = [spans[0]._replace(kind="computes", what=what, start=a, end=b) for what, a, b in parts]
    return computes + [span for span in spans if span.kind == "sends"]


def steps_of(run):
    """The spans of each rank, step by step, the quickest step first: the least disturbed."""
    return sorted(zip(*run.results, strict=True), key=length)


def length(ranks):
    """Seconds of a step, on the rank that takes longest."""
    return max(max(span.end for span in spans) - spans[0].start for spans in ranks)


def drawn(ranks, title):
    """A timeline with a row for each rank, and one for what it sends: two where two collectives overlap."""
    begin, bars = min(span.start for spans in ranks for span in spans), []
    for rank, spans in enumerate(ranks):
        for span in sorted(spans, key=lambda span: (span.kind == "sends", span.start)):
            row = f"rank {rank}" if span.kind == "computes" else f"rank {rank} sends" + " too" * span.lane
            bars.append((row, span.what, span.start, span.end))
    return timeline(bars, title, since=begin)


def step_ms(ddp, samples, steps=8):
    """Milliseconds of a step, forward and backward: the lower quartile, without DDP's first steps."""
    took = []
    for _ in range(3 + steps):
        dist.barrier()
        begin = time.perf_counter()
        ddp(torch.zeros(samples)).sum().backward()
        took.append(1e3 * (time.perf_counter() - begin))
    return sorted(took[3:])[steps // 4]
