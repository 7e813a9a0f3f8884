"""What people answer in exercise 06, wrong and right (see `answers`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.exercises.answers import right, wrong


@wrong("06.1", hint="nothing")
def the_same_seed(model):
    torch.manual_seed(0)


@wrong("06.1", hint="nothing")
def into_a_copy_of_each(model):
    for p in model.parameters():
        dist.broadcast(p.data.clone(), src=0)


@wrong("06.1", hint="source")
def from_the_last(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=dist.get_world_size() - 1)


@wrong("06.1", hint="arithmetic")
def the_mean_of_all(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


@wrong("06.1", hint="not all")
def what_is_trained(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=0)


@right("06.1")
def as_an_object(model):
    state = [model.state_dict()]
    dist.broadcast_object_list(state, src=0)
    model.load_state_dict(state[0])


@right("06.1")
def as_ddp_does(model):
    tensors = [p.detach() for p in model.parameters()]
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 2**20, 0)


BEGINS = "all replicas begin with rank 0's parameters"
DURING = "after backward() alone, every rank holds the mean of the gradients"


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.begin()

    def begin(self) -> None:
        self.share()
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.average)

    def share(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)

    def trained(self) -> list[Any]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@wrong("06.2", hint="apart")
class StartsApart(Wrapper):
    def share(self) -> None:
        pass


@wrong("06.2", hint="doesn't require gradient")
class HooksTheFrozen(Wrapper):
    def trained(self) -> list[Any]:
        return list(self.module.parameters())


@wrong("06.2", BEGINS, hint="own")
class HooksTheLastAlone(Wrapper):
    def trained(self) -> list[Any]:
        return super().trained()[-1:]


@wrong("06.2", BEGINS, hint="other")
class SumsUp(Wrapper):
    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)


@wrong("06.2", BEGINS, hint="differ")
class DividesOnRank0(Wrapper):
    def average(self, p: Any) -> None:
        dist.all_reduce(p.grad)
        if dist.get_rank() == 0:
            p.grad /= dist.get_world_size()


@wrong("06.2", BEGINS, DURING, hint="later")
class AveragesEverySecondTime(Wrapper):
    def average(self, p: Any) -> None:
        p.times = getattr(p, "times", 0) + 1
        if p.times % 2:
            super().average(p)


@wrong("06.2", hint="without waiting for the end of it")
class NeverWaits(Wrapper):
    def average(self, p: Any) -> None:
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True)


@wrong("06.2", hint="this time you write it yourself")
class LetsDDPDoIt(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = nn.parallel.DistributedDataParallel(module)

    def forward(self, x: Any) -> Any:
        return self.module(x)


@right("06.2")
class AveragesInAHookOfTheGradient(Wrapper):
    def begin(self) -> None:
        self.share()
        for p in self.trained():
            p.register_hook(self.mean)

    def mean(self, gradient: Any) -> Any:
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient


@right("06.2")
class HooksTheNodes(Wrapper):
    """Hooks the nodes at which gradients accumulate."""

    def begin(self) -> None:
        self.share()
        self.nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in self.trained()]
        for node, p in zip(self.nodes, self.trained(), strict=True):
            node.register_hook(lambda *_, p=p: self.average(p))


MEAN = "the gradients are the mean over the samples of all ranks, on every rank"


def trained(model):
    return [p for p in model.parameters() if p.grad is not None]


def over_all(samples):
    total = torch.tensor(samples)
    dist.all_reduce(total)
    return total.item()


@wrong("06.3", hint="alike")
def as_in_the_lesson(model, samples):
    for p in trained(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("06.3", hint="raised TypeError")
def word_for_word(model, samples):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("06.3", hint="sum")
def weighs_and_forgets(model, samples):
    for p in trained(model):
        p.grad *= samples
        dist.all_reduce(p.grad)


@wrong("06.3", hint="other")
def divided_twice(model, samples):
    total = over_all(samples)
    for p in trained(model):
        p.grad *= samples / total
        dist.all_reduce(p.grad)
        p.grad /= total


@wrong("06.3", hint="differ")
def divides_by_its_own(model, samples):
    for p in trained(model):
        p.grad *= samples
        dist.all_reduce(p.grad)
        p.grad /= samples


@wrong("06.3", MEAN, hint="given")
def zeros_for_none(model, samples):
    total = over_all(samples)
    for p in model.parameters():
        mean = (torch.zeros_like(p) if p.grad is None else p.grad) * samples
        dist.all_reduce(mean)
        p.grad = mean / total


@right("06.3")
def gathers_all(model, samples):
    total = over_all(samples)
    for p in trained(model):
        each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(each, p.grad * samples / total)
        p.grad = torch.stack(each).sum(0)


@right("06.3")
def in_one_tensor(model, samples):
    """The count travels with the gradients."""
    parameters = trained(model)
    flat = torch.cat([p.grad.flatten() for p in parameters] + [torch.ones(1, dtype=torch.float64)]) * samples
    dist.all_reduce(flat)
    sizes = [p.numel() for p in parameters]
    for p, part in zip(parameters, (flat[:-1] / flat[-1]).split(sizes), strict=True):
        p.grad = part.view_as(p)
