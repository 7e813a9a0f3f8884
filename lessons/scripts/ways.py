"""The ways to send less in lesson 19: what each registers, one run that counts and evaluates, and colours.

from scripts.ways import WAYS, trained, colored  # in a notebook of the folder lessons
"""

import itertools
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scripts.common import join, wrapped
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib import bytes_sent, curves, digits, launch

STEPS, BATCH, LR = 160, 64, 0.02  # the batch of all ranks together


class Net(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def tensors(count, device, train=True):
    torch.set_num_threads(1)  # a CPU rank is one core
    data = digits(train)
    images, labels = data.data[:count, None] / 255, data.targets[:count]
    return ((images - 0.16) / 0.29).to(device), labels.to(device)


def of_rank():
    """Every n-th sample of a batch: those of this rank."""
    return slice(dist.get_rank(), None, dist.get_world_size())


def my_batches(device, seed=0, steps=STEPS):
    """This rank's part of each batch, in the order of the seed."""
    images, labels = tensors(steps * BATCH, device)
    generator = torch.Generator().manual_seed(seed)
    for group in torch.randperm(steps * BATCH, generator=generator).split(BATCH):
        mine = group[of_rank()]
        yield images[mine], labels[mine]


def sent_by(work, *args):
    """The bytes that this rank sends in `work`, 0 where nobody counts them; and its result."""
    dist.barrier()
    before = bytes_sent() or 0
    result = work(*args)
    dist.barrier()  # all have done it
    after = bytes_sent() or 0
    dist.barrier()  # all have read: a rank that leaves closes its connections
    return after - before, result


def wrong(model, images, labels):
    """Which share of these digits this rank's model gets wrong, in %."""
    with torch.no_grad():
        found = torch.cat([model(part).argmax(dim=1) for part in images.split(250)])
    return 100 * (found != labels).double().mean().item()


# --- the ways: each gets the DDP model, and returns an optimizer ------------------------------------------


def sgd(model, lr=LR):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def with_hook(ddp, hook, make_state=lambda: None):
    ddp.register_comm_hook(make_state(), hook)
    return sgd(ddp)


class TopK:
    """The state of `top_k_hook`: the share of the numbers to send, and what is unsent, by parameter."""

    def __init__(self, share, feedback=True):
        self.share, self.feedback, self.unsent = share, feedback, {}


def top_k_hook(state, bucket):
    wanted, parameters, n = bucket.buffer().clone(), bucket.parameters(), dist.get_world_size()
    if state.feedback and parameters[0] in state.unsent:
        wanted += torch.cat([state.unsent[parameter] for parameter in parameters])
    positions = wanted.abs().topk(math.ceil(state.share * len(wanted))).indices
    message = torch.cat([wanted[positions].view(torch.int32), positions.int()])
    gathered = message.new_empty(n * len(message))
    future = dist.all_gather_into_tensor(gathered, message, async_op=True).get_future()
    unsent = wanted.index_fill(0, positions, 0)
    state.unsent |= dict(zip(parameters, unsent.split([each.numel() for each in parameters]), strict=True))

    def mean(done):
        done.value()  # gloo: raises what failed, else `gathered` has whatever was in memory
        total = torch.zeros_like(wanted)
        for values, positions in gathered.view(n, 2, -1):  # rank by rank: all ranks add in the same order
            total.index_add_(0, positions, values.view(torch.float32) / n)
        return total

    return future.then(mean)


def power(ddp, rank=1):
    state = PowerSGDState(None, rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
    ddp.register_comm_hook(state, powerSGD_hook)
    return sgd(ddp)


def local(ddp, period, shift=None, wrap=True):
    """PyTorch's local SGD: no gradients are sent; after every `period`-th step the weights are averaged."""
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    shift = period - 1 if shift is None else shift
    averager = PeriodicModelAverager(period, warmup_steps=shift)  # first after step `shift`, counted from 0
    return PostLocalSGDOptimizer(sgd(ddp), averager) if wrap else sgd(ddp)


class DiLoCo:
    """The lesson's loop as an optimizer, so that it can be trained beside the others."""

    def __init__(self, ddp, period, lr=0.7, momentum=0.9):
        ddp.register_comm_hook(None, noop_hook)  # gradients stay on their rank
        self.inner, self.parameters, self.period, self.steps = sgd(ddp), list(ddp.parameters()), period, 0
        self.start = nn.Parameter(parameters_to_vector(self.parameters).detach())  # the same on all ranks
        self.outer = torch.optim.SGD([self.start], lr=lr, momentum=momentum, nesterov=momentum > 0)

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        self.inner.step()
        self.steps += 1
        if self.steps % self.period == 0:
            change = (self.start - parameters_to_vector(self.parameters)).detach()
            dist.all_reduce(change)
            self.start.grad = change / dist.get_world_size()
            self.outer.step()
            vector_to_parameters(self.start.detach().clone(), self.parameters)


WAYS = {
    "DDP": sgd,
    "bf16": partial(with_hook, hook=bf16_compress_hook),
    "top 1 %": partial(with_hook, hook=top_k_hook, make_state=partial(TopK, 0.01)),
    "top 1 %, no feedback": partial(with_hook, hook=top_k_hook, make_state=partial(TopK, 0.01, False)),
    "PowerSGD, r = 1": partial(power, rank=1),
    "PowerSGD, r = 4": partial(power, rank=4),
    "nothing sent": partial(with_hook, hook=noop_hook),
    "local SGD, H = 8": partial(local, period=8),
    "local SGD, H = 40": partial(local, period=40),
    "DiLoCo, H = 8": partial(DiLoCo, period=8),
    "DiLoCo, H = 40": partial(DiLoCo, period=40),
    "4 × the batch": partial(sgd, lr=2 * LR),
}
LARGER = {"4 × the batch": 4 * BATCH}


def train(ddp, optimizer, images, labels, order, batch=BATCH):
    for group in order.split(batch):
        mine = group[of_rank()]
        loss = F.cross_entropy(ddp(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(ways, seeds=(0,), steps=STEPS):
    """For each way: the bytes that this rank sends in a run, and for each seed the held-out errors in %."""
    device, found = join(), {name: {"sent": 0, "wrong": []} for name in ways}
    (images, labels), held_out = tensors(STEPS * BATCH, device), tensors(2000, device, train=False)
    for name, seed in itertools.product(ways, seeds):
        torch.manual_seed(seed)  # on all ranks the same start and the same order
        ddp = wrapped(Net().to(device), device)
        optimizer = WAYS[name](ddp)
        order = torch.cat([torch.randperm(STEPS * BATCH) for _ in range(steps // STEPS)])
        total, errors = 0, []
        for part in order.split(40 * BATCH):  # a reading after 40 steps, when DiLoCo has just averaged
            sent, _ = sent_by(train, ddp, optimizer, images, labels, part, LARGER.get(name, BATCH))
            total += sent
            errors.append(wrong(ddp.module, *held_out))
        found[name]["sent"] = total
        found[name]["wrong"].append(errors)
    dist.destroy_process_group()
    return found


def all_ways():
    """Every way with five seeds, on two CPU ranks: minutes."""
    return launch(trained, list(WAYS), range(5), nprocs=2, device="cpu", dashboard=False).results[0]


# --- pictures ---------------------------------------------------------------------------------------------

COLORS = {"DDP": "#0072b2", "bf16": "#d55e00", "16 bits": "#d55e00", "fp16": "#999999", "top 1 %": "#009e73"}
COLORS |= {"PowerSGD": "#cc79a7", "nothing sent": "#000000", "local SGD": "#56b4e9", "DiLoCo": "#e69f00"}
COLORS |= {"4 × the batch": "#8a7f00"}
# The same colour, dotted
VARIANTS = ("random", "no feedback", "DiLoCo, H = 8", "local SGD, H = 40", "r = 4")


def colored(series, **words):
    """`curves`, in which each way to send less has one colour throughout lesson 19."""
    picture = curves(series, **words)
    (axes,), (legend,) = picture.figure.axes, picture.figure.legends
    for pair in zip(axes.lines, legend.get_lines(), strict=True):
        name = pair[0].get_label()
        for line in pair:
            line.set_color(next(color for way, color in COLORS.items() if name.startswith(way)))
            if name.endswith(VARIANTS):
                line.set(linestyle=":", markerfacecolor="white")
    return picture
